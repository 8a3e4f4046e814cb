"""The four systems side by side: `python -m twinserve.experiments.systems`.

No paper has this: BROS, Echo, LayerKV, Justitia and their baselines on the same hardware, model and recorded traces, at several
loads (`loads`), one part of each system at a time (`ladder`), and every policy there is on one hybrid workload and one of
applications (`everyone`). docs/systems.md says what came out.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from ..policies.registry import policy_names
from ..sim.config import SimulationConfig
from ..sim.run import simulate
from .curves import grid, panels
from .grid import Point, over_seeds
from .study import Figure, Scale, Study

PROFILE = "llama-3.1-8b@h100"
POOL = 16
CHUNK = "bros:chunk=2048"
BOUND = "bros-exact"  # solves an integer programme wherever few run: hours for a workload of this size (docs/optimality.md)
SYSTEMS = ("vllm", "vllm-v0", "bros", CHUNK, "echo", "layerkv", "justitia")
# trace -> how long a window is, and where windows begin, in seconds of the recording: each is a repeat of its own
WINDOWS = {"mooncake": (120.0, (0.0, 1200.0, 2400.0)), "azure-2023": (90.0, (0.0, 1200.0, 2400.0))}
# of estimated capacity, which leaves a reserve: short prompts saturate the engine much later than long ones
LOADS = {"mooncake": (0.5, 0.75, 1.0, 1.25), "azure-2023": (0.75, 1.25, 2.0, 2.75)}
LADDER_LOADS = {"mooncake": 1.0, "azure-2023": 2.0}
# system -> its parts, one more in each step
LADDERS = {
    "bros": {
        "vllm": "vllm",
        "two classes in turn": "round-robin:chunk=2048",
        "deadlines (Alg. 1)": "bros:chunk=2048,kv=paged,replacement=false",
        "+ replacement": "bros:chunk=2048,kv=paged",
        "+ bidirectional blocks": CHUNK,
    },
    "echo": {"priority": "echo-bs", "+ estimator": "echo-bs-e", "+ KV-aware choice": "echo-bs-e-s", "+ task-aware KV": "echo"},
    "layerkv": {
        "vllm-v0": "vllm-v0",
        "+ Alg. 1": "layerkv:layer_wise=false",
        "layers alone": "layerkv:slo_aware=false",
        "both": "layerkv",
        "both, late ones left out": "layerkv:savable_only=true",
    },
    "combinations": {
        "bros, chunks": CHUNK,
        "bros, whole prompts": "bros",
        "bros on layerwise": "bros:chunk=2048,kv=layerwise",
        "bros on task-aware": "bros:chunk=2048,kv=task-aware",
        "justitia": "justitia",
        "justitia, prefix cache": "justitia:kv=paged",
        "justitia on task-aware": "justitia:kv=task-aware",
    },
}
CACHED = ("justitia:kv=paged", "justitia:kv=task-aware")  # with a prefix cache, which Justitia's own engine has not
METRICS = {
    "slo_attainment": ("both objectives kept", 1.0),
    "ttft_s": ("mean TTFT, s", 1.0),
    "tpot_s": ("mean TPOT, s", 1.0),
    "be_tokens_per_s": ("best-effort tokens/s", 1.0),
}
LOOKS = {"vllm": {"color": "black"}, "vllm-v0": {"color": "grey"}, CHUNK: {"linestyle": "--"}}


def _row(summary: dict) -> dict:
    """What is compared. Seconds, tokens a second, shares; nan where a class had no requests."""
    rt, be = summary["classes"].get("rt", {}), summary["classes"].get("be", {})
    nan = float("nan")
    preempted = summary["kv"]["preemptions"]
    return {
        "slo_attainment": rt.get("slo_attainment", nan),
        "ttft_attainment": rt.get("ttft_attainment", nan),
        "tpot_attainment": rt.get("tpot_attainment", nan),
        "ttft_s": rt.get("mean_ttft_ms", nan) / 1e3,
        "ttft_p99_s": rt.get("p99_ttft_ms", nan) / 1e3,
        "tpot_s": rt.get("mean_tpot_ms", nan) / 1e3,
        "be_tokens_per_s": be.get("total_token_throughput", nan),
        "preempted": preempted["recompute"] + preempted["swap"],
        "prefix_hit_rate": summary["kv"]["prefix_hit_rate"],
        "kv_peak": summary["kv"]["peak_use"],
    }


def recorded(
    trace: str, policy: str, load: float, begin_s: float, seconds: float, seed: int, pool: int, cached: bool = False
) -> dict:
    """A window of a recorded trace at `load` times the estimated capacity, beside it a closed loop of `pool` best-effort
    requests. cached: with prefix caching, whatever the policy's own system does."""
    window, caching = (begin_s, begin_s + seconds), True if cached else None
    settings = {"trace": trace, "load": load, "window": window, "seed": seed, "pool": pool, "prefix_caching": caching}
    return _row(simulate(SimulationConfig(policy=(policy,), profile=PROFILE, **settings))[policy].summary)


