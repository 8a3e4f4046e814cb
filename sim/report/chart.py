"""What a chart of a page is made of, for every way of drawing it: curves with their numbers, axes
with their units, and what is seen in it, in words.

Long curves are thinned before they come here; `note` says so, and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

MOST_CURVES = 24  # of a chart; more cannot be told apart
POINTS = 600  # of a curve; more cannot be seen

Kind = Literal["line", "step", "points"]


@dataclass(frozen=True)
class Curve:
    """label    what the curve belongs to, as in the key of the chart
    x, y        float64[n]
    low, high   float64[n]: of points, the interval about each y; None: there is none
    colour      its place in the palette; the same run has the same everywhere
    about       a text for each point, shown with its numbers
    joined      of points: a line through them, in their order
    filled      of points: full marks; hollow ones stand behind
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


@dataclass(frozen=True)
class Chart:
    """key     of this kind of chart; a page may have several of a kind
    x, y       titles of the axes, with units
    alt        what is seen, in a sentence or two, with numbers
    note       what has been left out or thinned, and how
    share      the y axis is a share, 0 to 1
    log_x, log_y  logarithmic axes
    """

    key: str
    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    alt: str
    note: str = ""
    share: bool = False
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = field(default=())  # upright lines: x, and what it is

    @property
    def listed(self) -> bool:
        """Whether its numbers fit into a table."""
        return sum(len(c.x) for c in self.curves if c.kind == "points") <= 400 and all(
            c.kind == "points" for c in self.curves
        )


def plain(text: object) -> str:
    """A label of any origin as text that every drawer can show: signs that cannot be printed, and
    lone surrogates, become a mark."""
    found = str(text).encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "\ufffd" for c in found)


def number(value: float) -> str:
    """Six digits at most, as a table and a hovered point show it."""
    if not np.isfinite(value):
        return "-"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1e5 and size < 1e15 else f"{value:.6g}"


def thinned_steps(values: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """The cumulative distribution of float64[n]: (ascending values, share at or below each). Beyond
    `points` values every so many ranks are kept, the least and the largest too, so that a share is
    off by less than 1 / points between two of them, and right at each."""
    ordered = np.sort(values)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), points)).astype(int))
    return ordered[ranks], (ranks + 1) / max(len(ordered), 1)


def spans_decades(values: Sequence[np.ndarray], ratio: float = 30.0) -> bool:
    """Whether positive values lie so far apart that an axis should be logarithmic."""
    every = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    return bool(len(every) and every.min() > 0 and every.max() / every.min() > ratio)


def best(pairs: Sequence[tuple[str, float]], unit: str, high: bool = False) -> str:
    """Which is lowest and which is highest, in words, the better one first."""
    known = [(label, value) for label, value in pairs if np.isfinite(value)]
    if not known:
        return "no numbers"
    ordered = sorted(known, key=lambda pair: pair[1], reverse=high)
    (first, top), (last, bottom) = ordered[0], ordered[-1]
    said = [" ".join([f"{v:,.0f}" if abs(v) >= 1e4 else f"{v:.4g}", unit]) for v in (top, bottom)]
    if len(known) == 1 or said[0] == said[1]:
        return said[0].strip()
    return f"from {said[0].strip()} ({first}) to {said[1].strip()} ({last})"


def front(points: Sequence[tuple[float, float]], low_x: bool, low_y: bool) -> list[int]:
    """Pareto's front: places of the points that no other point equals in one and beats in the
    other, in order of x. low_x, low_y: whether less is better. Points with NaN are on no front."""
    signed = [
        (x if low_x else -x, y if low_y else -y, i)
        for i, (x, y) in enumerate(points)
        if np.isfinite(x) and np.isfinite(y)
    ]
    found: list[tuple[float, int]] = []
    least = np.inf
    previous: tuple[float, float] | None = None
    for x, y, i in sorted(signed):
        if y < least or (x, y) == previous:
            found.append((points[i][0], i))
            least, previous = min(least, y), (x, y)
    return [i for _, i in sorted(found)]
