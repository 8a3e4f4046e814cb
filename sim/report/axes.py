"""The parts that figures share: curves, time series, and numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

RUN_COLOURS = (
    *("#2f6fb0", "#d9642a", "#3c9a64", "#8a5bb0"),
    *("#b3912a", "#3da0ad", "#c2486c", "#6b7280"),
)
GREY = "#5b6470"
_POINTS = 2_000  # of a curve; more cannot be seen


def draw_cdf(
    ax: Axes,
    values: Mapping[str, np.ndarray],
    title: str,
    label: str,
    unit: str,
    bound: float | None = None,
) -> None:
    """A step curve for each run; `values` and `bound` in seconds, the axis in `unit` (s or ms)."""
    scale = {"s": 1.0, "ms": 1000.0}[unit]
    for i, (colour, seconds) in enumerate(zip(run_colours(values), values.values(), strict=True)):
        if len(seconds) == 0:
            continue
        # One request is one step; beyond _POINTS the curve is thinned by rank.
        ranks = np.unique(np.linspace(0, len(seconds) - 1, min(len(seconds), _POINTS)).astype(int))
        ordered = np.sort(seconds)[ranks] * scale
        ax.step(
            np.concatenate([ordered[:1], ordered]),
            np.concatenate([[0.0], (ranks + 1) / len(seconds)]),
            where="post",
            color=colour,
            linewidth=nested_width(i, len(values)),
        )
    known = {name: seconds * scale for name, seconds in values.items() if len(seconds)}
    if known:
        _time_axis(ax, known)
        _subtitle(ax, _medians({name: seconds / scale for name, seconds in known.items()}))
    if bound is not None:
        ax.axvline(bound * scale, color="#30363d", linewidth=1, linestyle=(0, (4, 3)))
        near_right = ax.transLimits.transform(ax.transScale.transform((bound * scale, 0)))[0] > 0.7
        ax.annotate(
            f"objective {_time(bound)}",
            (bound * scale, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if near_right else 4, 0),
            textcoords="offset points",
            ha="right" if near_right else "left",
            fontsize=8,
            color="#30363d",
        )
    ax.set_title(title, pad=20)
    ax.set_xlabel(f"{label} ({unit})")
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def over_time(steps: pd.DataFrame, column: str, edges: np.ndarray) -> np.ndarray:
    """Time-weighted mean of a column in each bin, summed over replicas; 0 while no step runs."""
    total = np.zeros(len(edges) - 1)
    for _, mine in steps.groupby("replica", sort=True):
        ends = mine["end_s"].to_numpy(np.float64)
        # With pipelined steps one may begin before the last has ended: it counts from there.
        reached = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
        starts = np.maximum(mine["start_s"].to_numpy(np.float64), reached)
        ends = np.maximum(ends, starts)
        area = np.cumsum(mine[column].to_numpy(np.float64) * (ends - starts))
        times = np.column_stack([starts, ends]).ravel()
        integral = np.column_stack([np.concatenate([[0.0], area[:-1]]), area]).ravel()
        total += np.diff(np.interp(edges, times, integral)) / np.diff(edges)
    return total


def span(
    title: str, values: Mapping[str, float | None], show: Callable[[float], str], high: bool = False
) -> str:
    """`title` with the best and the worst run named."""
    known = {label: value for label, value in values.items() if value is not None}
    if not known:
        return title.rstrip(":")
    ordered = sorted(known, key=lambda label: known[label], reverse=high)
    best, worst = ordered[0], ordered[-1]
    if len(known) == 1 or show(known[best]) == show(known[worst]):
        return f"{title} {show(known[best])}"
    return f"{title} {show(known[best])} ({_short(best)}) to {show(known[worst])} ({_short(worst)})"


def nested_width(i: int, n: int) -> float:
    """Later curves are thinner, so that one which lies on another leaves it visible."""
    return 1.4 + 1.6 * (n - 1 - i) / max(n - 1, 1)


def run_colours(items: Collection) -> list[str]:
    return [RUN_COLOURS[i % len(RUN_COLOURS)] for i in range(len(items))]


def _time_axis(ax: Axes, values: Mapping[str, np.ndarray]) -> None:
    """Logarithmic where the values span more than about one decade and a half."""
    low = min(float(np.quantile(v, 0.01)) for v in values.values())
    high = max(float(v.max()) for v in values.values())
    if low > 0 and high / low > 30:
        ax.set_xscale("log")
        ax.set_xlim(low * 0.8, high * 1.2)
        steps = (1, 2, 5) if high / low < 1000 else (1,)
        ax.xaxis.set_major_locator(LogLocator(subs=steps))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(True, which="minor", axis="x", color="#f1f3f5", linewidth=0.6)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))


def _medians(values: Mapping[str, np.ndarray]) -> str:
    if len(values) == 1:
        (only,) = values.values()
        return f"median {_time(np.median(only))}, p99 {_time(np.percentile(only, 99))}"
    return span("median", {name: float(np.median(v)) for name, v in values.items()}, _time)


def _subtitle(ax: Axes, text: str) -> None:
    ax.annotate(
        text,
        (0, 1),
        (0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=GREY,
    )


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _short(label: str) -> str:
    return label if len(label) <= 12 else label[:11] + "\u2026"
