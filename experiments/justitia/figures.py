"""The figures and tables of Justitia's paper (Yang et al.), each as a grid of runs; main.py
joins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.runs import (
    LLAMA_13B,
    PAPER_BLOCKS,
    QUANTILES,
    compare,
    lengths,
    two_mergers,
)
from twinserve.experiments.justitia.tables import (
    bars,
    chosen,
    claim,
    jct_table,
    judge_close,
    judge_up_to,
)
from twinserve.experiments.study.study import Figure, Scale
from twinserve.experiments.study.verdict import Claim, Verdict, judge_bound
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import over_seeds, shown

DENSITIES = ("1x", "2x", "3x")
# KV blocks: what the profile derives, and those of Fig. 3
POOLS = {"profile": None, "459": PAPER_BLOCKS}
# with the error that the paper reports of its predictor, DistilBERT (Table II)
SJF = "vllm-sjf:error=4.52"  # its default, told where it is shown
FAIR_SEEDS = 10  # at least, of everything that is said about fairness
POLICIES = ("justitia", "srjf", SJF, "vtc", "parrot", "vllm", "vllm-v0", "justitia:cost=compute")
SHOWN = ("justitia", "srjf", "vtc", "parrot", "vllm", "vllm-v0", SJF)
DEMAND = ("justitia", "srjf")
UP_TO = 42.3  # Fig. 12, per cent
POOL_WHY = "the share of the pool that applications take: `causes` (pool, arrivals)"
SPREAD_WHY = "how much larger the largest applications are than the smallest: `causes` (sizes)"
WHY_FIG8 = {"vs_vtc": POOL_WHY, "vs_parrot": SPREAD_WHY}
WHY_FIG9 = {
    "vs_vtc": (
        "two causes, which together move it there: the pool is large, and these GPUs take long "
        "for prompts, which KV "
        "token-time does not charge: `causes` (Llama-13B)"
    ),
    "vs_parrot": (
        "how much larger the largest applications are than the smallest: `causes` "
        "(Llama-13B: large a sixth)"
    ),
}
WHY_CLOSE = "the seeds differ by more than the two policies do; both know the same demands"
WHY_MERGERS = (
    "the mergers are ours, and the averages go with their size: those of the workload "
    "and a sixth as large are here"
)
WHY_MERGER_RATIO = (
    "two mergers are drawn in each seed, and the ratio depends on how much they "
    "differ in size (interval)"
)
WHY_DELAYED = (
    "no run here says why; an application that ends later than under `kv-share` is one "
    "that waited for the other"
)
WHY_WORST = (
    "the ratio of a single application, which another seed changes much (interval). A smaller "
    "pool lowers it: at 2x from 3.1 ± 0.7 to 1.15 ± 0.18 with 459 blocks (`causes`)"
)
WHY_NOT_SMALLER = {
    "srjf": (
        "the two have nearly the same order here: nobody keeps coming for so long that SRJF "
        "starves anyone. Fig. 11 has a "
        "crowd in which they part (summary a 36th)"
    )
}
WHY_FIG12 = (
    "p + 2d puts our classes into nearly the same order as KV token-time, and V says how much "
    "order counts: `causes` has small "
    "applications four times as large, and another V"
)
WHY_LENGTHS = "the generator draws other lengths than the paper's Fig. 4: traces/apps/classes.py"


def with_predictor(policies: Sequence[str], predictor: str | None) -> list[str]:
    """Those that predict demands with the predictor named; None: as they are."""
    if predictor is None:
        return list(policies)
    said = f"predictor={predictor}"
    return [
        p + ("," if ":" in p else ":") + said if p.split(":")[0] in DEMAND else p for p in policies
    ]


def small(scale: Scale) -> dict:
    """Arguments of `compare` that make a run short, for tests: few applications, the embedded
    replica's arrivals."""
    return {"count": 12, "offline": True} if scale.quick else {}


def settings_of(blocks: int | None) -> dict:
    return {} if blocks is None else {"num_blocks": blocks}


# -- Fig. 3 ----------------------------------------------------------------------------------------
MERGERS = {"ours": 1.0, "as in Fig. 3": 1 / 6}


