"""Figures of ours: the sizes and the pool that come near to the paper at once; what an option that
the paper denies is worth (preemption for the sake of order); a large application among small ones
whose demand is believed to be another one than it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.elephant import crowd_of
from twinserve.experiments.justitia.figures import DENSITIES, fair_seeds, small
from twinserve.experiments.justitia.runs import LLAMA_7B, compare, inputs_of
from twinserve.experiments.justitia.tables import against, bars, beside, plain
from twinserve.experiments.study.study import Figure, Scale
from twinserve.sim.results.metrics_jobs import job_completion
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import over_seeds

TRUTH = "predictor=perfect"
JUSTITIA = f"justitia:{TRUTH}"
TOGETHER_SETTING = {"sizes": {"small": 4.0, "large": 1 / 6}, "num_blocks": 1415}
RIVALS = (JUSTITIA, f"srjf:{TRUTH}", "vtc", "parrot", f"{JUSTITIA},cost=compute")
PREEMPTING = (JUSTITIA, f"{JUSTITIA},preempt=true", "vtc")
VALUES = (
    *("mean_s", "p90_s", "vs_vtc", "vs_parrot", "vs_justitia", "not_delayed", "worst"),
    *("late_gps_s", "within_gps", "worst_less", "late_less_s", "swaps", "swapped_tokens"),
)


def _points(
    scale: Scale, densities: Sequence[str], policies: Sequence[str], settings: Mapping
) -> list[Point]:
    return [
        Point(
            {"density": density, "seed": seed},
            {"policies": policies, "trace": f"apps:{density}", "seed": seed}
            | settings
            | small(scale),
        )
        for density in (densities[-1:] if scale.quick else densities)
        for seed in fair_seeds(scale)
    ]


def together_points(scale: Scale) -> list[Point]:
    return _points(scale, DENSITIES[1:], RIVALS, TOGETHER_SETTING)


def preempting_points(scale: Scale) -> list[Point]:
    return _points(scale, DENSITIES[1:], PREEMPTING, {})


def table(points: pd.DataFrame) -> pd.DataFrame:
    """A row a density and policy. vs_POLICY: mean completion above its, per cent; worst_less,
    late_less_s: by how much SRJF's worst ratio to VTC, and its latest application against GPS, are
    above, in the same seed; swaps, swapped_tokens: of a run."""
    frame = points.assign(policy=points.policy.map(plain))
    for base in ("vtc", "parrot", "justitia"):
        frame = against(frame, ["density"], "mean_s", base, f"vs_{base}")
    frame["worst_less"] = beside(frame, ["density"], "worst", "srjf") - frame.worst
    frame["late_less_s"] = beside(frame, ["density"], "late_gps_s", "srjf") - frame.late_gps_s
    return over_seeds(frame, ["density", "policy"], [name for name in VALUES if name in frame])


def plot(canvas: Canvas, rows: pd.DataFrame, points: pd.DataFrame) -> None:
    bars(canvas, rows, "density", {"mean_s": "average JCT, s", "worst": "worst ratio to VTC"})


# -- a demand that is wrong ------------------------------------------------------------------------
MISJUDGING = (JUSTITIA, f"{JUSTITIA},correct=true", f"srjf:{TRUTH}", "vtc")


def misjudged(policy: str, mice: int, seed: int, factor: float) -> dict:
    """A summary a 36th as large as drawn, in 400 blocks, and a small application every second; the
    demand of the summary is believed to be `factor` times what it is. Returns when it ends
    (elephant_s) and the mean of the small ones (mice_s)."""
    workload = crowd_of(mice, seed, {"large": 1 / 36})
    inputs = inputs_of(workload, [policy], seed, LLAMA_7B, {"num_blocks": 400})
    simulation = Simulation(inputs, inputs.policies[0])
    predictor = simulation.engines[0].core.policy.predictor
    if predictor is not None:
        known = predictor.application

        def believed(application, cost):
            return known(application, cost) * (1 if application.group else factor)

        predictor.application = believed
    jct = job_completion(run_simulation(simulation).rows.requests)["jct_s"]
    elephant = workload.group_names[0]
    return {
        "policy": policy,
        "elephant_s": float(jct[elephant]),
        "mice_s": float(jct.drop(elephant).mean()),
    }


def misjudged_points(scale: Scale) -> list[Point]:
    mice = 6 if scale.quick else 600
    return [
        Point(
            {"factor": factor, "seed": seed},
            {"policy": policy, "mice": mice, "seed": seed, "factor": factor},
        )
        for policy in MISJUDGING
        for factor in ((1, 12) if policy.startswith("justitia") else (1,))
        for seed in fair_seeds(scale)
    ]


def misjudged_table(points: pd.DataFrame) -> pd.DataFrame:
    frame = points.assign(policy=points.policy.map(plain))
    return over_seeds(frame, ["policy", "factor"], ["elephant_s", "mice_s"])


def misjudged_plot(canvas: Canvas, rows: pd.DataFrame, points: pd.DataFrame) -> None:
    labels = [f"{row.policy}, x {row.factor}" for row in rows.itertuples()]
    panel = canvas.subplots()
    panel.barh(labels, rows.elephant_s, xerr=rows.elephant_s_ci.fillna(0.0))
    panel.set_xlabel("the large application ends, s")


TOGETHER = Figure(
    "together",
    "ours: small applications four times, large ones a sixth, 1,415 blocks",
    together_points,
    compare,
    table,
    plot,
)
PREEMPTION = Figure(
    "preemption",
    "ours: preemption for the sake of order, which the paper denies",
    preempting_points,
    compare,
    table,
    plot,
)
MISJUDGED = Figure(
    "misjudged",
    "ours: a large application believed to be twelve times as large",
    misjudged_points,
    misjudged,
    misjudged_table,
    misjudged_plot,
)
