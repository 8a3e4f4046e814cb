"""When prefill apart from decode pays on equal GPUs: docs/kv_transfer.md.

    twinserve study apart --out docs/results/apart

The same requests are served by four GPUs that do both, and by one to three of them that compute
prompts while the others decode. What is compared is the share of requests that keep an objective.
"""

import pandas as pd

from twinserve.experiments.apart.runs import AGGREGATED, OBJECTIVES, run_point
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Table, Text
from twinserve.sim.report.over import with_digits as shown

GRID = Grid(
    {
        "prompt": (1024, 4096, 16384),
        "load": (0.3, 0.6, 0.9),
        "fleet": (AGGREGATED, "1P3D", "2P2D", "3P1D"),
    },
    few={"prompt": (4096,), "load": (0.6,)},
)
PAYS, LOSES, SAME = WORDS = ("pays", "loses", "not significant")
# A row for each prompt length, load, objective and split. together, apart: shares of requests that
# keep the objective, of four GPUs that do both and of the split
TABLE = Table(
    ("prompt", "load", "fleet", "objective"),
    ("apart",),
    {"together": ("apart", "baseline"), "gain": ("apart", "difference")},
    base={"fleet": AGGREGATED},
    pair=("prompt", "load", "objective"),
    own=False,
    verdicts={"verdict": ("gain", 0.0, WORDS)},
)


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """`TABLE` of runs that have a column for each objective."""
    long = [rows.assign(objective=name, apart=rows[f"{name}_kept"]) for name in OBJECTIVES]
    return TABLE(pd.concat(long).sort_index(kind="stable").reset_index(drop=True))


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Of each prompt length, load and objective, the split that keeps most; the first of equals."""
    order = found.groupby(["prompt", "load", "objective"], sort=False)["apart"].idxmax()
    return found.loc[order]


def _cell(row: pd.Series) -> str:
    shares = f"{100 * row.together:.0f}, {row.fleet} {100 * row.apart:.0f}"
    return f"{shares} ({shown(100 * row.gain, 100 * row.gain_ci)}): {row.verdict}"


TEXT = Text(
    "Means over {seeds} seeds. Each cell: four GPUs that do both, the split that keeps most, and "
    "in brackets the difference, paired by seed, ± half of its 95 % interval.",
    {"prompt tokens": "prompt"},
    {"": _cell},
    over="load",
    over_heading="load {:g}",
    each="objective",
    heading="**{}**: per cent of requests that keep it",
)
STUDY = Study(
    "apart",
    "",
    [
        Figure(
            "loads",
            "prefill apart, by load",
            GRID,
            run_point,
            gains,
            text=lambda found: TEXT(best(found)),
        )
    ],
    least_seeds=2,
)
