"""Charts as pictures, by matplotlib: SVG that takes its colours from the page, where Bokeh is not
installed. Nothing answers when it is hovered; tables and folded lists have the numbers."""

from __future__ import annotations

import io
import re

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from twinserve.sim.report.axes import GREY, mark, nested_width
from twinserve.sim.report.chart import Chart, Curve, plain
from twinserve.sim.report.figures import new_figure, png
from twinserve.sim.report.palette import COLOURS

_INK, _GRID = "#123450", "#123451"  # stand for colours of the page
_LEGEND_COLUMNS = 4
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "twinserve",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def picture(chart: Chart) -> bytes:
    """The chart as a PNG of its own, on a light ground: with its title, its key, and the text of
    each point beside it. The same chart gives the same bytes."""
    return png(drawn(chart))


def drawn(chart: Chart) -> Figure:
    """The chart as a figure of its own (see `picture`). Of a line what is said of each point is
    left out: it has too many."""
    light = {
        name: {_INK: GREY, _GRID: "#dfe3e8"}.get(value, value) for name, value in _STYLE.items()
    }
    with matplotlib.rc_context(light):
        figure = new_figure(8.4, 4.6)
        ax = figure.subplots()
        points = [curve for curve in chart.curves if curve.kind == "points"]
        for i, curve in enumerate(chart.curves):
            _draw(ax, curve, 1.5 if curve.kind == "points" else nested_width(i, len(chart.curves)))
        for curve in points:
            for x, y, text in zip(curve.x, curve.y, curve.about, strict=False):
                ax.annotate(
                    plain(text),
                    (x, y),
                    (5, 5),
                    textcoords="offset points",
                    fontsize=7.5,
                    color=GREY,
                )
        _axes(ax, chart)
        if points:
            ax.margins(x=0.18, y=0.15)
        ax.set_title(chart.title, loc="left")
        figure.legend(
            handles=[
                Line2D(
                    [],
                    [],
                    color=COLOURS[c.colour % len(COLOURS)],
                    marker="o" if c.kind == "points" else "",
                    label=plain(c.label),
                )
                for c in chart.curves
            ],
            loc="outside upper right",
            ncols=min(len(chart.curves), _LEGEND_COLUMNS),
            frameon=False,
        )
        return figure


def svg(chart: Chart, name: str) -> str:
    """The chart as an <svg> element; `name` tells its parts from those of others on the page."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        ax = figure.subplots()
        for i, curve in enumerate(chart.curves):
            _draw(ax, curve, nested_width(i, len(chart.curves)))
        _axes(ax, chart)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
    return _inline(sink.getvalue(), name)


def _draw(ax: Axes, curve: Curve, width: float) -> None:
    colour = COLOURS[curve.colour % len(COLOURS)]
    if curve.kind == "step":
        ax.step(curve.x, curve.y, where="post", color=colour, linewidth=width)
    elif curve.kind == "line":
        ax.plot(curve.x, curve.y, color=colour, linewidth=width)
    else:
        errors = None
        if curve.low is not None and curve.high is not None:
            errors = np.maximum([curve.y - curve.low, curve.high - curve.y], 0.0)
        face = colour if curve.filled else "none"
        style = {"color": colour, "markerfacecolor": face, "markersize": 6, "capsize": 2.5}
        line = "-" if curve.joined else ""
        ax.errorbar(curve.x, curve.y, errors, fmt="o", linestyle=line, **style)


def _axes(ax: Axes, chart: Chart) -> None:
    if chart.log_x:
        ax.set_xscale("log")
    if chart.log_y:
        ax.set_yscale("log")
    plain_numbers = FuncFormatter(lambda v, _: f"{v:,.6g}")
    ax.xaxis.set_major_formatter(plain_numbers)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0) if chart.share else plain_numbers)
    if not chart.log_y and ax.get_ylim()[0] < 0 <= min(
        (np.nanmin(c.y) for c in chart.curves if np.isfinite(c.y).any()), default=0.0
    ):
        ax.set_ylim(bottom=0)
    for x, text in chart.marks:
        mark(ax, x, plain(text), colour=_INK)
    ax.set_xlabel(plain(chart.x))
    ax.set_ylabel(plain(chart.y))


def _inline(text: str, name: str) -> str:
    """Without what a file of its own needs, with colours of the page, and names of its own."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{name}-", text)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' version="1.1"', "", text, count=1)
    text = text.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    return re.sub(r"font: [^;\"]*?(\d+)px[^;\"]*", r"font-size: \1px", text).strip()
