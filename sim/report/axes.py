"""The parts that figures share: curves, time series, and numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

RUN_COLOURS = (
    *("#2f6fb0", "#d9642a", "#3c9a64", "#8a5bb0"),
    *("#b3912a", "#3da0ad", "#c2486c", "#6b7280"),
)
GREY = "#5b6470"
_POINTS = 2_000  # of a curve; more cannot be seen
_TICKS = 5  # of an axis of times, at most: their numbers are long
_LEAST_SHARE = 0.4  # of the width of an axis, that curves keep beside the line of an objective


def draw_cdf(
    ax: Axes,
    values: Mapping[str, np.ndarray | Sequence[np.ndarray]],
    title: str,
    label: str,
    unit: str,
    bound: float | None = None,
) -> None:
    """A step curve for each run; `values` and `bound` in seconds, the axis in `unit` (s or ms).

    A sequence of arrays is a run and its repeats: a curve each, in one colour, and what is said of
    them is the mean over the repeats, as in tables beside the figure.
    """
    scale = {"s": 1.0, "ms": 1000.0}[unit]
    known: dict[str, list[np.ndarray]] = {}
    for i, (colour, (name, of_run)) in enumerate(
        zip(run_colours(values), values.items(), strict=True)
    ):
        repeats = [of_run] if isinstance(of_run, np.ndarray) else of_run
        for seconds in repeats:
            if len(seconds):
                _curve(ax, seconds * scale, colour, nested_width(i, len(values)))
                known.setdefault(name, []).append(seconds)
    if known:
        _time_axis(ax, [seconds * scale for repeats in known.values() for seconds in repeats])
        _subtitle(ax, _medians(known))
    if bound is not None:
        mark(ax, bound * scale, f"objective {_time(bound)}", curves=bool(known))
    ax.set_title(title, pad=20)
    ax.set_xlabel(f"{label} ({unit})")
    ax.set_ylim(0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _curve(ax: Axes, values: np.ndarray, colour: str, width: float) -> None:
    # One request is one step; beyond _POINTS the curve is thinned by rank.
    ranks = np.unique(np.linspace(0, len(values) - 1, min(len(values), _POINTS)).astype(int))
    ordered = np.sort(values)[ranks]
    ax.step(
        np.concatenate([ordered[:1], ordered]),
        np.concatenate([[0.0], (ranks + 1) / len(values)]),
        where="post",
        color=colour,
        linewidth=width,
    )


def mark(ax: Axes, at: float, text: str, curves: bool = True, colour: str = "#30363d") -> None:
    """An upright line at `at` on the axis, and what it is. Where it would leave the curves less
    than _LEAST_SHARE of the width, the axis stays theirs, and an arrow says on which side it is."""
    low, high = ax.get_xlim()
    onto = ax.transScale.transform
    (first, _), (last, _), (there, _) = onto([(low, 0.0), (high, 0.0), (at, 0.0)])
    beyond = curves and last - first < _LEAST_SHARE * (max(last, there) - min(first, there))
    if not beyond:
        ax.axvline(at, color=colour, linewidth=1, linestyle=(0, (4, 3)))
        low, high = ax.get_xlim()
        # the ends of a logarithmic axis are set already
        ax.set_xlim(at * 0.8 if at < low else low, at * 1.2 if at > high else high)
        right = ax.transLimits.transform(onto((at, 0.0)))[0] > 0.7
        place, coordinates = at, ("data", "axes fraction")
    else:
        ax.set_xlim(low, high)
        right = at > high
        text = f"{text} \u2192" if right else f"\u2190 {text}"
        place, coordinates = float(right), "axes fraction"
    ax.annotate(
        text,
        (place, 0.03),
        xycoords=coordinates,
        xytext=(-4 if right else 4, 0),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=8,
        color=colour,
    )


def over_time(
    steps: pd.DataFrame,
    column: str,
    edges: np.ndarray,
    stays: bool = False,
    gone_s: Mapping[int, float] = MappingProxyType({}),
) -> np.ndarray:
    """Time-weighted mean of a column in each bin, summed over replicas; 0 while no step runs.

    stays   it is of something that outlasts steps, such as cached prefixes: between two steps it
            is the larger of what both had, and after the last one what that had, until the run's
            last step has ended. (What a step's requests leave behind is seen in the next one, and
            what the next one's requests take up was seen in the one before, so this is never too
            much.)
    gone_s  replica -> when it went, and what it had with it
    """
    total = np.zeros(len(edges) - 1)
    last_s = float(steps["end_s"].max()) if len(steps) else 0.0
    for replica, mine in steps.groupby("replica", sort=True):
        starts, ends = _apart(mine)
        values = mine[column].to_numpy(np.float64)
        if stays:
            until = max(min(last_s, gone_s.get(int(replica), np.inf)), ends[-1])
            starts, ends, values = _with_gaps(starts, ends, values, until)
        area = np.cumsum(values * (ends - starts))
        times = np.column_stack([starts, ends]).ravel()
        integral = np.column_stack([np.concatenate([[0.0], area[:-1]]), area]).ravel()
        total += np.diff(np.interp(edges, times, integral)) / np.diff(edges)
    return total


def summed_peak(steps: pd.DataFrame, column: str) -> float:
    """The highest sum of a column over the steps that replicas run at one instant; 0 of none."""
    at, change = [np.zeros(0)], [np.zeros(0)]
    for _, mine in steps.groupby("replica", sort=True):
        starts, ends = _apart(mine)
        values = mine[column].to_numpy(np.float64)
        at += [starts, ends]
        change += [values, -values]
    times, changes = np.concatenate(at), np.concatenate(change)
    order = np.lexsort((changes, times))  # at one instant those that end come first
    return float(changes[order].cumsum().max(initial=0.0))


def _apart(mine: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of one replica's steps. With pipelined steps one may begin before the last has
    ended: it counts from there."""
    ends = mine["end_s"].to_numpy(np.float64)
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
    starts = np.maximum(mine["start_s"].to_numpy(np.float64), reached)
    return starts, np.maximum(ends, starts)


