"""Charts as pictures, by matplotlib: figures of files, and SVG in pages where Bokeh is not
installed. Nothing answers when it is hovered; tables and folded lists have the numbers."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from twinserve.sim.report.chart import (
    GREY,
    Chart,
    Curve,
    colour,
    dash,
    log_ticks,
    marked,
    plain,
    width,
)

_INK, _GRID = "#123450", "#123451"  # stand for colours of the page
_SHAPES = "osD^v"  # MARKS of the palette
_MARGIN_PX = 8.0  # between the legend and the edge of the figure
_MOST_COLUMNS = 6  # of a legend


def style(ink: str, grid: str, size: float) -> dict[str, object]:
    """Settings of matplotlib; size: of text, in points."""
    return {
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture everywhere
        "font.size": size,
        "text.parse_math": False,  # labels are names of folders, and no mathematics
        "text.color": ink,
        "svg.fonttype": "none",
        "svg.hashsalt": "twinserve",
        "axes.titlesize": size + 1,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 8,
        "axes.edgecolor": grid,
        "axes.labelcolor": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "xtick.color": ink,
        "ytick.color": ink,
        "legend.frameon": False,
        "figure.facecolor": "white",
    }


STYLE = style(GREY, "#dfe3e8", 9.5)


@dataclass(frozen=True)
class Size:
    """Of a panel in inches, of text in points; wide: of the whole figure, at least."""

    panel: tuple[float, float]
    text: float
    wide: float = 0.0


# `one`: a chart by itself; `column`: one column of a paper of two
SIZES = {
    "page": Size((4.6, 3.2), 9.5, 6.44),
    "one": Size((8.4, 4.6), 10.0),
    "column": Size((3.35, 2.1), 7.0),
}


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int = 130) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=dpi, metadata={"Software": None})
    return sink.getvalue()


def panels(
    charts: Sequence[Chart], columns: int = 1, size: str = "page", title: str = ""
) -> Figure:
    """A panel for each chart, and one key of all curves above them, below a title; on a light
    ground. The same charts give the same picture."""
    of = SIZES[size]
    rows = math.ceil(len(charts) / columns)
    with matplotlib.rc_context(style(GREY, "#dfe3e8", of.text)):
        figure = new_figure(max(of.panel[0] * columns, of.wide), of.panel[1] * rows)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for ax, chart in zip(axes, charts, strict=False):
            _panel(ax, chart)
            ax.set_title(plain(chart.title), wrap=True)
        for ax in axes[len(charts) :]:
            ax.remove()
        shown = {plain(c.label): c for chart in charts for c in reversed(chart.curves)}
        labels = list(dict.fromkeys(plain(c.label) for chart in charts for c in chart.curves))
        if any(labels):
            _legend(figure, labels, [_handle(shown[label]) for label in labels], plain(title))
        elif title:
            figure.suptitle(plain(title), weight="bold")
    return figure


def drawn(chart: Chart, size: str = "one") -> Figure:
    """Draw the chart as a figure of its own, with the text of each point next to it. A line's
    points have no text: there are too many."""
    figure = panels([chart], size=size)
    if size == "one":
        _name_points(figure.axes[0], chart, GREY)
    return figure


def _name_points(ax: Axes, chart: Chart, ink: str) -> None:
    """Write each point's text on the side that has room, except for the points of lines."""
    for curve in chart.curves:
        if curve.kind == "points":
            for x, y, text in zip(curve.x, curve.y, curve.about, strict=False):
                right = _place(ax, x) > 0.7
                ax.annotate(
                    plain(text),
                    (x, y),
                    (-6 if right else 6, -4),
                    textcoords="offset points",
                    ha="right" if right else "left",
                    va="top",
                    fontsize="x-small",
                    color=ink,
                    parse_math=False,
                )


def _place(ax: Axes, x: float) -> float:
    """Of x along its axis, 0 to 1."""
    return ax.transLimits.transform(ax.transScale.transform((x, 1.0)))[0]


def picture(chart: Chart) -> bytes:
    """The chart as a PNG (see `drawn`). The same chart gives the same bytes."""
    return png(drawn(chart))


def files(figure: Figure) -> Iterator[tuple[str, bytes]]:
    """(kind, bytes) as png, svg and pdf: the same for the same figure."""
    metadata = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    }
    for kind, without in metadata.items():
        sink = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "twinserve"}):
            figure.savefig(sink, format=kind, dpi=130, metadata=without)
        yield kind, sink.getvalue()


