"""Views of the bidirectional ledger for people, and its full recount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..requests import RequestClass, RequestTable
from .base import LedgerError
from .bidi_state import NOBODY, SlotState

if TYPE_CHECKING:
    from .bidirectional import BidirectionalLedger

RT = int(RequestClass.REAL_TIME)


@dataclass(frozen=True, slots=True)
class PreemptedBlock:
    """An entry of the preemption table: both owners claim slots [first, end) of a block.

    missing_row     the owner whose data of those slots is on the host only
    missing_slots   half-open range of all its slots here that are; at least the claimed ones
    """

    block: int
    real_time_row: int
    best_effort_row: int
    first: int
    end: int
    missing_row: int
    missing_slots: tuple[int, int]


def preempted_blocks(state: SlotState) -> list[PreemptedBlock]:
    n, size = state.num_blocks, state.size
    left, right = state.count[:n], state.count[n:]
    entries = []
    for b in np.flatnonzero(left + right > size).tolist():
        if state.lack[b]:
            missing, slots = b, (int(left[b] - state.lack[b]), int(left[b]))
        else:
            missing, slots = b + n, (int(size - right[b]), int(size - right[b] + state.lack[b + n]))
        rows = int(state.owner[b]), int(state.owner[b + n])
        claimed = int(size - right[b]), int(left[b])
        entries.append(PreemptedBlock(b, *rows, *claimed, int(state.owner[missing]), slots))
    return entries


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
            row = int(state.owner[cell])
            if row == NOBODY:
                continue
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
        self.host_room = ledger.host_blocks * ledger.block_tokens
        self.wrong: list[str] = []

    def need(self, holds: bool, message: str) -> None:
        if not holds:
            self.wrong.append(message)

    def problems(self) -> list[str]:
        state = self.state
        cells = 2 * state.num_blocks
        self.owner = np.full(cells, NOBODY)
        self.index, self.start = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
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
        side = int(self.table.klass[row])
        if len(cells) == 0 or len(np.unique(cells)) != len(cells):
            self.wrong.append(f"row {row} has a block table without blocks, or lists one twice")
            return
        self.need(
            bool((cells // state.num_blocks == side).all()), f"row {row} is on the wrong side"
        )
        self.need(
            bool((self.owner[cells] == NOBODY).all()), f"row {row} holds cells of another row"
        )
        counts, lack = state.count[cells], state.lack[cells]
        self.owner[cells] = row
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
        idle = state.owner == NOBODY
        self.need(
            not state.count[idle].any() and not state.lack[idle].any(), "an idle cell holds slots"
        )
        self.need(bool((self.data <= 1).all()), "a slot holds data of two rows")

    def _blocks(self) -> None:
        state, n = self.state, self.state.num_blocks
        kind = (self.owner[:n] != NOBODY) + 2 * (self.owner[n:] != NOBODY)
        self.need(np.array_equal(kind, state.kind), "the kind of a block is off")
        empty = np.sort(state._empty[: state.num_empty])
        self.need(np.array_equal(empty, np.flatnonzero(kind == 0)), "the empty blocks are off")
        self.need(state.rt_blocks == np.count_nonzero(kind & 1), "real-time blocks are miscounted")
        lack, overlap = state.lack, state.count[:n] + state.count[n:] - state.size
        self.need(not ((lack[:n] > 0) & (lack[n:] > 0)).any(), "both owners of a block miss slots")
        self.need(
            bool((np.maximum(lack[:n], lack[n:]) >= overlap).all()),
            "overlapping claims, none missing",
        )
        listed = {entry.block: entry for entry in preempted_blocks(state)}
        self.need(
            sorted(listed) == np.flatnonzero(overlap > 0).tolist(), "the preemption table is off"
        )
        for block, entry in listed.items():
            loser = block if entry.missing_row == self.owner[block] else block + n
            first, end = entry.missing_slots
            covers = first <= entry.first and end >= entry.end and end - first == lack[loser]
            self.need(covers, f"the preemption table is wrong about block {block}")

    def _host(self) -> None:
        state = self.state
        copies = {row: int(np.count_nonzero(mask)) for row, mask in state.host.items()}
        self.need(sum(copies.values()) == state.host_used, "host copies are miscounted")
        self.need(
            state.host_used <= self.host_room, f"{state.host_used} copies in {self.host_room}"
        )
        self.need(all(copies.values()), "a row keeps an empty list of host copies")
        for row in np.flatnonzero(state.tokens):
            row = int(row)
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
