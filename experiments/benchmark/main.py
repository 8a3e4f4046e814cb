"""The speed of the simulator: `python -m twinserve.experiments.benchmark`.

Whole commands as a user starts them, pages of help and large fleets among them, speed inside a run,
how it grows with the number of requests and with the length of the queue, and what the fast path
over runs of decode steps gains.
docs/benchmark.md says how to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
from cyclopts import Parameter
from rich.console import Console

from twinserve.experiments.benchmark.measure import (
    BenchmarkError,
    machine,
    one_core,
    run_command,
    same_results,
    timed_run,
)
from twinserve.experiments.benchmark.tables import markdown_tables, rich_tables
from twinserve.experiments.study.output import check_target
from twinserve.sim.cli.main import run_app
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.traces.write import write_atomically

POLICIES = ("vllm", "bros")
FLEET_PROFILE = "llama-3.1-8b@h100"  # 27,570 KV blocks a replica
PAGES = ("--version", "--help")  # of `simulate`
LOAD = 0.65  # share of the estimated capacity, where a load is set
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Requests, except where named otherwise.

    whole        of the trace in the whole-process runs; None: all of them
    repeats      of each whole-process run
    pages        times that each page of help is asked for
    pool         best-effort pool of the hybrid run, requests a batch
    growth       lengths of the generated request lists
    queues       requests submitted at once
    paths        of the trace, for the fast path against the exact one
    fleet        replicas of the large fleet, which serves 40 requests of the trace
    """

    whole: int | None = None
    repeats: int = 3
    pages: int = 20
    pool: int = 16
    growth: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    queues: tuple[int, ...] = (10, 100, 1_000, 10_000)
    paths: int = 1_000
    fleet: int = 4_000


QUICK = Sizes(whole=40, repeats=1, pages=2, growth=(20, 60), queues=(5, 20), paths=30, fleet=20)


def measure(sizes: Sizes, offline: bool = False, say: Say = lambda text: None) -> dict:
    """All measurements as plain values for JSON, units in names. `say`: progress, a line each."""
    with one_core() as core:
        runs = (
            _on_trace("vllm", sizes.whole, offline),
            _on_trace("bros", sizes.whole, offline, sizes.pool),
        )
        inputs, _ = timed_run(_on_trace("vllm", 20, offline))  # also warms up imports and caches
        origin = inputs.workload.provenance
        return {
            "machine": {**machine(), "core": core},
            "scheduling": _scheduling(SimulationConfig()),
            "trace": {
                "name": origin.name,
                "source": "embedded replica" if origin.replica else "original",
                "sha256": origin.sha256,
            },
            "sizes": asdict(sizes),
            "pages": [_page(arguments, sizes.pages, say) for arguments in PAGES],
            "process": [_process(run, sizes.repeats, say) for run in runs],
            "fleets": [
                _fleet(policy, replicas, requests, offline, say)
                for policy in POLICIES
                for replicas, requests in ((sizes.fleet, 40), (8, sizes.whole))
            ],
            "speed": [_speed(run, say) for run in runs],
            "growth": [_growth(policy, n, say) for policy in POLICIES for n in sizes.growth],
            "queue": [_queue(policy, n, say) for policy in POLICIES for n in sizes.queues],
            "paths": [_paths(_on_trace(policy, sizes.paths, offline), say) for policy in POLICIES],
        }


def _scheduling(config: SimulationConfig) -> str:
    """The mode of the engine that all of this simulates: the default one."""
    return "asynchronous" if config.async_scheduling else "synchronous"


def _on_trace(policy: str, requests: int | None, offline: bool, pool: int = 0) -> SimulationConfig:
    return SimulationConfig(
        policy=(policy,), trace="mooncake", requests=requests, offline=offline, pool=pool
    )


def _flags(config: SimulationConfig) -> list[str]:
    """The command line that means `config`."""
    flags = ["--policy", config.policy[0], "--trace", config.trace]
    if config.requests is not None:
        flags += ["--requests", str(config.requests)]
    if config.pool:
        flags += ["--pool", str(config.pool)]
    if config.replicas > 1:
        flags += ["--profile", config.profile, "--replicas", str(config.replicas)]
    return flags + (["--offline"] if config.offline else [])


def _process(config: SimulationConfig, repeats: int, say: Say) -> dict:
    """(1) The whole command, from interpreter start to exit."""
    flags = _flags(config)
    command = "simulate " + " ".join(flags)
    say(f"{command} ({repeats} times)")
    return {"command": command} | _spread([*flags, "--quiet"], repeats)


def _page(argument: str, repeats: int, say: Say) -> dict:
    """(7) A command that simulates nothing: what a user waits for its start alone."""
    say(f"simulate {argument} ({repeats} times)")
    return {"command": f"simulate {argument}"} | _spread([argument], repeats)


