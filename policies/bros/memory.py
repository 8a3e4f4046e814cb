"""Memory for the requests that BROS chose: FindBlock and FindPreemptBlock of the ledger, and
dropping others where these find nothing (Wan et al., IEEE version, Sec. V-B; Algorithm 1, lines 8
and 19)."""

from __future__ import annotations

import numpy as np

from twinserve.policies.bros.parts import PlanInProgress, Victims
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.plan import Preemption
from twinserve.policies.requests import State

_RUNNING = int(State.RUNNING)
_AT_ONCE = 128  # victims


def place_plain(step: PlanInProgress, batch: Batch) -> tuple[np.ndarray, list[int]]:
    """Rows that hold all their KV and have room in it are placed at once; the indices of the others
    are returned."""
    requests, ledger = step.view.requests, step.ledger
    holding = (requests.computed_tokens[batch.rows] > 0) & (batch.swapped == 0)
    if step.dropped:
        holding &= step.keeps(batch.rows)
    if np.count_nonzero(holding) == len(holding) and ledger.grow_all(batch.rows, batch.context):
        return np.ones(len(batch), bool), []
    placed = np.zeros(len(batch), bool)
    if not holding.any():
        return placed, list(range(len(batch)))
    roomy = np.flatnonzero(holding)
    roomy = roomy[ledger.slack_tokens(batch.rows[roomy]) >= batch.new[roomy]]
    if len(roomy) and ledger.grow_all(batch.rows[roomy], batch.context[roomy]):
        placed[roomy] = True
    return placed, np.flatnonzero(~placed).tolist()


def grow_first(
    step: PlanInProgress, batch: Batch, done: np.ndarray, left: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Those at the front of `left` (indices, int64) that hold memory and find what they lack
    without dropping anybody get it, and are marked in `done` (bool[n]). Returns the others, without
    dropped ones, and whether the first of them has just been refused."""
    if step.dropped:
        left = left[step.keeps(batch.rows[left])]
    if not len(left) or step.view.requests.state[batch.rows[left[0]]] != _RUNNING:
        return left, False
    rows = batch.rows[left]
    holding = step.view.requests.state[rows] == _RUNNING
    reach = len(rows) if holding.all() else int(holding.argmin())
    grown = step.ledger.grow_each(rows[:reach], batch.context[left[:reach]])
    done[left[:grown]] = True
    return left[grown:], grown < reach


class Hopeless:
    """How many tokens a best-effort newcomer need not ask for in this step.

    tokens  who needs so many or more would find nothing
    """

    def __init__(self, step: PlanInProgress) -> None:
        self._step = step
        self._refused = np.inf  # the least that somebody asked for in vain
        self._limit = np.inf  # what the ledger has, as long as nobody else is dropped
        self._dropped = -1

    @property
    def tokens(self) -> float:
        return (
            min(self._refused, self._limit)
            if len(self._step.dropped) == self._dropped
            else self._refused
        )

    def first_skipped(self, newcomer: np.ndarray, tokens: np.ndarray) -> int:
        """How many at the front are newcomers that need not ask; they count as refused. bool[n] and
        int64[n], in order."""
        ask = ~newcomer | (tokens < self.tokens)
        skipped = int(ask.argmax()) if ask.any() else len(ask)
        if skipped:
            self._refused = min(self._refused, int(tokens[:skipped].min()))
        return skipped

    def found_none(self, row: int, tokens: int) -> None:
        """`row`, a newcomer, found no room for `tokens`."""
        self._refused = min(self._refused, tokens)
        self._limit = self._step.ledger.room_tokens(row) + 1
        self._dropped = len(self._step.dropped)


def acquire(step: PlanInProgress, row: int, tokens: int, victims: Victims | np.ndarray) -> bool:
    """Room for `row` up to `tokens`; if there is none, drop `victims` one after another until there
    is."""
    return find(step, row, tokens) or take_from(step, row, tokens, victims)


def take_from(step: PlanInProgress, row: int, tokens: int, victims: Victims | np.ndarray) -> bool:
    """`acquire` for a row that `find` had nothing for."""
    ledger = step.ledger
    need = -(-tokens // ledger.block_tokens) - ledger.held_blocks(row)
    obtainable = ledger.obtainable_blocks(row)
    rivals = victims.rows if isinstance(victims, Victims) else victims
    rivals = rivals[step.view.requests.state[rivals] == _RUNNING]
    if step.dropped:
        rivals = rivals[step.keeps(rivals)]
    reach, looked_at = obtainable, 0
    while reach < need:  # there may be thousands: only as many are looked at as it takes
        some = rivals[looked_at : looked_at + _AT_ONCE]
        if not len(some):
            return False  # not even all of them would be enough
        reach += int(ledger.gained_by_all(row, some).sum())
        looked_at += len(some)
    mark = ledger.mark()
    dropped = []
    for victim in rivals.tolist():
        gain = ledger.gained_blocks(row, victim)
        kind = Preemption.SWAP
        if not (step.swap and ledger.swap_out(victim)):
            kind = Preemption.RECOMPUTE
            ledger.drop(victim)
        dropped.append((victim, kind))
        obtainable += gain
        if obtainable >= need and find(step, row, tokens):
            ledger.commit(mark)
            step.plan.preempted += dropped
            step.dropped.update(victim for victim, _ in dropped)
            return True
    ledger.rollback(mark)
    return False


def find(step: PlanInProgress, row: int, tokens: int) -> bool:
    """FindBlock / FindPreemptBlock: what the ledger can give without dropping anybody."""
    ledger = step.ledger
    fresh = step.view.requests.computed_tokens[row] == 0
    if not fresh and ledger.held_blocks(row):
        return ledger.grow(row, tokens)
    if fresh:
        if not ledger.admit(row, tokens):
            return False
        step.plan.admitted.append((row, 0))
        return True
    mark = ledger.mark()
    if ledger.swap_in(row) and ledger.grow(row, tokens):
        ledger.commit(mark)
        step.plan.swapped_in.append(row)
        return True
    ledger.rollback(mark)
    return False
