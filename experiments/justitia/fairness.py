"""Is Justitia fairer than SRJF? The same runs as Fig. 8, the two policies compared seed by seed, by
three measures of fairness: how many applications end no later than under VTC, the worst delay
against VTC, and how much later than in the fluid system (GPS) the latest of them ends."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.figures import POOLS, fair_seeds, jct_points, settings_of
from twinserve.experiments.justitia.runs import LLAMA_7B, compare, fluid_ends, inputs_of, size_of
from twinserve.experiments.justitia.tables import chosen, plain
from twinserve.experiments.study.study import Figure, Scale
from twinserve.experiments.study.verdict import Claim, judge_bound
from twinserve.sim.results.metrics_jobs import fair_ratio, job_completion
from twinserve.sim.setup.run import run_policy
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import over_seeds, shown
from twinserve.traces.apps.generate import load

OURS, OTHER = "justitia", "srjf"
# column of `compare`, in words, unit, factor to it, 1 where more is fairer
MEASURES = {
    "not_delayed": ("no later than under VTC", "points", 100.0, 1),
    "worst": ("worst ratio to VTC", "", 1.0, -1),
    "ratio_95": ("95th percentile of the ratios to VTC", "", 1.0, -1),
    "late_gps_s": ("latest against GPS", "s", 1.0, -1),
    "within_gps": ("no later than in GPS", "points", 100.0, 1),
}
PRINTED = ("not_delayed", "worst")  # the paper's measures; the others are ours
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


WHY = "which applications are later under which of the two: `who`"


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
            printed = name in PRINTED
            found.append(
                Claim.judged("Sec. V-B", what, "fairer", ours, verdict, WHY, directed=printed)
            )
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


# -- who -------------------------------------------------------------------------------------------
SIZES = ("small", "medium", "large")


def delayed(seed: int, predictor: str, trace: str, profile: str, **settings) -> list[dict]:
    """A row for each of the two policies: for each size of application the share that ends later
    than under VTC (later_SIZE), the mean completion over VTC's (ratio_SIZE) and the most that one
    ends after GPS (behind_SIZE, s).

    settings  of the run, and of the workload count and offline
    """
    asked = {name: settings.pop(name) for name in ("count", "offline") if name in settings}
    workload = load(trace, seed=seed, **asked)
    names = [f"{policy}:predictor={predictor}" for policy in (OURS, OTHER)]
    inputs = inputs_of(workload, [*names, "vtc"], seed, profile, settings)
    done = {spec.label: run_policy(inputs, spec).rows for spec in inputs.policies}
    sizes = {
        workload.group_names[group]: size_of(info.kind)
        for group, info in workload.applications.items()
    }
    number = {name: i for i, name in enumerate(workload.group_names)}
    found = []
    for name in names:
        rows = done[name]
        jobs = job_completion(rows.requests)
        fluid = fluid_ends(workload, rows.steps["end_s"].to_numpy(), inputs.hardware.kv_tokens)
        jobs["behind"] = jobs["end_s"] - fluid[[number[job] for job in jobs.index]]
        jobs["ratio"] = fair_ratio(rows, done["vtc"])["fair_ratio"]
        row: dict = {"policy": plain(name)}
        for size, part in jobs.groupby([sizes[job] for job in jobs.index]):
            row[f"later_{size}"] = float((part.ratio > 1).mean())
            row[f"ratio_{size}"] = float(part.ratio.mean())
            row[f"behind_{size}"] = float(part.behind.max())
        found.append(row)
    return found


def who_points(scale: Scale) -> list[Point]:
    asked = {"count": 40, "offline": True} if scale.quick else {}
    predictor = "class-mean" if scale.quick else "mlp"
    return [
        Point(
            {"pool": pool, "seed": seed},
            {"seed": seed, "predictor": predictor, "trace": "apps:2x", "profile": LLAMA_7B}
            | settings_of(blocks)
            | asked,
        )
        for pool, blocks in POOLS.items()
        for seed in fair_seeds(scale)
    ]


def who_table(points: pd.DataFrame) -> pd.DataFrame:
    """NAME_more: of Justitia above SRJF in the same seed."""
    names = [f"{what}_{size}" for what in ("later", "ratio", "behind") for size in SIZES]
    names = [name for name in names if name in points]
    keys = ["pool", "seed"]
    other = points[points.policy == OTHER].set_index(keys)
    theirs = other.loc[pd.MultiIndex.from_frame(points[keys])]
    for name in names:
        points = points.assign(**{f"{name}_more": points[name] - theirs[name].to_numpy()})
    values = names + [f"{name}_more" for name in names]
    return over_seeds(points, ["pool", "policy"], values)


def who_plot(canvas: Canvas, rows: pd.DataFrame, points: pd.DataFrame) -> None:
    pools = list(dict.fromkeys(rows.pool))
    panels = np.atleast_1d(canvas.subplots(1, len(pools), sharey=True))
    for panel, pool in zip(panels, pools, strict=True):
        for i, policy in enumerate((OURS, OTHER)):
            row = chosen(rows, pool=pool, policy=policy)
            at = np.arange(len(SIZES)) + 0.4 * i
            heights = [100 * row.get(f"later_{size}", np.nan) for size in SIZES]
            halves = [100 * row.get(f"later_{size}_ci", np.nan) for size in SIZES]
            panel.bar(at, heights, 0.4, yerr=np.nan_to_num(halves), label=policy)
        panel.set_xticks(np.arange(len(SIZES)) + 0.2, SIZES)
        panel.set_title(f"KV blocks: {pool}", fontsize=8)
    panels[0].set_ylabel("later than under VTC, %")
    panels[0].legend(fontsize=8)


WHO = Figure(
    "who",
    "ours: which applications are later than under VTC, by their size, at 2x",
    who_points,
    delayed,
    who_table,
    who_plot,
)
