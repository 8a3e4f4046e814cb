"""Sets of rows that stay in order without being sorted at each step."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


class RowSet:
    """Rows in order of submission; `rows` is an int64 array, rebuilt only after a change."""

    def __init__(self) -> None:
        self._sorted: list[int] = []
        self._rows: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        if self._rows is None:
            self._rows = np.array(self._sorted, np.int64)
        return self._rows

    def add(self, row: int) -> None:
        insort(self._sorted, row)
        self._rows = None

    def discard(self, row: int) -> None:
        at = bisect_left(self._sorted, row)
        if at < len(self._sorted) and self._sorted[at] == row:
            del self._sorted[at]
            self._rows = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, row: int) -> bool:
        at = bisect_left(self._sorted, row)
        return at < len(self._sorted) and self._sorted[at] == row


class DeadlineQueue:
    """Rows in order of (deadline, row). A waiting request's deadline does not move, so the order needs no upkeep."""

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

    def __len__(self) -> int:
        return len(self.rows)