def fig3_points(scale: Scale) -> list[Point]:
    sizes = {"as in Fig. 3": 1 / 24} if scale.quick else MERGERS
    return [
        Point(
            {"size": size, "policy": policy, "seed": seed},
            {"policy": named, "seed": seed, "size": factor},
        )
        for size, factor in sizes.items()
        for policy, named in (("kv-share", "kv-share"), ("justitia", "justitia:predictor=perfect"))
        for seed in scale.seeds
    ]


def fig3_table(points: pd.DataFrame) -> pd.DataFrame:
    jobs = points.drop_duplicates(["size", "policy", "seed"]).copy()
    jobs["mean_s"] = (jobs.jct_first_s + jobs.jct_second_s) / 2
    base = jobs[jobs.policy == "justitia"].set_index(["size", "seed"])
    keys = list(zip(jobs["size"], jobs.seed, strict=True))
    jobs["over_justitia"] = [m / base.mean_s.loc[k] for m, k in zip(jobs.mean_s, keys, strict=True)]
    jobs["delayed"] = [
        float(base.jct_first_s.loc[k] > a * (1 + 1e-9))
        + float(base.jct_second_s.loc[k] > b * (1 + 1e-9))
        for a, b, k in zip(jobs.jct_first_s, jobs.jct_second_s, keys, strict=True)
    ]
    return over_seeds(
        jobs,
        ["size", "policy"],
        ["mean_s", "jct_first_s", "jct_second_s", "over_justitia", "delayed"],
    )


def fig3_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    size = list(dict.fromkeys(points["size"]))[-1]
    frame = points[(points["size"] == size) & (points.seed == points.seed.min())]
    panels = canvas.subplots(1, 2, sharey=True, sharex=True)
    for panel, (policy, rows) in zip(panels, frame.groupby("policy", sort=False), strict=True):
        panel.stackplot(
            rows.t_s, rows["first"], rows.second, labels=("ends first", "ends second"), step="post"
        )
        panel.set(
            title=f"{policy}: mean {chosen(table, size=size, policy=policy).mean_s:.0f} s",
            xlabel="s",
        )
    panels[0].set_ylabel("KV blocks")
    panels[0].legend(fontsize=8)


def fig3_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    what = "average JCT of two DM on 459 blocks"
    for size in dict.fromkeys(table["size"]):
        fair, ours = (chosen(table, size=size, policy=p) for p in ("kv-share", "justitia"))
        sized = "mergers of the workload" if size == "ours" else "mergers a sixth as large"
        ratio = f"{what}, instantaneous fair sharing / Justitia; {sized}"
        delayed = judge_bound(1e-9 - fair.delayed, fair.delayed_ci)
        claims += [
            claim("Fig. 3", ratio, 210 / 166, fair, "over_justitia", WHY_MERGER_RATIO, text="1.27"),
            claim(
                "Fig. 3a",
                f"{what}, instantaneous fair sharing; {sized}",
                210,
                fair,
                "mean_s",
                WHY_MERGERS,
                " s",
            ),
            claim("Fig. 3b", f"{what}, Justitia; {sized}", 166, ours, "mean_s", WHY_MERGERS, " s"),
            Claim.judged(
                "Fig. 3",
                f"applications delayed by Justitia; {sized}",
                "none",
                f"{fair.delayed:.2g} of 2",
                delayed,
                WHY_DELAYED,
                False,
            ),
        ]
    return claims


# -- Fig. 4 ----------------------------------------------------------------------------------------
def _edges(low: float, high: float) -> list[float]:
    return np.linspace(low, high, 11).tolist()


EDGES = {
    "FV": {"prompt": _edges(360, 380), "output": _edges(0, 150)},
    "MRS": {"prompt": _edges(1100, 1400), "output": _edges(0, 1000)},
}


def fig4_points(scale: Scale) -> list[Point]:
    trials = 10 if scale.quick else 100
    return [
        Point(
            {"kind": kind, "seed": seed},
            {"kind": kind, "edges": edges, "seed": seed, "trials": trials},
        )
        for kind, edges in EDGES.items()
        for seed in scale.seeds
    ]


def fig4_table(points: pd.DataFrame) -> pd.DataFrame:
    return over_seeds(
        points, ["kind", "what", "low", "high"], ["share", "least", "most", "relative_spread"]
    )


def fig4_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    panels = canvas.subplots(2, 2).ravel()
    for panel, ((kind, what), rows) in zip(
        panels, table.groupby(["kind", "what"], sort=False), strict=True
    ):
        panel.bar(
            rows.low,
            rows.share,
            rows.high - rows.low,
            align="edge",
            yerr=np.nan_to_num(rows.share_ci),
        )
        panel.set_title(f"{kind}, first stage: {what} tokens", fontsize=9)


