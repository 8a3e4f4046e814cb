"""The figures and tables of Justitia's paper (Yang et al.), each as a grid of runs; justitia.py joins them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from .grid import Point, over_seeds, shown
from .justitia_runs import LLAMA_13B, PAPER_BLOCKS, QUANTILES, compare, elephant, lengths, two_mergers
from .justitia_tables import bars, chosen, claim, jct_table, plain
from .study import Claim, Figure, Scale

DENSITIES = ("1x", "2x", "3x")
POOLS = {"profile": None, "459": PAPER_BLOCKS}  # KV blocks: what the profile derives, and those of Fig. 3
POLICIES = ("justitia", "srjf", "vllm-sjf", "vtc", "parrot", "vllm", "vllm-v0", "justitia:cost=compute")
SHOWN = ("justitia", "srjf", "vtc", "parrot", "vllm", "vllm-sjf")
DEMAND = ("justitia", "srjf")
POOL_WHY = "the share of the pool that applications take: `causes` (pool, arrivals)"
SPREAD_WHY = "how much larger the largest applications are than the smallest: `causes` (sizes)"


def with_predictor(policies: Sequence[str], predictor: str | None) -> list[str]:
    """Those that predict demands with the predictor named; None: as they are."""
    if predictor is None:
        return list(policies)
    said = f"predictor={predictor}"
    return [p + ("," if ":" in p else ":") + said if p.split(":")[0] in DEMAND else p for p in policies]


def small(scale: Scale) -> dict:
    """Arguments of `compare` that make a run short, for tests: few applications, the embedded replica's arrivals."""
    return {"count": 12, "offline": True} if scale.quick else {}


def settings_of(blocks: int | None) -> dict:
    return {} if blocks is None else {"num_blocks": blocks}


# -- Fig. 3 --------------------------------------------------------------------------------------------------------------
MERGERS = {"ours": 1.0, "as in Fig. 3": 1 / 6}


def fig3_points(scale: Scale) -> list[Point]:
    sizes = {"as in Fig. 3": 1 / 24} if scale.quick else MERGERS
    return [
        Point({"size": size, "policy": policy, "seed": seed}, {"policy": named, "seed": seed, "size": factor})
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
        float(base.jct_first_s.loc[k] > a * (1 + 1e-9)) + float(base.jct_second_s.loc[k] > b * (1 + 1e-9))
        for a, b, k in zip(jobs.jct_first_s, jobs.jct_second_s, keys, strict=True)
    ]
    return over_seeds(jobs, ["size", "policy"], ["mean_s", "jct_first_s", "jct_second_s", "over_justitia", "delayed"])


def fig3_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    size = list(dict.fromkeys(points["size"]))[-1]
    frame = points[(points["size"] == size) & (points.seed == points.seed.min())]
    panels = canvas.subplots(1, 2, sharey=True, sharex=True)
    for panel, (policy, rows) in zip(panels, frame.groupby("policy", sort=False), strict=True):
        panel.stackplot(rows.t_s, rows["first"], rows.second, labels=("ends first", "ends second"), step="post")
        panel.set(title=f"{policy}: mean {chosen(table, size=size, policy=policy).mean_s:.0f} s", xlabel="s")
    panels[0].set_ylabel("KV blocks")
    panels[0].legend(fontsize=8)


def fig3_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    for size in dict.fromkeys(table["size"]):
        fair, ours = (chosen(table, size=size, policy=p) for p in ("kv-share", "justitia"))
        sized = "mergers of the workload" if size == "ours" else "mergers a sixth as large"
        why = "mergers are ours: `kv-share` gains the more from the last requests of the other one, the longer these are"
        what = "average JCT of two DM on 459 blocks"
        claims += [
            claim(
                "Fig. 3",
                f"{what}, instantaneous fair sharing / Justitia; {sized}",
                210 / 166,
                fair,
                "over_justitia",
                why,
                text="1.27",
            ),
            claim("Fig. 3a", f"{what}, instantaneous fair sharing; {sized}", 210, fair, "mean_s", "mergers are ours", " s"),
            claim("Fig. 3b", f"{what}, Justitia; {sized}", 166, ours, "mean_s", "mergers are ours", " s"),
        ]
        delayed = fair.delayed
        said = "agrees" if delayed == 0 else "differs"
        claims.append(Claim("Fig. 3", f"applications delayed by Justitia; {sized}", "none", f"{delayed:.2g} of 2", said))
    return claims


# -- Fig. 4 --------------------------------------------------------------------------------------------------------------
def _edges(low: float, high: float) -> list[float]:
    return np.linspace(low, high, 11).tolist()


EDGES = {
    "FV": {"prompt": _edges(360, 380), "output": _edges(0, 150)},
    "MRS": {"prompt": _edges(1100, 1400), "output": _edges(0, 1000)},
}


def fig4_points(scale: Scale) -> list[Point]:
    trials = 10 if scale.quick else 100
    return [
        Point({"kind": kind, "seed": seed}, {"kind": kind, "edges": edges, "seed": seed, "trials": trials})
        for kind, edges in EDGES.items()
        for seed in scale.seeds
    ]


