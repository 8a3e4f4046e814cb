"""`twinserve report`: compare finished runs in one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twinserve.sim.cli.progress import RunProgress


def report(
    runs: Annotated[list[Path], Parameter(negative="")],
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    overwrite: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """One self-contained HTML page, with its plots beside it, that compares runs.

    Parameters
    ----------
    runs: list[Path]
        Folders that `simulate --out` wrote, or folders of such folders.
    out: Path
        The .html file, or a folder for it.
    overwrite: bool
        Replace a page that is there.
    """
    from twinserve.sim.report.html import write_report
    from twinserve.sim.results.files import ResultsError, find_runs

    if not runs:
        raise ResultsError("name at least one folder that `simulate --out` wrote")
    with RunProgress(shown=True) as progress:

        def piece(done: int, total: int, what: str) -> None:
            if done == 1:  # of this kind
                progress.end()
                progress.begin("report", 1 / total)
            progress.count(done, total, what)

        page = write_report(find_runs(runs), out, overwrite, piece)
    print(page)
