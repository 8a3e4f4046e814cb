"""Waiting queues whose head is found in logarithmic time, however many requests wait (Justitia,
Sec. IV-C)."""

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

# entries of what has left that a heap may hold beyond as many as it has others: they are then taken
# out at once, so that memory goes with what waits and an operation still takes logarithmic time
SPARE = 64


class RankedQueue:
    """Rows by a rank that does not change while they wait: the smallest first, ties by row."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple, int]] = []
        self._present: set[int] = set()  # only asked, never walked through

    def add(self, row: int, rank: tuple) -> None:
        self._present.add(row)
        heapq.heappush(self._heap, (rank, row))
        if len(self._heap) > 2 * len(self._present) + SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in self._present]
            heapq.heapify(self._heap)

    def peek(self) -> int:
        while self._heap[0][1] not in self._present:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove(self, row: int) -> None:
        """Nothing if it is not here. It leaves the heap when it gets to the top."""
        self._present.discard(row)

    def __len__(self) -> int:
        return len(self._present)


Owner = TypeVar("Owner", bound=Hashable)


class OwnersQueue(Generic[Owner]):
    """Rows by owner (application, user): first the owner with the smallest value, then its rows in
    order of arrival.

    value(owner)  may change at any time. If it has grown the heap finds out by itself, since its
                  entries are then lower bounds; if it has shrunk, `shrunk(owner)` must be
                  called. Ties: the owner that was first seen.
    """

    def __init__(self, value: Callable[[Owner], float]) -> None:
        self._value = value
        self._rows: dict[Owner, deque[int]] = {}  # owners with rows that wait
        # (value at some time, number of the owner, owner)
        self._heap: list[tuple[float, int, Owner]] = []
        self._numbers: dict[Owner, int] = {}
        self._seen = 0  # owners so far
        self._owner_of: dict[int, Owner] = {}

    def add(self, row: int, owner: Owner) -> None:
        if owner not in self._numbers:
            self._numbers[owner], self._seen = self._seen, self._seen + 1
        self._owner_of[row] = owner
        rows = self._rows.get(owner)
        if rows is None:
            rows = self._rows[owner] = deque()
            self._push(owner)
        rows.append(row)

    def place_of(self, owner: Owner) -> int:
        """Of an owner that was seen: after how many others, which ties are settled by."""
        return self._numbers[owner]

    def forget(self, owner: Owner) -> None:
        """An owner without rows that will have none any more."""
        self._numbers.pop(owner, None)

    def shrunk(self, owner: Owner) -> None:
        """The owner's value has become smaller."""
        if owner in self._rows:
            self._push(owner)

    def _push(self, owner: Owner) -> None:
        heapq.heappush(self._heap, (self._value(owner), self._numbers[owner], owner))
        if len(self._heap) > 2 * len(self._rows) + SPARE:
            self._heap = [(self._value(one), self._numbers[one], one) for one in self._rows]
            heapq.heapify(self._heap)

    def first(self) -> Owner:
        """The owner with the smallest value; there must be one."""
        heap = self._heap
        while True:
            value, number, owner = heap[0]
            if owner not in self._rows:
                heapq.heappop(heap)
            elif (now := self._value(owner)) > value:
                heapq.heapreplace(heap, (now, number, owner))
            else:
                return owner

    def second_value(self) -> float:
        """No owner but the first has a smaller value; call after `first`. A lower bound, infinite
        if there is none."""
        return min((entry[0] for entry in self._heap[1:3]), default=float("inf"))

    def peek(self) -> int:
        return self._rows[self.first()][0]

    def remove(self, row: int) -> None:
        """Nothing if it is not here."""
        owner = self._owner_of.pop(row, None)
        if owner is None:
            return
        rows = self._rows[owner]
        rows.remove(row)  # the head, unless a client withdrew it
        if not rows:
            del self._rows[owner]

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._rows

    def __len__(self) -> int:
        return len(self._owner_of)
