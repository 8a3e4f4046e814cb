"""Prefix blocks as ranges of ids, for pools so large that eight bytes a block would fill the
memory.

A prompt of a generated pool is a document, or none, and text of its own. Both have consecutive ids,
so a row is two ranges, and its ids are written out on demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class PrefixRanges:
    """What `PrefixBlocks` offers, of rows that consist of two ranges of ids each.

    first_shared, shared  int64[rows]: row i begins with the `shared[i]` ids from `first_shared[i]`
    first_own             int64[rows]: its other blocks have the ids from there on
    offsets, block_tokens as of PrefixBlocks
    """

    first_shared: np.ndarray
    shared: np.ndarray
    first_own: np.ndarray
    offsets: np.ndarray
    block_tokens: int

    @property
    def own(self) -> np.ndarray:
        """Return int64[rows]: the blocks behind the shared ones."""
        return np.diff(self.offsets) - self.shared

    @property
    def ids(self) -> np.ndarray:
        """int64[total], made anew at each call: all ids, as of PrefixBlocks."""
        place = np.arange(int(self.offsets[-1])) - np.repeat(self.offsets[:-1], self._counts)
        in_shared = place < np.repeat(self.shared, self._counts)
        shared = np.repeat(self.first_shared, self._counts) + place
        own = np.repeat(self.first_own - self.shared, self._counts) + place
        return np.where(in_shared, shared, own)

    @property
    def _counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    def of(self, row: int) -> np.ndarray:
        first, shared = int(self.first_shared[row]), int(self.shared[row])
        behind = int(self.first_own[row])
        own = int(self.offsets[row + 1] - self.offsets[row]) - shared
        return np.concatenate([np.arange(first, first + shared), np.arange(behind, behind + own)])

    @cached_property
    def distinct(self) -> int:
        starts, counts = self._pieces()
        return int((starts + counts).max(initial=0))

    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """First ids and lengths of all ranges that are not empty."""
        starts = np.concatenate([self.first_shared, self.first_own])
        counts = np.concatenate([self.shared, self.own])
        return starts[counts > 0], counts[counts > 0]

    def take(self, rows: np.ndarray) -> PrefixRanges:
        """Return those of some rows (indices, any order), with dense ids in the old order."""
        counts = self._counts[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        columns = self.first_shared[rows], self.shared[rows], self.first_own[rows]
        return PrefixRanges(*columns, offsets, self.block_tokens)._dense()

    def _dense(self) -> PrefixRanges:
        starts, counts = self._pieces()
        if not len(starts):
            return self
        order = np.argsort(starts, kind="stable")
        starts, reached = starts[order], np.maximum.accumulate((starts + counts)[order])
        fresh = np.concatenate([[True], starts[1:] > reached[:-1]])  # ids between belong to no row
        unused = np.cumsum(np.where(fresh, starts - np.concatenate([[0], reached[:-1]]), 0))

        def renamed(first: np.ndarray) -> np.ndarray:
            at = np.maximum(np.searchsorted(starts, first, side="right") - 1, 0)
            return first - unused[at]

        return PrefixRanges(
            np.where(self.shared > 0, renamed(self.first_shared), 0),
            self.shared,
            np.where(self.own > 0, renamed(self.first_own), 0),
            self.offsets,
            self.block_tokens,
        )

    def joined(self, other: PrefixRanges) -> PrefixRanges:
        """These rows, then those of the other; blocks of one never equal blocks of the other."""
        n = self.distinct
        return PrefixRanges(
            np.concatenate([self.first_shared, other.first_shared + n]),
            np.concatenate([self.shared, other.shared]),
            np.concatenate([self.first_own, other.first_own + n]),
            np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
            self.block_tokens,
        )
