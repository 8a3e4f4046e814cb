"""When prefill apart from decode pays on equal GPUs: docs/kv_transfer.md.

    twinserve study apart --out docs/results/apart

The same requests are served by four GPUs that do both, and by one to three of them that compute
prompts while the others decode. What is compared is the share of requests that keep an objective.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from twinserve.experiments.apart.runs import AGGREGATED, OBJECTIVES, run_point
from twinserve.experiments.study.output import markdown_table
from twinserve.experiments.study.study import Figure, Scale, Study, points_over
from twinserve.sim.sweep.grid import Point
from twinserve.sim.sweep.paired import baseline_of, told
from twinserve.sim.sweep.statistics import over_seeds, shown

PROMPTS = (1024, 4096, 16384)
SPLITS = ("1P3D", "2P2D", "3P1D")
LOADS = (0.3, 0.6, 0.9)
QUICK_PROMPTS, QUICK_LOADS = (4096,), (0.6,)
PAYS, LOSES, SAME = WORDS = ("pays", "loses", "cannot be told")


def points(scale: Scale) -> list[Point]:
    settings = [
        {"prompt": prompt, "load": load, "fleet": fleet}
        for prompt in (QUICK_PROMPTS if scale.quick else PROMPTS)
        for load in (QUICK_LOADS if scale.quick else LOADS)
        for fleet in (AGGREGATED, *SPLITS)
    ]
    return points_over(scale, settings, ("prompt", "load", "fleet"), {})


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each prompt length, load, objective and split, seeds paired, as means and, as
    NAME_ci, half of the 95 % interval.

    together, apart  shares of requests that keep the objective, of four GPUs that do both and of
                     the split
    gain             the second less the first
    verdict          whether it pays: where the whole interval of `gain` is on one side of 0
    """
    pairs = ["prompt", "load", "seed"]
    plain, split = rows[rows.fleet == AGGREGATED], rows[rows.fleet != AGGREGATED]
    both = baseline_of(split, plain, pairs)
    found = [
        split.assign(objective=name, together=both[f"{name}_kept"], apart=split[f"{name}_kept"])
        for name in OBJECTIVES
    ]
    each = pd.concat(found).sort_index(kind="stable")
    each["gain"] = each.apart - each.together
    values = ["together", "apart", "gain"]
    table = over_seeds(each, ["prompt", "load", "fleet", "objective"], values)
    table["verdict"] = [told(*pair, WORDS) for pair in zip(table.gain, table.gain_ci, strict=True)]
    columns = ["prompt", "load", "objective", "fleet", *values, "gain_ci", "verdict", "seeds"]
    return table[columns]


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


STUDY = Study(
    "apart",
    "",
    [Figure("loads", "prefill apart, by load", points, run_point, gains, text=report)],
    least_seeds=2,
)
