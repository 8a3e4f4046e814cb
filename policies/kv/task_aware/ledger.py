"""Echo's KV cache manager (Sec. 4.2): paged memory that knows which cached blocks will be used
again.

Every offline request in the table, queued or running, counts from its submission to its end on each
block of its prompt (the paper's reference count, rc). So any policy can use this memory without
further input: requests of class best-effort are the offline ones.

`paged-rc` evicts by last use, like `paged`, and only offers the counts: the memory of Echo's
BS+E+S, whose scheduler weighs what an eviction loses. `task-aware` also evicts by them.
"""

import numpy as np

from twinserve.native.chosen import paged
from twinserve.policies.kv.base import KvLedger, LedgerError
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.kv.task_aware.eviction import CountedPool
from twinserve.policies.requests import RequestClass

_NOTHING = np.zeros(0, np.int64)
_OFFLINE = int(RequestClass.BEST_EFFORT)


class CountedLedger(PagedLedger):
    """A paged ledger with reference counts of future use; parameters as for PagedLedger."""

    name = "paged-rc"
    by_priority = False
    pool: CountedPool

    def setup(self) -> None:
        self.pool = CountedPool(self.num_blocks, self.shared_contents, self.by_priority)
        self._counted: dict[int, np.ndarray] = {}  # offline row -> contents that it counts on
        self._seen = 0  # rows of the table that have been looked at
        if type(self) in (CountedLedger, TaskAwareLedger):  # they override nothing of a kernel's
            self._kernel = paged

    # -- questions ---------------------------------------------------------------------------------
    def lost_tokens(self, tokens: int) -> int:
        return self.pool.needed_among_first(-(-tokens // self.block_tokens)) * self.block_tokens

    @property
    def lost_blocks(self) -> int:
        return self.pool.lost

    def gained_blocks(self, row: int, victim: int) -> int:
        """Those that only the victim uses."""
        if not self.held_blocks(victim):
            return 0
        return int((self.pool.refs[self.blocks_of(victim)] == 1).sum())

    # -- changes -----------------------------------------------------------------------------------
    def grow_each(self, rows: np.ndarray, tokens: np.ndarray) -> int:
        """One by one: a text that a row has just filled is not lost with another copy that the next
        row's block held."""
        return KvLedger.grow_each(self, rows, tokens)

    def begin_step(self) -> None:
        super().begin_step()
        table = self.table
        if self._seen == len(table) or not self.prefix_caching:
            return
        offline = self._seen + np.flatnonzero(table.service_class[self._seen :] == _OFFLINE)
        for row in offline.tolist():
            self._count(row, self._contents_of(row))
        self._seen = len(table)

    def free(self, row: int) -> None:
        # before its blocks are released: they find their place in the order once
        self._count(row, _NOTHING)
        super().free(row)

    def _remember_text(self, row: int) -> None:
        """Of a preempted offline request everything that it has computed will be used again: its
        own text, too, whether or not the workload had named it before."""
        super()._remember_text(row)
        if self.prefix_caching and self.table.service_class[row] == _OFFLINE:
            self._count(row, self._contents.get(row, _NOTHING))

    def _give_back(self, row: int) -> None:
        if self.table.service_class[row] != _OFFLINE:
            self.pool.mark_online(self.blocks_of(row))
        super()._give_back(row)

    def _count(self, row: int, contents: np.ndarray) -> None:
        """From now on the row counts on `contents`, which continue those before, or on nothing at
        all."""
        before = self._counted.get(row, _NOTHING)
        if len(contents) > len(before):
            self.pool.count(contents[len(before) :], +1)
        elif len(contents) < len(before):
            self.pool.count(before[len(contents) :], -1)
        self._set_counted(row, contents)
        if self.pool.undo is not None:
            self.pool.undo.append(lambda: self._set_counted(row, before))

    def _set_counted(self, row: int, contents: np.ndarray) -> None:
        if len(contents):
            self._counted[row] = contents
        else:
            self._counted.pop(row, None)

    # -- auditor -----------------------------------------------------------------------------------
    def check(self) -> None:
        super().check()
        recount = np.zeros(len(self.pool.rc), np.int64)
        for contents in self._counted.values():
            recount[contents] += 1
        if not np.array_equal(recount, self.pool.rc):
            raise LedgerError("the reference counts are not those of the offline requests")


class TaskAwareLedger(CountedLedger):
    """Echo's: eviction by priority (rc, 0.5, 0), then by last use."""

    name = "task-aware"
    by_priority = True
    evicts_by_last_use = False
