"""The paged ledger with a host tier behind it."""

import numpy as np

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.offload.connector import Offloading
from twinserve.policies.kv.offload.store import HostStore
from twinserve.policies.kv.paged.ledger import PagedLedger


class TieredLedger(PagedLedger):
    """offload: what this engine has on its tier, once `put_behind` has been called. Changes of
    tiers cannot be tried: a policy that tries is not for this ledger."""

    offload: Offloading
    _left: dict[int, np.ndarray]

    def setup(self) -> None:
        self._left = {}  # names of the text of rows that have ended, until the next plan

    def put_behind(
        self, store: HostStore, blocks_per_chunk: int = 1, prompt_only: bool = False, names: int = 0
    ) -> None:
        """The tier, before the first row; see `Offloading`."""
        if not self.prefix_caching:
            raise LedgerError("a host tier keeps blocks by their names: with prefix caching only")
        self.offload = Offloading(self, store, blocks_per_chunk, prompt_only, names)

    def names(self, row: int, blocks: int) -> np.ndarray:
        """int64[n <= blocks]: names of the first full blocks of the row's known text."""
        entry = self._tables.get(row)
        if entry is None:
            names = self._left.get(row)
            return (self._contents_of(row) if names is None else names)[:blocks]
        if blocks > len(entry.contents):
            self._name_contents(entry, blocks)
        return entry.contents[:blocks]

    def forget(self, row: int) -> None:
        """Names of the row's text will not be asked for any more."""
        self._left.pop(row, None)

    def free(self, row: int) -> None:
        if row in self._tables and self.offload.follows(row):
            self._left[row] = self._tables[row].contents
        super().free(row)

    def admit_load(
        self,
        row: int,
        tokens: int,
        hit_tokens: int,
        keep_free: int,
        reserve_tokens: int,
        beside: int,
    ) -> bool:
        """`admit_remote` for a part of the text. Gives room up to `tokens` if `beside` blocks that
        others need stay free, and if a sequence of `reserve_tokens` would fit."""
        size = self.block_tokens
        found = self.pool.find(self._contents_of(row)[: hit_tokens // size])
        idle = int((self.pool.refs[found] == 0).sum())
        whole = -(-reserve_tokens // size) - len(found) + idle
        if reserve_tokens and whole + keep_free > self.pool.free:
            return False
        return self.admit_remote(row, tokens, hit_tokens, keep_free + beside)

    def mark(self) -> int:
        raise LedgerError("changes cannot be tried with a host tier behind the device")

    def check(self) -> None:
        super().check()
        for problem in self.offload.problems():
            raise LedgerError(problem)
        self.offload.store.check()
