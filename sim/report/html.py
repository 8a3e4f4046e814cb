"""`twinserve report DIR...`: one self-contained HTML page about what commands have left in folders.

The page needs no network, and the same folders give the same bytes (under one version of the
library that draws). It holds numbers that are thinned, never the rows of runs.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.errors import worded
from twinserve.sim.report.chart import Chart
from twinserve.sim.report.found import Found, find, read_document
from twinserve.sim.report.limit_part import limit_part
from twinserve.sim.report.metric_names import label
from twinserve.sim.report.over import (
    CI,
    cell_of,
    is_number,
    names_of,
    over,
    queues,
    values,
    with_digits,
)
from twinserve.sim.report.page import (
    Block,
    Html,
    Part,
    folded,
    listing,
    note,
    paragraph,
    render,
    table,
)
from twinserve.sim.report.plan_part import plan_part
from twinserve.sim.report.run_charts import pareto
from twinserve.sim.report.runs_part import runs_part
from twinserve.sim.report.seen import Seen, look
from twinserve.sim.report.table import NONE
from twinserve.sim.report.twin_parts import comparison_part, validation_part
from twinserve.sim.results.checked import SHAPES
from twinserve.sim.results.command import command
from twinserve.sim.results.files import ResultsError, dump_json, read_run
from twinserve.sim.results.folders import policy_of
from twinserve.sim.results.options import measured_again
from twinserve.sim.results.parts import front
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import check_free, write_together

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
    document = read_document(found.folder / "sweep.json", SHAPES["sweep"])
    failures = _csv(found.folder / "failures.csv")
    means = _csv(found.folder / "table.csv")
    seeds = [int(seed) for seed in document["seeds"]]
    blocks: list[Block] = []
    if means is None:
        blocks.append(note("No run of this sweep has completed."))
    else:
        axes = _checked(means, found.folder / "table.csv")
        blocks.append(paragraph(_repeated(document, len(means), len(seeds))))
        if document.get("objectives"):
            blocks.append(paragraph(f"Objectives: {', '.join(document['objectives'])}."))
        if _COPIES in means and means[_COPIES].any():
            blocks.append(
                note("Requests are recorded, the same for each seed, so there is no interval.")
            )
        blocks.append(_table(means, axes))
        blocks += _differences(_csv(found.folder / "differences.csv"), axes)
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
    """Return the table, or None without a file. Raises ResultsError for a file that is no table."""
    if not file.exists():
        return None
    try:
        return pd.read_csv(file)
    except (ValueError, OSError, pd.errors.ParserError) as error:
        raise ResultsError(
            f"{file}: no table of a sweep ({worded(error)}); run the sweep again"
        ) from None


def _checked(means: pd.DataFrame, file: Path) -> list[str]:
    """Return the settings of combinations: all columns before the seeds. Raises ResultsError if
    these are missing, or a number is none."""
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
            cells.append(queues(cell_of(means[verdict].iloc[i])))
        rows.append(cells)
    return table(head, rows)


def _differences(found: pd.DataFrame | None, axes: Sequence[str]) -> list[Block]:
    """Return differences.csv as a table, with settings' columns but the baseline's."""
    if found is None or not len(found):
        return []
    numbers = list(dict.fromkeys(found["number"]))
    rows = []
    for keys, group in found.groupby(list(axes), sort=False, dropna=False):
        cells = {
            one.number: with_digits(one.difference, one.ci, 4)
            + " *" * (one.verdict == "significant")
            for one in group.itertuples()
        }
        rows.append([*map(cell_of, keys), *(cells.get(name, NONE) for name in numbers)])
    said = f"Differences to {found['baseline'].iloc[0]}, runs with the same requests in pairs. "
    said += "* significant: its 95 % interval leaves out 0."
    heads = [", ".join(filter(None, label(name))) for name in numbers]
    return [paragraph(said), table([*axes, *heads], rows)]


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
    """The number with most values; a load before all else. None if no number varies."""
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


_SHOWN = 3  # runs that a title names
_READERS = {
    "sweep": sweep_part,
    "plan": plan_part,
    "limit": limit_part,
    "comparison": comparison_part,
}


def write_report(
    dirs: Iterable[str | os.PathLike],
    out: str | os.PathLike,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    title: str | None = None,
) -> Path:
    """What is in `dirs`, at whatever depth, in `out`: an .html file, or a folder that gets
    report.html. title: of the page, instead of what is in it. Returns the page.

    Raises ResultsError for what cannot be read, a page that cannot be written, or one that is there
    already and `overwrite` is not set; the old page is whole then. progress(done, total, of what)
    is called for each folder that is read.
    """
    found = find(dirs)
    page = Path(out)
    if page.suffix.lower() not in (".html", ".htm"):
        page = page / "report.html"
    check_free(page, overwrite, ResultsError)
    what, lines, parts = _read(found, progress)
    if title is not None:
        lines = [what, *lines]
    try:
        write_together([(page, render(title or what, lines, parts).encode())])
    except WorkloadError as error:
        raise ResultsError(worded(error)) from None
    return page


def _read(
    found: Sequence[Found], progress: Callable[[int, int, str], None]
) -> tuple[str, list[str], list[Part]]:
    """(title, lines below it, chapters): runs first, then what is made of runs."""
    validations = [one for one in found if one.kind == "validation"]
    of_runs: dict[Path | None, list[Seen]] = {None: []}
    others: dict[Path, Part] = {}
    for done, one in enumerate(found, 1):
        if one.kind == "run":
            home = next((v.folder for v in validations if v.folder in one.folder.parents), None)
            run = read_run(one.folder)
            name = policy_of(one.label, run.config.get("label"))
            of_runs.setdefault(home, []).append(look(name, one.given, run))
        elif one.kind in _READERS:
            others[one.folder / one.kind] = _READERS[one.kind](one)
        progress(done, len(found), "folders read")
    parts = [runs_part(of_runs[None])] if of_runs[None] else []
    for one in found:
        if one.kind == "validation":
            parts.append(validation_part(one, of_runs.get(one.folder, [])))
        elif one.kind != "run":
            parts.append(others[one.folder / one.kind])
    title, counted = _title(found, of_runs[None]), _counted(found)
    return title, [f"{counted}."] * (len(found) > 1 and title != counted), parts


def _title(found: Sequence[Found], runs: Sequence[Seen]) -> str:
    if len(found) == len(runs):
        named = [run.label for run in runs]
        return " against ".join(named) if len(named) <= _SHOWN else f"{len(named)} runs"
    others = [one for one in found if one.kind != "run"]
    if len(others) == 1:
        return others[0].title
    return _counted(found)


def _counted(found: Sequence[Found]) -> str:
    kinds = list(dict.fromkeys(one.kind for one in found))
    counts = [(kind, sum(one.kind == kind for one in found)) for kind in kinds]
    return ", ".join(f"{n} {kind}" + "s" * (n > 1) for kind, n in counts)
