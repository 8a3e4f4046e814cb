"""Piecewise linear tables: curves, planes and boxes of measured times, read one value or many at a
time.

Inside a table the value is linear between neighbours; below the first point it is the first value,
past the last one it goes on with the last slope. A scalar and a vector of the same argument give
the same bits: both evaluate `y[i] + slope[i] * (x - x[i])` in this order.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np


class Curve:
    """y over x (strictly rising, two points or more)."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x = np.asarray(x, np.float64)
        self.y = np.asarray(y, np.float64)
        self.slope = np.diff(self.y) / np.diff(self.x)
        self._x, self._y, self._slope = self.x.tolist(), self.y.tolist(), self.slope.tolist()
        self._last = len(self._x) - 2

    def at(self, x: float) -> float:
        if x <= self._x[0]:
            return self._y[0]
        i = min(bisect_right(self._x, x) - 1, self._last)
        return self._y[i] + self._slope[i] * (x - self._x[i])

    def of(self, x: np.ndarray) -> np.ndarray:
        """float64[n] for float64[n]: `at` of each, bit for bit."""
        i = np.clip(np.searchsorted(self.x, x, side="right") - 1, 0, self._last)
        return np.where(x <= self.x[0], self.y[0], self.y[i] + self.slope[i] * (x - self.x[i]))


def weights(axis: Sequence[float], value: float) -> tuple[int, float]:
    """(i, w): the value lies at (1 - w) axis[i] + w axis[i + 1]; w is 0 below the axis and above 1
    past it.

    An axis of one point is constant.
    """
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    i = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


class Plane:
    """z over (x, y), bilinear. z: [len(x)][len(y)]."""

    def __init__(
        self, x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]]
    ) -> None:
        self.x, self.y, self.z = list(x), list(y), [list(row) for row in z]

    def at(self, x: float, y: float) -> float:
        i, u = weights(self.x, x)
        j, v = weights(self.y, y)
        low = _between(self.z[i], j, v)
        return low if not u else low + u * (_between(self.z[i + 1], j, v) - low)

    def row(self, x: float) -> list[float]:
        """z over the y axis, at this x."""
        i, u = weights(self.x, x)
        if not u:
            return list(self.z[i])
        return [low + u * (high - low) for low, high in zip(self.z[i], self.z[i + 1], strict=True)]


class Box:
    """A plane for each point of a third axis, linear between them."""

    def __init__(self, x, y, z, values) -> None:
        self.x = list(x)
        self.planes = [Plane(y, z, part) for part in values]

    def at(self, x: float, y: float, z: float) -> float:
        i, u = weights(self.x, x)
        low = self.planes[i].at(y, z)
        return low if not u else low + u * (self.planes[i + 1].at(y, z) - low)


def _between(row: list[float], j: int, v: float) -> float:
    return row[j] if not v else row[j] + v * (row[j + 1] - row[j])


def never_falling(values: np.ndarray) -> np.ndarray:
    """The nearest values (least squares) that never fall along any axis.

    Kernel times are not monotone: a larger batch may get a better tile. Followed to the letter,
    such noise would make an extra token save time, and schedulers that search for the best chunk
    would find it. Pool-adjacent-violators along each axis in turn, until none changes anything.
    """
    from scipy.optimize import isotonic_regression

    found = np.array(values, np.float64)
    for _ in range(50):
        before = found.copy()
        for axis in range(found.ndim):
            found = np.apply_along_axis(lambda line: isotonic_regression(line).x, axis, found)
        if np.array_equal(before, found):
            return found
    for axis in range(found.ndim):  # what rounding leaves
        found = np.maximum.accumulate(found, axis=axis)
    return found
