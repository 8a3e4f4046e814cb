"""What a row lacks in the bidirectional ledger, and what dropping others would yield of it: bounds,
from counts alone, that spare most tries."""

import numpy as np

from twinserve.policies.kv.bidirectional.place import Placement

_BOTH = 3  # SlotState.kind


def relief_of_real_time(
    place: Placement, row: int, tokens: int, victims: np.ndarray, real_time: np.ndarray
) -> tuple[int, np.ndarray]:
    """Blocks that real-time `row` lacks of room up to `tokens`, and those that each victim yields.

    None comes from best-effort victims: the row may enter their own blocks anyway, and the others
    have a real-time owner. Neither do blocks that a running best-effort row shares.
    real_time  bool[n], of the victims
    """
    state = place.state
    _, stuck = place.stuck_parts(row)
    places = state.num_empty + len(place.preemptable())
    lack = -(-tokens // state.size) - int(state.held[row]) + int(np.count_nonzero(stuck)) - places
    gains = np.where(real_time, state.held[victims], 0)
    cells = np.flatnonzero(state.used_kinds == _BOTH)
    cells = cells[state.is_pinned(state.owner[state.peer[cells]])]
    if len(cells):
        gains -= np.where(real_time, _by_row(state.owner[cells], None, victims), 0)
    return lack, gains


def relief_of_best_effort(
    place: Placement, row: int, tokens: int, victims: np.ndarray
) -> tuple[int, np.ndarray]:
    """Return what best-effort `row` lacks and what each victim yields. If places for parts that
    must move away from running real-time rows are too few, the unit is such places. Otherwise it is
    slots for room up to `tokens`."""
    cells, stuck = place.stuck_parts(row)
    if stuck.any():
        smallest = int(place.state.count[cells[stuck]].min())
        lack = int(np.count_nonzero(stuck)) - place.places_beside_others(row, smallest)
        if lack > 0:
            return lack, _places_gained(place, smallest, victims)
    return _slots_lacking(place, row, tokens), _slots_gained(place, row, victims)


def without_place(place: Placement, rows: np.ndarray) -> np.ndarray:
    """bool[n]: which best-effort `rows` have more parts that must move than there are places for:
    `Placement.restore` of them fails."""
    state = place.state
    found = np.zeros(len(rows), bool)
    lacking = ((state.missing_blocks[rows] > 0) & (state.held[rows] > 0)).nonzero()[0]
    if not len(lacking):
        return found
    tables = [state.cells_of(row) for row in rows[lacking].tolist()]
    which = np.arange(len(tables)).repeat([len(table) for table in tables])
    cells = np.concatenate(tables)
    lack = state.lack[cells] > 0
    cells, which = cells[lack], which[lack]
    peers = cells - state.num_blocks
    overlap = state.count[cells] + state.count[peers] > state.size
    stuck = overlap & state.is_pinned(state.owner[peers])
    parts = np.bincount(which[stuck], minlength=len(tables))
    smallest = np.full(len(tables), state.size)
    np.minimum.at(smallest, which[stuck], state.count[cells[stuck]])
    found[lacking] = parts > state.num_empty + place.places_by_count()[smallest]
    return found


def _places_gained(place: Placement, smallest: int, victims: np.ndarray) -> np.ndarray:
    """Blocks of best-effort victims that would have room for a part of `smallest` slots."""
    state = place.state
    cells = np.flatnonzero(state.used_kinds >= _BOTH - 1) + state.num_blocks
    peers = state.peer[cells]
    fits = (state.count[peers] + smallest <= state.size) | ~state.is_pinned(state.owner[peers])
    return _by_row(state.owner[cells[fits]], None, victims)


def _slots_lacking(place: Placement, row: int, tokens: int) -> int:
    """Tokens of the row's growth less the slots that it might get now."""
    state = place.state
    held = bool(state.held[row])
    need = tokens - int(state.tokens[row]) * held
    cells = place.sharable()
    count, pinned = state.count[cells], state.is_pinned(state.owner[cells])
    partial = count < state.size
    slots = state.num_empty * state.size + int((state.size - count[partial]).sum())
    slots += state.size * int(np.count_nonzero(~partial & ~pinned))
    # One of the blocks beside real-time rows, the last that the row enters, may be filled over
    # theirs.
    over = int(count[partial & ~pinned].max(initial=0))
    if held:
        last = int(state.last[row])
        slots += state.room_in_last(row)
        peer = last - state.num_blocks
        if state.count[peer] and not state.is_pinned(state.owner[peer]):
            over = max(over, int(state.size - state.count[last]) - state.room_in_last(row))
    return need - slots - over


def _slots_gained(place: Placement, row: int, victims: np.ndarray) -> np.ndarray:
    """Return the slots of the victims' blocks that `row` could then fill. Of best-effort ones these
    are all that no running real-time row holds; of real-time ones, those that it could not
    overwrite before."""
    state = place.state
    cells = np.flatnonzero(state.used_kinds >= _BOTH - 1) + state.num_blocks
    peers = state.peer[cells]
    kept = np.where(state.is_pinned(state.owner[peers]), state.count[peers], 0)
    gained = _by_row(state.owner[cells], state.size - kept, victims)
    partial = place.sharable()
    partial = partial[state.count[partial] < state.size]
    gained += _by_row(state.owner[partial], state.count[partial], victims)
    if state.held[row]:
        beside = state.owner[int(state.last[row]) - state.num_blocks]
        gained += np.where(victims == beside, state.size, 0)
    return gained


def _by_row(owners: np.ndarray, weights: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """int64[n]: how often, or with what weight, each of `rows` is among `owners`."""
    reach = int(max(owners.max(initial=0), rows.max(initial=0))) + 1
    return np.bincount(owners, weights, reach).astype(np.int64)[rows]
