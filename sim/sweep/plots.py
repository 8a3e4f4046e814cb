"""Plots of a sweep: numbers of the runs over one setting, a line for each combination of the
others, bars for the 95 % intervals over seeds, bands for error bars of the step times."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from twinserve.sim.report.axes import from_zero, nested_width, run_colours
from twinserve.sim.report.figures import new_figure
from twinserve.sim.sweep.combinations import text_of
from twinserve.sim.sweep.draw import is_number
from twinserve.sim.sweep.one import HIGH, LOW
from twinserve.sim.sweep.output import COLUMNS
from twinserve.traces.write import write_atomically

_PANEL = (4.6, 3.2)  # inches
_MARGIN_PX = 8.0  # between the legend and the edge of the figure
_MOST_COLUMNS = 6


def plot(table: pd.DataFrame, axes: Sequence[str], x: str, names: Sequence[str]) -> Figure:
    """A panel for each of `names`, over the axis `x`; the legend stands above, outside of them."""
    others = told_by(table, [name for name in axes if name != x])
    lines = list(_lines(table, others))
    columns = min(len(names), 2) if len(names) != 3 else 3
    rows = math.ceil(len(names) / columns)
    figure = new_figure(_PANEL[0] * max(columns, 1.4), _PANEL[1] * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    places = None if is_number(table[x]) else [*dict.fromkeys(table[x])]
    drawn = [_panel(ax, lines, x, name, places) for ax, name in zip(panels, names, strict=False)]
    for ax in panels[len(names) :]:
        ax.remove()
    if others:
        _legend(figure, [label for label, _ in lines], drawn[0])
    return figure


def told_by(table: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """Those that tell lines apart: not what is the same in all, nor what a combination's name says
    already."""
    named = table["name"] if "name" in axes else pd.Series("", table.index)

    def said(name: str) -> bool:
        return bool((table[name].groupby(named, dropna=False).nunique(dropna=False) == 1).all())

    return [name for name in axes if name == "name" or not said(name)]


def _lines(table: pd.DataFrame, others: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    if not others:
        yield "", table
        return
    for values, part in table.groupby(list(others), sort=False, dropna=False):
        named = [
            text_of(value) if name in ("policy", "name") else f"{name}={text_of(value)}"
            for name, value in zip(others, values, strict=True)
            if pd.notna(value)
        ]
        yield ", ".join(named), part


def _panel(
    ax: Axes,
    lines: Sequence[tuple[str, pd.DataFrame]],
    x: str,
    name: str,
    places: list[object] | None,
) -> list[ErrorbarContainer]:
    """The lines that it drew."""
    colours, drawn = run_colours(lines), []
    for number, (colour, (_, part)) in enumerate(zip(colours, lines, strict=True)):
        at = part[x] if places is None else part[x].map(places.index)
        order = np.argsort(at.to_numpy(), kind="stable")
        line = ax.errorbar(
            at.to_numpy()[order],
            part[name].to_numpy(float)[order],
            part[f"{name}_ci"].fillna(0.0).to_numpy(float)[order],
            color=colour,
            marker="osD^v"[number // len(set(colours)) % 5],
            markersize=4,
            linewidth=nested_width(number, len(lines)) if places is None else 0,
            elinewidth=1.0,
            capsize=2.5,
        )
        drawn.append(line)
        if f"{name}{LOW}" in part:
            ends = (part[f"{name}{end}"].to_numpy(float)[order] for end in (LOW, HIGH))
            _band(ax, at.to_numpy()[order], *ends, colour, joined=places is None)
    if places is not None:
        ax.set_xticks(range(len(places)), [text_of(place) for place in places])
        ax.set_xlim(-0.5, len(places) - 0.5)
    ax.set_xlabel(x)
    ax.set_ylabel(COLUMNS.get(name, name))
    low, high = ax.get_ylim()
    if low > 0:
        ax.set_ylim(0, high * 1.05)
    elif ax.dataLim.ymin == ax.dataLim.ymax == 0.0:
        from_zero(ax)
    ax.grid(True, color="#e5e8eb", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    return drawn


def _band(ax: Axes, at, low, high, colour, joined: bool) -> None:
    """Between the ends of the error bars; where the axis has no scale, a wide bar at each place."""
    if joined and len(at) > 1:
        ax.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    else:
        ax.vlines(at, low, high, color=colour, alpha=0.25, linewidth=6)


def _legend(figure: Figure, labels: Sequence[str], handles: Sequence[ErrorbarContainer]) -> None:
    """Above the panels, in as many columns as fit; the figure grows where that is not enough."""
    labels = [label.replace("$", r"\$") for label in labels]  # no mathematics
    panels_height, renderer = figure.get_figheight(), FigureCanvasAgg(figure).get_renderer()
    for columns in range(min(len(labels), _MOST_COLUMNS), 0, -1):
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        width = legend.get_window_extent(renderer).width + 2 * _MARGIN_PX
        if width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    grown = max(figure.get_figwidth(), width / figure.dpi)
    height = legend.get_window_extent(renderer).height + 2 * _MARGIN_PX
    figure.set_size_inches(grown, panels_height + height / figure.dpi)


def write_plots(out: Path, figure: Figure) -> list[Path]:
    """plot.png, plot.svg and plot.pdf: the same bytes for the same figure. Raises WorkloadError."""
    metadata = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    }
    files = []
    for kind, without in metadata.items():
        sink = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "twinserve"}):
            figure.savefig(sink, format=kind, dpi=130, metadata=without)
        files.append(out / f"plot.{kind}")
        write_atomically(files[-1], sink.getvalue())
    return files
