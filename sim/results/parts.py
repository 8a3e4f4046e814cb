"""Confidence of a share of requests, from parts of a run, because requests of one run depend on
each other (a burst delays many at once). And the points that no other point beats."""

import math
from collections.abc import Sequence

import numpy as np

PARTS = 10  # equal parts of the arrivals' time
# Student's t, two-sided, 95 %, by degrees of freedom (no scipy here: loading it takes as long as a
# short run); between two of them the larger one.
_STUDENT = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 15: 2.131, 19: 2.093, 24: 2.064, 29: 2.045, 39: 2.023, 49: 2.010,
    59: 2.001, 79: 1.990, 99: 1.984,
}  # fmt: skip


def by_parts(
    arrival_s: np.ndarray, due: np.ndarray, kept: np.ndarray, parts: int = PARTS
) -> tuple[tuple[int, int], ...]:
    """Return (due requests, those that met it) in each of so many equal parts of the time in which
    due requests arrived; empty if none is due. bool[n]: due, kept."""
    at, kept = arrival_s[due], kept[due]
    if not len(at):
        return ()
    edges = np.linspace(at.min(), at.max(), parts + 1)
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, parts - 1)
    dues = np.bincount(place, minlength=parts)
    keeps = np.bincount(place[kept], minlength=parts)
    return tuple(zip(dues.tolist(), keeps.tolist(), strict=True))


def ratio(parts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return (kept / due over all parts, half width of its 95 % interval; inf for one part)."""
    due, kept = sum(n for n, _ in parts), sum(k for _, k in parts)
    share, count = kept / due, len(parts)
    if count < 2:
        return share, math.inf
    squares = sum((k - share * n) ** 2 for n, k in parts)
    return share, student(count - 1) * math.sqrt(count / (count - 1) * squares) / due


def student(freedom: int) -> float:
    """Return the table's value at the next smaller number of degrees of freedom."""
    return _STUDENT[max(n for n in _STUDENT if n <= freedom)]


def front(points: Sequence[tuple[float, float]], low_x: bool, low_y: bool) -> list[int]:
    """Return Pareto's front: places of the points that no other point dominates, in order of x.
    low_x, low_y: less is better. A point with NaN is not on the front."""
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
