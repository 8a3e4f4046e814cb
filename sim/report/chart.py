"""The parts of a chart, for every way of drawing it: curves with their numbers, axes with their
units, and a description in words.

Long curves are thinned before they come here; `note` says so, and how.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

COLOURS = (
    *("#2f7ed0", "#d9642a", "#2f9a5e", "#9a63cf"),
    *("#a8801a", "#1f96a5", "#d0507a", "#7b8391"),
)
INK = "#7b8391"  # axes and marks of charts, before a page says otherwise
GREY = "#5b6470"
LIGHT, DARK = "#ffffff", "#14181d"
DASHES = ("solid", "dashed", "dotted")
MARKS = ("circle", "square", "diamond", "triangle", "inverted_triangle")  # as Bokeh calls them


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> str:
    return DASHES[number % len(DASHES)]


def marked(number: int) -> int:
    """Its place in MARKS."""
    return number % len(MARKS)


def width(number: int, of: int) -> float:
    """Of a curve: later ones are thinner, so that one which lies on another leaves it visible."""
    return 1.4 + 1.6 * max(of - 1 - number, 0) / max(of - 1, 1)


MOST_CURVES = 24  # of a chart; more cannot be told apart
POINTS = 600  # of a curve; more cannot be seen

Kind = Literal["line", "step", "points"]
_FEW = 6  # points whose names do not cover each other
_LEAST_SHARE = 0.4  # of the width of an axis, that curves keep beside a mark


@dataclass(frozen=True)
class Curve:
    """label    what the curve belongs to, as in the key of the chart
    x, y        float64[n]
    low, high   float64[n]: of points, the interval about each y; None: there is none
    colour      its place in the palette; the same run has the same everywhere
    about       a text for each point, shown with its numbers
    joined      of points: a line through them, in their order
    filled      of points: full marks; hollow ones stand behind
    band        of points: (low, high) of each with step times off; NaN: there is none
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int
    kind: Kind = "line"
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    about: tuple[str, ...] = ()
    joined: bool = False
    filled: bool = True
    band: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class Chart:
    """key     of this kind of chart; a page may have several of a kind
    x, y       titles of the axes, with units
    alt        what is seen, in a sentence or two, with numbers
    note       what has been left out or thinned, and how
    share      the y axis is a share, 0 to 1
    log_x, log_y  logarithmic axes; None: where positive numbers span decades
    marks      upright lines: x, and what it is
    level      a line across: y, and what it is
    ticks      names of x = 0, 1, ...: the axis has no scale
    """

    key: str
    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    alt: str
    note: str = ""
    share: bool = False
    log_x: bool | None = False
    log_y: bool | None = None
    marks: tuple[tuple[float, str], ...] = field(default=())
    level: tuple[float, str] | None = None
    ticks: tuple[str, ...] = ()

    @property
    def listed(self) -> bool:
        """Whether its numbers fit into a table."""
        return sum(len(c.x) for c in self.curves if c.kind == "points") <= 400 and all(
            c.kind == "points" for c in self.curves
        )

    @property
    def named(self) -> bool:
        """Whether few points have texts that the key does not say."""
        points = [(c.label, text) for c in self.curves for text in c.about if c.kind == "points"]
        return len(points) <= _FEW and any(text != label for label, text in points)

    @cached_property
    def x_log(self) -> bool:
        wanted = spans_decades([c.x for c in self.curves]) if self.log_x is None else self.log_x
        return wanted and not self.ticks

    @cached_property
    def y_log(self) -> bool:
        if self.log_y is not None:
            return self.log_y
        return not self.share and spans_decades([c.y for c in self.curves])

    @cached_property
    def y_range(self) -> tuple[float, float]:
        """From 0 if nothing is below it, and a little above the highest; up to 1 if there is
        nothing above 0 to be seen."""
        ends = [end for c in self.curves for end in (c.y, c.low, c.high, *(c.band or ()))]
        low, high = _ends([end for end in ends if end is not None], self.y_log)
        if self.y_log:
            return low / 1.25, high * 1.25
        if low < 0:
            return low - 0.05 * (high - low), high + 0.05 * (high - low)
        return 0.0, min(high * 1.05, 1.02 if self.share else np.inf) or 1.0

    @cached_property
    def x_range(self) -> tuple[float, float]:
        """Of the curves, and of the marks that leave them enough room."""
        if self.ticks:
            return -0.5, len(self.ticks) - 0.5
        low, high = _ends([c.x for c in self.curves], self.x_log)
        scale = np.log if self.x_log else float
        for at, _ in self.marks:
            first, last = min(low, at), max(high, at)
            squeezed = first <= 0 if self.x_log else False
            if not squeezed and scale(high) - scale(low) >= _LEAST_SHARE * (
                scale(last) - scale(first)
            ):
                low, high = first, last
        if self.x_log:
            return low / 1.25, high * 1.25
        pad = 0.08 if any(c.kind == "points" for c in self.curves) else 0.01
        room = pad * (high - low) or 0.1 * abs(high) or 1.0
        return (max(low - room, 0.0) if low >= 0 else low - room), high + room

    @cached_property
    def placed(self) -> list[tuple[float, str, int]]:
        """Return (x, what it is, side) of the marks; side -1 or 1: beyond that end of the axis."""
        low, high = self.x_range
        found = []
        for at, what in self.marks:
            side = int(at > high) - int(at < low)
            arrow = {-1: f"\u2190 {what}", 0: what, 1: f"{what} \u2192"}[side]
            found.append((at, arrow, side))
        return found


