"""When prefill apart from decode pays on equal GPUs: docs/apart-study.md.

    python -m twinserve.experiments.apart --out docs/results/apart

The same requests are served by four GPUs that do both, and by one to three of them that compute
prompts while the others decode. What is compared is the share of requests that keep an objective.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from twinserve.experiments.apart.runs import AGGREGATED, OBJECTIVES, run_point
from twinserve.experiments.study.command import GridOptions, command_line
from twinserve.experiments.study.output import markdown_table, write_tables
from twinserve.experiments.study.progress import shown_grid
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.statistics import interval, shown
from twinserve.traces.write import write_atomically

PROMPTS = (1024, 4096, 16384)
SPLITS = ("1P3D", "2P2D", "3P1D")
LOADS = (0.3, 0.6, 0.9)
QUICK_PROMPTS, QUICK_LOADS = (4096,), (0.6,)
SEEDS = 3
PAYS, LOSES, SAME = "pays", "loses", "cannot be told"


def points(quick: bool, seeds: int) -> list[Point]:
    found = []
    for prompt in QUICK_PROMPTS if quick else PROMPTS:
        for load in QUICK_LOADS if quick else LOADS:
            for fleet in (AGGREGATED, *SPLITS):
                for seed in range(seeds):
                    axes = {"prompt": prompt, "load": load, "fleet": fleet, "seed": seed}
                    found.append(Point(axes, axes))
    return found


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each prompt length, load, objective and split, seeds paired, as means and, as
    NAME_ci, half of the 95 % interval.

    together, apart  shares of requests that keep the objective, of four GPUs that do both and of
                     the split
    gain             the second less the first
    verdict          whether it pays: where the whole interval of `gain` is on one side of 0
    """
    key = ["prompt", "load", "seed"]
    plain = rows[rows.fleet == AGGREGATED].set_index(key)
    found = []
    for (prompt, load, fleet), part in rows[rows.fleet != AGGREGATED].groupby(
        ["prompt", "load", "fleet"], sort=False
    ):
        base = plain.loc[pd.MultiIndex.from_frame(part[key])]
        for name in OBJECTIVES:
            apart, both = (of[f"{name}_kept"].to_numpy() for of in (part, base))
            gain, half = interval(apart - both)
            found.append(
                {
                    "prompt": prompt,
                    "load": load,
                    "objective": name,
                    "fleet": fleet,
                    "together": both.mean(),
                    "apart": apart.mean(),
                    "gain": gain,
                    "gain_ci": half,
                    "verdict": verdict(gain, half),
                    "seeds": len(part),
                }
            )
    return pd.DataFrame(found)


def verdict(gain: float, half: float) -> str:
    """NaN for `half`, as of a single seed, tells nothing."""
    if gain - half > 0:
        return PAYS
    return LOSES if gain + half < 0 else SAME


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Of each prompt length, load and objective, the split that keeps most; the first of equals."""
    order = found.groupby(["prompt", "load", "objective"], sort=False)["apart"].idxmax()
    return found.loc[order]


def summary(found: pd.DataFrame) -> Iterator[str]:
    """Markdown: a table for each objective; in each cell four GPUs together, the best split."""
    chosen = best(found)
    loads = sorted({*found.load})
    for objective, part in chosen.groupby("objective", sort=False):
        rows = []
        for prompt, mine in part.groupby("prompt", sort=False):
            by_load = mine.set_index("load")
            rows.append([f"{prompt:,}", *(_cell(by_load.loc[load]) for load in loads)])
        yield f"**{objective}**: per cent of requests that keep it\n"
        yield markdown_table(["prompt tokens", *(f"load {load:g}" for load in loads)], rows)


def _cell(row: pd.Series) -> str:
    shares = f"{100 * row.together:.0f}, {row.fleet} {100 * row.apart:.0f}"
    return f"{shares} ({shown(100 * row.gain, 100 * row.gain_ci)}): {row.verdict}"


def report(found: pd.DataFrame) -> str:
    text = (
        f"Means over {int(found.seeds.min())} seeds. Each cell: four GPUs that do both, the split "
        "that keeps most, and in brackets the difference, paired by seed, ± half of its 95 % "
        "interval.\n"
    )
    return "\n".join([text, *summary(found)])


def experiment(options: GridOptions) -> str:
    """Run everything, write points.csv, table.csv and report.md, and return the report."""
    out = options.out
    rows = shown_grid(
        run_point,
        points(options.quick, options.seeds),
        out,
        options.workers,
        "apart",
        options.any_version,
    )
    found = gains(rows)
    text = report(found)
    write_tables(out, {"points": rows, "table": found})
    write_atomically(out / "report.md", text.encode())
    return text


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    command_line(
        "apart",
        "When prefill apart from decode pays on equal GPUs.",
        experiment,
        SEEDS,
        arguments,
        least_seeds=2,
    )