def fig4_claims(table: pd.DataFrame) -> list[Claim]:
    rows = table[(table.kind == "FV") & (table.what == "prompt")]
    low, high = rows.least.min(), rows.most.max()
    what = (
        "prompts of FV's generate-queries, tokens (generated so: nothing but that the "
        "generator does what it says)"
    )
    verdict = "agrees" if 360 <= low and high <= 380 else "differs"
    return [
        Claim.judged(
            "Fig. 4b", what, "360 to 380", f"{low:.0f} to {high:.0f}", verdict, WHY_LENGTHS, False
        )
    ]


# -- Fig. 8, 9, 10, 12 -----------------------------------------------------------------------------
def jct_points(scale: Scale, densities: Sequence[str] = DENSITIES) -> list[Point]:
    policies = with_predictor(POLICIES, "class-mean" if scale.quick else None)
    return [
        Point(
            {"density": density, "pool": pool, "seed": seed},
            {"policies": policies, "trace": f"apps:{density}", "seed": seed}
            | settings_of(blocks)
            | small(scale),
        )
        for density in (densities[-1:] if scale.quick else densities)
        for pool, blocks in POOLS.items()
        for seed in fair_seeds(scale)
    ]


def fair_seeds(scale: Scale) -> tuple[int, ...]:
    """Those of the scale, and as many more as a statement about fairness takes."""
    return scale.seeds if scale.quick else tuple(range(max(FAIR_SEEDS, len(scale.seeds))))


def fig9_points(scale: Scale) -> list[Point]:
    policies = with_predictor(SHOWN, "class-mean" if scale.quick else None)
    return [
        Point(
            {"density": density, "pool": "profile", "seed": seed},
            {"policies": policies, "trace": f"apps:{density}", "seed": seed, "profile": LLAMA_13B}
            | small(scale),
        )
        for density in (DENSITIES[-1:] if scale.quick else DENSITIES)
        for seed in scale.seeds
    ]


def by_density(points: pd.DataFrame) -> pd.DataFrame:
    """`jct_table`, with rows for the mean over the densities (density `all`)."""
    return jct_table(points, ["density", "pool"], pooled="density")


def jct_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    _by_setting(canvas, table, SHOWN)
    for panel in canvas.axes:
        panel.set_yscale("log")


def _by_setting(canvas: Canvas, table: pd.DataFrame, policies: Sequence[str]) -> None:
    rows = table[table.policy.isin(policies) & (table.density != "all")].copy()
    rows["setting"] = rows.density + "\n" + rows.pool.astype(str)
    bars(canvas, rows, "setting", {"mean_s": "average JCT, s", "p90_s": "P90 JCT, s"}, policies)


def jct_claims(table: pd.DataFrame, where: str, model: str, why: Mapping[str, str]) -> list[Claim]:
    claims = []
    for pool in dict.fromkeys(table.pool):
        ours, srjf = (
            chosen(table, density="all", pool=pool, policy=policy)
            for policy in ("justitia", "srjf")
        )
        setting = (
            f"{model}, {'' if pool == 'profile' else f'{pool} KV blocks, '}mean over the densities"
        )
        fair, blocking = (
            f"average JCT, Justitia against VTC; {setting}",
            f"average JCT, Justitia against Parrot; {setting}",
        )
        close = f"average JCT, SRJF against Justitia; {setting}"
        claims += [
            claim(where, fair, -57.5, ours, "vs_vtc", why["vs_vtc"], " %"),
            claim(where, blocking, -61.1, ours, "vs_parrot", why["vs_parrot"], " %"),
            claim(
                where, close, 0.0, srjf, "vs_justitia", WHY_CLOSE, " %", "very close", judge_close
            ),
        ]
    return claims


def fig10_table(points: pd.DataFrame) -> pd.DataFrame:
    return jct_table(points, ["pool"])


