"""`twinserve report`: one page about the folders that commands wrote."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twinserve.sim.cli.progress import RunProgress


def report(
    runs: Annotated[list[Path], Parameter(negative="")],
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])],
    title: str | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write one self-contained HTML page about runs, sweeps, plans, comparisons and validations.

    For example:

    $ twinserve report run other-run --out report.html

    Args:
        runs: Folders that `--out` of these commands wrote, or that contain such folders at any
            depth. The page keeps their order.
        out: The .html file, or a folder for it.
        title: Of the page, instead of what is in it.
        overwrite: Replace an existing page.
    """
    from twinserve.sim.report.html import write_report

    with RunProgress(shown=True) as progress:

        def piece(done: int, total: int, what: str) -> None:
            if done == 1:  # of this kind
                progress.end()
                progress.begin("report", 1 / total)
            progress.count(done, total, what)

        page = write_report(runs, out, overwrite, piece, title)
    print(page)
