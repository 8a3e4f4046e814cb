"""The speed of the simulator: `twinserve study benchmark`.

Whole commands as a user starts them, speed inside a run, how both grow, and what the fast path over
runs of decode steps gains. A seed is a repeat: of measured times the tables have medians. If
TWINSERVE_DYNAMO names the interpreter of an environment with ai-dynamo 1.4.2, they also have the
whole trace under Dynamo's simulator. docs/benchmark.md says how to read the tables.
"""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twinserve.backends.live.measure.device import cpu_name
from twinserve.experiments.benchmark.measure import (
    BenchmarkError,
    alone,
    run_process,
    simulate_command,
)
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.study import Figure, Scale, Study, titled
from twinserve.experiments.study.tables import MEDIANS, Medians
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate
from twinserve.traces.catalog import resolve
from twinserve.traces.download import cache_folder, find_local, search_folders

POLICIES = ("vllm", "bros")
H100 = "llama-3.1-8b@h100"  # 27,570 KV blocks a replica
# what `simulate` may take of Dynamo's CPU time, and of its memory, by replicas
CPU_LIMITS, MEMORY_LIMITS = {1: 0.7, 8: 0.95}, {1: 0.5, 8: 0.5}
LIBRARIES = ("twinserve", "numpy", "pandas", "simpy", "pyarrow")
LIMIT_S = 3600  # of CPU time: a command that takes longer has no figures


# -- what is measured ------------------------------------------------------------------------------
def where(seed: int) -> dict[str, Any]:
    """This machine, as a row."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": " ".join(f"{name} {version(name)}" for name in LIBRARIES),
    }


@alone
def whole(seed: int, **settings: Any) -> dict[str, float]:
    """`simulate` from its start to its exit. settings: its options; with `json` also what it had to
    do: steps of all replicas, and stays, how often a request got memory (once, and once more after
    each preemption)."""
    found, printed = run_process([*simulate_command(), *_flags(settings)], limit_s=LIMIT_S)
    if not settings.get("json"):
        return found
    if not printed:
        return found | {"steps": np.nan, "stays": np.nan}
    (summary,) = json.loads(printed)["runs"]
    preempted = sum(summary["kv"]["preemptions"].values())
    stays = sum(each["completed"] for each in summary["classes"].values()) + preempted
    return found | {"steps": float(summary["scheduler"]["steps"]), "stays": float(stays)}


def _flags(settings: Mapping[str, Any]) -> list[str]:
    given = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [
        name if value is True else f"{name}={value}"
        for name, value in given.items()
        if value is not None and value is not False
    ]


@alone
def inside(seed: int, policy: str, **settings: Any) -> dict[str, float]:
    """A run's own timings (timing.json, docs/metrics.md)."""
    (result,) = simulate(SimulationConfig(policy=(policy,), **settings)).values()
    timing, count = result.timing, len(result.rows.requests)
    seconds = timing["wall_s"] + timing["metrics_s"]
    return {
        "done": count,
        "steps": len(result.rows.steps),
        "wall_s": seconds,
        "request_us": 1e6 * seconds / count,
        "steps_per_s": timing["simulated_steps_per_s"],
        "decisions": timing["decisions"],
        "decision_us": 1e6 * timing["decision_mean_s"],
        "decision_p99_us": 1e6 * timing["decision_p99_s"],
    }


