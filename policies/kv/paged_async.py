"""Paged ledgers under asynchronous scheduling: a block can be found only once its tokens are known.

Source: vLLM `v1/core/kv_cache_manager.py` (`allocate_slots` caches up to `request.num_tokens`) and
`v1/core/sched/async_scheduler.py` (`_update_request_with_output` caches when a token has come).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .base import KvLedger
from .paged import PagedLedger


class KnownTextOnly:
    """Put before a paged ledger's class. A plan may take memory for a token after one that is still being computed. A
    block that such a token would fill has no name yet, so only known text is published by `admit` and `grow`; when the
    engine has booked an outcome it calls `grow_all` once more, with what the rows have computed. For asynchronous
    engines only, which do that."""

    def _known_blocks(self, rows):
        """Full blocks of known text; an int for a row, int64[n] for an array of rows."""
        table = self.table
        return (table.known_tokens(rows) - table.in_flight[rows]) // self.block_tokens

    def _publish(self, row: int, full: int) -> None:
        super()._publish(row, min(full, int(self._known_blocks(row))))

    def _publish_each(self, rows: np.ndarray, full: np.ndarray) -> None:
        full = np.minimum(full, self._known_blocks(rows))
        filled = full > self._published[rows]
        if np.count_nonzero(filled):
            super()._publish_each(rows[filled], full[filled])


class AsyncPagedLedger(KnownTextOnly, PagedLedger):
    """PagedLedger for asynchronous engines."""


@cache
def for_asynchronous(kind: type[KvLedger]) -> type[KvLedger]:
    """The class of ledgers of this `kind` for asynchronous engines: the same, where it is not paged."""
    if kind is PagedLedger:
        return AsyncPagedLedger
    if issubclass(kind, PagedLedger) and not issubclass(kind, KnownTextOnly):
        return type(f"Async{kind.__name__}", (KnownTextOnly, kind), {})
    return kind
