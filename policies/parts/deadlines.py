"""Sets of rows that stay in order without being sorted at each step."""

from bisect import bisect_left, bisect_right

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
    needs no upkeep. Lists: of a crowd thousands wait, and arrays would be copied at each change."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._deadlines: list[float] = []  # seconds
        self._deadline_of: dict[int, float] = {}

    def _place(self, row: int, deadline: float) -> int:
        begin = bisect_left(self._deadlines, deadline)
        return bisect_left(self._rows, row, begin, bisect_right(self._deadlines, deadline, begin))

    def add(self, row: int, deadline: float) -> None:
        at = self._place(row, deadline)
        self._rows.insert(at, row)
        self._deadlines.insert(at, deadline)
        self._deadline_of[row] = deadline

    def remove(self, row: int) -> None:
        """Of a row that is not here nothing is removed."""
        deadline = self._deadline_of.pop(row, None)
        if deadline is not None:
            at = self._place(row, deadline)
            del self._rows[at], self._deadlines[at]

    @property
    def first_deadline(self) -> float:
        """Seconds; of the first row."""
        return self._deadlines[0]

    def first(self, n: int) -> np.ndarray:
        """int64[n or fewer]: the first of them, however many there are behind."""
        return np.array(self._rows[:n], np.int64)

    def open_first(self, now: float, count: int) -> np.ndarray:
        """int64[at most count]: rows whose deadline has not passed, in order, then those whose
        deadline has."""
        at = bisect_left(self._deadlines, now)
        still_open = self._rows[at : at + count]
        return np.array(still_open + self._rows[: min(at, count - len(still_open))], np.int64)

    def __len__(self) -> int:
        return len(self._rows)
