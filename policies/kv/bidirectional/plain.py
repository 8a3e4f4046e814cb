"""Growth in the bidirectional ledger that touches no other row: into own free slots and empty
blocks.

Most steps are of this kind, so this part is vectorised over rows. It takes exactly the slots that
the general rules (`place.py`) would take row by row, in any order of the rows, or says that it
cannot.
"""

import numpy as np

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.bidirectional.state import SlotState


def last_blocks(state: SlotState, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each row's last block: cell, own slots, the peer's slots, unclaimed slots."""
    cells = state.last[rows]
    mine = state.count[cells]
    other = state.count[state.peer[cells]]
    room = state.size - mine
    if np.count_nonzero(other):
        room = np.maximum(room - other, 0)
    return cells, mine, other, room


def grow_plainly(state: SlotState, row: int, side: int, tokens: int) -> bool:
    """Growth of a row with nothing missing that touches no other row; False and unchanged
    otherwise.
    """
    need = tokens - int(state.tokens[row])
    if need > 0:
        room = state.room_in_last(row)
        if need > room:
            cell = int(state.last[row])
            partial = cell < state.num_blocks and state.count[cell] < state.size
            if partial and state.count[cell - state.num_blocks]:
                return False
            fresh = -(-(need - room) // state.size)
            if fresh > state.num_empty:
                return False
        if room:
            state.widen(row, min(need, room))
        if need > room:
            state.claim_empty(row, side, need - room, fresh)
    state.put("pinned", row, state.step)
    return True


def grow_all(state: SlotState, rows: np.ndarray, tokens: np.ndarray) -> bool:
    """`grow_plainly` for distinct rows; False and unchanged unless all can."""
    if np.count_nonzero(state.missing_tokens[rows]):
        return False
    before = state.tokens[rows]
    if np.count_nonzero(before) < len(rows):  # swapped rows, whose tokens count too, miss them
        raise LedgerError("rows without blocks cannot grow; they are admitted or swapped in")
    cells, mine, other, room = last_blocks(state, rows)
    need = np.maximum(tokens - before, 0)
    here = np.minimum(need, room)
    over = need - here
    if np.count_nonzero(other) and _conflicts(state, cells, mine, other, need, over, room):
        return False
    growing = over.nonzero()[0]
    if len(growing):
        fresh = -(-over[growing] // state.size)
        if sum(fresh.tolist()) > state.num_empty:
            return False
    state.put("count", cells, mine + here)
    state.put("tokens", rows, before + here)
    state.put("pinned", rows, state.step)
    if len(growing):
        state.claim_many(rows[growing], over[growing], fresh, state.side[cells[growing]])
    return True


def _conflicts(state: SlotState, cells, mine, other, need, over, room) -> bool:
    """A real-time row needs slots of its last block that the peer claims, or will claim in the same
    step.
    """
    partial_rt = (cells < state.num_blocks) & (mine < state.size) & (other > 0)
    if np.count_nonzero(partial_rt & (over > 0)):
        return True
    for i, j in _pairs(state, cells, other):
        if partial_rt[i] and 0 < need[i] and need[i] + need[j] > room[i]:
            return True
    return False


def _pairs(state: SlotState, cells: np.ndarray, other: np.ndarray) -> list[tuple[int, int]]:
    """Positions (real-time, best-effort) of rows that share their last block."""
    shared = other.nonzero()[0]
    blocks = cells[shared] % state.num_blocks
    order = np.lexsort((cells[shared], blocks))
    blocks = blocks[order]
    twice = (blocks[1:] == blocks[:-1]).nonzero()[0]
    return list(zip(shared[order[twice]].tolist(), shared[order[twice + 1]].tolist(), strict=True))


def steps_before_conflict(
    state: SlotState, rows: np.ndarray, computed: np.ndarray, limit: int
) -> int:
    """Steps (at most `limit`) before a real-time row meets the peer in its last block, one token a
    step.
    """
    cells, mine, other, room = last_blocks(state, rows)
    if not np.count_nonzero(other):
        return limit
    granted = state.tokens[rows] - computed
    partial_rt = (cells < state.num_blocks) & (mine < state.size) & (other > 0)
    limit = min([limit, *(granted + room)[partial_rt].tolist()])
    for i, j in _pairs(state, cells, other):
        if partial_rt[i]:
            # Up to what i has been granted, or else the most steps s for which both still fit:
            # (s - granted[i]) + (s - granted[j]) <= room[i].
            both = (int(room[i]) + int(granted[i]) + int(granted[j])) // 2
            limit = min(limit, max(int(granted[i]), both))
    return limit