def generated(workload: str, policy: str, seed: int, quick: bool) -> dict:
    """`hybrid`: the setting of the BROS paper, shortened. `applications`: Justitia's, JCT in seconds."""
    if workload == "applications":
        profile = "llama-7b@a100-pcie-40g"
        config = SimulationConfig(policy=(policy,), trace="apps:2x", seed=seed, profile=profile, slo="none")
        found = simulate(config)[policy].summary["applications"]
        return {"jct_s": found["mean_jct_s"], "jct_p90_s": found["p90_jct_s"]}
    from ..sim.config import PRESETS

    shortened = PRESETS["bros-hybrid"] | {"duration": 10.0 if quick else 60.0, "pool": 16 if quick else 128}
    return _row(simulate(SimulationConfig(policy=(policy,), seed=seed, **shortened))[policy].summary)


def _windows(scale: Scale, trace: str) -> list[dict]:
    seconds, begins = WINDOWS[trace]
    chosen = [begins[seed % len(begins)] for seed in scale.seeds]
    return [
        {"trace": trace, "begin_s": b, "seconds": seconds / 8 if scale.quick else seconds, "seed": s, "pool": POOL}
        for s, b in zip(scale.seeds, chosen, strict=True)
    ]


def loads(scale: Scale) -> list[Point]:
    return [
        Point({"trace": t, "policy": p, "load": load, "seed": w["seed"]}, {**w, "policy": p, "load": load})
        for t in WINDOWS
        for load in (LOADS[t][1:2] if scale.quick else LOADS[t])
        for p in SYSTEMS
        for w in _windows(scale, t)
    ]


def ladder(scale: Scale) -> list[Point]:
    return [
        Point(
            {"trace": t, "system": system, "part": part, "policy": p, "seed": w["seed"]},
            {**w, "policy": p, "load": LADDER_LOADS[t], "cached": p in CACHED},
        )
        for t in WINDOWS
        for system, parts in LADDERS.items()
        for part, p in parts.items()
        for w in _windows(scale, t)
    ]


def everyone(scale: Scale) -> list[Point]:
    return [
        Point({"workload": w, "policy": p, "seed": s}, {"workload": w, "policy": p, "seed": s, "quick": scale.quick})
        for w in (("hybrid",) if scale.quick else ("hybrid", "applications"))
        for p in policy_names()
        if p != BOUND
        for s in scale.seeds
    ]


def _summed(*by: str):
    def table(points: pd.DataFrame) -> pd.DataFrame:
        values = [name for name in points if name not in (*by, "seed")]
        return over_seeds(points, by, values)

    return table


def draw_loads(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    def finish(axes, metric: str) -> None:
        if metric in ("ttft_s", "tpot_s"):
            axes.set_yscale("log")

    grid(canvas, table, "trace", METRICS, "load", "policy", LOOKS, finish, xlabel="online load / estimated capacity")


def draw_ladder(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    axes = panels(canvas, len(LADDERS), 2, 4.6, 1.9)
    for i, system in enumerate(LADDERS):
        part = table[table["system"] == system]
        for j, (metric, label) in enumerate(
            (("slo_attainment", "both objectives kept"), ("be_tokens_per_s", "best-effort tokens/s"))
        ):
            _bars(axes[i, j], part, metric, label if i == len(LADDERS) - 1 else "", names=j == 0)
        axes[i, 0].set_title(system, fontsize=9, loc="left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=8)


def _bars(axes, part: pd.DataFrame, metric: str, label: str, names: bool) -> None:
    steps, traces = list(dict.fromkeys(part["part"])), list(dict.fromkeys(part["trace"]))
    height = 0.8 / len(traces)
    for k, trace in enumerate(traces):
        rows = part[part["trace"] == trace].set_index("part").loc[steps]
        where = np.arange(len(steps)) + (k - (len(traces) - 1) / 2) * height
        spread = {"xerr": np.nan_to_num(rows[f"{metric}_ci"]), "error_kw": {"linewidth": 0.8}}
        axes.barh(where, rows[metric], height, label=trace, **spread)
    axes.set_yticks(range(len(steps)), steps if names else [""] * len(steps), fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(label, fontsize=8)


STUDY = Study(
    "systems",
    "",
    [
        Figure("loads", "four systems, several loads", loads, recorded, _summed("trace", "policy", "load"), draw_loads),
        Figure(
            "ladder",
            "which part earns it, one more at a time",
            ladder,
            recorded,
            _summed("trace", "system", "part", "policy"),
            draw_ladder,
        ),
        Figure("everyone", "every policy on two workloads", everyone, generated, _summed("workload", "policy")),
    ],
)

if __name__ == "__main__":
    STUDY.main()
