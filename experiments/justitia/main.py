"""Figures and tables of Justitia's paper: `twinserve study justitia
[FIGURE ...]`. docs/justitia.md says what comes out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia import claims, tables
from twinserve.experiments.justitia.claims import ERRORS, OVERHEAD_MS, QUEUES, SJF, TEXTS
from twinserve.experiments.justitia.overhead import decisions, prediction
from twinserve.experiments.justitia.runs import (
    LLAMA_13B,
    PAPER_BLOCKS,
    QUANTILES,
    compare,
    elephant,
    lengths,
    two_mergers,
)
from twinserve.experiments.study.curves import Bars, lines_of, of_runs, one_seed, ylog
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.points import Point
from twinserve.experiments.study.study import Scale, Study, titled
from twinserve.experiments.study.tables import Table

DENSITIES = ("1x", "2x", "3x")
# KV blocks: what the profile derives, and those of Fig. 3
POOLS = {"profile": {}, "459": {"num_blocks": PAPER_BLOCKS}}
FAIR_SEEDS = 10  # at least, of everything that is said about fairness
POLICIES = ("justitia", "srjf", SJF, "vtc", "parrot", "vllm", "vllm-v0", "justitia:cost=compute")
SHOWN = ("justitia", "srjf", "vtc", "parrot", "vllm", "vllm-v0", SJF)
TRUTH = "predictor=perfect"
JUSTITIA, SRJF = f"justitia:{TRUTH}", f"srjf:{TRUTH}"
# few applications, the arrivals of the embedded replica, and no network to train
WORKLOAD = {"count": 300, "offline": False}
QUICK = {"count": 12, "offline": True, "policies": lambda policies: quickly(policies)}


def quickly(policies: Sequence[str]) -> list[str]:
    """Policies that predict demands, by the mean of a class unless they name a predictor."""
    asked = [p.split(":")[0] in ("justitia", "srjf") and "predictor" not in p for p in policies]
    return [
        f"{p}{',' if ':' in p else ':'}predictor=class-mean" if mean else p
        for p, mean in zip(policies, asked, strict=True)
    ]


def densities(values: Sequence[str]) -> dict[str, dict[str, str]]:
    return {value: {"trace": f"apps:{value}"} for value in values}


def jct(
    values: Sequence[str], policies: Sequence[str], seeds: int = FAIR_SEEDS, **more: Any
) -> Grid:
    """Runs of `compare` at these densities; more: `pools`, if that is an axis, and
    further settings."""
    axes = {"pool": more.pop("pools")} if "pools" in more else {}
    common = {"policies": [*policies], **WORKLOAD} | more
    few = {"density": values[-1:]}
    vary = {"density": densities(values), **axes}
    return Grid(vary, common, few=few, quick=QUICK, least_seeds=seeds)


# -- plots -----------------------------------------------------------------------------------------
def _log(axes, metric: str) -> None:
    axes.set_xscale("log")
    axes.autoscale(axis="x")
    axes.tick_params(which="minor", labelbottom=False)


def jct_bars(policies: Sequence[str]) -> Callable:
    metrics = {"mean_s": "average JCT, s", "p90_s": "P90 JCT, s"}
    draw = Bars("policy", "density", metrics, group="pool", finish=_log)

    def plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
        draw(canvas, table[table.policy.isin(policies) & (table.density != "all")], points)

    return plot


def last_size(points: pd.DataFrame) -> pd.DataFrame:
    """One run of the last size."""
    return one_seed(points[points["size"] == points["size"].iloc[-1]])


BLOCKS = {name: (f"KV blocks, ends {name}", 1.0) for name in ("first", "second")}
THIN = {"": {"marker": "", "linewidth": 1.0}}


def lengths_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    groups = table.groupby(["kind", "what"], sort=False)
    for panel, ((kind, what), rows) in zip(canvas.subplots(2, 2).ravel(), groups, strict=True):
        error = np.nan_to_num(rows.share_ci)
        panel.bar(rows.low, rows.share, rows.high - rows.low, align="edge", yerr=error)
        panel.set_title(f"{kind}, first stage: {what} tokens", fontsize=9)


def ratios_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    pools = list(dict.fromkeys(table.pool))
    panels = canvas.subplots(1, len(pools), sharey=True, squeeze=False)[0]
    for panel, pool in zip(panels, pools, strict=True):
        by_policy = table[table.pool == pool].set_index("policy")
        for policy in (name for name in SHOWN if name != "vtc"):
            ratios = by_policy.loc[policy, tables.RATIOS].to_numpy(float)
            panel.plot(ratios, np.array(QUANTILES) / 100, label=policy)
        panel.axvline(1.0, color="grey", lw=0.8)
        panel.set(xscale="log", xlabel="JCT / JCT under VTC", title=f"KV blocks: {pool}")
    panels[0].set_ylabel("share of applications")
    panels[0].legend(fontsize=8)


def _papers_jct(axes, metric: str) -> None:
    axes.axvline(151.1, color="black", lw=1, ls=":", label="paper, 53 %")
    axes.axvline(366.7, color="black", lw=1, ls="--", label="paper, 452 %")


def _papers_ms(axes, metric: str) -> None:
    axes.plot(list(OVERHEAD_MS), list(OVERHEAD_MS.values()), marker="s", label="paper")
    ylog(axes, metric)


def _zero(axes, metric: str) -> None:
    axes.axvline(0.0, color="grey", lw=0.8)


# -- Table II --------------------------------------------------------------------------------------
NOISE = "justitia:predictor=perfect,error={error},seed={draw}"
PREDICTORS = {
    "mlp": "justitia",
    "class mean": "justitia:predictor=class-mean",
    "perfect": "justitia:predictor=perfect",
}
DRAWS = {"error": 1, "class error": 4}  # in each seed


def table2_points(scale: Scale) -> list[Point]:
    wanted = [
        (name, seed, 0, {"policy": policy})
        for name, policy in PREDICTORS.items()
        if not (scale.quick and name == "mlp")
        for seed in scale.seeds
    ]
    for kind, draws in DRAWS.items():
        of_class = {"class_errors": True} if kind == "class error" else {}
        wanted += [
            (
                f"{kind} {said} %",
                seed,
                draw,
                {"policy": NOISE.format(error=error, draw=n)} | of_class,
            )
            for said, error in ERRORS.items()
            for seed in scale.seeds
            for draw in range(1 if scale.quick else draws)
            for name, n in [(f"{kind} {said} %", draws * seed + draw)]
        ]
    size = {"count": 12, "offline": True} if scale.quick else {}
    # what a predictor says does not depend on the pool: it is asked once
    trials = {"profile": 5 if scale.quick else 100, "459": 0}
    return [
        Point(
            {"predictor": name, "pool": pool, "seed": seed, "draw": draw},
            asked | {"seed": seed, "blocks": more.get("num_blocks"), "trials": trials[pool]} | size,
        )
        for name, seed, draw, asked in wanted
        for pool, more in POOLS.items()
    ]


# -- figures ---------------------------------------------------------------------------------------
SIZES = {"ours": 1.0, "as in Fig. 3": 1 / 6}
FIG3 = Grid(
    {"size": SIZES, "policy": {"kv-share": "kv-share", "justitia": JUSTITIA}},
    few={"size": ("as in Fig. 3",)},
    quick={"size": 1 / 24},
)


def _edges(low: float, high: float) -> list[float]:
    return np.linspace(low, high, 11).tolist()


EDGES = {
    "FV": {"prompt": _edges(360, 380), "output": _edges(0, 150)},
    "MRS": {"prompt": _edges(1100, 1400), "output": _edges(0, 1000)},
}
FIG4 = Grid(
    {"kind": {kind: {"kind": kind, "edges": edges} for kind, edges in EDGES.items()}},
    {"trials": 100},
    quick={"trials": 10},
)
CROWDS = {  # how large the summary is, and the pool
    "as drawn, profile": {},
    "summary a 6th, 400 blocks": {"sizes": {"large": 1 / 6}, "num_blocks": 400},
    "summary a 36th, 400 blocks": {"sizes": {"large": 1 / 36}, "num_blocks": 400},
}
FIG11 = Grid(
    {"crowd": CROWDS, "mice": (0, 100, 200, 400, 600)},
    {"policies": (JUSTITIA, SRJF)},
    few={"mice": 2},
    quick={"mice": lambda mice: min(mice, 6)},
    least_seeds=FAIR_SEEDS,
)
TABLE3 = Grid(
    {"queue": {queue: {"resort": queue != "heap"} for queue in QUEUES}, "a_minute": QUEUES["heap"]},
    {"policy": "justitia", "minutes": 3.0},
    where=lambda at: at["a_minute"] in QUEUES[at["queue"]],
    quick={"policy": "justitia:predictor=class-mean", "minutes": 0.2},
)
FIG8 = jct(DENSITIES, POLICIES, pools=POOLS)
FIG9 = jct(DENSITIES, SHOWN, seeds=1, pools={"profile": {}}, profile=LLAMA_13B)
OURS = Bars("policy", "density", {"mean_s": "average JCT, s", "worst": "worst ratio to VTC"})
FAIRER = {f"{name}_gain": f"fairer by: {words[0]}" for name, words in tables.MEASURES.items()}
ENDS = {
    "elephant_s": ("JCT of the summary, s", 1.0),
    "gps_s": ("GPS ends it, s", 1.0),
    "bound_s": ("GPS and bound 2, s", 1.0),
}

figure = titled(TEXTS.TITLES)
STUDY = Study(
    "justitia",
    'Yang et al., "Justitia: Fair and Efficient Scheduling for LLM Applications"',
    [
        figure(
            "fig3",
            FIG3,
            two_mergers,
            tables.MERGERS,
            of_runs(lines_of("policy", BLOCKS, "t_s", None, THIN, xlabel="s"), last_size),
            claims.FIG3,
        ),
        figure(
            "fig4",
            FIG4,
            lengths,
            Table(("kind", "what", "low", "high"), ("share", "least", "most", "relative_spread")),
            lengths_plot,
            claims.fig4,
        ),
        figure(
            "fig8",
            FIG8,
            compare,
            tables.BY_DENSITY,
            jct_bars(SHOWN),
            claims.jct("Fig. 8", "Llama-7B", TEXTS.FIG8),
        ),
        figure(
            "fig9",
            FIG9,
            compare,
            tables.BY_DENSITY,
            jct_bars(SHOWN),
            claims.jct("Fig. 9", "Llama-13B", TEXTS.FIG9),
        ),
        figure(
            "fig10",
            jct(("3x",), POLICIES, pools=POOLS),
            compare,
            tables.jct("pool"),
            ratios_plot,
            claims.fig10,
        ),
        figure(
            "fig11",
            FIG11,
            elephant,
            tables.ELEPHANTS,
            lines_of("crowd", ENDS, "mice", "policy", {}, xlabel="small applications"),
            claims.fig11,
        ),
        figure(
            "fig12",
            FIG8,
            compare,
            tables.BY_DENSITY,
            jct_bars(("justitia", "justitia:cost=compute")),
            claims.fig12,
        ),
        figure(
            "fairness",
            FIG8,
            compare,
            tables.fairness,
            Bars("density", "pool", FAIRER, finish=_zero),
            claims.fairness,
        ),
        figure(
            "table2",
            table2_points,
            prediction,
            tables.errors,
            Bars("predictor", "pool", {"mean_s": "average JCT at 2x, s"}, finish=_papers_jct),
            claims.TABLE2,
        ),
        figure(
            "table3",
            TABLE3,
            decisions,
            tables.DECISIONS,
            lines_of(
                None,
                {"plan_ms": ("ms a decision", 1.0)},
                "a_minute",
                "queue",
                {},
                _papers_ms,
                xlabel="applications a minute",
            ),
            claims.table3,
        ),
        figure(
            "together",
            jct(
                DENSITIES[1:],
                (JUSTITIA, SRJF, "vtc", "parrot", f"{JUSTITIA},cost=compute"),
                sizes={"small": 4.0, "large": 1 / 6},
                num_blocks=1415,
            ),
            compare,
            tables.OF_OURS,
            OURS,
        ),
        figure(
            "preemption",
            jct(DENSITIES[1:], (JUSTITIA, f"{JUSTITIA},preempt=true", "vtc")),
            compare,
            tables.OF_OURS,
            OURS,
        ),
    ],
    claims.ABSENT,
)
