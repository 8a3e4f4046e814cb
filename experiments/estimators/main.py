"""Whose estimator wins: Echo, BROS and LayerKV on the same loads, each with the form of its own
paper, with the simulator's own step times and with one form for all:
`twinserve study estimators`. docs/estimators.md has what came out.

The engine's step times are composed from kernel tables, so that every form of a paper errs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.sensitivity.runs import KEPT, OFFLINE, TOKENS, TPOT, TTFT, Metric
from twinserve.experiments.study.curves import legend, panels
from twinserve.experiments.study.study import Figure, Scale, Study, points_over
from twinserve.sim.plan.capacity import WhileOnline
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_simulation
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.paired import gained
from twinserve.sim.sweep.statistics import over_seeds
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.transform import merge

ENGINE = "llama-3.1-8b@a100-80g"  # operator tables
POLICIES = {"Echo": "echo:slo=gap", "BROS": "bros", "LayerKV": "layerkv:savable_only=true"}
EXACT = "perfect"
# what a policy believes -> how it is called here
BELIEFS = {"paper": "its own form", "echo-sum": "one form", EXACT: "exact"}
# chats with objectives, requests/s -> what comes beside them
LOADS: Mapping[str, Mapping[str, Any]] = {
    "chats, 16/s, beside batches": {"rate": 16.0, "pool": 64},
    "chats, 4/s, beside documents": {"rate": 4.0, "documents": 1000},
}
METRICS: Mapping[str, Metric] = {
    "kept": KEPT,
    "ttft_ms": TTFT,
    "tpot_ms": TPOT,
    "offline_tps": OFFLINE,
    "all_tps": TOKENS,
}


def inputs_of(
    policy: str,
    estimator: str,
    rate: float,
    seed: int,
    pool: int = 0,
    documents: int = 0,
    duration: float = 60.0,
) -> Inputs:
    """Chats with ShareGPT's lengths for `duration` seconds, TTFT 1 s and TPOT 50 ms, beside a
    closed loop of best-effort batches of `pool` or questions on `documents` at once."""
    inputs = resolve(
        SimulationConfig(
            policy=(policy,),
            trace="sharegpt",
            profile=ENGINE,
            rate=rate,
            duration=duration,
            pool=pool,
            num_blocks=10_000,
            slo="ttft=1,tpot=0.05",
            estimator=estimator,
            seed=seed,
            **PAPERS_ENGINE,
        )
    )
    if not documents:
        return inputs
    beside = longdoc("toolbench", requests=documents, seed=seed)
    return replace(inputs, workload=merge(inputs.workload, beside))


def run_point(**settings: Any) -> dict[str, float]:
    """One run as a row; it ends with the last chat. Arguments: see `inputs_of`."""
    inputs = inputs_of(**settings)
    result = run_simulation(WhileOnline(inputs, inputs.policies[0]))
    return {name: metric.of(result.summary) for name, metric in METRICS.items()}


def points(scale: Scale) -> list[Point]:
    settings = [
        {"_load": load, "_system": name, "policy": policy, "estimator": estimator}
        | dict(work)
        | (
            {"duration": 5.0, **{k: min(v, 8) for k, v in work.items() if k != "rate"}}
            if scale.quick
            else {}
        )
        for load, work in LOADS.items()
        for name, policy in POLICIES.items()
        for estimator in BELIEFS
    ]
    return points_over(scale, settings, ("load", "system", "estimator"), {})


def costs(found: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds, and seed by seed what each belief changes against exact step times: shares
    of requests as a difference, the rest as a ratio (`cost_NAME`)."""
    kinds = {name: "difference" if metric.share else "ratio" for name, metric in METRICS.items()}
    costs = {f"cost_{name}": (name, kind) for name, kind in kinds.items()}
    exact = found[found.estimator == EXACT]
    beside = gained(found, exact, ["load", "system", "seed"], costs)
    return over_seeds(beside, ["load", "system", "estimator"], [*METRICS, *costs])


def _plot(canvas: Canvas, table: pd.DataFrame, found: pd.DataFrame) -> None:
    """Objectives kept and best-effort work, a group of bars for each system."""
    shown = {"kept": ("objectives kept, %", 100.0), "offline_tps": ("best-effort tokens/s", 1.0)}
    axes = panels(canvas, len(shown), len(LOADS), width=3.4, height=2.4)
    for j, load in enumerate(LOADS):
        for i, (metric, (label, factor)) in enumerate(shown.items()):
            for k, (estimator, said) in enumerate(BELIEFS.items()):
                mine = table[(table["load"] == load) & (table.estimator == estimator)]
                mine = mine.set_index("system").reindex(list(POLICIES))
                error = np.nan_to_num(mine[f"{metric}_ci"]) * factor
                at = np.arange(len(POLICIES)) + 0.25 * k
                axes[i, j].bar(at, mine[metric] * factor, 0.25, yerr=error, label=said, capsize=2)
            axes[i, j].set_xticks(np.arange(len(POLICIES)) + 0.25, list(POLICIES))
            axes[i, j].set_ylabel(label, fontsize=8)
        axes[0, j].set_title(load, fontsize=9)
    legend(canvas, axes[0, 0])


STUDY = Study(
    "estimators",
    "",
    [Figure("loads", "what each system gets with each estimator", points, run_point, costs, _plot)],
)