def fig4_table(points: pd.DataFrame) -> pd.DataFrame:
    return over_seeds(points, ["kind", "what", "low", "high"], ["share", "least", "most", "relative_spread"])


def fig4_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    panels = canvas.subplots(2, 2).ravel()
    for panel, ((kind, what), rows) in zip(panels, table.groupby(["kind", "what"], sort=False), strict=True):
        panel.bar(rows.low, rows.share, rows.high - rows.low, align="edge", yerr=np.nan_to_num(rows.share_ci))
        panel.set_title(f"{kind}, first stage: {what} tokens", fontsize=9)


def fig4_claims(table: pd.DataFrame) -> list[Claim]:
    rows = table[(table.kind == "FV") & (table.what == "prompt")]
    low, high = rows.least.min(), rows.most.max()
    said = "agrees" if 360 <= low and high <= 380 else "differs"
    why = "the workload is generated so: it shows nothing but that the generator does what it says"
    return [Claim("Fig. 4b", "prompts of FV's generate-queries, tokens", "360 to 380", f"{low:.0f} to {high:.0f}", said, why)]


# -- Fig. 8, 9, 10, 12 ---------------------------------------------------------------------------------------------------
def jct_points(scale: Scale, densities: Sequence[str] = DENSITIES) -> list[Point]:
    policies = with_predictor(POLICIES, "class-mean" if scale.quick else None)
    return [
        Point(
            {"density": density, "pool": pool, "seed": seed},
            {"policies": policies, "trace": f"apps:{density}", "seed": seed} | settings_of(blocks) | small(scale),
        )
        for density in (densities[-1:] if scale.quick else densities)
        for pool, blocks in POOLS.items()
        for seed in scale.seeds
    ]


