"""The figures of a validation, and what other figures in files share, drawn by matplotlib without a
display. Pages have charts of their own (sim/report/page.py).

A run has one colour in every figure. Titles tell what is seen, with numbers from the runs; axes
carry units.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from twinserve.sim.report.axes import (
    GREY,
    draw_cdf,
    from_zero,
    gone,
    nested_width,
    over_time,
    run_colours,
)
from twinserve.sim.report.seen import CLASS_NAMES
from twinserve.sim.results.files import RunResult, RunRows
from twinserve.sim.results.metrics import latencies
from twinserve.sim.results.metrics_engine import describe_kv

KV_COLOURS = {"real-time": "#2f5d8a", "best-effort": "#e0a458", "cached prefixes": "#d8dde3"}
STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "text.parse_math": False,  # labels are names of folders, and no mathematics
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": GREY,
    "axes.edgecolor": "#b8bec6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
_BINS = 300  # of the time axis

Runs = Mapping[str, RunResult]


def latency_figure(
    runs: Runs, repeats: Mapping[str, Sequence[RunResult]] = MappingProxyType({})
) -> Figure | None:
    """Distributions of TTFT, TPOT and end-to-end latency: a row a class, a curve a run. repeats:
    further runs of a label, each a curve of its colour."""
    by_run = {
        label: [latencies(one.rows.requests) for one in (run, *repeats.get(label, ()))]
        for label, run in runs.items()
    }
    frames = [frame for of_run in by_run.values() for frame in of_run]
    present = set().union(*(frame["service_class"].unique() for frame in frames))
    classes = [service_class for service_class in CLASS_NAMES if service_class in present]
    if not classes:
        return None
    figure = new_figure(11.5, 3.4 * len(classes) + 0.35)
    axes = figure.subplots(len(classes), 3, squeeze=False)
    columns = (
        ("ttft_s", "TTFT", "time to first token", "slo_ttft_s", "s"),
        ("tpot_s", "TPOT", "time per output token", "slo_tpot_s", "ms"),
        ("e2el_s", "End to end", "arrival to last token", None, "s"),
    )
    for row, service_class in zip(axes, classes, strict=True):
        for ax, (column, title, label, slo, unit) in zip(row, columns, strict=True):
            values = {
                name: [
                    frame.loc[frame["service_class"] == service_class, column].dropna().to_numpy()
                    for frame in of_run
                ]
                for name, of_run in by_run.items()
            }
            bound = _common_objective(runs, service_class, slo)
            draw_cdf(ax, values, f"{title}, {CLASS_NAMES[service_class]}", label, unit, bound)
        row[0].set_ylabel("share of requests")
    _legend(figure, runs)
    return figure


def load_figure(runs: Runs) -> Figure | None:
    """Requests waiting over time, and below, for each run, whose blocks the KV cache holds."""
    ends = [run.rows.steps["end_s"].max() for run in runs.values() if len(run.rows.steps)]
    if not ends:
        return None
    edges = np.linspace(0.0, max(ends), _BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    figure = new_figure(11.5, 2.7 + 1.75 * len(runs))
    axes = figure.subplots(
        1 + len(runs), 1, sharex=True, height_ratios=[1.45] + [1] * len(runs), squeeze=False
    )[:, 0]
    peaks = {}
    for colour, (label, run) in zip(run_colours(runs), runs.items(), strict=True):
        waiting = over_time(run.rows.steps, "waiting", edges)
        width = nested_width(len(peaks), len(runs))
        axes[0].plot(middle, waiting, color=colour, label=label, linewidth=width)
        peaks[label] = run.rows.steps["waiting"].max() if len(run.rows.steps) else 0
    worst = max(peaks, key=lambda label: peaks[label])
    title = f"Queue: up to {peaks[worst]:,.0f} requests wait at once"
    axes[0].set_title(title + (f" ({worst})" if len(runs) > 1 else ""))
    axes[0].set_ylabel("requests waiting")
    from_zero(axes[0], top=1.0)
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(runs) > 1:
        axes[0].legend(ncols=2, loc="upper left")
    cached = any((run.rows.steps["kv_cached_blocks"] > 0).any() for run in runs.values())
    for ax, (label, run) in zip(axes[1:], runs.items(), strict=True):
        _kv_over_time(ax, label, run.rows, edges, middle, cached)
    # Beside the title of the first panel, where it hides no data.
    axes[1].legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98), fontsize=8.5)
    axes[-1].set_xlabel("simulated time (s)")
    axes[-1].set_xlim(0, edges[-1])
    return figure


def _kv_over_time(
    ax: Axes, label: str, rows: RunRows, edges: np.ndarray, middle: np.ndarray, cached: bool
) -> None:
    steps = rows.steps
    capacity = rows.kv_blocks
    scale = 1 / capacity if capacity else 1.0
    columns = ["kv_rt_blocks", "kv_be_blocks"] + ["kv_cached_blocks"] * cached
    names = list(KV_COLOURS)[: len(columns)]
    went = gone(rows.replicas)
    layers = [
        over_time(steps, column, edges, stays=column == "kv_cached_blocks", gone_s=went) * scale
        for column in columns
    ]
    ax.stackplot(middle, layers, labels=names, colors=[KV_COLOURS[n] for n in names], linewidth=0)
    peak = steps["kv_used_blocks"].max() if len(steps) else 0
    if capacity:
        ax.set_title(f"{label}: KV cache in use, peak {describe_kv(rows)['peak_use'] or 0:.0%}")
        ax.set_ylim(0, 1)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylabel("of KV blocks")
    else:
        ax.set_title(f"{label}: KV cache in use, peak {peak:,.0f} blocks")
        ax.set_ylabel("KV blocks")
        from_zero(ax, top=1.0)


def _common_objective(runs: Runs, service_class: str, column: str | None) -> float | None:
    """The objective in seconds, where all requests of the class have the same one."""
    if column is None:
        return None
    tables = [run.rows.requests for run in runs.values()]
    distinct = pd.concat(
        [t.loc[t["service_class"] == service_class, column] for t in tables]
    ).unique()
    return float(distinct[0]) if len(distinct) == 1 and not np.isnan(distinct[0]) else None


def _legend(figure: Figure, runs: Runs) -> None:
    handles = [
        Line2D([], [], color=colour, linewidth=6, solid_capstyle="butt", label=label)
        for colour, label in zip(run_colours(runs), runs, strict=True)
    ]
    columns = min(len(runs), 6)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.0)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int = 130) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=dpi, metadata={"Software": None})
    return sink.getvalue()
