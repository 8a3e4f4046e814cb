"""Names for the texts of KV blocks: vLLM's block hashes as the ledger's dense content ids, so that
both find the same prefixes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from twinserve.policies.kv.base import KvLedger

# names kept beyond what the pool can hold, before those without a block are dropped
_SPARE = 65_536


class TextNames:
    """For a ledger with prefix caching; for others every method does nothing.

    vLLM hashes a block when its last token is known, also of answers, so a later prompt that quotes
    an answer finds it. The ledger gives answers names of its own; here they get the hash's name
    before a plan can fill the block.
    """

    def __init__(self, ledger: KvLedger) -> None:
        self._ledger = ledger
        self.named = ledger.prefix_caching  # whether names are asked for
        self._id_of: dict[Hashable, int] = {}
        self._named: dict[int, int] = {}  # row -> blocks of it that have their name
        self._most = 4 * ledger.num_blocks + _SPARE

    def contents(self, hashes: Sequence[Hashable]) -> np.ndarray | None:
        """int64[n]: content ids of these blocks; None without prefix caching."""
        if not self.named:
            return None
        ids, known = np.empty(len(hashes), np.int64), self._id_of
        for i, text in enumerate(hashes):
            name = known.get(text)
            if name is None:
                name = known[text] = self._ledger.pool.new_contents(1)
            ids[i] = name
        return ids

    def begin(self, row: int, blocks: int) -> None:
        """A row was submitted with the names of its first `blocks` blocks."""
        if self.named:
            self._named[row] = blocks
            if len(self._id_of) > self._most:
                self._drop_unused()

    def extend(self, row: int, hashes: Sequence[Hashable]) -> None:
        """The text of `row` is known up to these blocks."""
        named = self._named.get(row, 0) if self.named else len(hashes)
        if len(hashes) <= named:
            return
        fresh = self.contents(hashes[named:])
        entry = self._ledger._tables.get(row)
        if entry is None:  # dropped: it may look for these blocks when it comes again
            self._ledger._contents[row] = np.concatenate(
                [self._ledger._contents_of(row)[:named], fresh]
            )
        else:
            entry.contents = np.concatenate([entry.contents[:named], fresh])
        self._named[row] = len(hashes)

    def end(self, row: int) -> None:
        """The row ended: the names of its blocks are not asked for any more."""
        self._named.pop(row, None)
        self._ledger.table.prefix[row] = None

    def disown(self, hashes: Sequence[Hashable]) -> None:
        """The ledger may have blocks of these texts that were never computed: give the texts other
        names."""
        for text in hashes:
            self._id_of.pop(text, None)

    def forget_all(self) -> None:
        """The engine emptied its prefix cache: what the ledger still has is never found again."""
        self._id_of.clear()

    def _drop_unused(self) -> None:
        """Forget texts that no block holds and no unfinished request consists of."""
        used = set()
        for row in self._named:
            used.update(self._ledger._contents_of(row).tolist())
            if row in self._ledger._tables:
                used.update(self._ledger._tables[row].contents.tolist())
        held = self._ledger.pool.content
        used.update(held[held >= 0].tolist())
        self._id_of = {text: name for text, name in self._id_of.items() if name in used}
        self._most = max(self._most, 2 * len(self._id_of))
