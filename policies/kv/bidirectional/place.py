"""Where tokens go in the bidirectional ledger: FindBlock, FindPreemptBlock, restoring, relocating.

A method that returns False may have changed the state half-way: its caller runs it inside a try and
rolls back.
"""

from collections.abc import Mapping

import numpy as np

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.bidirectional.moves import StepMoves
from twinserve.policies.kv.bidirectional.state import SlotState, filled, spans
from twinserve.policies.requests import RequestClass, RequestTable


class Overwriting:
    """An owner of a block writes slots that its peer claims too. The peer's data survive on the
    host (lazy checkpoint). Done for many blocks at once."""

    def __init__(self, state: SlotState, moves: StepMoves) -> None:
        self.state = state
        self.moves = moves

    def overwrite(self, cells: np.ndarray) -> bool:
        """The owners of these cells write all their slots: what peers had there survives on the
        host only.

        Copies out just the slots that have no copy yet. False, with the state changed half-way, if
        the host has no room for them.
        """
        state = self.state
        theirs = state.peer[cells]
        overlap = state.count[cells] + state.count[theirs] - state.size
        more = overlap > state.lack[theirs]
        hit = np.count_nonzero(more)
        if not hit:
            return True
        if hit < len(cells):
            theirs, overlap = theirs[more], overlap[more]
        rows = state.owner[theirs]
        if hit > 1:  # the parts of a row one behind the other
            order = rows.argsort(kind="stable")
            theirs, overlap, rows = theirs[order], overlap[order], rows[order]
        if np.count_nonzero(state.is_pinned(rows)):
            raise LedgerError("slots of a row that runs in this step were about to be overwritten")
        lack = state.lack[theirs]
        length = overlap - lack
        state.put("lack", theirs, overlap)
        first = np.append(True, rows[1:] != rows[:-1]).nonzero()[0]
        owners = rows[first]
        lost = np.add.reduceat(length, first)
        state.put("missing_tokens", owners, state.missing_tokens[owners] + lost)
        newly = np.add.reduceat(lack == 0, first, dtype=np.int64)
        state.put("missing_blocks", owners, state.missing_blocks[owners] + newly)
        return self._copy_out(owners, lost, theirs, state.count[theirs] - overlap, length)

    def _copy_out(self, owners, lost, cells, offset, length) -> bool:
        """To the host what has no copy there: of each cell the `length` tokens that begin `offset`
        slots from its end of the block; the cells of each of the `owners` follow each other, and
        hold its `lost` tokens."""
        state = self.state
        if len(length) == lost.sum():  # one token each, as in most steps
            tokens = state.start[cells] + offset
        else:
            offset = spans(offset, length)
            cells = cells.repeat(length)
            tokens = state.start[cells] + offset
        ends = lost.cumsum().tolist()
        fresh = np.ones(len(tokens), bool)
        begin, owned = 0, owners.tolist()
        for row, end in zip(owned, ends, strict=True):
            if row in state.host:
                fresh[begin:end] = ~state.copied(row, tokens[begin:end])
            begin = end
        copies = int(np.count_nonzero(fresh))
        if copies > state.on_host.free:
            of_each = np.add.reduceat(fresh, [0, *ends[:-1]], dtype=np.int64)
            if not self.host_has_room(dict(zip(owned, of_each.tolist(), strict=True))):
                return False
        if not copies:
            return True
        blocks = state.block[cells]
        slots = np.where(state.real_time[cells], offset, state.size - 1 - offset)
        begin = 0
        for row, end in zip(owned, ends, strict=True):
            part: slice | np.ndarray = slice(begin, end)
            if copies < len(fresh):
                part = fresh[part].nonzero()[0] + begin
            piece = tokens[part], blocks[part], slots[part]
            if len(piece[0]):
                state.add_copies(row, piece[0])
                self.moves.to_host_from(row, *piece)
            begin = end
        return True

    def host_has_room(self, fresh: Mapping[int, int]) -> bool:
        """Make room for copies of so many tokens of each row, just lost by the device. If needed,
        copies of resident slots are given up, lowest row first.

        Rows of this step keep theirs: a copy may just be on its way to the device.
        """
        state, tokens = self.state, sum(fresh.values())
        if tokens <= state.on_host.free:
            return True
        # Copies of what the device has lost stay. Rows without blocks, thousands in a crowd, need
        # all of theirs. Were these too many, all others would go for nothing.
        rows = sorted(state.tables.keys() & state.host.keys())
        spare = [
            state.on_host.held_by(row) - lost + fresh.get(row, 0)
            for row, lost in zip(rows, state.missing_tokens[rows].tolist(), strict=True)
        ]
        if tokens > state.on_host.free + sum(spare):
            return False
        for row, copies in zip(rows, spare, strict=True):
            if copies and not state.is_pinned(row):
                state.drop_copies(row, keep_missing=True)
                if tokens <= state.on_host.free:
                    return True
        return False


