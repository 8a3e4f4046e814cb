"""KV events: changes of the texts in a ledger's prefix cache.

vLLM publishes BlockStored and BlockRemoved (`vllm/distributed/kv_events.py`), and routers that know
of caches (Dynamo, llm-d) keep an index of each engine's events. Differences from vLLM's events are
in docs/architecture.md.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from twinserve.policies.kv.free import zeros_by_page


class KvListener(Protocol):
    """Hears how the prefix cache of one engine changes.

    `contents` are int64[n], n > 0, ascending, each once: ids of the workload's full KV blocks
    (RequestTable.prefix), for that engine's block size. The arrays may be kept, not changed.
    """

    def stored(self, contents: np.ndarray) -> None:
        """These can be found from now on; they could not before."""

    def removed(self, contents: np.ndarray) -> None:
        """These can be found no more: their last copy is gone."""


class FindablePool(Protocol):
    """undo: None while nothing is tried (see UndoPool)."""

    undo: list[Callable[[], object]] | None

    def holds(self, contents: np.ndarray) -> np.ndarray:
        """bool[n]: which of these contents (int64[n]) some block holds."""

    def findable(self) -> np.ndarray:
        """int64[n]: contents that some block holds."""


class KvEvents:
    """Report to listeners what can be found in `pool`, of the contents below `shared`.

    The pool says which contents it has touched. An event is a difference between the contents now
    and those reported before. So a second copy, or a change undone by a rollback, is no event.
    During a tried change there are no events.
    """

    def __init__(self, pool: FindablePool, shared: int) -> None:
        self._pool = pool
        (self._told,) = zeros_by_page((shared, np.bool_))
        found = pool.findable()
        self._told[found[found < shared]] = True
        self._touched: list[np.ndarray] = []  # since events were told
        self._listeners: list[KvListener] = []

    def subscribe(self, listener: KvListener) -> None:
        """`listener` hears at once what can be found now, and all that changes later."""
        self._listeners.append(listener)
        if self._told.any():
            listener.stored(np.flatnonzero(self._told))

    def touch(self, contents: np.ndarray) -> None:
        """Blocks have come to hold `contents`, or hold them no more."""
        shared = contents[contents < len(self._told)]
        if not len(shared):
            return
        self._touched.append(shared)
        if self._pool.undo is None:
            self.publish()

    def foretell(self, contents: np.ndarray) -> None:
        """Tell now that `contents` (int64[n], each once) are lost. The pool loses them later, at
        the end of a run of steps, and that is no event any more."""
        known = contents[contents < len(self._told)]
        lost = np.sort(known[self._told[known]])
        if not len(lost):
            return
        self._told[lost] = False
        for listener in self._listeners:
            listener.removed(lost)

    def publish(self) -> None:
        """Nothing is tried any more: tell what has changed."""
        if not self._touched:
            return
        contents = np.unique(np.concatenate(self._touched))
        self._touched.clear()
        held, told = self._pool.holds(contents), self._told[contents]
        self._told[contents] = held
        stored, removed = contents[held & ~told], contents[told & ~held]
        for listener in self._listeners:
            if len(removed):
                listener.removed(removed)
            if len(stored):
                listener.stored(stored)
