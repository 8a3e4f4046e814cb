"""Memory for the requests that BROS chose: FindBlock and FindPreemptBlock of the ledger, and
dropping others where these find nothing (Wan et al., IEEE version, Sec. V-B; Algorithm 1, lines 8
and 19)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from twinserve.policies.bros.parts import PlanInProgress, Victims
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.plan import Preemption
from twinserve.policies.requests import State

_T = TypeVar("_T")


class Search:
    """For a set of `rivals` (int64[n], the first to be dropped first) that is enough for `granted`,
    which tries to take the memory and undoes nothing itself. No member can be spared.

    lack, gains  KvLedger.relief
    """

    def __init__(
        self,
        step: PlanInProgress,
        rivals: np.ndarray,
        lack: int,
        gains: np.ndarray,
        granted: Callable[[], bool],
    ) -> None:
        self._step = step
        self._rivals = rivals
        self._lack = lack
        self._gains = gains
        self._granted = granted

    def drop(self) -> list[tuple[int, Preemption]] | None:
        """Return those that were dropped, and how, in order; None, and nothing changed, if no row's
        memory helps."""
        if not len(self._rivals) or self._gains.sum() < self._lack:
            return None
        if self._lack > 0:
            # All that are left out of these could not do without any of them: if these are enough,
            # the ledger's bound has proved each of them necessary.
            chosen = self._rivals[enough(self._gains, self._lack)].tolist()
            if (dropped := self._dropping(chosen)) is not None:
                return dropped
        # The ledger promised too much: parts that find no place, shared blocks, a full host.
        gaining = self._gains > 0
        order = np.concatenate([self._rivals[gaining], self._rivals[~gaining]]).tolist()
        found = self._sufficient(order)
        return None if found is None else self._dropping(self._needed(found))

    def _dropping(self, rows: list[int]) -> list[tuple[int, Preemption]] | None:
        ledger = self._step.ledger
        mark = ledger.mark()
        dropped = [(row, self._drop(row)) for row in rows]
        if self._granted():
            ledger.commit(mark)
            return dropped
        ledger.rollback(mark)
        return None

    def _drop(self, row: int) -> Preemption:
        if self._step.swap and self._step.ledger.swap_out(row):
            return Preemption.SWAP
        self._step.ledger.drop(row)
        return Preemption.RECOMPUTE

    def _tried(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns; all that it changes in the ledger is undone."""
        mark = self._step.ledger.mark()
        result = attempt()
        self._step.ledger.rollback(mark)
        return result

    def _without(self, rows: list[int], attempt: Callable[[], _T]) -> _T:
        def both() -> _T:
            for row in rows:
                self._drop(row)
            return attempt()

        return self._tried(both)

    def _sufficient(self, order: list[int]) -> list[int] | None:
        """The first 1, 2, 4, .. of `order`, as soon as they are enough."""

        def attempt() -> list[int] | None:
            done = 0
            while done < len(order):
                reach = max(2 * done, 1)
                for row in order[done:reach]:
                    self._drop(row)
                done = min(reach, len(order))
                if self._tried(self._granted):
                    return order[:done]
            return None

        return self._tried(attempt)

    def _needed(self, rows: list[int], others_dropped: bool = False) -> list[int]:
        """Return those of `rows`, which are enough, that cannot be spared, with as few of the last
        ones as possible. It takes n log n drops and, for m needed rows, some m log n trials.

        Source: Junker, "QuickXplain: Preferred Explanations and Relaxations for Over-Constrained
        Problems" (AAAI 2004).
        """
        if others_dropped and self._tried(self._granted):
            return []
        if len(rows) == 1:
            return rows
        first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        late = self._without(first, lambda: self._needed(second, True))
        early = self._without(late, lambda: self._needed(first, bool(late)))
        return early + late


def enough(gains: np.ndarray, lack: int) -> np.ndarray:
    """Return indices, in order, of a minimal set whose gains (int64[n]) reach `lack` > 0. Of the
    first ones that do, the later are spared first."""
    sums = gains.cumsum()
    reach = int(np.searchsorted(sums, lack)) + 1
    surplus = int(sums[reach - 1]) - lack
    chosen = np.ones(reach, bool)
    for i in np.flatnonzero(gains[:reach] <= surplus)[::-1].tolist():
        if gains[i] <= surplus:
            surplus -= int(gains[i])
            chosen[i] = False
    return np.flatnonzero(chosen)


_RUNNING = int(State.RUNNING)


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


def in_want(
    step: PlanInProgress, batch: Batch, done: np.ndarray, others: list[int]
) -> Iterator[tuple[int, Callable[..., bool]]]:
    """Return those of `others` (indices of `batch`, in order) that need memory found one by one,
    each with its function. This is `take_from` if the row has just been refused, else `acquire`.
    Rows before them that can grow without dropping another do so, and are marked in `done`
    (bool[n]). Rows that were dropped in the meantime are left out."""
    left = np.array(others, np.int64)
    while len(left):
        left, refused = _grow_first(step, batch, done, left)
        if len(left):
            yield int(left[0]), take_from if refused else acquire
            left = left[1:]


def _grow_first(
    step: PlanInProgress, batch: Batch, done: np.ndarray, left: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Those at the front of `left` (indices, int64) that hold memory and find what they lack
    without dropping another get it, and are marked in `done`. Returns the others, without dropped
    ones, and whether the first of them has just been refused."""
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

    tokens  a row that needs so many or more would find nothing
    """

    def __init__(self, step: PlanInProgress) -> None:
        self._step = step
        self._refused = np.inf  # the least that was asked for in vain
        self._limit = np.inf  # what the ledger has, as long as no other row is dropped
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
    """`acquire` for a row that `find` had nothing for. No row is dropped without which it would
    have been enough."""
    rivals = victims.rows if isinstance(victims, Victims) else victims
    rivals = rivals[step.view.requests.state[rivals] == _RUNNING]
    if step.dropped:
        rivals = rivals[step.keeps(rivals)]
    if not len(rivals):
        return False
    lack, gains = step.ledger.relief(row, tokens, rivals)
    held = step.ledger.held_blocks(row)
    search = Search(step, rivals, lack, gains, lambda: _granted(step, row, tokens))
    dropped = search.drop()
    if dropped is None:
        return False
    _note(step, row, held)
    step.plan.preempted += dropped
    step.dropped.update(victim for victim, _ in dropped)
    return True


def find(step: PlanInProgress, row: int, tokens: int) -> bool:
    """FindBlock / FindPreemptBlock: what the ledger can give without dropping a row."""
    held = step.ledger.held_blocks(row)
    if not _granted(step, row, tokens):
        return False
    _note(step, row, held)
    return True


def _granted(step: PlanInProgress, row: int, tokens: int) -> bool:
    """Room for `row`, if the ledger has it; the plan does not know of it yet."""
    ledger = step.ledger
    if step.view.requests.computed_tokens[row] == 0:
        return ledger.admit(row, tokens)
    if ledger.held_blocks(row):
        return ledger.grow(row, tokens)
    mark = ledger.mark()
    if ledger.swap_in(row) and ledger.grow(row, tokens):
        ledger.commit(mark)
        return True
    ledger.rollback(mark)
    return False


def _note(step: PlanInProgress, row: int, held: int) -> None:
    """In the plan: `row`, which held so many blocks, has been granted its memory."""
    if step.view.requests.computed_tokens[row] == 0:
        step.plan.admitted.append((row, 0))
    elif not held:
        step.plan.swapped_in.append(row)