def _ends(values: Sequence[np.ndarray], positive: bool) -> tuple[float, float]:
    """Least and largest number; of a logarithmic axis, of those above 0."""
    every = np.concatenate([np.asarray(v, np.float64) for v in values]) if values else np.zeros(0)
    every = every[np.isfinite(every) & (every > 0 if positive else True)]
    if not len(every):
        return (1.0, 10.0) if positive else (0.0, 0.0)
    return float(every.min()), float(every.max())


def plain(text: object) -> str:
    """A label of any origin as text that every drawer can show: signs that cannot be printed, and
    lone surrogates, become a mark."""
    found = str(text).encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "\ufffd" for c in found)


def number(value: float) -> str:
    """Six digits at most, as a table and a hovered point show it."""
    if not np.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:,.6g}"


def thinned_steps(values: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return the cumulative distribution of float64[n]: (ascending values, share at or below each).
    Beyond `points` values, only equally spaced ranks are kept, with the least and the largest. A
    share is exact at each, and off by less than 1 / points between two."""
    ordered = np.sort(values)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), points)).astype(int))
    return ordered[ranks], (ranks + 1) / max(len(ordered), 1)


def spans_decades(values: Sequence[np.ndarray], ratio: float = 30.0) -> bool:
    """Whether positive values lie so far apart that an axis should be logarithmic."""
    every = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    return bool(len(every) and every.min() > 0 and every.max() / every.min() > ratio)


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis from `low` to `high`: 1, 2 and 5 of each power of ten; the
    powers alone if they are many."""
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    every = [float(f"{step}e{power}") for power in powers for step in steps]
    return [tick for tick in every if low <= tick <= high]


def best(pairs: Sequence[tuple[str, float]], unit: str, high: bool = False) -> str:
    """Which is lowest and which is highest, in words, the better one first."""
    known = [(label, value) for label, value in pairs if np.isfinite(value)]
    if not known:
        return "no numbers"
    ordered = sorted(known, key=lambda pair: pair[1], reverse=high)
    (first, top), (last, bottom) = ordered[0], ordered[-1]
    said = [" ".join([f"{v:,.0f}" if abs(v) >= 1e3 else f"{v:.4g}", unit]) for v in (top, bottom)]
    if len(known) == 1 or said[0] == said[1]:
        return said[0].strip()
    return f"from {said[0].strip()} ({first}) to {said[1].strip()} ({last})"