@alone
def dynamo(seed: int, python: str, replicas: int, requests: int | None) -> dict[str, float]:
    """`python -m dynamo.replay` of the whole trace, or its first requests. It writes a report into
    the folder that it runs in."""
    file = find_local(resolve("mooncake"), search_folders(), cache_folder())
    if file is None:
        raise BenchmarkError("the Mooncake trace is missing; run `twinserve trace fetch mooncake`")
    engine = {"block_size": 64, "num_gpu_blocks": 16384}
    engine |= {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        trace.write_text("".join(lines[:requests]), encoding="utf-8")
        command = [
            python, "-m", "dynamo.replay", str(trace), "--replay-mode=offline",
            "--router-mode=round_robin", "--trace-block-size=512", f"--num-workers={replicas}",
            f"--extra-engine-args={json.dumps(engine)}",
        ]  # fmt: skip
        return run_process(command, Path(folder))[0]


def compared(seed: int, simulator: str, **settings: Any) -> dict[str, float]:
    """A row of the figure `dynamo`. Both route round robin and have the same KV memory, seats and
    token budget; step times are each one's own."""
    python, few = os.environ.get("TWINSERVE_DYNAMO"), settings.get("requests")
    found: dict[str, float] = {}
    for _ in range(1 if seed else 2):  # the first one of all may have to compile its modules
        if simulator == "twinserve":
            found = whole(seed, **settings)
        else:
            found = dynamo(seed, str(python), settings["replicas"], few)
    return found


def with_limits(points: pd.DataFrame) -> pd.DataFrame:
    """Medians, and our least CPU time and largest memory over those of Dynamo, with the limits."""
    found = Medians(("simulator", "replicas"), ("cpu_s", "peak_mb"))(points)
    theirs = found[found.simulator == "dynamo.replay"].set_index("replicas")
    mine = found.simulator == "twinserve"
    for name, column, limits in (
        ("cpu", "cpu_s_least", CPU_LIMITS),
        ("peak", "peak_mb_most", MEMORY_LIMITS),
    ):
        over = found[column] / found.replicas.map(theirs[column])
        found[f"{name}_over"], found[f"{name}_limit"] = over, found.replicas.map(limits)
        found.loc[~mine, [f"{name}_over", f"{name}_limit"]] = np.nan
    return found


def in_turns(scale: Scale) -> list[Point]:
    """Points of the figure `dynamo`: both simulators get the same moments of a busy machine."""
    grid = Grid(
        {"replicas": (1, 8), "simulator": ("twinserve", "dynamo.replay")},
        {**MOONCAKE, "policy": "vllm", "profile": H100, "rate_scale": 1, "block_tokens": 64}
        | {"num_blocks": 16384, "router": "round-robin", "quiet": True},
        where=lambda axes: axes["simulator"] == "twinserve" or "TWINSERVE_DYNAMO" in os.environ,
        quick=FEW,
    )
    return sorted(grid(scale), key=lambda point: (point.axes["replicas"], point.axes["seed"]))


# -- the figures -----------------------------------------------------------------------------------
MOONCAKE = {"trace": "mooncake", "requests": None, "offline": False}
FEW = {"requests": 40, "offline": True}  # never downloads
SHAREGPT = {"trace": "sharegpt", "load": 0.65}  # a fixed load, where it is set
ON_TRACE = {"vllm": {"policy": "vllm", "pool": 0}, "bros": {"policy": "bros", "pool": 16}}


figure = titled(texts(__file__).TITLES)


def _figure(name: str, points, work, *by: str, spread: Sequence[str] = ()) -> Figure:
    return figure(name, points, work, Medians(by, spread))


MACHINE = figure("machine", lambda scale: [Point({}, {"seed": 0})], where, lambda points: points)
WHOLE = ("wall_s", "cpu_s")
FIGURES = [
    MACHINE,
    _figure(
        "process",
        Grid({"policy": ON_TRACE}, {**MOONCAKE, "quiet": True}, quick=FEW),
        whole,
        "policy",
        spread=WHOLE,
    ),
    _figure(
        "fleets",
        Grid(
            {"policy": POLICIES, "replicas": {4_000: {"replicas": 4_000, "requests": 40}, 8: {}}},
            {**MOONCAKE, "replicas": 8, "profile": H100, "quiet": True},
            quick={**FEW, "replicas": lambda n: min(n, 20)},
        ),
        whole,
        "policy",
        "replicas",
    ),
    _figure("inside", Grid({"policy": ON_TRACE}, MOONCAKE, quick=FEW), inside, "policy"),
    _figure(
        "growth",
        Grid(
            {"policy": POLICIES, "requests": (1_000, 3_000, 10_000, 30_000, 100_000)},
            SHAREGPT,
            quick={"requests": lambda n: n // 50},
            few={"requests": 2},
        ),
        inside,
        "policy",
        "requests",
    ),
    figure("dynamo", in_turns, compared, with_limits),
]
STUDY = Study("benchmark", "", FIGURES, workers=1, intro=MEDIANS)