def _spread(arguments: list[str], repeats: int) -> dict:
    runs = [asdict(run_command(arguments)) for _ in range(repeats)]
    return {"runs": runs} | {
        name: {
            "min": min(run[name] for run in runs),
            "median": float(np.median([run[name] for run in runs])),
            "max": max(run[name] for run in runs),
        }
        for name in runs[0]
    }


def _fleet(policy: str, replicas: int, requests: int | None, offline: bool, say: Say) -> dict:
    """(6) The whole command with many replicas: what they keep should be what they hold."""
    config = _on_trace(policy, requests, offline).model_copy(
        update={"profile": FLEET_PROFILE, "replicas": replicas}
    )
    say(f"simulate {' '.join(_flags(config))}")
    figures = run_command([*_flags(config), "--quiet"])
    return {"policy": policy, "replicas": replicas, "requests": requests, **asdict(figures)}


def _timed(config: SimulationConfig, at_once: bool = False) -> dict:
    """One run's own timings; see docs/metrics.md for timing.json."""
    result = timed_run(config, at_once)[1]
    timing = result.timing
    return {
        "policy": config.policy[0],
        "requests": len(result.rows.requests),
        "steps": len(result.rows.steps),
        **{
            name: timing[name]
            for name in ("wall_s", "metrics_s", "decisions", "decision_mean_s", "decision_p99_s")
        },
        "steps_per_s": timing["simulated_steps_per_s"],
        "requests_per_s": timing["requests_per_s"],
        "simulated_s_per_s": result.summary["duration"] / timing["wall_s"],
    }


def _speed(config: SimulationConfig, say: Say) -> dict:
    """(2) Inside the same runs: steps and requests a second, time of a decision."""
    say(f"{' '.join(_flags(config))}: speed inside")
    return _timed(config)


def _growth(policy: str, requests: int, say: Say) -> dict:
    """(3) Generated requests at a fixed load: time should grow with their number and no faster."""
    say(f"{policy}: {requests:,} generated requests")
    found = _timed(
        SimulationConfig(policy=(policy,), trace="sharegpt", requests=requests, load=LOAD)
    )
    return {**found, "wall_per_request_s": (found["wall_s"] + found["metrics_s"]) / requests}


def _queue(policy: str, requests: int, say: Say) -> dict:
    """(4) All requests at once: a decision should not look at the whole queue."""
    say(f"{policy}: {requests:,} requests at once")
    return _timed(
        SimulationConfig(policy=(policy,), trace="sharegpt", requests=requests, load=LOAD),
        at_once=True,
    )


def _paths(config: SimulationConfig, say: Say) -> dict:
    """(5) Runs of identical decode steps executed at once, against every step planned by itself."""
    say(f"{' '.join(_flags(config))}: fast path against exact path")
    _, fast = timed_run(config)
    _, exact = timed_run(config.model_copy(update={"exact": True}))
    if not same_results(fast, exact):
        raise BenchmarkError(
            f"policy {config.policy[0]}: the fast path and the exact path gave different results"
        )
    return {
        "policy": config.policy[0],
        "requests": config.requests,
        "steps": len(fast.rows.steps),
        "fast_s": fast.timing["wall_s"],
        "exact_s": exact.timing["wall_s"],
        "ratio": exact.timing["wall_s"] / fast.timing["wall_s"],
    }


def benchmark(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    out: Path | None = None,
    markdown: Annotated[bool, Parameter(negative="")] = False,
    offline: Annotated[bool, Parameter(negative="")] = False,
    repeats: int | None = None,
) -> None:
    """Measure how fast the simulator is on this machine.

    Parameters
    ----------
    quick: bool
        Tiny sizes: whether it works, not how fast it is.
    out: Path
        Write all figures as JSON.
    markdown: bool
        Print the tables as Markdown.
    offline: bool
        Never download the trace: a local copy, or its embedded replica.
    repeats: int
        Runs of each whole command. [default: 3]
    """
    sizes = QUICK if quick else Sizes()
    if repeats is not None:
        if repeats < 1:
            raise SettingsError(f"--repeats {repeats}: at least one run is needed")
        sizes = Sizes(**{**asdict(sizes), "repeats": repeats})
    check_target(out)
    progress = Console(stderr=True, highlight=False)
    report = measure(sizes, offline, lambda text: progress.print(text, style="dim", soft_wrap=True))
    if out is not None:
        write_atomically(out, dump_json(report, out.name).encode())
    if markdown:
        print(markdown_tables(report), end="")
    else:
        rich_tables(report, Console(highlight=False))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="benchmark", help=benchmark.__doc__)
    app.default(benchmark)
    run_app(app, arguments)
