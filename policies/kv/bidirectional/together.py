"""Growth of many real-time rows at once in the bidirectional ledger, over slots of best-effort rows
that do not run. If memory is full, most rows of a step grow so."""

import numpy as np

from twinserve.policies.kv.bidirectional.place import Placement


def grow_together(place: Placement, rows: np.ndarray, tokens: np.ndarray) -> int:
    """Grow real-time rows within their last blocks, or from a full one into one more. Returns how
    many rows from the front of `rows` grew: those that need nothing else, and for which the host
    has room without giving anything up. They get the slots that `Placement.grow` would give them
    one by one: none of them touches another one's, and blocks are taken in their order."""
    state = place.state
    before, cells = state.tokens[rows], state.last[rows]
    need, mine, peers = np.maximum(tokens - before, 0), state.count[cells], state.peer[cells]
    after = mine + need
    over = after + state.count[peers] - state.size
    over[need == 0] = 0
    plain = state.real_time[cells] & (state.held[rows] > 0) & (state.missing_tokens[rows] == 0)
    enter = (plain & (mine == state.size) & (0 < need) & (need <= state.size)).nonzero()[0]
    plain &= (after <= state.size) & ((over <= 0) | ~state.is_pinned(state.owner[peers]))
    lost = np.maximum(over - state.lack[peers], 0)
    victims = enter[:0]
    if len(enter):
        empty = min(len(enter), state.num_empty)
        if empty < len(enter):
            victims = place.emptiest(place.preemptable(), len(enter) - empty)
        enter = enter[: empty + len(victims)]
        plain[enter], lost[enter] = True, 0
        covered = need[enter[empty:]] + state.count[victims] - state.size - state.lack[victims]
        lost[enter[empty:]] = np.maximum(covered, 0)
    plain &= lost.cumsum() <= state.on_host.free
    n = len(rows) if plain.all() else int(plain.argmin())
    if not n:
        return 0
    enter = enter[: int(np.searchsorted(enter, n))]
    stay = np.ones(n, bool)
    stay[enter] = False
    state.put("count", cells[:n][stay], after[:n][stay])
    state.put("tokens", rows[:n][stay], (before[:n] + need[:n])[stay])
    state.put("pinned", rows[:n], state.step)
    written = cells[:n][stay & (over[:n] > 0)]
    if len(enter):
        empties = state.take_empty(min(len(enter), empty))
        entered = victims[: len(enter) - len(empties)] - state.num_blocks
        entered = np.concatenate([empties, entered])
        state.claim_one_each(rows[enter], entered, need[enter])
        written = np.concatenate([written, entered[len(empties) :]])
    place.overwrite(written)
    return n