def _with_gaps(
    starts: np.ndarray, ends: np.ndarray, values: np.ndarray, until: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps and, after each of them, the time to the next one, the last until `until`:

    start[0] .. end[0] .. start[1] .. end[1] .. until
        value[0]    larger     value[1]    value[1]
    """
    between = np.maximum(values, np.append(values[1:], values[-1:]))
    of_steps = np.column_stack([starts, ends]).ravel()
    return of_steps, np.append(of_steps[1:], until), np.column_stack([values, between]).ravel()


def from_zero(ax: Axes, top: float = 0.0) -> None:
    """The y axis begins at 0, and reaches at least `top`; at least 1 where there is nothing above 0
    to be seen. (Left to itself, an axis of zeros ends at 0.05.)"""
    if 0 < ax.dataLim.ymax < np.inf:
        ax.set_ylim(0, max(top, ax.get_ylim()[1]))
    else:
        ax.set_ylim(0, max(top, 1.0))


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


def _time_axis(ax: Axes, values: Sequence[np.ndarray]) -> None:
    """Logarithmic where the values span more than about one decade and a half."""
    low = min(float(np.quantile(v, 0.01)) for v in values)
    high = max(float(v.max()) for v in values)
    if low > 0 and high / low > 30:
        ax.set_xscale("log")
        ax.set_xlim(low * 0.8, high * 1.2)
        steps = (1, 2, 5) if high / low < 1000 else (1,)
        ax.xaxis.set_major_locator(LogLocator(subs=steps))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(True, which="minor", axis="x", color="#f1f3f5", linewidth=0.6)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(_TICKS))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))


def _medians(values: Mapping[str, Sequence[np.ndarray]]) -> str:
    """The median of each run; of repeats the mean of theirs, and how many they are."""
    median = {name: _mean(np.median, repeats) for name, repeats in values.items()}
    counted = "".join(
        f"; {_short(name)}: mean of {len(repeats)} runs"
        for name, repeats in values.items()
        if len(repeats) > 1
    )
    if len(median) > 1:
        return span("median", median, _time) + counted
    ((name, repeats),) = values.items()
    p99 = _mean(lambda seconds: np.percentile(seconds, 99), repeats)
    return f"median {_time(median[name])}, p99 {_time(p99)}{counted}"


def _mean(statistic: Callable[[np.ndarray], float], repeats: Sequence[np.ndarray]) -> float:
    return float(np.mean([statistic(seconds) for seconds in repeats]))


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


def gone(replicas: pd.DataFrame | None) -> dict[int, float]:
    """Replica -> when it went (seconds), of those that did: `gone_s` of `over_time`."""
    return {} if replicas is None else replicas.set_index("replica")["down_s"].dropna().to_dict()
