"""What drafts do to BROS's deadlines and to best-effort work: docs/policies.md.

    twinserve study speculation deadlines --out docs/results/speculation

Real-time requests arrive with a closed loop of best-effort ones, as in the BROS study, under `bros`
on paged memory. Each kind of drafts is run on the same requests as `bros` without drafts.
"""

from __future__ import annotations

import pandas as pd

from twinserve.experiments.bros.main import COLUMNS, SLO
from twinserve.experiments.study.claims import texts
from twinserve.experiments.study.curves import lines_of
from twinserve.experiments.study.grid import Grid
from twinserve.experiments.study.runs import run
from twinserve.experiments.study.study import Figure
from twinserve.experiments.study.tables import Cell, Table, Text, mean
from twinserve.sim.setup.config import PAPERS_ENGINE

ENGINE = "qwen2.5-14b@a100-40g:tp2"
POOL = 128  # best-effort requests in a batch, as in the BROS study
SECONDS = 300.0
RATES, QUICK_RATES = (5.0, 10.0, 15.0), (10.0,)
FULL = 15.0  # real-time requests/s, of which a machine is full; runs take longest there
NONE = "none"
DATA = texts(__file__, "data.yaml")
ARMS, SHOWN = DATA.ARMS, DATA.SHOWN
QUICK_ARMS = ("none", "k=3, 0.8", "k=3, 0.8, always")
FULL_ARMS = ("none", "k=1, 0.8", "k=3, 0.8")
SHARES = ("ttft_attainment", "tpot_attainment", "token_attainment")
RATIOS = ("normalized_ms", "be_rps", "step_ms")
BY = ["drafts", "rate"]
GRID = Grid(
    {
        "rate": RATES,
        "drafts": {
            name: {"policy": f"bros:kv=paged,{options}"}
            | ({} if drafts is None else {"speculate": f"{drafts},method=eagle"})
            for name, (options, drafts) in ARMS.items()
        },
    },
    {
        "profile": ENGINE,
        "step_times": "roofline",
        "trace": "sharegpt",
        "duration": SECONDS,
        "pool": POOL,
        "slo": SLO,
        **PAPERS_ENGINE,
    },
    {**COLUMNS, "verified": "verified"},
    where=lambda at: at["rate"] != FULL or at["drafts"] in FULL_ARMS,
    few={"rate": QUICK_RATES, "drafts": QUICK_ARMS},
    quick={"duration": 60.0},
)


# Means, and as NAME_change the difference to the same seed without drafts (shares), or the ratio.
CHANGES = Table(
    BY,
    (*SHARES, *RATIOS, "tpot_s", "ttft_p99_s", "batch", "verified"),
    {f"{name}_change": (name, "difference") for name in SHARES}
    | {f"{name}_change": (name, "ratio") for name in RATIOS},
    base={"drafts": NONE},
    pair=("rate",),
)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """`CHANGES`, and how many seeds of each row are saturated, and how many may be."""
    counts = rows.groupby(BY, sort=False)[["saturated", "unclear"]].sum().astype(int)
    return CHANGES(rows).join(counts, on=BY)


def _ratio(name: str) -> Cell:
    ratio = mean(f"{name}_change")
    return lambda row: "1" if row.drafts == NONE else ratio(row)


TEXT = Text(
    "Means over {seeds} seeds, ± half of the 95 % interval; x: ratio to the same seed without "
    "drafts.",
    {"drafts": "drafts"},
    {
        "TTFT kept, %": mean("ttft_attainment", 100),
        "TPOT kept, %": mean("tpot_attainment", 100),
        "tokens in time, %": mean("token_attainment", 100),
        "latency, x": _ratio("normalized_ms"),
        "best-effort requests/s, x": _ratio("be_rps"),
        "steps, x": _ratio("step_ms"),
        "decodes that verify, %": mean("verified", 100),
        "queue grows": lambda row: f"{row.saturated} of {row.seeds}, unclear {row.unclear}",
    },
    each="rate",
    heading="**{:g} real-time requests/s**",
)


PLOT = lines_of(None, SHOWN, "rate", "drafts", xlabel="real-time requests/s")
FIGURE = Figure("deadlines", "BROS's deadlines", GRID, run, table, PLOT, text=TEXT)
