"""Which units of a memory are free: numbers on a stack, of which those never taken cost nothing."""

import contextlib
import mmap
from typing import Any

import numpy as np

_WORTH_MAPPING = 16 * mmap.PAGESIZE  # bytes; a process can have some ten thousand mappings
# Pages that no other process has, where the system tells them apart.
_PRIVATE: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


def zeros_by_page(*columns: tuple[int, type]) -> list[np.ndarray]:
    """An array of zeros for each of these lengths and types, all in one mapping if that is worth
    it."""
    page = mmap.PAGESIZE
    sizes = [length * np.dtype(kind).itemsize for length, kind in columns]
    if sum(sizes) < _WORTH_MAPPING:
        return [np.zeros(length, kind) for length, kind in columns]
    ends = np.cumsum([-(-size // page) * page for size in sizes])  # each on pages of its own
    memory = mmap.mmap(-1, int(ends[-1]), **_PRIVATE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # where one written zero would take two million bytes; a system without such pages refuses
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    starts = [0, *ends[:-1].tolist()]
    return [
        np.frombuffer(memory, kind, length, start)
        for (length, kind), start in zip(columns, starts, strict=True)
    ]


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
        """Undo a `put` of `n` units: they are on top, and go back."""
        self.free -= n

    def units(self) -> np.ndarray:
        """int64[free]: all of them, the topmost last."""
        back = self.free - (self.capacity - self.used)
        fresh = np.arange(self.capacity - 1, self.used - 1, -1)
        return np.concatenate([fresh, self._entries[:back]])
