"""`twinserve report DIR...`: one self-contained HTML page about what commands have left in folders.

The page needs no network, and the same folders give the same bytes (under one version of the
library that draws). It holds numbers that are thinned, never the rows of runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from twinserve.errors import worded
from twinserve.sim.report.found import Found, find
from twinserve.sim.report.limit_part import limit_part
from twinserve.sim.report.page import Part, render
from twinserve.sim.report.plan_part import plan_part
from twinserve.sim.report.runs_part import runs_part
from twinserve.sim.report.seen import Seen, look
from twinserve.sim.report.sweep_part import sweep_part
from twinserve.sim.report.twin_parts import comparison_part, validation_part
from twinserve.sim.results.files import ResultsError, read_run
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import check_free, write_together

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
            of_runs.setdefault(home, []).append(look(one.label, one.given, read_run(one.folder)))
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