def fig9_points(scale: Scale) -> list[Point]:
    policies = with_predictor(SHOWN, "class-mean" if scale.quick else None)
    return [
        Point(
            {"density": density, "pool": "profile", "seed": seed},
            {"policies": policies, "trace": f"apps:{density}", "seed": seed, "profile": LLAMA_13B} | small(scale),
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


def jct_claims(table: pd.DataFrame, where: str, model: str) -> list[Claim]:
    claims = []
    for pool in dict.fromkeys(table.pool):
        ours = chosen(table, density="all", pool=pool, policy="justitia")
        srjf = chosen(table, density="all", pool=pool, policy="srjf")
        setting = f"{model}, {'' if pool == 'profile' else f'{pool} KV blocks, '}mean over the densities"
        fair, blocking = f"average JCT, Justitia against VTC; {setting}", f"average JCT, Justitia against Parrot; {setting}"
        claims += [
            claim(where, fair, -57.5, ours, "vs_vtc", POOL_WHY, " %"),
            claim(where, blocking, -61.1, ours, "vs_parrot", SPREAD_WHY, " %"),
        ]
        said = "agrees" if abs(srjf.vs_justitia) <= 10 else "differs"
        close = f"{shown(srjf.vs_justitia, srjf.vs_justitia_ci)} %"
        claims.append(Claim(where, f"average JCT, SRJF against Justitia; {setting}", "very close", close, said))
    return claims


def fig10_table(points: pd.DataFrame) -> pd.DataFrame:
    return jct_table(points, ["pool"])


def fig10_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    pools = list(dict.fromkeys(table.pool))
    for panel, pool in zip(np.atleast_1d(canvas.subplots(1, len(pools), sharey=True)), pools, strict=True):
        for policy in SHOWN:
            if policy == "vtc":
                continue
            row = chosen(table, pool=pool, policy=policy)
            panel.plot([row[f"ratio_{q}"] for q in QUANTILES], np.array(QUANTILES) / 100, label=policy)
        panel.axvline(1.0, color="grey", lw=0.8)
        panel.set(xscale="log", xlabel="JCT / JCT under VTC", title=f"KV blocks: {pool}")
    canvas.axes[0].set_ylabel("share of applications")
    canvas.axes[0].legend(fontsize=8)


def fig10_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    for pool in dict.fromkeys(table.pool):
        row = chosen(table, pool=pool, policy="justitia").copy()
        setting = "3x" if pool == "profile" else f"3x, {pool} KV blocks"
        for name, source in (("share", "not_delayed"), ("late", "worst")):
            shift = 0 if name == "share" else 1
            row[name], row[f"{name}_ci"] = 100 * (row[source] - shift), 100 * row[f"{source}_ci"]
        claims += [
            claim("Fig. 10", f"applications no later than under VTC; {setting}", 92.0, row, "share", POOL_WHY, " %"),
            claim("Fig. 10", f"worst delay against VTC; {setting}", 26.0, row, "late", POOL_WHY, " %"),
        ]
    return claims


def fig12_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    _by_setting(canvas, table, ("justitia", "justitia:cost=compute"))


def fig12_claims(table: pd.DataFrame) -> list[Claim]:
    why = "p + 2d puts our classes into nearly the same order; small ones four times as large, or another V: `causes`"
    claims = []
    for name, what in (("vs_justitia", "average"), ("p90_vs_justitia", "P90")):
        for pool in dict.fromkeys(table.pool):
            rows = table[(table.pool == pool) & (table.policy == "justitia:cost=compute") & (table.density != "all")]
            most = rows.loc[rows[name].idxmax()]
            setting = f"at most, {most.density}" + ("" if pool == "profile" else f", {pool} KV blocks")
            claims.append(
                claim(
                    "Fig. 12",
                    f"{what} JCT, Justitia/C against Justitia; {setting}",
                    42.3,
                    most,
                    name,
                    why,
                    " %",
                    "up to 42.3 %",
                )
            )
    return claims


# -- Fig. 11 -------------------------------------------------------------------------------------------------------------
CROWDS = {  # how large the summary is, and the pool
    "as drawn, profile": ({}, None),
    "summary a 6th, 400 blocks": ({"large": 1 / 6}, 400),
    "summary a 36th, 400 blocks": ({"large": 1 / 36}, 400),
}
CROWD_WHY = {
    "as drawn, profile": "one small application a second does not fill this pool: there is nothing to be starved by",
    "summary a 6th, 400 blocks": "small applications fill the pool: N grows, V slows down, and GPS itself has not ended it",
}


def fig11_points(scale: Scale) -> list[Point]:
    counts = (0, 6) if scale.quick else (0, 100, 200, 400, 600)
    return [
        Point(
            {"crowd": crowd, "mice": mice, "seed": seed},
            {"policies": with_predictor(DEMAND, "perfect"), "mice": mice, "seed": seed, "sizes": sizes, "num_blocks": blocks},
        )
        for crowd, (sizes, blocks) in CROWDS.items()
        for mice in counts
        for seed in scale.seeds
    ]


def fig11_table(points: pd.DataFrame) -> pd.DataFrame:
    return over_seeds(points.assign(policy=points.policy.map(plain)), ["crowd", "policy", "mice"], ["elephant_s", "mice_s"])


def fig11_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    crowds = list(dict.fromkeys(table.crowd))
    for panel, crowd in zip(np.atleast_1d(canvas.subplots(1, len(crowds))), crowds, strict=True):
        for policy, rows in table[table.crowd == crowd].groupby("policy", sort=False):
            panel.errorbar(rows.mice, rows.elephant_s, np.nan_to_num(rows.elephant_s_ci), marker="o", label=policy)
        panel.set_title(crowd, fontsize=8)
        panel.set(xlabel="small applications", ylabel="JCT of the summary, s")
    canvas.axes[0].legend(fontsize=8)


def fig11_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    for crowd in dict.fromkeys(table.crowd):
        rows = table[table.crowd == crowd]
        most = rows.mice.max()
        last = {p: float(chosen(rows, policy=p, mice=most).elephant_s) for p in DEMAND}
        half = {p: float(chosen(rows, policy=p, mice=sorted(set(rows.mice))[-2]).elephant_s) for p in DEMAND}
        grown = {p: last[p] / half[p] - 1 for p in DEMAND}
        said = "agrees" if grown["justitia"] < 0.02 < grown["srjf"] else "differs"
        ours = ", ".join(f"{p} {half[p]:.0f} to {last[p]:.0f} s" for p in ("srjf", "justitia"))
        why = "" if said == "agrees" else CROWD_WHY.get(crowd, "")
        what = f"elephant as small applications go from {sorted(set(rows.mice))[-2]} to {most}; {crowd}"
        claims.append(Claim("Fig. 11", what, "grows under SRJF, bounded under Justitia", ours, said, why))
    return claims


FIG3 = Figure("fig3", "two document mergers, KV blocks over time", fig3_points, two_mergers, fig3_table, fig3_plot, fig3_claims)
FIG4 = Figure("fig4", "lengths of first-stage requests over 100 runs", fig4_points, lengths, fig4_table, fig4_plot, fig4_claims)
FIG8 = Figure(
    "fig8", "JCT, Llama-7B on an A100", jct_points, compare, by_density, jct_plot, lambda t: jct_claims(t, "Fig. 8", "Llama-7B")
)
FIG9 = Figure(
    "fig9",
    "JCT, Llama-13B on 4 V100",
    fig9_points,
    compare,
    by_density,
    jct_plot,
    lambda t: jct_claims(t, "Fig. 9", "Llama-13B"),
)
FIG10 = Figure(
    "fig10", "finish-time fair ratios at 3x", lambda s: jct_points(s, ("3x",)), compare, fig10_table, fig10_plot, fig10_claims
)
FIG11 = Figure("fig11", "an elephant among mice", fig11_points, elephant, fig11_table, fig11_plot, fig11_claims)
FIG12 = Figure("fig12", "cost in memory or in computation", jct_points, compare, by_density, fig12_plot, fig12_claims)
