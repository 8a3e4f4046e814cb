"""Is Justitia fairer than SRJF? The same runs as Fig. 8, the two policies compared seed by seed, by
three measures of fairness: how many applications end no later than under VTC, the worst delay
against VTC, and how much later than in the fluid system (GPS) the latest of them ends."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.figures import POOLS, jct_points
from twinserve.experiments.justitia.runs import compare
from twinserve.experiments.justitia.tables import chosen, plain
from twinserve.experiments.study.study import Figure
from twinserve.experiments.study.verdict import Claim, judge_bound
from twinserve.sim.sweep.statistics import over_seeds, shown

OURS, OTHER = "justitia", "srjf"
# column of `compare`, in words, unit, factor to it, 1 where more is fairer
MEASURES = {
    "not_delayed": ("no later than under VTC", "points", 100.0, 1),
    "worst": ("worst ratio to VTC", "", 1.0, -1),
    "ratio_95": ("95th percentile of the ratios to VTC", "", 1.0, -1),
    "late_gps_s": ("latest against GPS", "s", 1.0, -1),
    "within_gps": ("no later than in GPS", "points", 100.0, 1),
}
COMPLETION = ("mean_s", "p90_s")


def table(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each density and pool, and `all` densities: means of both policies (NAME_justitia,
    NAME_srjf), by how much Justitia is the fairer in the same seed (NAME_gain, above 0: fairer), in
    which part of the seeds it is (NAME_wins), and its completion times above SRJF's, per cent."""
    keys, names = ["density", "pool", "seed"], [*MEASURES, *COMPLETION]
    frame = points.assign(policy=points.policy.map(plain))
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
    order = [pool for pool in POOLS if (found.pool == pool).any()]
    found = found.sort_values("pool", key=lambda one: one.map(order.index), kind="stable")
    return over_seeds(found, ["density", "pool"], [c for c in found if c not in keys])


def plot(canvas: Canvas, rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """By how much Justitia is the fairer, with the interval; 0: as fair."""
    panels = canvas.subplots(1, len(MEASURES))
    canvas.set_size_inches(13, 3.6)
    names = [f"{row.density}, {row.pool}" for row in rows.itertuples()]
    for panel, (name, (said, unit, _, _)) in zip(panels, MEASURES.items(), strict=True):
        half = np.nan_to_num(rows[f"{name}_gain_ci"])
        panel.errorbar(rows[f"{name}_gain"], range(len(rows)), xerr=half, fmt="o", capsize=2)
        panel.axvline(0.0, color="grey", lw=0.8)
        panel.set_title(said, fontsize=8)
        panel.set_xlabel(f"fairer by{', ' + unit if unit else ''}", fontsize=8)
        panel.set_yticks(range(len(rows)), names if panel is panels[0] else [""] * len(rows))
        panel.invert_yaxis()


WHY = "not known"


def claims(rows: pd.DataFrame) -> list[Claim]:
    """The paper says that Justitia is the fairer of the two; no number is given for SRJF."""
    found = []
    for pool in dict.fromkeys(rows.pool):
        row = chosen(rows, density="all", pool=pool)
        setting = "mean over the densities" + ("" if pool == "profile" else f", {pool} KV blocks")
        for name, (said, unit, _, _) in MEASURES.items():
            gain, half = row[f"{name}_gain"], row[f"{name}_gain_ci"]
            ours = (
                f"fairer by {shown(gain, half)}{' ' + unit if unit else ''}, in "
                f"{100 * row[f'{name}_wins']:.0f} % of runs"
            )
            what = f"Justitia fairer than SRJF: {said}; {setting}"
            verdict = judge_bound(gain, half)
            found.append(Claim.judged("Sec. V-B", what, "fairer", ours, verdict, WHY))
    return found


FAIRNESS = Figure(
    "fairness",
    "ours: is Justitia fairer than SRJF? paired, seed by seed",
    jct_points,
    compare,
    table,
    plot,
    claims,
)
