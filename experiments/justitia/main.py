"""Figures and tables of Justitia's paper, and why ours differ: `python -m
twinserve.experiments.justitia [FIGURE ...]`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.justitia.causes import CAUSES
from twinserve.experiments.justitia.elephant import FIG11
from twinserve.experiments.justitia.fairness import FAIRNESS, WHO
from twinserve.experiments.justitia.figures import (
    FIG3,
    FIG4,
    FIG8,
    FIG9,
    FIG10,
    FIG12,
    POOLS,
    small,
)
from twinserve.experiments.justitia.ours import MISJUDGED, PREEMPTION, TOGETHER
from twinserve.experiments.justitia.overhead import decisions, prediction
from twinserve.experiments.justitia.tables import chosen, claim
from twinserve.experiments.study.study import Figure, Scale, Study
from twinserve.experiments.study.verdict import Claim, judge_bound, worst
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import over_seeds, shown

NOISE = "justitia:predictor=perfect,error={error},seed={draw}"
PREDICTORS = {
    "mlp": "justitia",
    "class mean": "justitia:predictor=class-mean",
    "perfect": "justitia:predictor=perfect",
}
ERRORS = {53: 0.53, 452: 4.52}  # per cent: the paper's MLP and DistilBERT
# noise of each application, or one factor a class: draws in each seed
KINDS = {"error": 1, "class error": 4}
SLOWER = 142.7  # Table II: 366.7 s over 151.1 s, per cent
# Table III: applications a minute -> ms
OVERHEAD_MS = {15: 0.778, 20: 1.827, 30: 3.076, 50: 5.190, 100: 8.093}
RATES = tuple(OVERHEAD_MS)
QUEUES = {"heap": RATES, "sorted at each decision": (RATES[0], RATES[-1])}

WHY_MLP = (
    "demands within a class spread less than the paper's: without any text (class mean, "
    "table.csv) the error is below 53 %; "
    "that generated texts tell more than real prompts is a guess"
)
WHY_TIME = (
    "seconds of our code on a shared CPU core; the paper's are of its own code on a "
    "machine that is not ours"
)
WHY_POOL = (
    "the pool: where memory is not short order costs little; with 459 blocks (Fig. 3) it "
    "is above twice as much"
)
WHY_NOISE = (
    "not reproduced; tried: noise of each application and one factor a class (rows with that), "
    "each with two pools. Single draws of one factor a class with 459 blocks reach it, the mean "
    "does not; the paper does not say how its network errs"
)
WHY_CLASSES = (
    "nine factors are drawn for the nine classes, and another draw changes much (interval)"
)
WHY_PLAN = (
    "a decision here looks at the head of a heap, and takes little longer with more waiting. With "
    "the queue sorted at each decision it grows, but not tenfold. Not reproduced; tried: heap, and "
    "sorted at each decision (rows here)"
)


def table2_points(scale: Scale) -> list[Point]:
    # what a predictor says does not depend on the pool: it is asked once
    trials = {
        pool: (5 if scale.quick else 100) if blocks is None else 0 for pool, blocks in POOLS.items()
    }
    wanted = [
        (name, seed, 0, {"policy": policy})
        for name, policy in PREDICTORS.items()
        if not (scale.quick and name == "mlp")
        for seed in scale.seeds
    ] + [
        (
            f"{kind} {said} %",
            seed,
            draw,
            {"policy": NOISE.format(error=error, draw=KINDS[kind] * seed + draw)} | _noise(kind),
        )
        for kind, draws in KINDS.items()
        for said, error in ERRORS.items()
        for seed in scale.seeds
        for draw in range(1 if scale.quick else draws)
    ]
    return [
        Point(
            {"predictor": name, "pool": pool, "seed": seed, "draw": draw},
            asked | {"seed": seed, "blocks": blocks, "trials": trials[pool]} | small(scale),
        )
        for name, seed, draw, asked in wanted
        for pool, blocks in POOLS.items()
    ]


def _noise(kind: str) -> dict:
    return {"class_errors": True} if kind == "class error" else {}


def table2_table(points: pd.DataFrame) -> pd.DataFrame:
    """vs_perfect, vs_53: mean JCT above that with demands known, and above that with errors of 53 %
    of the same kind and draw, in the same seed, per cent. Draws are averaged before seeds are."""
    runs = points.set_index(["predictor", "pool", "seed", "draw"]).mean_s

    def above(bases: Iterable[tuple[str, int]]) -> np.ndarray:
        names, draws = zip(*bases, strict=True)
        keys = pd.MultiIndex.from_arrays([names, points.pool, points.seed, draws])
        return 100 * (points.mean_s.to_numpy() / runs.reindex(keys).to_numpy() - 1)

    said = [
        name.replace("452 %", "53 %") if name.endswith("%") else "" for name in points.predictor
    ]
    frame = points.assign(
        vs_perfect=above([("perfect", 0)] * len(points)),
        vs_53=above(zip(said, points.draw, strict=True)),
    )
    values = ["mean_s", "p90_s", "vs_perfect", "vs_53", "error", "predict_ms", "train_s"]
    frame = frame.groupby(["predictor", "pool", "seed"], sort=False)[values].mean().reset_index()
    return over_seeds(frame, ["predictor", "pool"], values)


def table2_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    panel = canvas.subplots()
    names = list(dict.fromkeys(table.predictor))
    for i, (pool, rows) in enumerate(table.groupby("pool", sort=False)):
        panel.bar(
            np.arange(len(names)) + 0.4 * i,
            rows.mean_s,
            0.4,
            yerr=np.nan_to_num(rows.mean_s_ci),
            label=f"KV blocks: {pool}",
        )
    panel.axhline(151.1, color="black", lw=1, ls=":", label="paper, 53 %")
    panel.axhline(366.7, color="black", lw=1, ls="--", label="paper, 452 %")
    panel.set_xticks(np.arange(len(names)) + 0.2, names, fontsize=8)
    panel.set(ylabel="average JCT at 2x, s")
    panel.legend(loc="upper left")


def table2_claims(table: pd.DataFrame) -> list[Claim]:
    claims = []
    if "mlp" in set(table.predictor):
        row = chosen(table, predictor="mlp", pool="profile").copy()
        row["error"], row["error_ci"] = 100 * row.error, 100 * row.error_ci
        claims += [
            claim("Table II", "MLP, mean relative error", 53.0, row, "error", WHY_MLP, " %"),
            claim("Table II", "MLP, one prediction", 2.16, row, "predict_ms", WHY_TIME, " ms"),
            claim(
                "Table II",
                "MLP, training of all classes",
                60.0,
                row,
                "train_s",
                WHY_TIME,
                " s",
                "about 1 min",
            ),
        ]
    for kind in KINDS:
        model = "noise of each application" if kind == "error" else "one factor a class"
        for pool in dict.fromkeys(table.pool):
            setting = f"{model}, 2x" if pool == "profile" else f"{model}, 2x, {pool} KV blocks"
            right, wrong = (
                chosen(table, predictor=f"{kind} {said} %", pool=pool) for said in ERRORS
            )
            why = WHY_POOL if pool == "profile" else WHY_NOISE if kind == "error" else WHY_CLASSES
            why_more = WHY_NOISE if kind == "error" else why
            claims += [
                claim(
                    "Table II",
                    f"average JCT with an error of 53 %; {setting}",
                    151.1,
                    right,
                    "mean_s",
                    why,
                    " s",
                ),
                claim(
                    "Table II",
                    f"average JCT with an error of 452 %; {setting}",
                    366.7,
                    wrong,
                    "mean_s",
                    why,
                    " s",
                ),
                claim(
                    "Table II",
                    f"JCT with 452 % against 53 %; {setting}",
                    SLOWER,
                    wrong,
                    "vs_53",
                    why_more,
                    " %",
                ),
            ]
    return claims


def table3_points(scale: Scale) -> list[Point]:
    policy = "justitia:predictor=class-mean" if scale.quick else "justitia"
    minutes = 0.2 if scale.quick else 3.0
    return [
        Point(
            {"a_minute": rate, "queue": queue, "seed": seed},
            {
                "a_minute": rate,
                "seed": seed,
                "policy": policy,
                "minutes": minutes,
                "resort": queue != "heap",
            },
        )
        for queue, rates in QUEUES.items()
        for rate in rates
        for seed in scale.seeds
    ]


def table3_table(points: pd.DataFrame) -> pd.DataFrame:
    """over_least: how often as long a decision takes as at the lowest rate, in the same seed and
    with the same queue."""
    least = points[points.a_minute == RATES[0]].set_index(["queue", "seed"]).plan_ms
    keys = pd.MultiIndex.from_frame(points[["queue", "seed"]])
    frame = points.assign(over_least=points.plan_ms.to_numpy() / least.reindex(keys).to_numpy())
    return over_seeds(
        frame, ["queue", "a_minute"], ["plan_ms", "plan_p99_ms", "plans", "over_least"]
    )


def table3_plot(canvas: Canvas, table: pd.DataFrame, points: pd.DataFrame) -> None:
    panel = canvas.subplots()
    for queue, rows in table.groupby("queue", sort=False):
        panel.errorbar(
            rows.a_minute,
            rows.plan_ms,
            np.nan_to_num(rows.plan_ms_ci),
            marker="o",
            label=f"ours, {queue}",
        )
    panel.plot(list(OVERHEAD_MS), list(OVERHEAD_MS.values()), marker="s", label="paper")
    panel.set(xlabel="applications a minute", ylabel="ms a decision", yscale="log")
    panel.legend()


def table3_claims(table: pd.DataFrame) -> list[Claim]:
    rows = {rate: chosen(table, queue="heap", a_minute=rate) for rate in RATES}
    found = [
        claim(
            "Table III",
            f"a decision at {rate} applications a minute",
            OVERHEAD_MS[rate],
            row,
            "plan_ms",
            WHY_TIME,
            " ms",
        )
        for rate, row in rows.items()
    ]
    slowest = max(rows.values(), key=lambda row: row.plan_ms)
    said = worst(*(judge_bound(10 - row.plan_ms, row.plan_ms_ci) for row in rows.values()))
    ours = f"{shown(slowest.plan_ms, slowest.plan_ms_ci)} ms at most"
    found.append(
        Claim.judged(
            "Table III", "a decision, at every rate", "under 10 ms", ours, said, WHY_TIME, False
        )
    )
    grown = OVERHEAD_MS[RATES[-1]] / OVERHEAD_MS[RATES[0]]
    for queue in QUEUES:
        row = chosen(table, queue=queue, a_minute=RATES[-1])
        what = (
            f"a decision at {RATES[-1]} over one at {RATES[0]} applications a minute; queue: "
            f"{queue}"
        )
        found.append(
            claim("Table III", what, grown, row, "over_least", WHY_PLAN, text=f"x {grown:.1f}")
        )
    return found


TABLE2 = Figure(
    "table2",
    "errors of prediction",
    table2_points,
    prediction,
    table2_table,
    table2_plot,
    table2_claims,
)
TABLE3 = Figure(
    "table3",
    "time of a decision",
    table3_points,
    decisions,
    table3_table,
    table3_plot,
    table3_claims,
)

STUDY = Study(
    "justitia",
    'Yang et al., "Justitia: Fair and Efficient Scheduling for LLM Applications"',
    (
        FIG3,
        FIG4,
        FIG8,
        FIG9,
        FIG10,
        FIG11,
        FIG12,
        FAIRNESS,
        WHO,
        TABLE2,
        TABLE3,
        CAUSES,
        TOGETHER,
        PREEMPTION,
        MISJUDGED,
    ),
    (
        Claim(
            "Theorem 1 (Eq. 4)",
            "an application ends no later than in GPS plus 2 c_max + C_max / M",
            "a constant",
            "bounds 1 and 2 of our own",
            "not reproduced",
            "the printed sum adds token-iterations to iterations; with one stage "
            "2 d_max - 1 - c / M iterations are proved, and for graphs among graphs no constant "
            "holds (tests/policies/test_justitia.py)",
            False,
        ),
        Claim(
            "Table II",
            "DistilBERT, one prediction",
            "55.7 ms",
            "-",
            "not reproduced",
            "stands for an error level here, not a network",
            False,
        ),
        Claim(
            "Table II",
            "DistilBERT, training",
            "about 2 h",
            "-",
            "not reproduced",
            "an error level here, not a network",
            False,
        ),
    ),
)
