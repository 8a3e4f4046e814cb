"""The ledger of ConServe: paged memory whose full blocks can be copied to the host while their
request runs.

Source: Qiao et al., "ConServe: Harvesting GPUs for Low-Latency and High-Throughput Large Language
Model Serving" (2024), incremental checkpointing. KV of a full block never changes, so its copy
stays good until the request ends. A copied block need not be moved when the request loses its
place.
"""

from dataclasses import replace

import numpy as np

from twinserve.policies.kv.base import KvUsage, LedgerError
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.plan import DEVICE, HOST, KvMove
from twinserve.policies.requests import FIRST_ROWS


class CheckpointedLedger(PagedLedger):
    """A paged ledger with copies of resident blocks on the host; parameters as for PagedLedger.

    The copies of a row are of its first blocks. They take room on the host; if a row that is
    swapped out needs it, those of other rows go, the first to arrive first (it is the last to be
    preempted).
    """

    name = "checkpointed"

    def setup(self) -> None:
        # row on the device -> its first blocks that have a copy
        self._copied = np.zeros(FIRST_ROWS, np.int64)
        self._copies = 0  # of all rows, blocks

    # -- questions ---------------------------------------------------------------------------------
    @property
    def free_host_blocks(self) -> int:
        """Room for further copies."""
        return self.host.free

    def pending_blocks(self, rows: np.ndarray) -> np.ndarray:
        """int64[n]: full blocks of `rows`, on the device, that have no copy on the host."""
        return self.table.computed_tokens[rows] // self.block_tokens - self._copied[rows]

    def usage(self) -> KvUsage:
        usage = super().usage()
        copied = self._copies * self.block_tokens
        return replace(usage, host_tokens=usage.host_tokens + copied)

    # -- changes -----------------------------------------------------------------------------------
    def checkpoint(self, row: int, blocks: int) -> int:
        """Copy at most `blocks` further full blocks of the row to the host, during this step, as
        far as there is room. Returns how many."""
        first = int(self._copied[row])
        blocks = min(
            blocks,
            int(self.table.computed_tokens[row]) // self.block_tokens - first,
            self.free_host_blocks,
        )
        if blocks <= 0:
            return 0
        copied = self.blocks_of(row)[first : first + blocks].copy()
        self._moves.append(KvMove(row, DEVICE, HOST, blocks * self.block_tokens, blocks=copied))
        self._keep_copies(row, first + blocks)
        return blocks

    def swap_out(self, row: int) -> bool:
        """As the base says; only what has no copy is moved."""
        tokens, copied = int(self.table.computed_tokens[row]), int(self._copied[row])
        blocks = -(-tokens // self.block_tokens)
        if blocks > self.host.free + self._copies:
            return False
        self._make_host_room(row, blocks - copied)
        left = tokens - copied * self.block_tokens
        if left > 0:
            rest = self.blocks_of(row)[copied:blocks].copy()
            self._moves.append(KvMove(row, DEVICE, HOST, left, blocks=rest))
        self._remember_text(row)
        self._give_back(row)
        self._keep_copies(row, 0)  # from now on they count as the swapped row's
        self._put_on_host(row, tokens, blocks)
        return True

    def swap_in(self, row: int, keep_free: int = 0) -> bool:
        """As the base says; the copies of its full blocks stay."""
        tokens = self._swapped[row]
        if not super().swap_in(row, keep_free):
            return False
        self._keep_copies(row, tokens // self.block_tokens)
        return True

    def _make_host_room(self, row: int, blocks: int) -> None:
        """Forget copies of other rows until `blocks` blocks of host memory are free."""
        if self.free_host_blocks >= blocks:
            return
        for other in np.flatnonzero(self._copied).tolist():
            if other != row:
                lacking = blocks - self.free_host_blocks
                self._keep_copies(other, max(0, int(self._copied[other]) - lacking))
            if self.free_host_blocks >= blocks:
                return

    def _keep_copies(self, row: int, blocks: int) -> None:
        before = int(self._copied[row])
        if blocks == before:
            return
        if blocks > before:
            self.host.reserve(row, blocks - before)
        else:
            self.host.release(row, before - blocks)
        self._count_copies(row, blocks)
        self._undo(lambda: self._count_copies(row, before))

    def _count_copies(self, row: int, blocks: int) -> None:
        self._copies += blocks - int(self._copied[row])
        self._copied[row] = blocks

    def _leave(self, row: int) -> None:
        if row < len(self._copied):  # else it was never admitted
            self._keep_copies(row, 0)
        super()._leave(row)

    def _make_room_for_row(self, row: int) -> None:
        super()._make_room_for_row(row)
        more = len(self._held) - len(self._copied)
        if more > 0:
            self._copied = np.concatenate([self._copied, np.zeros(more, np.int64)])

    # -- auditor -----------------------------------------------------------------------------------
    def check(self) -> None:
        super().check()
        wrong = []
        if int(self._copied.sum()) != self._copies:
            wrong.append("the count of copies is off")
        for row in np.flatnonzero(self._copied).tolist():
            if row not in self._tables:
                wrong.append(f"row {row} has copies and no blocks")
            elif self._copied[row] * self.block_tokens > self.table.computed_tokens[row]:
                wrong.append(f"row {row} has copies of blocks that are not computed")
        if wrong:
            raise LedgerError("; ".join(wrong))

    def _on_host(self) -> dict[int, int]:
        copied = {row: int(self._copied[row]) for row in np.flatnonzero(self._copied).tolist()}
        return super()._on_host() | copied
