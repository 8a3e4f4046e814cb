"""How far Algorithm 1 of BROS is from the best batch: `python -m twinserve.experiments.optimality`.

The gap on single iterations, random ones and those of runs, and what it comes to in short runs: deadlines that the greedy
choice loses and the exact one keeps, and the other way round. docs/optimality.md has the results and what they mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import cyclopts
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure as Canvas

from ..sim.cli import run_app
from ..sim.config import SettingsError
from ..traces.write import write_atomically
from .command import RESUMABLE
from .grid import Point, over_seeds, run_grid, shown
from .optimality_runs import deadlines_of_runs, iterations_of_a_run, random_iterations
from .output import table_lines, write_plot, write_tables

OBJECTIVES = ("ttft=0.4,tpot=0.2", "ttft=0.2,tpot=0.1", "ttft=0.1,tpot=0.05")  # the paper's, a half, a quarter
RATE, POOL = 1.0, 3  # so that seldom more than 12 requests are in the system

ITERATIONS = ["iterations of", "problem", "n", "optimal", "loses more deadlines", "misses another goal", "compared"]
ITERATIONS += ["gap, mean", "median", "p95", "max"]
OUTCOMES = ["this only", "`bros` only", "neither"]
DEADLINES = ["objectives", "beside `bros`", "requests", "first token: both", *OUTCOMES, "later tokens: both", *OUTCOMES]
DEADLINES += ["best-effort tokens", "left to Alg. 1"]
SHARES = ("optimal", "outside", "loses_more", "other_goal", "compared", "gap_mean", "gap_median", "gap_p95")
PAIRS = tuple(f"{name}_{who}" for name in ("ttft", "tokens") for who in ("both", "this_only", "bros_only", "neither"))


def run_iterations(out: Path, seeds: int, count: int, seconds: float, slos: tuple[str, ...], workers: int) -> pd.DataFrame:
    """Rows of `optimality_runs.gap_rows` with source (random, or a run's objectives) and seed."""
    points = [
        Point({"source": source, "seed": s}, {"seed": s, "count": count, "late": late})
        for source, late in (("random", True), ("random, none late", False))
        for s in range(seeds)
    ]
    drawn = run_grid(random_iterations, points, out, workers, "random iterations")
    return pd.concat([drawn, run_grid(iterations_of_a_run, _of_runs("source", seeds, seconds, slos), out, workers, "runs")])


def run_deadlines(out: Path, seeds: int, seconds: float, slos: tuple[str, ...], workers: int) -> pd.DataFrame:
    """Rows of `optimality_runs.deadlines_of_runs` with slo and seed."""
    return run_grid(deadlines_of_runs, _of_runs("slo", seeds, seconds, slos), out, workers, "deadlines")


def _of_runs(axis: str, seeds: int, seconds: float, slos: tuple[str, ...]) -> list[Point]:
    settings = {"seconds": seconds, "rate": RATE, "pool": POOL}
    return [Point({axis: slo, "seed": s}, {"seed": s, "slo": slo, **settings}) for slo in slos for s in range(seeds)]


def markdown(iterations: pd.DataFrame, deadlines: pd.DataFrame) -> str:
    """Two tables, means over seeds with 95 % intervals."""
    whole = iterations[iterations.requests == 0]
    of_iterations = []
    for row in over_seeds(whole, ["source", "problem"], SHARES).to_dict("records"):
        own = whole[(whole.source == row["source"]) & (whole.problem == row["problem"])]
        names = ("optimal", "loses_more", "other_goal", "compared", "gap_mean", "gap_median", "gap_p95")
        values = (_percent(row, name) for name in names)
        most = f"{100 * own.gap_max.max():.1f}"
        of_iterations.append([row["source"], row["problem"], f"{int(own.iterations.sum()):,}", *values, most])
    of_runs = []
    for row in over_seeds(deadlines, ["slo", "problem"], [*PAIRS, "be_tokens", "fallback"]).to_dict("records"):
        own = deadlines[(deadlines.slo == row["slo"]) & (deadlines.problem == row["problem"])]
        values = (_percent(row, name) for name in (*PAIRS, "be_tokens", "fallback"))
        of_runs.append([row["slo"], row["problem"], f"{int(own.requests.sum()):,}", *values])
    lines = ["### Single iterations", "", *table_lines(ITERATIONS, of_iterations), ""]
    lines += ["### Deadlines in runs", "", *table_lines(DEADLINES, of_runs), ""]
    return "\n".join([*lines, "All but counts in percent.", ""])


def _percent(row: dict, name: str) -> str:
    return shown(100.0 * row[name], 100.0 * row[f"{name}_ci"])


def plot(iterations: pd.DataFrame, deadlines: pd.DataFrame) -> Canvas:
    """The gap by number of requests, and first tokens in time under one of the two only."""
    figure = Canvas(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = iterations[(iterations.source == "random") & (iterations.requests > 0)]
    for problem, rows in over_seeds(drawn, ["problem", "requests"], ["gap_mean"]).groupby("problem", sort=False):
        left.errorbar(rows.requests, 100 * rows.gap_mean, 100 * rows.gap_mean_ci, marker="o", capsize=3, label=problem)
    left.set(xlabel="requests in the iteration", ylabel="gap of best-effort tokens a second (%)", title="random iterations")
    left.legend(title="problem")
    table = over_seeds(deadlines, ["slo", "problem"], ["ttft_this_only", "ttft_bros_only"])
    at = range(len(table))
    for name, sign, label in (("ttft_this_only", 1, "this only"), ("ttft_bros_only", -1, "bros only")):
        right.barh(at, sign * 100 * table[name], xerr=100 * table[f"{name}_ci"], capsize=3, label=label)
    right.set_yticks(at, [f"{row.slo}  {row.problem}" for row in table.itertuples()], fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="requests whose first token is in time under one only (%)", title="runs beside bros")
    right.legend()
    return figure


def optimality(
    *,
    quick: Annotated[bool, Parameter(negative="")] = False,
    seeds: int = 8,
    out: Path = Path("optimality"),
    workers: int = 1,
) -> None:
    """Measure the optimality gap of BROS's Algorithm 1 against the exact solution of its problem.

    Parameters
    ----------
    quick: bool
        Few and short: shows that it works, measures nothing.
    seeds: int
        Runs of each kind; the intervals are over these.
    out: Path
        Folder for iterations.csv, deadlines.csv, optimality.md and optimality.png; what it holds of the same code is not
        computed again.
    workers: int
        Processes.
    """
    if seeds < 2 or workers < 1:
        raise SettingsError("--seeds must be 2 or more, for intervals, and --workers 1 or more")
    if quick:
        seeds = 2
    count, seconds, slos = (20, 3.0, OBJECTIVES[:1]) if quick else (500, 12.0, OBJECTIVES)
    iterations = run_iterations(out, seeds, count, seconds, slos, workers)
    deadlines = run_deadlines(out, seeds, seconds, slos, workers)
    text = markdown(iterations, deadlines)
    write_tables(out, {"iterations": iterations, "deadlines": deadlines})
    write_atomically(out / "optimality.md", text.encode())
    write_plot(out / "optimality.png", plot(iterations, deadlines), dpi=110)
    print(text, end="")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input ends as one line."""
    app = cyclopts.App(name="optimality", help=optimality.__doc__)
    app.default(optimality)
    run_app(app, arguments, RESUMABLE)


if __name__ == "__main__":
    main()
