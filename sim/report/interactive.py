"""Charts that answer when they are hovered and zoomed, by Bokeh: its script goes into the page, so
that nothing is loaded from elsewhere."""

import json
import re
from collections.abc import Sequence

import numpy as np

from twinserve.sim.report.chart import (
    INK,
    MARKS,
    Chart,
    Curve,
    colour,
    dash,
    log_ticks,
    marked,
    number,
    plain,
    width,
)


def script() -> str:
    """BokehJS without what needs maps, tables or WebGL. Raises ImportError if there is none."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def item(chart: Chart, target: str) -> str:
    """Return JSON of `Bokeh.embed.embed_item` for element `target`; equal for equal charts."""
    from bokeh.embed import json_item

    text = json.dumps(json_item(figure_of(chart), target), separators=(",", ":"))
    # Bokeh counts what a process has made; a page must not depend on that.
    names: dict[str, str] = {}
    for name in re.findall(r'(?<!\\)"(?:id|root_id)":"(p\d+)"', text):
        names.setdefault(name, f"{target}-{len(names)}")
    return re.sub(r'(?<!\\)("(?:id|root_id)":)"(p\d+)"', lambda m: f'{m[1]}"{names[m[2]]}"', text)


def figure_of(chart: Chart):
    from bokeh.models import (
        BoxZoomTool,
        Label,
        NumeralTickFormatter,
        PanTool,
        PlainText,
        ResetTool,
        SaveTool,
        Span,
        WheelZoomTool,
    )
    from bokeh.plotting import figure

    wheel = WheelZoomTool()
    drawn = figure(
        height=320,
        sizing_mode="stretch_width",
        tools=[PanTool(), BoxZoomTool(), wheel, ResetTool(), SaveTool()],
        toolbar_location="above",
        x_axis_type="log" if chart.x_log else "linear",
        y_axis_type="log" if chart.y_log else "linear",
        x_range=chart.x_range,
        y_range=chart.y_range,
        x_axis_label=PlainText(text=plain(chart.x)),  # a name is no mathematics
        y_axis_label=PlainText(text=plain(chart.y)),
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=12,
    )
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    # A finger that scrolls the page must not move a chart: dragging and the wheel do nothing
    # until they are chosen above the chart.
    drawn.toolbar.active_drag = None
    drawn.toolbar.active_scroll = None
    for axis, log, ends in (
        (drawn.xaxis, chart.x_log, chart.x_range),
        (drawn.yaxis, chart.y_log, chart.y_range),
    ):
        axis.formatter = NumeralTickFormatter(format="0,0.[000000]")
        if log:  # numbers as the picture has them, and no powers of ten
            axis.ticker = log_ticks(*ends)
    if chart.share:
        drawn.yaxis.formatter = NumeralTickFormatter(format="0%")
    if chart.ticks:
        drawn.xaxis.ticker = list(range(len(chart.ticks)))
        drawn.xaxis.major_label_overrides = dict(enumerate(map(plain, chart.ticks)))
    for i, curve in enumerate(chart.curves):
        _draw(drawn, curve, width(i, len(chart.curves)))
    if chart.level is not None:
        at, text = chart.level
        line = {"line_dash": "dashed", "line_color": INK}
        drawn.add_layout(Span(location=at, dimension="width", **line))
        label = Label(x=4, x_units="screen", y=at, text=plain(text), text_baseline="top")
        label.update(text_color=INK, text_font_size="12px")
        drawn.add_layout(label)
    for x, text, side in chart.placed:
        if side == 0:
            line = Span(location=x, dimension="height", line_dash="dashed", line_color=INK)
            drawn.add_layout(line)
        end = chart.x_range[1 if side > 0 else 0] if side else x
        right = _place(chart, end) > 0.7
        given = {"text_align": "right" if right else "left", "x_offset": -4 if right else 4}
        label = Label(x=end, y=4, y_units="screen", text=plain(text), text_color=INK, **given)
        label.text_font_size = "12px"
        drawn.add_layout(label)
    return drawn


def _place(chart: Chart, x: float) -> float:
    """Of x along its axis, 0 to 1."""
    low, high = chart.x_range
    scale = np.log if chart.x_log else float
    return (scale(x) - scale(low)) / (scale(high) - scale(low))


def _draw(drawn, curve: Curve, thick: float) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    ink, name = colour(curve.colour), plain(curve.label)
    columns: dict = {"x": curve.x, "y": curve.y}
    if curve.about:
        columns["about"] = [plain(text) for text in curve.about]
    if curve.low is not None and curve.high is not None:
        columns |= {"low": curve.low, "high": curve.high}
    if curve.band is not None:
        columns |= {"least": curve.band[0], "most": curve.band[1]}
    listed = curve.kind == "points"
    if listed:  # few enough for their numbers as the tables have them
        columns |= {
            f"{name}_text": [number(v) for v in columns[name]] for name in _numbers(columns)
        }
    source = ColumnDataSource(columns)
    if listed:
        line = _points(drawn, curve, source, ink)
    else:
        given = {"source": source, "color": ink, "line_width": thick, "name": name}
        given["line_dash"] = dash(curve.colour)
        if curve.kind == "step":
            drawn.step("x", "y", mode="after", **given)
        else:
            drawn.line("x", "y", **given)
        # What answers is wider than what is seen: a mouse hits no line of two pixels.
        line = drawn.line("x", "y", source=source, line_width=14, line_alpha=0.0, name=name)
    shown = (lambda n: f"@{n}_text") if listed else (lambda n: f"@{n}{{%.6g}}")
    tips = [("", "$name"), ("x", shown("x")), ("y", shown("y"))]
    tips += [("", "@about")] if curve.about else []
    tips += [("95 %", f"{shown('low')} to {shown('high')}")] if "low" in columns else []
    formats = {} if listed else {"@x": "printf", "@y": "printf"}
    # A line answers at the nearest of its points: between two of them nothing is known.
    where = {"line_policy": "nearest"} if not listed else {}
    drawn.add_tools(
        HoverTool(
            renderers=[line],
            tooltips=tips,
            formatters=formats,
            mode="mouse",
            point_policy="snap_to_data",
            visible=False,
            **where,
        )
    )


def _points(drawn, curve: Curve, source, ink: str):
    given = {"source": source, "name": plain(curve.label), "line_width": 1.5}
    if curve.joined:
        drawn.line("x", "y", color=ink, line_dash=dash(curve.colour), **given)
    if curve.low is not None:
        drawn.segment("x", "low", "x", "high", color=ink, **given)
    found = drawn.scatter(
        "x",
        "y",
        size=9,
        marker=MARKS[marked(curve.colour)],
        line_color=ink,
        fill_color=ink,
        fill_alpha=1.0 if curve.filled else 0.0,
        **given,
    )
    if curve.band is not None:
        wide = {"source": source, "name": plain(curve.label), "color": ink}
        if curve.joined:
            drawn.varea("x", "least", "most", alpha=0.15, **wide)
        else:
            drawn.segment("x", "least", "x", "most", line_width=6, alpha=0.25, **wide)
    return found


def _numbers(columns: dict) -> Sequence[str]:
    return [name for name in ("x", "y", "low", "high") if name in columns]
