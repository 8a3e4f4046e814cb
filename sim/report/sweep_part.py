"""The chapter of a sweep: means over seeds with their intervals, throughput against latency,
attainment over load, the front, what failed, and how to run it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.errors import worded
from twinserve.sim.report.chart import Chart
from twinserve.sim.report.found import Found, read_document
from twinserve.sim.report.metric_names import label
from twinserve.sim.report.over import (
    CI,
    cell_of,
    is_number,
    names_of,
    over,
    values,
    with_digits,
    with_own_names,
)
from twinserve.sim.report.page import Block, Html, Part, folded, listing, note, paragraph, table
from twinserve.sim.report.run_charts import pareto
from twinserve.sim.results.checked import Shape
from twinserve.sim.results.command import command
from twinserve.sim.results.files import ResultsError, dump_json
from twinserve.sim.results.options import measured_again
from twinserve.sim.results.parts import front

_SHAPE = Shape(
    "object",
    needed={"common": Shape("object"), "seeds": Shape("list", rest=Shape("number"))},
    known={
        "runs": Shape("number"),
        "versions": Shape("object"),
        "seeds_of_each": Shape("number"),
        "given": Shape("object"),
        "combinations": Shape("list", rest=Shape("object")),
        "metrics": Shape("object"),
    },
)
_TOKENS = "total_token_throughput"
_SHARE = "classes.rt.slo_attainment"
# Drawn over the load, and in the table, in this order.
_OVER = (
    *(_SHARE, "classes.be.slo_attainment", "classes.rt.mean_ttft_ms", "classes.rt.mean_tpot_ms"),
    *("output_throughput", "kv.peak_use", "scheduler.mean_batch", "scheduler.mean_waiting"),
)
_COPIES = "same_requests"


def sweep_part(found: Found) -> Part:
    """Raises ResultsError for a file that is no sweep's."""
    document = read_document(found.folder / "sweep.json", _SHAPE)
    failures = _csv(found.folder / "failures.csv")
    means = _csv(found.folder / "table.csv")
    seeds = [int(seed) for seed in document["seeds"]]
    blocks: list[Block] = []
    if means is None:
        blocks.append(note("No run of this sweep has completed."))
    else:
        axes = _checked(means, found.folder / "table.csv")
        means = with_own_names(means)
        blocks.append(paragraph(_repeated(document, len(means), len(seeds))))
        if _COPIES in means and means[_COPIES].any():
            blocks.append(
                note("Requests are recorded, the same for each seed, so there is no interval.")
            )
        blocks.append(_table(means, axes))
        blocks += [c for c in _charts(means, axes) if c.curves]
    if failures is not None:
        rows = failures.astype(object).where(failures.notna(), "").values.tolist()
        blocks.append(note(f"{len(failures)} runs failed."))
        blocks.append(folded("failed runs", [table(list(failures.columns), rows)]))
    blocks += _again(document)
    return Part(found.title, tuple(blocks))


def _repeated(document: Mapping, combinations: int, seeds: int) -> str:
    """How many runs the numbers are of, and what an interval is."""
    kind, _, count = str(document.get("repeat") or "").partition("=")
    if kind == "blocks":
        return (
            f"{combinations} combinations, one run each. ± and bars are half widths of 95 % "
            f"intervals, from a bootstrap over {count} blocks of its time."
        )
    what = f"{count} windows" if kind else f"{seeds} seed" + "s" * (seeds != 1)
    return (
        f"{combinations} combinations with {what} each. Numbers are means over them, ± and bars "
        "half widths of their 95 % intervals (Student's)."
    )


def _csv(file: Path) -> pd.DataFrame | None:
    """None where it is not there. Raises ResultsError for one that is no table."""
    if not file.exists():
        return None
    try:
        return pd.read_csv(file)
    except (ValueError, OSError, pd.errors.ParserError) as error:
        raise ResultsError(
            f"{file}: no table of a sweep ({worded(error)}); run the sweep again"
        ) from None


