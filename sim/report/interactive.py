"""Charts that answer when they are hovered and zoomed, by Bokeh: its script goes into the page, so
that nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from twinserve.sim.report.chart import Chart, Curve, number, plain
from twinserve.sim.report.palette import COLOURS, INK


def script() -> str:
    """BokehJS without what needs maps, tables or WebGL. Raises ImportError where there is none."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def item(chart: Chart, target: str) -> str:
    """JSON of `Bokeh.embed.embed_item` for the element `target`. The same chart gives the same
    text."""
    from bokeh.embed import json_item

    text = json.dumps(json_item(_figure(chart), target), separators=(",", ":"))
    # Bokeh counts what a process has made; a page must not depend on that.
    names: dict[str, str] = {}
    for name in re.findall(r'(?<!\\)"(?:id|root_id)":"(p\d+)"', text):
        names.setdefault(name, f"{target}-{len(names)}")
    return re.sub(r'(?<!\\)("(?:id|root_id)":)"(p\d+)"', lambda m: f'{m[1]}"{names[m[2]]}"', text)


def _figure(chart: Chart):
    from bokeh.models import (
        BoxZoomTool,
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
        x_axis_type="log" if chart.log_x else "linear",
        y_axis_type="log" if chart.log_y else "linear",
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
    if chart.share:
        drawn.yaxis.formatter = NumeralTickFormatter(format="0%")
    if not chart.log_y and all((c.y[np.isfinite(c.y)] >= 0).all() for c in chart.curves):
        drawn.y_range.start = 0
    for curve in chart.curves:
        _draw(drawn, curve)
    for x, _ in chart.marks:
        drawn.add_layout(Span(location=x, dimension="height", line_dash="dashed", line_color=INK))
    return drawn


def _draw(drawn, curve: Curve) -> None:
    from bokeh.models import ColumnDataSource, HoverTool

    colour, name = COLOURS[curve.colour % len(COLOURS)], plain(curve.label)
    columns: dict = {"x": curve.x, "y": curve.y}
    if curve.about:
        columns["about"] = [plain(text) for text in curve.about]
    if curve.low is not None and curve.high is not None:
        columns |= {"low": curve.low, "high": curve.high}
    listed = curve.kind == "points"
    if listed:  # few enough for their numbers as the tables have them
        columns |= {
            f"{name}_text": [number(v) for v in columns[name]] for name in _numbers(columns)
        }
    source = ColumnDataSource(columns)
    if listed:
        line = _points(drawn, curve, source, colour)
    else:
        if curve.kind == "step":
            drawn.step("x", "y", source=source, mode="after", color=colour, line_width=2, name=name)
        else:
            drawn.line("x", "y", source=source, color=colour, line_width=2, name=name)
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


def _points(drawn, curve: Curve, source, colour: str):
    given = {"source": source, "name": plain(curve.label), "line_width": 1.5}
    if curve.joined:
        drawn.line("x", "y", color=colour, **given)
    if curve.low is not None:
        drawn.segment("x", "low", "x", "high", color=colour, **given)
    return drawn.scatter(
        "x",
        "y",
        size=9,
        line_color=colour,
        fill_color=colour,
        fill_alpha=1.0 if curve.filled else 0.0,
        **given,
    )


def _numbers(columns: dict) -> Sequence[str]:
    return [name for name in ("x", "y", "low", "high") if name in columns]
