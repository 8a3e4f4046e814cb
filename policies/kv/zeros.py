"""Zeros that take memory only where they are written to, page by page.

`np.zeros` promises as much for large arrays only, and the C library decides what is large: it
raises its threshold with every array that is freed, and writes zeros into what it takes from its
heap. So large arrays are mapped here.
"""

from __future__ import annotations

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
