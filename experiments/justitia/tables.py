"""Tables of Justitia's study: compare policies in the same run."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pandas as pd

from twinserve.experiments.justitia.runs import QUANTILES, plain
from twinserve.experiments.study.tables import BEFORE, Against, Table
from twinserve.sim.sweep.statistics import over_seeds

RATIOS = [f"ratio_{q}" for q in QUANTILES]
OURS, OTHER = "justitia", "srjf"


def named(points: pd.DataFrame) -> pd.DataFrame:
    return points.assign(policy=points.policy.map(plain))


def beside_others(*by: str, **more: Any) -> Table:
    """A row a setting and policy. vs_POLICY: mean completion above that of the policy in the same
    run, per cent."""
    others = [
        Against({f"vs_{base}": ("mean_s", "per cent")}, {"policy": base}, by)
        for base in ("vtc", "parrot", OURS)
    ]
    return Table((*by, "policy"), pair=by, also=others, prepared=named, **more)


def jct(*by: str, pooled: str | None = None) -> Table:
    """JCT, how far from others, and the ratios to VTC's. half_delay: half of the worst delay
    against VTC (ratio - 1) less Justitia's worst in the same run: above 0 where Justitia's is
    smaller than half."""
    values = ["mean_s", "p90_s", "late_s", "load", "not_delayed", "worst", "half_delay"]
    values += ["vs_vtc", "vs_parrot", "vs_justitia", "p90_vs_justitia", *RATIOS]
    return beside_others(
        *by,
        values=values,
        gains={"_worst": ("worst", "baseline"), "p90_vs_justitia": ("p90_s", "per cent")},
        base={"policy": OURS},
        derived={"half_delay": lambda runs: (runs.worst - 1) / 2 - (runs._worst - 1)},
        pooled=pooled,
    )


BY_DENSITY = jct("density", "pool", pooled="density")
# worst_less, late_less_s: by how much SRJF's worst ratio to VTC, and its latest application against
# GPS, are above, in the same seed; swaps, swapped_tokens: of runs that have them
OF_OURS = beside_others(
    "density",
    values=("mean_s", "p90_s", "vs_vtc", "vs_parrot", "vs_justitia", "not_delayed", "worst")
    + ("late_gps_s", "within_gps", "worst_less", "late_less_s", "swaps", "swapped_tokens"),
    gains={"worst_less": ("worst", "saving"), "late_less_s": ("late_gps_s", "saving")},
    base={"policy": OTHER},
)
# Fig. 3. over_justitia: mean completion over Justitia's; delayed: how many of the two applications
# Justitia ends later
ENDS = ("jct_first_s", "jct_second_s")
MERGERS = Table(
    ("size", "policy"),
    ("mean_s", *ENDS, "over_justitia", "delayed"),
    {"over_justitia": ("mean_s", "ratio"), **{f"_{name}": (name, "baseline") for name in ENDS}},
    {"policy": OURS},
    ("size",),
    derived={
        "delayed": lambda runs: sum(
            (runs[f"_{name}"] > runs[name] * (1 + 1e-9)).astype(float) for name in ENDS
        )
    },
    prepared=lambda points: points.drop_duplicates(["size", "policy", "seed"]).assign(
        mean_s=lambda jobs: (jobs.jct_first_s + jobs.jct_second_s) / 2
    ),
)
# Fig. 11. grown: JCT of the summary above that with the number of small ones before, in the same
# seed, per cent.
ELEPHANTS = Table(
    ("crowd", "policy", "mice"),
    ("elephant_s", "mice_s", "grown", "gps_s", "bound_s"),
    {"grown": ("elephant_s", "per cent")},
    BEFORE,
    ("crowd", "policy"),
    prepared=named,
)


def errors(points: pd.DataFrame) -> pd.DataFrame:
    """Table II. vs_perfect, vs_53: mean JCT above that with demands known, and above that with
    errors of 53 % of the same kind and draw, in the same seed, per cent. Draws are averaged before
    seeds are."""
    keys = ["predictor", "pool", "seed", "draw"]
    runs = points.set_index(keys).mean_s
    known = points[keys].assign(predictor="perfect", draw=0)
    less = points[keys].assign(predictor=points.predictor.str.replace("452 %", "53 %"))
    less.loc[~less.predictor.str.endswith("%"), "predictor"] = ""
    frame = points.assign(
        **{
            name: 100 * (points.mean_s / runs.reindex(pd.MultiIndex.from_frame(base)).array - 1)
            for name, base in (("vs_perfect", known), ("vs_53", less))
        }
    )
    values = ["mean_s", "p90_s", "vs_perfect", "vs_53", "error", "predict_ms", "train_s"]
    frame = frame.groupby(keys[:3], sort=False)[values].mean().reset_index()
    return over_seeds(frame, keys[:2], values)


# -- is Justitia fairer than SRJF? -----------------------------------------------------------------
# column of `compare`, in words, unit, factor to it, 1 where more is fairer
MEASURES = {
    "not_delayed": ("no later than under VTC", "points", 100.0, 1),
    "worst": ("worst ratio to VTC", "", 1.0, -1),
    "ratio_95": ("95th percentile of the ratios to VTC", "", 1.0, -1),
    "late_gps_s": ("latest against GPS", "s", 1.0, -1),
    "within_gps": ("no later than in GPS", "points", 100.0, 1),
}
COMPLETION = ("mean_s", "p90_s")


def _gain(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    _, _, factor, sign = MEASURES[name]
    return lambda runs: sign * factor * (runs[name] - runs[f"{name}_{OTHER}"])


def _wins(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    gain = _gain(name)
    return lambda runs: (gain(runs) > 0) + 0.5 * (gain(runs) == 0)


# Means of both policies (NAME_justitia, NAME_srjf), by how much Justitia is the fairer in the same
# seed (NAME_gain, above 0: fairer), in which part of the seeds it is (NAME_wins), and its
# completion times above SRJF's, per cent
FAIRNESS = Table(
    ("density", "pool"),
    [f"{name}_{what}" for name in MEASURES for what in (OURS, OTHER, "gain", "wins")]
    + [f"{name}_{what}" for name in COMPLETION for what in (OURS, OTHER, "above")],
    {f"{name}_{OTHER}": (name, "baseline") for name in (*MEASURES, *COMPLETION)}
    | {f"{name}_above": (name, "per cent") for name in COMPLETION},
    {"policy": OTHER},
    ("density", "pool"),
    own=False,
    derived={f"{name}_{OURS}": itemgetter(name) for name in (*MEASURES, *COMPLETION)}
    | {f"{name}_gain": _gain(name) for name in MEASURES}
    | {f"{name}_wins": _wins(name) for name in MEASURES},
    prepared=lambda points: named(points)[lambda runs: runs.policy.isin([OURS, OTHER])],
    pooled="density",
)


def fairness(points: pd.DataFrame) -> pd.DataFrame:
    """`FAIRNESS`, a pool after the other."""
    order = {pool: i for i, pool in enumerate(dict.fromkeys(points.pool))}
    return FAIRNESS(points).sort_values("pool", key=lambda one: one.map(order), kind="stable")


# Table III. over_least: how often as long a decision takes as at the lowest rate, in the same seed
# and with the same queue.
DECISIONS = Table(
    ("queue", "a_minute"),
    ("plan_ms", "plan_p99_ms", "plans"),
    {"over_least": ("plan_ms", "ratio")},
    {"a_minute": 15},
    ("queue",),
)
