"""The free queue of vLLM up to 0.22: every freed block goes to its end, with reusable text or not.

Source: vLLM 0.22 `v1/core/block_pool.py`, `BlockPool.free_blocks`. Blocks that were never taken are
at the front, as in later releases.
"""

import numpy as np

from twinserve.policies.kv.paged.pool import BlockPool


class OneQueuePool(BlockPool):
    """A pool whose eviction order has blank blocks, too; `blank` counts those never taken only.

    queued_blank  blocks in the eviction order that hold nothing reusable; part of `cached`
    """

    def __init__(self, num_blocks: int, contents: int = 0) -> None:
        super().__init__(num_blocks, contents)
        self.queued_blank = 0

    def _forget(self, blocks: np.ndarray) -> None:
        findable = self.content[blocks] >= 0
        held = blocks[findable]
        self._count_blank(len(held) - len(blocks))
        if len(held):
            super()._forget(held)

    def _count_blank(self, n: int) -> None:
        """`n` blank blocks more wait in the order. Those that leave it are no evicted prefixes."""
        if not n:
            return
        gone = max(-n, 0)
        self.queued_blank += n
        self.evicted -= gone
        if self.undo is not None:

            def undo() -> None:
                self.queued_blank -= n
                self.evicted += gone

            self.undo.append(undo)

    def evicted_by(self, taken: np.ndarray) -> np.ndarray:
        queued = np.maximum(taken - self.blank, 0)
        cached = self.content[self.evicted_first(queued.item(-1))] >= 0
        return np.concatenate([[0], cached.cumsum()])[queued]

    def lost_with(self, blocks: np.ndarray, first: int = 0) -> np.ndarray:
        contents = super().lost_with(blocks, first)
        return contents[contents >= 0]

    def release(self, blocks: np.ndarray) -> None:
        self.refs[blocks] -= 1
        idle = blocks[self.refs[blocks] == 0]
        if len(idle):
            self._chunks += 1
            self._stamp[idle] = self._chunks
            self._order.append((self._chunks, idle))
            self.cached += len(idle)
        if self.undo is not None:

            def undo() -> None:
                if len(idle):
                    self._order.pop()
                    self._stamp[idle] = 0
                    self.cached -= len(idle)
                self.refs[blocks] += 1

            self.undo.append(undo)
        self._count_blank(int(np.count_nonzero(self.content[idle] < 0)))