def _checked(means: pd.DataFrame, file: Path) -> list[str]:
    """What combinations name: all that stands before the seeds. Raises ResultsError where that is
    not there, or where a number is none."""
    if "seeds" not in means:
        raise ResultsError(f"{file}: no column seeds; run the sweep again")
    numbers = [c for c in means if c == "seeds" or c.endswith(CI)]
    numbers += [c.removesuffix(CI) for c in numbers if c != "seeds"]
    for column in numbers:
        if column not in means:
            raise ResultsError(f"{file}: no column {column}; run the sweep again")
        if means[column].notna().any() and means[column].dtype.kind not in "iuf":
            raise ResultsError(f"{file}: column {column} is not of numbers; run the sweep again")
    return list(means.columns[: means.columns.get_loc("seeds")])


def _table(means: pd.DataFrame, axes: Sequence[str]) -> Html:
    known = [(n, ", ".join(filter(None, label(n)))) for n in _OVER if n in means]
    verdict = "classes.rt.saturation.verdict"
    head = [*axes, *(title for _, title in known)] + ["queue"] * (verdict in means)
    columns = {name: values(means, name) for name, _ in known}
    rows = []
    for i in range(len(means)):
        cells = [cell_of(means[name].iloc[i]) for name in axes]
        for name, _ in known:
            mean, half = (column[i] for column in columns[name])
            cells.append(with_digits(mean, half or np.nan, 4))
        if verdict in means:
            cells.append(cell_of(means[verdict].iloc[i]))
        rows.append(cells)
    return table(head, rows)


def _charts(means: pd.DataFrame, axes: Sequence[str]) -> Iterator[Chart]:
    x = _load_axis(means, axes)
    if _TOKENS in means:
        for name in ("classes.rt.p99_ttft_ms", "classes.rt.mean_tpot_ms"):
            yield over(means, axes, _TOKENS, name, x)
    if x is not None:
        for name in _OVER:
            yield over(means, axes, x, name)
    yield from _front(means, names_of(means, axes))


def _load_axis(means: pd.DataFrame, axes: Sequence[str]) -> str | None:
    """The number with most values; a load before all else. None where no number varies."""
    numbers = [n for n in axes if is_number(means[n]) and means[n].nunique() > 1]
    loads = [n for n in ("rate", "rate_scale", "load") if n in numbers]
    return next(iter(loads or sorted(numbers, key=lambda n: -means[n].nunique())), None)


def _front(means: pd.DataFrame, whole: Sequence[str]) -> Iterator[Chart]:
    tokens, _ = values(means, _TOKENS)
    shares, _ = values(means, _SHARE)
    ends = front(list(zip(tokens.tolist(), shares.tolist(), strict=True)), False, False)
    if not ends:
        return
    others = [i for i in range(len(means)) if i not in ends]
    yield pareto(
        "sweep-front",
        "Pareto front: throughput and objectives kept",
        "tokens a second, prompt and output",
        "share that keeps its objectives",
        *((tokens[i], shares[i], [whole[j] for j in i]) for i in (ends, others)),
        share=True,
        what="combination",
    )


def _again(document: Mapping) -> list[Html]:
    """The combinations as a file for --params, and the command."""
    combinations = document.get("combinations")
    if not combinations:  # of an earlier version
        return [folded("settings of all runs", [listing(dump_json(document["common"]))])]
    asked = measured_again(document.get("metrics"))
    settings = {**document.get("given", {}), "params": "combinations.json"}
    settings |= {"seeds": document.get("seeds_of_each"), "repeat": document.get("repeat"), **asked}
    settings |= {"error_bars": document.get("error_bars") is True, "out": "again"}
    return [
        paragraph("To run it again, with the combinations below in combinations.json:"),
        listing(command("twinserve sweep", settings)),
        folded("combinations.json", [listing(json.dumps(combinations, indent=2))]),
    ]
