"""How far Algorithm 1 of BROS is from the best batch: `twinserve study optimality`.

The gap on single iterations of runs. Then deadlines in short runs that the
greedy choice loses and the exact one keeps, and the reverse. Then first tokens in time compared
with the most of any schedule. docs/optimality.md has the results and what they mean.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from twinserve.experiments.optimality.runs import (
    deadlines_of_runs,
    first_tokens_of_runs,
    iterations_of_a_run,
)
from twinserve.experiments.study.curves import Bars
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Table, Text, mean

# the paper's, a half, a quarter
OBJECTIVES = ("ttft=0.4,tpot=0.2", "ttft=0.2,tpot=0.1", "ttft=0.1,tpot=0.05")
# so that seldom more than 12 requests are in the system
LOAD = {"seconds": 12.0, "rate": 1.0, "pool": 3}
QUICK = {"seconds": 3.0}

OF_RUNS = Grid(
    {"source": {slo: {"slo": slo} for slo in OBJECTIVES}}, LOAD, few={"source": 1}, quick=QUICK
)
DEADLINES = Grid(
    {"slo": {slo: {"slo": slo} for slo in OBJECTIVES}}, LOAD, few={"slo": 1}, quick=QUICK
)
# of runs whose first tokens are beside the most possible
FIRST = Grid(
    {"rate": (15.0, 25.0), "slo": (OBJECTIVES[0], OBJECTIVES[-1])},
    {"seconds": 30.0, "pool": 16},
    few={"slo": 1},
    quick={"seconds": 7.5},
)


def _with_totals(
    table: Table, totals: Mapping[str, str], rows: Callable[[pd.DataFrame], pd.DataFrame]
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """`table` of `rows` of the points, with sums or largest values over seeds."""

    def made(points: pd.DataFrame) -> pd.DataFrame:
        chosen = rows(points)
        groups = chosen.groupby(list(table.by), sort=False)
        return table(chosen).assign(**{n: groups[n].agg(how).values for n, how in totals.items()})

    return made


def _percent(*names: str) -> dict[str, Any]:
    return {name.replace("_", " "): mean(name, 100.0) for name in names}


def _count(name: str) -> Callable[[pd.Series], str]:
    return lambda row: f"{int(row[name]):,}"


def _text(by: Sequence[str], cells: Mapping[str, Any]) -> Text:
    intro = "Means over {seeds} seeds and half widths of their 95 % intervals; shares in per cent."
    return Text(intro, {name: name for name in by}, cells)


SHARES = ("optimal", "outside", "loses_more", "other_goal", "compared")
GAPS = ("gap_mean", "gap_median", "gap_p95")
PAIRS = tuple(
    f"{name}_{who}"
    for name in ("ttft", "tokens")
    for who in ("both", "this_only", "bros_only", "neither")
)
OF_DEADLINES = (*PAIRS, "be_tokens", "fallback")
OF_FIRST = ("kept", "bound", "share")


STUDY = Study(
    "optimality",
    "",
    [
        Figure(
            "iterations",
            "Single iterations",
            OF_RUNS,
            iterations_of_a_run,
            _with_totals(
                Table(("source", "problem"), (*SHARES, *GAPS)),
                {"iterations": "sum", "gap_max": "max"},
                lambda points: points[points.requests == 0],
            ),
            text=_text(
                ("source", "problem"),
                {"n": _count("iterations"), **_percent(*SHARES, *GAPS)}
                | {"gap max": lambda row: f"{100 * row.gap_max:.1f}"},
            ),
        ),
        Figure(
            "deadlines",
            "Deadlines in runs",
            DEADLINES,
            deadlines_of_runs,
            _with_totals(
                Table(("slo", "problem"), (*OF_DEADLINES, "swaps")),
                {"requests": "sum"},
                lambda points: points,
            ),
            Bars(
                "problem",
                "slo",
                {f"ttft_{who}_only": f"first token kept by {who} only" for who in ("this", "bros")},
            ),
            text=_text(
                ("slo", "problem"),
                {"requests": _count("requests"), **_percent(*OF_DEADLINES), "swaps": mean("swaps")},
            ),
        ),
        Figure(
            "first_tokens",
            "First tokens",
            FIRST,
            first_tokens_of_runs,
            _with_totals(
                Table(("rate", "slo", "policy"), OF_FIRST),
                {"requests": "sum"},
                lambda points: points.assign(share=points.kept / points.bound),
            ),
            text=_text(
                ("rate", "slo", "policy"), {"requests": _count("requests"), **_percent(*OF_FIRST)}
            ),
        ),
    ],
    seeds=8,
    least_seeds=2,
)
