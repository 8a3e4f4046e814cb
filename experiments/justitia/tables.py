"""Tables of Justitia's study: policies beside each other in the same run."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from twinserve.experiments.justitia.runs import QUANTILES, plain
from twinserve.experiments.study.tables import BEFORE, Table
from twinserve.sim.sweep.baseline import baseline_of
from twinserve.sim.sweep.statistics import over_seeds

RATIOS = [f"ratio_{q}" for q in QUANTILES]
OURS, OTHER = "justitia", "srjf"


def named(points: pd.DataFrame) -> pd.DataFrame:
    return points.assign(policy=points.policy.map(plain))


def beside(frame: pd.DataFrame, by: Sequence[str], value: str, base: str) -> pd.Series:
    """Of each row of `frame`, `value` of policy `base` in the same run; nan where that was not run.
    by: the columns that, with the seed, tell runs apart."""
    return baseline_of(frame, frame[frame.policy == base], [*by, "seed"])[value]


def against(
    frame: pd.DataFrame, by: Sequence[str], value: str, base: str, name: str
) -> pd.DataFrame:
    """`frame` with a column `name`: how much `value` is above that of policy `base` in the same
    run, per cent."""
    return frame.assign(**{name: 100 * (frame[value] / beside(frame, by, value, base) - 1)})


def above_others(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """With vs_vtc, vs_parrot, vs_justitia: mean completion above theirs, per cent."""
    for base in ("vtc", "parrot", OURS):
        frame = against(frame, by, "mean_s", base, f"vs_{base}")
    return frame


def jct_table(points: pd.DataFrame, by: Sequence[str], pooled: str | None = None) -> pd.DataFrame:
    """A row a setting and policy: JCT, how far from `vtc`, `parrot` and `justitia`, and the ratios
    to VTC's.

    half_delay  half of the worst delay against VTC (ratio - 1) less Justitia's worst in the same
                run: above 0 where Justitia's is smaller than half
    pooled      one of `by`: further rows, in which it is `all`, hold the mean over its values of
                each seed
    """
    frame = named(points)
    frame["half_delay"] = (frame.worst - 1) / 2 - (beside(frame, by, "worst", OURS) - 1)
    frame = against(above_others(frame, by), by, "p90_s", OURS, "p90_vs_justitia")
    values = ["mean_s", "p90_s", "late_s", "load", "not_delayed", "worst", "half_delay"]
    values += ["vs_vtc", "vs_parrot", "vs_justitia", "p90_vs_justitia", *RATIOS]
    if pooled is not None:
        keys = [*(name for name in by if name != pooled), "policy", "seed"]
        means = frame.groupby(keys, sort=False)[values].mean().reset_index()
        frame = pd.concat([frame, means.assign(**{pooled: "all"})], ignore_index=True)
    return over_seeds(frame, [*by, "policy"], values)


def by_density(points: pd.DataFrame) -> pd.DataFrame:
    """`jct_table`, with rows for the mean over the densities (density `all`)."""
    return jct_table(points, ["density", "pool"], pooled="density")


def ours(points: pd.DataFrame) -> pd.DataFrame:
    """A row a density and policy. vs_POLICY: mean completion above its, per cent; worst_less,
    late_less_s: by how much SRJF's worst ratio to VTC, and its latest application against GPS, are
    above, in the same seed; swaps, swapped_tokens: of runs that have them."""
    by = ["density"]
    frame = above_others(named(points), by)
    frame["worst_less"] = beside(frame, by, "worst", OTHER) - frame.worst
    frame["late_less_s"] = beside(frame, by, "late_gps_s", OTHER) - frame.late_gps_s
    values = ("mean_s", "p90_s", "vs_vtc", "vs_parrot", "vs_justitia", "not_delayed", "worst")
    values += ("late_gps_s", "within_gps", "worst_less", "late_less_s", "swaps", "swapped_tokens")
    return Table(("density", "policy"), values)(frame)


def mergers(points: pd.DataFrame) -> pd.DataFrame:
    """Fig. 3. over_justitia: mean completion over Justitia's; delayed: how many of the two
    applications Justitia ends later."""
    by = ["size"]
    jobs = points.drop_duplicates(["size", "policy", "seed"]).copy()
    jobs["mean_s"] = (jobs.jct_first_s + jobs.jct_second_s) / 2
    jobs["over_justitia"] = jobs.mean_s / beside(jobs, by, "mean_s", OURS)
    jobs["delayed"] = sum(
        (beside(jobs, by, name, OURS) > jobs[name] * (1 + 1e-9)).astype(float)
        for name in ("jct_first_s", "jct_second_s")
    )
    values = ["mean_s", "jct_first_s", "jct_second_s", "over_justitia", "delayed"]
    return over_seeds(jobs, ["size", "policy"], values)


# Fig. 11. grown: JCT of the summary above that with the number of small ones before, in the same
# seed, per cent.
ELEPHANTS = Table(
    ("crowd", "policy", "mice"),
    ("elephant_s", "mice_s", "grown", "gps_s", "bound_s"),
    {"grown": ("elephant_s", "change")},
    BEFORE,
    ("crowd", "policy"),
    derived={"grown": lambda runs: 100 * runs.grown},
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


def fairness(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each density and pool, and `all` densities: means of both policies (NAME_justitia,
    NAME_srjf), by how much Justitia is the fairer in the same seed (NAME_gain, above 0: fairer), in
    which part of the seeds it is (NAME_wins), and its completion times above SRJF's, per cent."""
    keys, names = ["density", "pool", "seed"], [*MEASURES, *COMPLETION]
    frame = named(points)
    both = frame[frame.policy.isin([OURS, OTHER])].pivot(index=keys, columns="policy", values=names)
    found = pd.DataFrame(index=both.index)
    for name in names:
        mine, theirs = both[name, OURS], both[name, OTHER]
        found[f"{name}_{OURS}"], found[f"{name}_{OTHER}"] = mine, theirs
        if name in COMPLETION:
            found[f"{name}_above"] = 100 * (mine / theirs - 1)
        else:
            _, _, factor, sign = MEASURES[name]
            gain = sign * factor * (mine - theirs)
            found[f"{name}_gain"] = gain
            found[f"{name}_wins"] = (gain > 0) + 0.5 * (gain == 0)
    found = found.reset_index()
    means = found.groupby(["pool", "seed"], sort=False).mean(numeric_only=True).reset_index()
    found = pd.concat([found, means.assign(density="all")], ignore_index=True)
    # the pools in the order of the runs
    order = dict(zip(points.pool.unique(), range(points.pool.nunique()), strict=True))
    found = found.sort_values("pool", key=lambda one: one.map(order), kind="stable")
    return over_seeds(found, keys[:2], [name for name in found if name not in keys])


# Which applications are later than under VTC. NAME_more: of Justitia above SRJF in the same seed.
OF_SIZES = [
    f"{what}_{size}"
    for what in ("later", "ratio", "behind")
    for size in ("small", "medium", "large")
]
WHO = Table(
    ("pool", "policy"),
    OF_SIZES,
    {f"{name}_more": (name, "difference") for name in OF_SIZES},
    {"policy": OTHER},
    ("pool",),
)
# Table III. over_least: how often as long a decision takes as at the lowest rate, in the same seed
# and with the same queue.
DECISIONS = Table(
    ("queue", "a_minute"),
    ("plan_ms", "plan_p99_ms", "plans"),
    {"over_least": ("plan_ms", "ratio")},
    {"a_minute": 15},
    ("queue",),
)
