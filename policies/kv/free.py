"""Which units of a memory are free: numbers on a stack, of which those never taken cost nothing."""

from __future__ import annotations

import numpy as np

_FIRST = 16  # entries that the stack has room for when the first unit comes back


class FreeStack:
    """`capacity` units, numbered from 0; the unit that came back last is taken first.

    At first they lie with 0 on top. Those that were never taken are always the lowest of the stack,
    in that order, so their number says which they are. Only what came back is an entry.

    free  units on the stack
    used  units that were ever taken: 0 .. used - 1
    """

    __slots__ = ("_entries", "capacity", "free", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.used = 0
        self._entries = np.empty(0, np.int64)

    def take(self, n: int) -> np.ndarray:
        """int64[n]: the `n` units on top, the topmost last. There are so many."""
        back = self.free - (self.capacity - self.used)  # entries
        self.free -= n
        if n <= back:
            return self._entries[back - n : back].copy()
        used, self.used = self.used, self.used + n - back
        fresh = np.arange(self.used - 1, used - 1, -1)
        return np.concatenate([fresh, self._entries[:back]]) if back else fresh

    def put(self, units: np.ndarray) -> None:
        """`units` come back, the last one on top."""
        back = self.free - (self.capacity - self.used)
        end = back + len(units)
        if end > len(self._entries):
            room = min(self.used, max(end, 2 * len(self._entries), _FIRST))
            grown = np.empty(room, np.int64)
            grown[:back] = self._entries[:back]
            self._entries = grown
        self._entries[back:end] = units
        self.free += len(units)

    def lift(self, n: int) -> None:
        """Undo a `put` of `n` units: they are on top, and go where they were."""
        self.free -= n

    def units(self) -> np.ndarray:
        """int64[free]: all of them, the topmost last."""
        back = self.free - (self.capacity - self.used)
        fresh = np.arange(self.capacity - 1, self.used - 1, -1)
        return np.concatenate([fresh, self._entries[:back]])
