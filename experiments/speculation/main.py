"""From which batch on speculation stops paying, by model and GPU: docs/policies.md.

    twinserve study speculation --out docs/results/speculation

Closed loops of each batch size are run with and without drafts. The gain is output tokens a second
with drafts over those without, of the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from twinserve.experiments.speculation.runs import run_point
from twinserve.experiments.study.curves import lines_of
from twinserve.experiments.study.grid import Grid, joined
from twinserve.experiments.study.output import markdown_table
from twinserve.experiments.study.study import Figure, Study
from twinserve.experiments.study.tables import Table
from twinserve.sim.report.over import with_digits as shown

ENGINES = ("llama-3.1-8b@h100", "qwen2.5-14b@a100-40g:tp2", "llama-3.1-70b@h100:tp4")
# Rates published for EAGLE-3 (docs/policies.md), and the same for drafts that cost nothing.
RATES = "rates=0.622/0.356/0.203"
DRAFTED = {"eagle": f"k=3,method=eagle,{RATES}", "ngram": f"k=3,method=ngram,{RATES}"}
BATCHES = {"chat": (1, 16, 64, 128, 192, 256, 384), "documents": (1, 8, 16, 32, 48)}
PAYS, LOSES, OPEN = WORDS = ("pays", "loses", "not significant")
GRIDS = [
    Grid(
        {
            "lengths": (lengths,),
            "engine": ENGINES,
            "drafts": {"none": {"drafts": None}, **DRAFTED},
            "batch": batches,
        },
        {"most": max(batches)},
        few={"lengths": int(lengths == "chat"), "engine": 1, "batch": 2},
        quick={"most": 16},
    )
    for lengths, batches in BATCHES.items()
]
# Ratios to the same seed without drafts.
#   gain         of output tokens a second
#   longer       of the mean step that computes no prompt
#   step_tokens  tokens that such a step gives a request
#   preemptions, preemptions_without  mean of a run with drafts, and without
#   verdict      whether drafts pay: where the whole interval of `gain` is on one side of 1
GAINS = Table(
    ("lengths", "engine", "drafts", "batch"),
    ("step_tokens", "preemptions"),
    {
        "gain": ("tokens_per_s", "ratio"),
        "longer": ("step_s", "ratio"),
        "preemptions_without": ("preemptions", "baseline"),
    },
    base={"drafts": "none"},
    pair=("lengths", "engine", "batch"),
    own=False,
    verdicts={"verdict": ("gain", 1.0, WORDS)},
)


def stops(part: pd.DataFrame) -> str:
    """From which batch on drafts stop paying, of one engine's rows of `GAINS`."""
    part = part.sort_values("batch")
    batches, pays = part.batch.tolist(), (part.verdict == PAYS).tolist()
    if all(pays):
        return f"pays up to {batches[-1]}, the largest run"
    first = pays.index(False)
    said = f"{part.verdict.iloc[first]} at {batches[first]}"
    return f"pays up to {batches[first - 1]}, {said}" if first else said


def why(part: pd.DataFrame) -> str:
    """What the runs show where drafts lose: how much longer steps without prompts are, for how many
    tokens. `not known` unless the two intervals part."""
    part = part.sort_values("batch")
    lost = part[part.verdict == LOSES]
    dear = lost[lost.longer - lost.longer_ci > lost.step_tokens + lost.step_tokens_ci]
    if dear.empty:
        return "not known" if (part.verdict != PAYS).any() else ""
    row = dear.iloc[0]
    longer, tokens = (shown(row[name], row[f"{name}_ci"]) for name in ("longer", "step_tokens"))
    return f"at {row.batch} steps take {longer} times as long, and give {tokens} tokens a request"


def summary(found: pd.DataFrame) -> Iterator[str]:
    """Markdown: for each kind of lengths a table of gains, and one of where drafts stop paying."""
    for lengths, part in found.groupby("lengths", sort=False):
        batches = sorted({*part.batch})
        rows, ends = [], []
        for (engine, drafts), mine in part.groupby(["engine", "drafts"], sort=False):
            by_batch = mine.set_index("batch")
            cells = [shown(by_batch.gain[b], by_batch.gain_ci[b]) for b in batches]
            rows.append([engine, drafts, *cells])
            ends.append([engine, drafts, stops(mine), why(mine)])
        yield f"**{lengths}**: gain by batch\n"
        yield markdown_table(["engine", "drafts", *map(str, batches)], rows)
        yield markdown_table(["engine", "drafts", "stops paying", "why"], ends)


def report(found: pd.DataFrame) -> str:
    seeds = int(found.seeds.min())
    text = f"Means over {seeds} seeds, paired by seed, ± half of the 95 % interval.\n"
    return "\n".join([text, *summary(found)])


def _doubling(axes, metric: str) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)


PLOT = lines_of(
    "engine",
    {"gain": ("tokens/s over without", 1.0)},
    "batch",
    "drafts",
    {},
    _doubling,
    xlabel="requests under way",
    split="lengths",
)
STUDY = Study(
    "speculation",
    "",
    [Figure("batches", "gain by batch", joined(*GRIDS), run_point, GAINS, PLOT, text=report)],
    least_seeds=2,
)