def svg(chart: Chart, name: str) -> str:
    """The chart as an <svg> element; `name` tells its parts from those of others on the page."""
    with matplotlib.rc_context(style(_INK, _GRID, 10.0) | {"svg.hashsalt": name}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        ax = figure.subplots()
        _panel(ax, chart)
        if chart.named:
            _name_points(ax, chart, _INK)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
    return _inline(sink.getvalue(), name)


def _panel(ax: Axes, chart: Chart) -> None:
    for i, curve in enumerate(chart.curves):
        _draw(ax, curve, width(i, len(chart.curves)))
    if chart.ticks:
        ax.set_xticks(range(len(chart.ticks)), [plain(tick) for tick in chart.ticks])
    for axis, log, share in ((ax.xaxis, chart.x_log, False), (ax.yaxis, chart.y_log, chart.share)):
        if axis is ax.xaxis and chart.ticks:
            continue
        if log:
            (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log")
            ticks = log_ticks(*(chart.x_range if axis is ax.xaxis else chart.y_range))
            axis.set_major_locator(FixedLocator(ticks))
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        numbers = FuncFormatter(lambda v, _: f"{v:,.6g}")
        axis.set_major_formatter(PercentFormatter(1.0) if share else numbers)
    ax.set_xlim(*chart.x_range)
    ax.set_ylim(*chart.y_range)
    for at, text, side in chart.placed:
        _mark(ax, at, plain(text), side)
    if chart.level is not None:
        at, text = chart.level
        ink = matplotlib.rcParams["axes.labelcolor"]
        ax.axhline(at, color=ink, linewidth=1, linestyle=(0, (4, 3)))
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        ax.annotate(text, (0, at), (4, -3), va="top", fontsize="small", color=ink, **place)
    ax.set_xlabel(plain(chart.x))
    ax.set_ylabel(plain(chart.y))


def _draw(ax: Axes, curve: Curve, thick: float) -> None:
    line = {"color": colour(curve.colour), "linewidth": thick, "linestyle": dash(curve.colour)}
    if curve.kind == "step":
        ax.step(curve.x, curve.y, where="post", **line)
    elif curve.kind == "line":
        ax.plot(curve.x, curve.y, **line)
    else:
        errors = None
        if curve.low is not None and curve.high is not None:
            errors = np.maximum([curve.y - curve.low, curve.high - curve.y], 0.0)
        line |= {} if curve.joined else {"linestyle": ""}
        face = colour(curve.colour) if curve.filled else "none"
        marks = {
            "marker": _SHAPES[marked(curve.colour)],
            "markerfacecolor": face,
            "markersize": 4.5,
        }
        ax.errorbar(curve.x, curve.y, errors, elinewidth=1.0, capsize=2.5, **line, **marks)
    if curve.band is not None:
        known = np.isfinite(curve.band[0])
        at, low, high = curve.x[known], curve.band[0][known], curve.band[1][known]
        if curve.joined and len(at) > 1:
            ax.fill_between(at, low, high, color=colour(curve.colour), alpha=0.15, linewidth=0)
        else:  # a wide bar at each place
            ax.vlines(at, low, high, color=colour(curve.colour), alpha=0.25, linewidth=6)


def _mark(ax: Axes, at: float, text: str, side: int) -> None:
    """An upright line, or at an end of the axis what lies beyond it."""
    ink = matplotlib.rcParams["axes.labelcolor"]
    if side == 0:
        ax.axvline(at, color=ink, linewidth=1, linestyle=(0, (4, 3)))
    right = _place(ax, at) > 0.7 if side == 0 else side > 0
    ax.annotate(
        text,
        (at if side == 0 else float(side > 0), 0.03),
        xycoords=("data", "axes fraction") if side == 0 else "axes fraction",
        xytext=(-4 if right else 4, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize="small",
        color=ink,
    )


def _handle(curve: Curve) -> Line2D:
    """What stands for a curve in a key."""
    points = curve.kind == "points"
    return Line2D(
        [],
        [],
        color=colour(curve.colour),
        linestyle=dash(curve.colour) if curve.joined or not points else "",
        marker=_SHAPES[marked(curve.colour)] if points else "",
        label=plain(curve.label),
        markersize=4.5,
        markerfacecolor=colour(curve.colour) if curve.filled else "none",
    )


def _legend(figure: Figure, labels: Sequence[str], handles: Sequence[Line2D], title: str) -> None:
    """Above the panels, in as many columns as fit; the figure grows if that is not enough."""
    panels_height, renderer = figure.get_figheight(), FigureCanvasAgg(figure).get_renderer()
    for columns in range(min(len(labels), _MOST_COLUMNS), 0, -1):
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        if title:
            legend.set_title(title, {"weight": "bold", "size": "large"})
            legend.set_alignment("left")
        wide = legend.get_window_extent(renderer).width + 2 * _MARGIN_PX
        if wide <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    grown = max(figure.get_figwidth(), wide / figure.dpi)
    height = legend.get_window_extent(renderer).height + 2 * _MARGIN_PX
    figure.set_size_inches(grown, panels_height + height / figure.dpi)


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
