"""How far Algorithm 1 of BROS is from the best batch: `twinserve study optimality`.

The gap on single iterations, random ones and those of runs, and what it comes to in short runs:
deadlines that the greedy choice loses and the exact one keeps, and the other way round; both also
where memory binds. Then first tokens in time beside the most that any schedule could have had.
docs/studies.md has the results and what they mean.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure as Canvas

from twinserve.experiments.optimality.first_tokens import first_tokens_of_runs
from twinserve.experiments.optimality.memory import iterations_in_blocks
from twinserve.experiments.optimality.runs import (
    deadlines_of_runs,
    iterations_of_a_run,
    random_iterations,
)
from twinserve.experiments.study.command import GridOptions, Special
from twinserve.experiments.study.output import table_lines, write_plot, write_tables
from twinserve.experiments.study.progress import shown_grid
from twinserve.sim.sweep.grid import Point, Rows
from twinserve.sim.sweep.statistics import over_seeds, shown
from twinserve.traces.write import write_atomically

# the paper's, a half, a quarter
OBJECTIVES = ("ttft=0.4,tpot=0.2", "ttft=0.2,tpot=0.1", "ttft=0.1,tpot=0.05")
SEEDS = 8
RATE, POOL = 1.0, 3  # so that seldom more than 12 requests are in the system
BLOCKS = (96, 160)  # of memory that binds; the longest request needs 72
LEDGERS = ("paged", "bidirectional")
LOADS = (15.0, 25.0)  # requests/s, of runs whose first tokens are beside the most possible
FEW = 16  # best-effort requests beside those

ITERATIONS = [
    "iterations of",
    "problem",
    "n",
    "optimal",
    "loses more deadlines",
    "misses another goal",
    "compared",
]
ITERATIONS += ["gap, mean", "median", "p95", "max"]
OUTCOMES = ["this only", "`bros` only", "neither"]
DEADLINES = [
    "objectives",
    "beside `bros`",
    "requests",
    "first token: both",
    *OUTCOMES,
    "later tokens: both",
    *OUTCOMES,
]
DEADLINES += ["best-effort tokens", "left to Alg. 1", "swaps a run"]
FIRST = ["requests/s", "objectives", "policy", "requests", "kept", "most possible", "of these kept"]
SHARES = (
    "optimal",
    "outside",
    "loses_more",
    "other_goal",
    "compared",
    "gap_mean",
    "gap_median",
    "gap_p95",
)
PAIRS = tuple(
    f"{name}_{who}"
    for name in ("ttft", "tokens")
    for who in ("both", "this_only", "bros_only", "neither")
)


def run_iterations(
    options: GridOptions, count: int, seconds: float, slos: tuple[str, ...]
) -> pd.DataFrame:
    """Rows of `runs.gap_rows` with source (random, or a run's objectives) and seed."""
    points = [
        Point({"source": source, "seed": s}, {"seed": s, "count": count, "late": late})
        for source, late in (("random", True), ("random, none late", False))
        for s in range(options.seeds)
    ]
    drawn = _run(random_iterations, points, options, "random iterations")
    watched = _of_runs("source", options.seeds, seconds, slos)
    short = [
        point
        for blocks in (BLOCKS[:1] if options.quick else BLOCKS)
        for kv in LEDGERS
        for point in _of_runs("source", options.seeds, seconds, slos[:1], blocks=blocks, kv=kv)
    ]
    return pd.concat(
        [
            drawn,
            _run(iterations_of_a_run, watched, options, "runs"),
            _run(iterations_in_blocks, short, options, "runs in little memory"),
        ]
    )


def run_deadlines(options: GridOptions, seconds: float, slos: tuple[str, ...]) -> pd.DataFrame:
    """Rows of `runs.deadlines_of_runs` with slo and seed; of the first and the last objectives also
    in the least memory."""
    points = _of_runs("slo", options.seeds, seconds, slos)
    for slo in dict.fromkeys((slos[0], slos[-1])):
        points += _of_runs("slo", options.seeds, seconds, (slo,), blocks=BLOCKS[0])
    return _run(deadlines_of_runs, points, options, "deadlines")


def run_first_tokens(options: GridOptions, seconds: float, slos: tuple[str, ...]) -> pd.DataFrame:
    """Rows of `first_tokens.first_tokens_of_runs` with rate, slo and seed."""
    points = [
        Point(
            {"rate": rate, "slo": slo, "seed": s},
            {"seed": s, "seconds": seconds, "rate": rate, "pool": FEW, "slo": slo},
        )
        for rate in LOADS
        for slo in slos
        for s in range(options.seeds)
    ]
    return _run(first_tokens_of_runs, points, options, "first tokens")


def _run(
    work: Callable[..., Rows], points: list[Point], options: GridOptions, label: str
) -> pd.DataFrame:
    return shown_grid(work, points, options.out, options.workers, label, options.any_version)


def _of_runs(
    axis: str, seeds: int, seconds: float, slos: tuple[str, ...], **memory: int | str
) -> list[Point]:
    """memory: blocks, and of which ledger (kv); they are in the name of the source."""
    settings = {"seconds": seconds, "rate": RATE, "pool": POOL, **memory}
    said = "".join(
        f", {value} blocks" if name == "blocks" else f", {value}" for name, value in memory.items()
    )
    return [
        Point({axis: slo + said, "seed": s}, {"seed": s, "slo": slo, **settings})
        for slo in slos
        for s in range(seeds)
    ]


def markdown(iterations: pd.DataFrame, deadlines: pd.DataFrame, first_tokens: pd.DataFrame) -> str:
    """Three tables, means over seeds with 95 % intervals."""
    whole = iterations[iterations.requests == 0]
    of_iterations = []
    for row in over_seeds(whole, ["source", "problem"], SHARES).to_dict("records"):
        own = whole[(whole.source == row["source"]) & (whole.problem == row["problem"])]
        names = (
            "optimal",
            "loses_more",
            "other_goal",
            "compared",
            "gap_mean",
            "gap_median",
            "gap_p95",
        )
        values = (_percent(row, name) for name in names)
        most = f"{100 * own.gap_max.max():.1f}"
        of_iterations.append(
            [row["source"], row["problem"], f"{int(own.iterations.sum()):,}", *values, most]
        )
    of_runs = []
    shares = (*PAIRS, "be_tokens", "fallback")
    for row in over_seeds(deadlines, ["slo", "problem"], [*shares, "swaps"]).to_dict("records"):
        own = deadlines[(deadlines.slo == row["slo"]) & (deadlines.problem == row["problem"])]
        values = (_percent(row, name) for name in shares)
        swaps = shown(row["swaps"], row["swaps_ci"])
        of_runs.append([row["slo"], row["problem"], f"{int(own.requests.sum()):,}", *values, swaps])
    lines = ["### Single iterations", "", *table_lines(ITERATIONS, of_iterations), ""]
    lines += ["### Deadlines in runs", "", *table_lines(DEADLINES, of_runs), ""]
    lines += ["### First tokens", "", *table_lines(FIRST, _of_first(first_tokens)), ""]
    return "\n".join([*lines, "All but counts and rates in percent.", ""])


def _of_first(found: pd.DataFrame) -> list[list[str]]:
    """Rows of the third table."""
    found = found.assign(share=found.kept / found.bound)
    rows = []
    axes = ["rate", "slo", "policy"]
    for row in over_seeds(found, axes, ["kept", "bound", "share"]).to_dict("records"):
        own = found[(found[axes] == [row[name] for name in axes]).all(axis=1)]
        values = (_percent(row, name) for name in ("kept", "bound", "share"))
        name = f"`{row['policy']}`"
        rows.append([f"{row['rate']:g}", row["slo"], name, f"{own.requests.sum():,}", *values])
    return rows


def _percent(row: dict, name: str) -> str:
    return shown(100.0 * row[name], 100.0 * row[f"{name}_ci"])


def plot(iterations: pd.DataFrame, deadlines: pd.DataFrame) -> Canvas:
    """The gap by number of requests, and first tokens in time under one of the two only."""
    figure = Canvas(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = iterations[(iterations.source == "random") & (iterations.requests > 0)]
    for problem, rows in over_seeds(drawn, ["problem", "requests"], ["gap_mean"]).groupby(
        "problem", sort=False
    ):
        left.errorbar(
            rows.requests,
            100 * rows.gap_mean,
            100 * rows.gap_mean_ci,
            marker="o",
            capsize=3,
            label=problem,
        )
    left.set(
        xlabel="requests in the iteration",
        ylabel="gap of best-effort tokens a second (%)",
        title="random iterations",
    )
    left.legend(title="problem")
    table = over_seeds(deadlines, ["slo", "problem"], ["ttft_this_only", "ttft_bros_only"])
    at = range(len(table))
    for name, sign, label in (
        ("ttft_this_only", 1, "this only"),
        ("ttft_bros_only", -1, "bros only"),
    ):
        right.barh(
            at, sign * 100 * table[name], xerr=100 * table[f"{name}_ci"], capsize=3, label=label
        )
    right.set_yticks(at, [f"{row.slo}  {row.problem}" for row in table.itertuples()], fontsize=7)
    right.invert_yaxis()
    right.set(
        xlabel="requests whose first token is in time under one only (%)", title="runs beside bros"
    )
    right.legend()
    return figure


def experiment(options: GridOptions) -> str:
    """Run everything, write iterations.csv, deadlines.csv, first_tokens.csv, optimality.md and
    optimality.png, and return the report. quick: few and short, shows that it works and measures
    nothing."""
    count, seconds, slos = (20, 3.0, OBJECTIVES[:1]) if options.quick else (500, 12.0, OBJECTIVES)
    iterations = run_iterations(options, count, seconds, slos)
    deadlines = run_deadlines(options, seconds, slos)
    first = run_first_tokens(options, 2.5 * seconds, (slos[0], slos[-1])[: len(slos)])
    text = markdown(iterations, deadlines, first)
    write_tables(
        options.out, {"iterations": iterations, "deadlines": deadlines, "first_tokens": first}
    )
    write_atomically(options.out / "optimality.md", text.encode())
    write_plot(options.out / "optimality.png", plot(iterations, deadlines), dpi=110)
    return text


# intervals are over seeds, so that one is not enough
STUDY = Special("optimality", experiment, SEEDS, least_seeds=2)
