"""Columns that a policy keeps of its own, indexed by row of the request table."""

from __future__ import annotations

import numpy as np


def room_for(column: np.ndarray, row: int) -> np.ndarray:
    """`column`, or a longer one that begins with it and has a place for `row`; new places hold
    0."""
    if row < len(column):
        return column
    size = max(row + 1, 2 * len(column))
    return np.concatenate([column, np.zeros(size - len(column), column.dtype)])