RT = int(RequestClass.REAL_TIME)
_RT_ONLY, _BE_ONLY = 1, 2  # SlotState.kind


class Placement(Overwriting):
    """The rules, over a SlotState."""

    def __init__(self, state: SlotState, moves: StepMoves, table: RequestTable) -> None:
        super().__init__(state, moves)
        self.table = table
        self._places, self._counted = np.zeros(0, np.int64), -1  # of which version of the state

    # -- FindBlock and FindPreemptBlock ----------------------------------------------------------
    def preemptable(self) -> np.ndarray:
        """Best-effort cells of the blocks that hold best-effort slots only, of rows not in this
        step.
        """
        state = self.state
        cells = np.flatnonzero(state.used_kinds == _BE_ONLY) + state.num_blocks
        return cells[~state.is_pinned(state.owner[cells])]

    def sharable(self) -> np.ndarray:
        """Real-time cells of the blocks that hold real-time slots only."""
        return np.flatnonzero(self.state.used_kinds == _RT_ONLY)

    def emptiest(self, cells: np.ndarray, n: int) -> np.ndarray:
        """The first n of these cells: most empty slots first, ties by owner, then by place in its
        table.
        """
        state = self.state
        key = (state.count[cells] << 52) | (state.owner[cells] << 24) | state.index[cells]
        if n == 1 and len(cells):
            return cells[[np.argmin(key)]]
        if n < len(cells):
            few = np.argpartition(key, n - 1)[:n]
            cells, key = cells[few], key[few]
        return cells[np.argsort(key)]

    def could_fit(self, row: int, tokens: int, keep_free: int) -> bool:
        """So many tokens of a new row would find slots now, host room for checkpoints aside."""
        state = self.state
        empty = state.num_empty - keep_free
        return tokens <= empty * self.state.size or tokens <= self.room(row, keep_free)

    def room(self, row: int, keep_free: int = 0) -> int:
        """Tokens of a new row that would find slots now, host room for checkpoints aside."""
        state = self.state
        room = (state.num_empty - keep_free) * state.size
        if self.table.service_class[row] == RT:
            return room + len(self.preemptable()) * state.size
        cells = self.sharable()
        free = np.where(
            state.is_pinned(state.owner[cells]), state.size - state.count[cells], state.size
        )
        return room + int(free.sum())

    def grow(self, row: int, tokens: int) -> bool:
        return self.expand(row, tokens - int(self.state.tokens[row]))

    def expand(self, row: int, need: int, keep_free: int = 0) -> bool:
        """Places for the row's next `need` tokens; the row is pinned and has nothing missing."""
        real_time = self.table.service_class[row] == RT
        if need > 0 and self.state.held[row]:
            taken = self._fill_last_rt(row, need) if real_time else self._fill_last_be(row, need)
            if taken < 0:
                return False
            need -= taken
        if need <= 0:
            return True
        return (
            self._expand_rt(row, need, keep_free)
            if real_time
            else self._expand_be(row, need, keep_free)
        )

    def _fill_last_rt(self, row: int, need: int) -> int:
        """Tokens put into the last block, which has to become full before the next; negative if it
        cannot.
        """
        state = self.state
        cell = int(state.last[row])
        take = min(need, state.size - int(state.count[cell]))
        if take == 0:
            return 0
        state.widen(row, take)
        peer = int(state.owner[cell - state.num_blocks])
        if peer >= 0 and state.count[cell] + state.count[cell - state.num_blocks] > state.size:
            done = (
                self._relocate(cell + state.num_blocks)
                if state.is_pinned(peer)
                else self.overwrite(np.array([cell]))
            )
            if not done:
                return -1
        return take

    def _fill_last_be(self, row: int, need: int) -> int:
        take = min(need, self.state.room_in_last(row))
        if take:
            self.state.widen(row, take)
        return take

    def _expand_rt(self, row: int, need: int, keep_free: int) -> bool:
        state = self.state
        blocks = -(-need // state.size)
        empty = min(blocks, state.num_empty - keep_free)
        need -= state.claim_empty(row, int(self.table.service_class[row]), need, empty)
        if need == 0:
            return True
        blocks -= empty
        victims = self.emptiest(self.preemptable(), blocks)
        if len(victims) < blocks:
            return False
        cells = victims - state.num_blocks
        state.claim(row, cells, filled(need, blocks, state.size))
        return self.overwrite(cells)

    def _expand_be(self, row: int, need: int, keep_free: int) -> bool:
        state = self.state
        empty = min(-(-need // state.size), state.num_empty - keep_free)
        need -= state.claim_empty(row, int(self.table.service_class[row]), need, empty)
        if need:
            need -= self._share_free_slots(row, need)
        if need and state.held[row]:
            taken = self._fill_last_over_rt(row, need)
            if taken < 0:
                return False
            need -= taken
        if need == 0:
            return True
        cells = self.sharable()
        blocks = -(-need // state.size)
        victims = self.emptiest(cells[~state.is_pinned(state.owner[cells])], blocks)
        if len(victims) < blocks:
            return False
        cells = victims + state.num_blocks
        state.claim(row, cells, filled(need, blocks, state.size))
        return self.overwrite(cells)

    def _share_free_slots(self, row: int, need: int) -> int:
        """Slots that real-time rows leave free in blocks without a best-effort owner; tokens
        placed.
        """
        state = self.state
        cells = self.sharable()
        cells = cells[state.count[cells] < state.size]
        if not len(cells):
            return 0
        cells = self.emptiest(cells, len(cells))
        reach = np.cumsum(state.size - state.count[cells])
        cells = cells[: int(np.searchsorted(reach, need)) + 1]
        counts = state.size - state.count[cells]
        placed = min(need, int(reach[len(cells) - 1]))
        counts[-1] -= int(reach[len(cells) - 1]) - placed
        state.claim(row, cells + state.num_blocks, counts)
        return placed

    def _fill_last_over_rt(self, row: int, need: int) -> int:
        """Slots of a real-time row that does not run, in the last block; tokens placed, negative on
        failure.
        """
        state = self.state
        cell = int(state.last[row])
        peer = int(state.owner[cell - state.num_blocks])
        take = min(need, state.size - int(state.count[cell]))
        if peer < 0 or state.is_pinned(peer) or take == 0:
            return 0
        state.widen(row, take)
        return take if self.overwrite(np.array([cell])) else -1

    # -- restoring --------------------------------------------------------------------------------
    def returning(self, row: int) -> tuple[np.ndarray, np.ndarray] | None:
        """`stuck_parts` of the row; None if there are fewer places than must move."""
        cells, stuck = self.stuck_parts(row)
        if stuck.any():
            parts = cells[stuck]
            count = self.state.count[parts]
            smallest = int(count.min())
            if len(parts) > self.places_beside_others(row, smallest):
                return None
            if parts[0] >= self.state.num_blocks and self._too_long(parts, count):
                return None
        return cells, stuck

    def _too_long(self, parts: np.ndarray, count: np.ndarray) -> bool:
        """Whether, for some length, more of these best-effort parts (`count` slots) have it than
        there are places for, with those that the parts leave."""
        state = self.state
        places = self.places_by_count() + state.num_empty
        if len(parts) <= places[-1]:
            return False
        left = np.maximum(state.size - state.count[parts - state.num_blocks], 0)
        longer, wider = (
            np.bincount(found, minlength=state.size + 1)[::-1].cumsum()[::-1]
            for found in (count, left)
        )
        return bool(np.count_nonzero(longer[1:] > (places + wider)[1:]))

    def restore(self, row: int, cells: np.ndarray, stuck: np.ndarray) -> bool:
        """Bring all missing slots of the (pinned) row back, to their old places or, with a pinned
        peer, elsewhere. cells, stuck: `returning`"""
        state = self.state
        self.moves.to_device(row, state.missing(row))
        resident = (state.count[cells] - state.lack[cells])[stuck]
        state.put("lack", cells, 0)
        state.put("missing_tokens", row, 0)
        state.put("missing_blocks", row, 0)
        if not self.overwrite(cells[~stuck]):
            return False
        parts = cells[stuck]
        n = min(len(parts), state.num_empty)
        if n:
            new = state.take_empty(n) + state.side[parts[0]]
            state.replace(row, parts[:n], new)
            self.moves.relocate(row, parts[:n].tolist(), new.tolist(), resident[:n].tolist())
        return self._relocate_all(row, parts[n:], resident[n:])

    def _relocate_all(self, row: int, parts: np.ndarray, resident: np.ndarray) -> bool:
        """`_relocate` for parts of the row (not empty blocks: there are none), at once as far as
        that is the same as one after another."""
        state, at, new = self.state, 0, parts[:0]
        if (
            state.kernel is not None
            and len(parts) > 1
            and parts[0] >= state.num_blocks
            # no copies are given up for others
            and state.count[parts].sum() <= state.on_host.free
        ):
            new = state.kernel.blocks_for_be(state, parts) + state.num_blocks
            at = len(new)
        if at:
            state.replace(row, parts[:at], new)
            self.moves.relocate(row, parts[:at].tolist(), new.tolist(), resident[:at].tolist())
            if not self.overwrite(new):
                return False
        others = zip(parts[at:].tolist(), resident[at:].tolist(), strict=True)
        return all(self._relocate(cell, resident) for cell, resident in others)

    def stuck_parts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Cells of the row with missing slots, and which of them (bool[n]) an owner that runs in
        this step fills too: these parts must move."""
        state = self.state
        cells = state.cells_of(row)
        cells = cells[state.lack[cells] > 0]
        peers = cells - state.num_blocks
        overlap = state.count[cells] + state.count[peers] > state.size
        return cells, overlap & state.is_pinned(state.owner[peers])

    def places_beside_others(self, row: int, count: int) -> int:
        """At most so many parts of the row, of `count` slots or more, could move to other
        blocks."""
        state = self.state
        if state.cells_of(row)[0] < state.num_blocks:
            return state.num_empty + len(self.preemptable())
        return state.num_empty + int(self.places_by_count()[count])

    def places_by_count(self) -> np.ndarray:
        """Return int64[size + 1]: for each number of best-effort slots, how many blocks with only
        real-time slots have room for a part of that size. The real-time owner may be running, or be
        one that the part may overwrite."""
        state = self.state
        if self._counted != state.version:
            self._counted = state.version
            if state.kernel is not None:
                self._places = state.kernel.places_by_count(state)
                return self._places
            cells = self.sharable()
            pinned = state.is_pinned(state.owner[cells])
            taken = np.bincount(state.count[cells[pinned]], minlength=state.size + 1)
            free = len(cells) - np.count_nonzero(pinned)
            self._places = free + taken.cumsum()[::-1]
        return self._places

    def _relocate(self, cell: int, resident: int | None = None) -> bool:
        """Move all that the cell's owner has there into one other block; `resident` of it is on the
        device.
        """
        state = self.state
        count = int(state.count[cell])
        empty = state.num_empty > 0
        if empty:
            block = int(state.take_empty(1)[0])
        else:
            found = self._block_for_rt() if cell < state.num_blocks else self._block_for_be(count)
            if found < 0:
                return False
            block = found % state.num_blocks
        new = block + (0 if cell < state.num_blocks else state.num_blocks)
        row = int(state.owner[cell])
        state.replace(row, cell, new)
        self.moves.relocate(row, [cell], [new], [count if resident is None else resident])
        return empty or self.overwrite(np.array([new]))

    def _block_for_rt(self) -> int:
        """Cell of the best-effort owner to preempt, or -1."""
        if self.state.kernel is not None:
            return self.state.kernel.block_for_rt(self.state)
        best = self.emptiest(self.preemptable(), 1)
        return int(best[0]) if len(best) else -1

    def _block_for_be(self, count: int) -> int:
        """Return the cell of a real-time owner with so many free slots in its block, else of one
        that does not run, or -1."""
        state = self.state
        if state.kernel is not None:
            return state.kernel.block_for_be(state, count)
        cells = self.sharable()
        best = self.emptiest(cells, 1)
        if len(best) and state.count[best[0]] + count <= state.size:
            return int(best[0])
        best = self.emptiest(cells[~state.is_pinned(state.owner[cells])], 1)
        return int(best[0]) if len(best) else -1