def fig10_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    pools = list(dict.fromkeys(table.pool))
    for panel, pool in zip(
        np.atleast_1d(canvas.subplots(1, len(pools), sharey=True)), pools, strict=True
    ):
        for policy in SHOWN:
            if policy == "vtc":
                continue
            row = chosen(table, pool=pool, policy=policy)
            panel.plot(
                [row[f"ratio_{q}"] for q in QUANTILES], np.array(QUANTILES) / 100, label=policy
            )
        panel.axvline(1.0, color="grey", lw=0.8)
        panel.set(xscale="log", xlabel="JCT / JCT under VTC", title=f"KV blocks: {pool}")
    canvas.axes[0].set_ylabel("share of applications")
    canvas.axes[0].legend(fontsize=8)


def fig10_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    for pool in dict.fromkeys(table.pool):
        rows = {
            policy: _late(chosen(table, pool=pool, policy=policy))
            for policy in SHOWN
            if policy != "vtc"
        }
        ours = rows.pop("justitia")
        setting = "3x" if pool == "profile" else f"3x, {pool} KV blocks"
        claims += [
            claim(
                "Fig. 10",
                f"applications no later than under VTC; {setting}",
                92.0,
                ours,
                "share",
                POOL_WHY,
                " %",
            ),
            claim(
                "Fig. 10",
                f"worst delay against VTC; {setting}",
                26.0,
                ours,
                "late",
                WHY_WORST,
                " %",
            ),
        ]
        for policy, row in rows.items():
            what = (
                f"worst delay against VTC, Justitia's beside that of `{policy}` (much "
                f"smaller: at most half); {setting}"
            )
            texts = [f"{shown(r.late, r.late_ci)} %" for r in (ours, row)]
            verdict = judge_bound(row.half_delay, row.half_delay_ci)
            why = WHY_NOT_SMALLER.get(policy, WHY_WORST)
            claims.append(
                Claim.judged("Fig. 10", what, "much smaller", " against ".join(texts), verdict, why)
            )
    return claims


def _late(row: pd.Series) -> pd.Series:
    """With share, of applications no later than under VTC, and late, the worst delay; both per
    cent."""
    late = {
        "share": row.not_delayed,
        "late": row.worst - 1,
        "share_ci": row.not_delayed_ci,
        "late_ci": row.worst_ci,
    }
    return pd.concat([row, 100 * pd.Series(late)])


def fig12_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    _by_setting(canvas, table, ("justitia", "justitia:cost=compute"))


def fig12_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    for name, what in (("vs_justitia", "average"), ("p90_vs_justitia", "P90")):
        for pool in dict.fromkeys(table.pool):
            rows = table[
                (table.pool == pool)
                & (table.policy == "justitia:cost=compute")
                & (table.density != "all")
            ]
            most = rows.loc[rows[name].idxmax()]
            setting = f"at most, {most.density}" + (
                "" if pool == "profile" else f", {pool} KV blocks"
            )
            said = f"{what} JCT, Justitia/C against Justitia; {setting}"
            claims.append(
                claim(
                    "Fig. 12", said, UP_TO, most, name, WHY_FIG12, " %", f"up to {UP_TO} %", up_to
                )
            )
    return claims


def up_to(change: float, half: float) -> Verdict:
    """Of Justitia/C above Justitia, per cent."""
    return judge_up_to(change, half, UP_TO)


FIG3 = Figure(
    "fig3",
    "two document mergers, KV blocks over time",
    fig3_points,
    two_mergers,
    fig3_table,
    fig3_plot,
    fig3_claims,
)
FIG4 = Figure(
    "fig4",
    "lengths of first-stage requests over 100 runs",
    fig4_points,
    lengths,
    fig4_table,
    fig4_plot,
    fig4_claims,
)
FIG8 = Figure(
    "fig8",
    "JCT, Llama-7B on an A100",
    jct_points,
    compare,
    by_density,
    jct_plot,
    partial(jct_claims, where="Fig. 8", model="Llama-7B", why=WHY_FIG8),
)
FIG9 = Figure(
    "fig9",
    "JCT, Llama-13B on 4 V100",
    fig9_points,
    compare,
    by_density,
    jct_plot,
    partial(jct_claims, where="Fig. 9", model="Llama-13B", why=WHY_FIG9),
)
FIG10 = Figure(
    "fig10",
    "finish-time fair ratios at 3x",
    lambda s: jct_points(s, ("3x",)),
    compare,
    fig10_table,
    fig10_plot,
    fig10_claims,
)
FIG12 = Figure(
    "fig12",
    "cost in memory or in computation",
    jct_points,
    compare,
    by_density,
    fig12_plot,
    fig12_claims,
)
