"""Views of the bidirectional ledger for people, and its full recount."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.bidirectional.state import SlotState
from twinserve.policies.requests import RequestClass, RequestTable

if TYPE_CHECKING:
    from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger

RT = int(RequestClass.REAL_TIME)


def render(
    state: SlotState, table: RequestTable, blocks=None, names: dict[int, str] | None = None
) -> str:
    """One line a block: what each slot holds, then in brackets what its owners have on the host
    only.

    A token is its row's name (the request id unless `names` says otherwise) and its number, from 1
    as in the paper's Fig. 8; best-effort names are drawn in lower case, real-time ones in upper
    case; "." is an empty slot.
    """
    lines = []
    for b in range(state.num_blocks) if blocks is None else blocks:
        slots, lost = ["."] * state.size, []
        for cell in (b, b + state.num_blocks):
            if not state.count[cell]:
                continue
            row = int(state.owner[cell])
            name = (names or {}).get(row, table.ids[row])
            name = name.upper() if cell == b else name.lower()
            here = int(state.count[cell] - state.lack[cell])
            for i in range(int(state.count[cell])):
                token = f"{name}{int(state.start[cell]) + i + 1}"
                if i < here:
                    slots[i if cell == b else state.size - 1 - i] = token
                else:
                    lost.append(token)
        tail = f" ({' '.join(lost)})" if lost else ""
        lines.append(f"{b} | {' '.join(slots)} |{tail}")
    return "\n".join(lines)


def audit(ledger: BidirectionalLedger) -> None:
    """Raise LedgerError with everything that does not add up."""
    wrong = _Audit(ledger).problems()
    if wrong:
        raise LedgerError("; ".join(wrong))


class _Audit:
    """Rebuilds each per-cell and per-row number from the rows' block tables alone and compares."""

    def __init__(self, ledger: BidirectionalLedger) -> None:
        self.state: SlotState = ledger._state
        self.table = ledger.table
        self.wrong: list[str] = []

    def need(self, holds: bool, message: str) -> None:
        if not holds:
            self.wrong.append(message)

    def problems(self) -> list[str]:
        state = self.state
        cells = 2 * state.num_blocks
        self.held = np.zeros(cells, bool)
        self.owner, self.index, self.start = np.zeros((3, cells), np.int64)
        self.data = np.zeros((state.num_blocks, state.size), np.int64)  # resident tokens per slot
        for row in sorted(state.tables):
            self._row(row)
        self._cells()
        self._blocks()
        self._host()
        return self.wrong

    def _row(self, row: int) -> None:
        state, size = self.state, self.state.size
        cells = state.cells_of(row)
        side = int(self.table.service_class[row])
        if len(cells) == 0 or len(np.unique(cells)) != len(cells):
            self.wrong.append(f"row {row} has a block table without blocks, or lists one twice")
            return
        self.need(
            bool((cells // state.num_blocks == side).all()), f"row {row} is on the wrong side"
        )
        self.need(not self.held[cells].any(), f"row {row} holds cells of another row")
        counts, lack = state.count[cells], state.lack[cells]
        self.owner[cells], self.held[cells] = row, True
        self.index[cells] = np.arange(len(cells))
        self.start[cells] = np.cumsum(counts) - counts
        self.need(
            bool(((counts > 0) & (counts <= size)).all()), f"row {row} has a block without slots"
        )
        self.need(bool(((lack >= 0) & (lack <= counts)).all()), f"row {row} lacks more than it has")
        if side == RT:
            self.need(bool((counts[:-1] == size).all()), f"real-time row {row} left slots free")
        tokens = int(counts.sum())
        self.need(
            tokens == state.tokens[row], f"row {row} has {tokens} slots, not {state.tokens[row]}"
        )
        computed = int(self.table.computed_tokens[row])
        self.need(tokens >= computed, f"row {row} computed {computed} tokens in {tokens} slots")
        self.need(state.last[row] == cells[-1], f"row {row}: the last block is noted wrongly")
        self.need(
            state.missing_tokens[row] == lack.sum(), f"row {row}: missing tokens are miscounted"
        )
        self.need(
            state.missing_blocks[row] == np.count_nonzero(lack),
            f"row {row}: missing blocks are miscounted",
        )
        if state.is_pinned(row):
            self.need(not lack.any(), f"row {row} runs in this step with slots missing")
        slot = np.arange(size)
        from_end = slot if side == RT else size - 1 - slot
        self.data[cells % state.num_blocks] += from_end < (counts - lack)[:, None]
        mask = np.zeros(tokens, bool)
        known = state.host.get(row, mask)[:tokens]
        mask[: len(known)] = known
        self.need(bool(mask[state.missing(row)].all()), f"row {row}: a token is nowhere")

    def _cells(self) -> None:
        state = self.state
        for name in ("owner", "index", "start"):
            same = np.array_equal(getattr(self, name), getattr(state, name))
            self.need(same, f"the {name} of a cell does not match the block tables")
        idle = ~self.held
        self.need(
            not state.count[idle].any() and not state.lack[idle].any(), "an idle cell holds slots"
        )
        self.need(bool((self.data <= 1).all()), "a slot holds data of two rows")

    def _blocks(self) -> None:
        state, n = self.state, self.state.num_blocks
        kind = self.held[:n] + 2 * self.held[n:]
        self.need(np.array_equal(kind, state.kind), "the kind of a block is off")
        empty = np.sort(state.empty.units())
        same = len(empty) == state.num_empty and np.array_equal(empty, np.flatnonzero(kind == 0))
        self.need(same, "the empty blocks are off")
        self.need(state.rt_blocks == np.count_nonzero(kind & 1), "real-time blocks are miscounted")
        lack, overlap = state.lack, state.count[:n] + state.count[n:] - state.size
        self.need(not ((lack[:n] > 0) & (lack[n:] > 0)).any(), "both owners of a block miss slots")
        self.need(
            bool((np.maximum(lack[:n], lack[n:]) >= overlap).all()),
            "overlapping claims, none missing",
        )

    def _host(self) -> None:
        state = self.state
        copies = {row: int(np.count_nonzero(mask)) for row, mask in state.host.items()}
        self.wrong += state.on_host.problems(copies)
        self.need(all(copies.values()), "a row keeps an empty list of host copies")
        for row in np.flatnonzero(state.tokens).tolist():
            if state.held[row] == 0:
                tokens = int(state.tokens[row])
                self.need(copies.get(row, 0) == tokens, f"swapped row {row} is not all on the host")
                self.need(state.missing_tokens[row] == tokens, f"swapped row {row}: missing tokens")
        gone = [row for row in copies if not state.tokens[row]]
        self.need(not gone, f"rows {gone} are gone but have host copies")
        self.need(
            bool((state.held[sorted(state.tables)] > 0).all()), "a block table without blocks"
        )
        self.need(np.count_nonzero(state.held) == len(state.tables), "a row lost its block table")
