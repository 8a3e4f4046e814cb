"""Plots of a sweep: numbers of the runs over one setting, as its page draws them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from twinserve.sim.report.over import over
from twinserve.sim.report.static import files, panels
from twinserve.traces.write import write_atomically


def plot(
    table: pd.DataFrame, axes: Sequence[str], x: str, names: Sequence[str], size: str = "page"
) -> Figure:
    """A panel for each of `names`, over the axis `x`; the key stands above, outside of them. size:
    `page`, or `column` for one column of a paper."""
    columns = 1 if size == "column" else 3 if len(names) == 3 else min(len(names), 2)
    return panels([over(table, axes, x, name) for name in names], columns, size)


def write_plots(out: Path, figure: Figure) -> list[Path]:
    """plot.png, plot.svg and plot.pdf: the same bytes for the same figure. Raises WorkloadError."""
    written = []
    for kind, content in files(figure):
        written.append(out / f"plot.{kind}")
        write_atomically(written[-1], content)
    return written
