"""Overwriting in the bidirectional ledger: an owner of a block writes slots that its peer claims
too. The peer's data survive on the host (lazy checkpoint). Done for many blocks at once."""

from collections.abc import Mapping

import numpy as np

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.bidirectional.moves import StepMoves
from twinserve.policies.kv.bidirectional.state import SlotState, spans


class Overwriting:
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
