"""Sets of rows that stay in order without being sorted at each step."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

_MENDED = 8  # changes


class RowSet:
    """Rows in order of submission; `rows` is an int64 array, which after a few changes is not made
    anew but mended: of thousands of rows that takes a fraction of the time."""

    def __init__(self) -> None:
        self._sorted: list[int] = []
        self._rows = np.zeros(0, np.int64)
        # since `_rows` was made: place, and the row added there or -1
        self._changes: list[tuple[int, int]] = []

    @property
    def rows(self) -> np.ndarray:
        if len(self._changes) > _MENDED:
            self._rows = np.array(self._sorted, np.int64)
        else:
            for at, row in self._changes:
                added, after = ([], at + 1) if row < 0 else ([row], at)
                self._rows = np.concatenate(
                    [self._rows[:at], np.array(added, np.int64), self._rows[after:]]
                )
        self._changes.clear()
        return self._rows

    def first(self, n: int) -> np.ndarray:
        """int64[n or fewer]: the first of them, however many there are behind."""
        return np.array(self._sorted[:n], np.int64)

    def add(self, row: int) -> None:
        at = bisect_left(self._sorted, row)
        self._sorted.insert(at, row)
        self._changed(at, row)

    def discard(self, row: int) -> None:
        at = bisect_left(self._sorted, row)
        if at < len(self._sorted) and self._sorted[at] == row:
            del self._sorted[at]
            self._changed(at, -1)

    def _changed(self, at: int, row: int) -> None:
        if len(self._changes) <= _MENDED:  # more need not be told apart
            self._changes.append((at, row))

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, row: int) -> bool:
        at = bisect_left(self._sorted, row)
        return at < len(self._sorted) and self._sorted[at] == row


class DeadlineQueue:
    """Rows in order of (deadline, row). A waiting request's deadline does not move, so the order
    needs no upkeep."""

    def __init__(self) -> None:
        self.rows = np.zeros(0, np.int64)
        self._deadline = np.zeros(0)  # seconds

    def add(self, row: int, deadline: float) -> None:
        at = int(np.searchsorted(self._deadline, deadline, side="right"))
        while at and self._deadline[at - 1] == deadline and self.rows[at - 1] > row:
            at -= 1
        # np.insert would do, but takes several times as long
        self.rows = np.concatenate([self.rows[:at], [row], self.rows[at:]])
        self._deadline = np.concatenate([self._deadline[:at], [deadline], self._deadline[at:]])

    def remove(self, row: int) -> None:
        keep = self.rows != row
        self.rows = self.rows[keep]
        self._deadline = self._deadline[keep]

    @property
    def first_deadline(self) -> float:
        """Seconds; of the first row."""
        return float(self._deadline[0])

    def open_first(self, now: float, count: int) -> np.ndarray:
        """int64[at most count]: rows whose deadline has not passed, in order, then those whose
        deadline has."""
        at = int(self._deadline.searchsorted(now))
        still_open = self.rows[at : at + count]
        return np.concatenate([still_open, self.rows[: min(at, count - len(still_open))]])

    def __len__(self) -> int:
        return len(self.rows)
