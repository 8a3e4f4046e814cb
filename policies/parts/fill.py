"""What most policies share: a policy puts rows into an order, `fill` finds them memory in it."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import Hold, KvMove, Preemption, StepPlan
from twinserve.policies.requests import RequestTable, State

_RUNNING, _SWAPPED = int(State.RUNNING), int(State.SWAPPED)


def fill(
    view: SystemView,
    ledger: KvLedger,
    order: np.ndarray,
    *,
    seats: int,
    token_budget: int | None = None,
    chunk: int | None = None,
    swap: bool = False,
    newcomers_evict: bool = True,
    split: bool = False,
) -> StepPlan:
    """Return a plan that runs the rows of `order` (int64[n], most deserving first) as far as
    memory, seats and tokens allow.

    seats         rows in the batch, at most
    token_budget  new tokens in the batch: the first row that would exceed it ends the batch, unless
                  the batch is empty (a prompt longer than the budget runs alone)
    chunk         tokens a row computes at most; None: all that it lacks
    swap          evicted rows go to the host while it has room; otherwise they are recomputed
    split         the row that the token budget ends in computes as much as is left of it

    A row that finds no memory takes that of the rows behind it in `order`, the last one first. If
    even that is not enough no row loses anything, and the row is left out. One that holds memory
    stays paused; of those without memory none behind it may overtake it. With `newcomers_evict`
    off, rows without memory take free memory only. Rows in flight over PCIe are left out.

    The caller begins the step on the ledger and takes its moves; an empty plan has changed nothing.
    """
    order = landed(order, view)
    filling = _Filling(view.requests, ledger, order, seats, token_budget, chunk, swap)
    filling.newcomers_evict, filling.split = newcomers_evict, split
    holds = view.requests.state[order] == _RUNNING
    edges = (np.flatnonzero(np.diff(holds)) + 1).tolist()
    for start, end in pairwise([0, *edges, len(order)]):
        if filling.full or start == end:
            break
        if holds[start]:
            filling.go_on(start, end)
        else:
            filling.bring_in(start, end)
    return filling.finish()


class _Filling:
    """One call of `fill`; segments of its order come as index ranges [start, end)."""

    def __init__(
        self,
        requests: RequestTable,
        ledger: KvLedger,
        order: np.ndarray,
        seats: int,
        budget: int | None,
        chunk: int | None,
        swap: bool,
    ) -> None:
        self.requests = requests
        self.ledger = ledger
        self.order = order
        self.seats = seats
        self.budget = np.iinfo(np.int64).max if budget is None else budget
        self.chunk = np.iinfo(np.int64).max if chunk is None else chunk
        self.swap = swap
        self.newcomers_evict = True
        self.split = False
        self.plan = StepPlan()
        self.full = seats <= 0
        self._closed = False  # a row without memory found none
        self._granted: list[tuple[np.ndarray, np.ndarray]] = []
        # Of the order: indices of rows with memory. They are evicted from the end, so that the
        # first `_kept` of them still have it.
        self._holding = np.flatnonzero(requests.state[order] == _RUNNING)
        self._kept = len(self._holding)

    def finish(self) -> StepPlan:
        if self._granted:
            self.plan.rows = np.concatenate([rows for rows, _ in self._granted])
            self.plan.tokens = np.concatenate([tokens for _, tokens in self._granted])
        return self.plan

    # -- rows that hold their memory -------------------------------------------------------------
    def go_on(self, start: int, end: int) -> None:
        rows = self.order[start:end]
        if self._kept < len(self._holding):
            rows = rows[: max(int(self._holding[self._kept]) - start, 0)]
        if not len(rows):
            return
        computed = self.requests.computed_tokens[rows]
        new = np.minimum(self.requests.known_tokens(rows) - computed, self.chunk)
        used = np.cumsum(new)
        n = min(int(np.searchsorted(used, self.budget, side="right")), self.seats)
        if (
            self.split
            and n < min(len(rows), self.seats)
            and self.budget > (left := int(used[n] - new[n]))
        ):
            new[n] = self.budget - left
            n += 1
        elif not self._granted:
            n = max(n, 1)
        if self.ledger.grow_all(rows[:n], computed[:n] + new[:n]):
            self._grant(rows[:n], new[:n])
            self.full |= n < len(rows)
            return
        self._go_on_in_want(start, end)

    def _go_on_in_want(self, start: int, end: int) -> None:
        """Memory is short: as many together as free memory reaches, and rows that find none by
        itself."""
        rows = self.order[start:end]
        computed = self.requests.computed_tokens[rows]
        new = np.minimum(self.requests.known_tokens(rows) - computed, self.chunk)
        at = 0
        while at < len(rows) and not self.full:
            if self._kept < len(self._holding) and start + at >= self._holding[self._kept]:
                return  # it was evicted, and so were those behind it
            some = slice(at, at + self._affordable(start, at, new))
            grown = self.ledger.grow_each(rows[some], computed[some] + new[some])
            if grown:
                self._grant(rows[at : at + grown], new[at : at + grown])
                at += grown
                continue
            row, part = int(rows[at]), self._part(int(new[at]))
            if self._exceeds(part):
                return
            grow = partial(self.ledger.grow, row, int(computed[at]) + part)
            if self._acquire(start + at, grow, True):
                self._grant(np.array([row]), np.array([part]))
            at += 1

    def _affordable(self, start: int, at: int, new: np.ndarray) -> int:
        """How many rows from `at` on find seats and tokens, and have not been evicted."""
        end = min(len(new), at + self.seats)
        if self._kept < len(self._holding):
            end = min(end, int(self._holding[self._kept]) - start)
        return int(new[at:end].cumsum().searchsorted(self.budget, side="right"))

    # -- rows without memory, or with it on the host ---------------------------------------------
    def bring_in(self, start: int, end: int) -> None:
        for index in range(start, end):
            if self._closed or self.full:
                return
            row = int(self.order[index])
            if self.requests.state[row] == _SWAPPED:
                self._resume(index, row)
            else:
                self._admit(index, row)

    def _admit(self, index: int, row: int) -> None:
        ledger = self.ledger
        known = int(self.requests.known_tokens(row))
        hit = ledger.hit_tokens(row)
        new = self._part(known - hit)
        if self._exceeds(new):
            return
        # All of its text must fit now, though a chunk only gets memory as it is computed: otherwise
        # more prompts would be begun than can be finished.
        if self._acquire(
            index, lambda: ledger.admit(row, hit + new, hit, 0, known), self.newcomers_evict
        ):
            self.plan.admitted.append((row, hit))
            self._grant(np.array([row]), np.array([new]))
        else:
            self._closed = True

    def _resume(self, index: int, row: int) -> None:
        computed = int(self.requests.computed_tokens[row])
        new = self._part(int(self.requests.known_tokens(row)) - computed)
        if self._exceeds(new):
            return
        if self._acquire(index, lambda: self._swap_in(row, computed + new), self.newcomers_evict):
            self.plan.swapped_in.append(row)
            self._grant(np.array([row]), np.array([new]))
        else:
            self._closed = True

    def _swap_in(self, row: int, tokens: int) -> bool:
        mark = self.ledger.mark()
        if self.ledger.swap_in(row) and self.ledger.grow(row, tokens):
            self.ledger.commit(mark)
            return True
        self.ledger.rollback(mark)
        return False

    # -- seats, tokens, memory -------------------------------------------------------------------
    def _part(self, lacking: int) -> int:
        """Of the tokens that a row lacks, those that it may compute in this step."""
        new = min(lacking, self.chunk)
        return min(new, max(self.budget, 1)) if self.split else new

    def _exceeds(self, new: int) -> bool:
        """The batch ends before a row with so many tokens."""
        if new > self.budget and self._granted:
            self.full = True
            return True
        return False

    def _grant(self, rows: np.ndarray, new: np.ndarray) -> None:
        if not len(rows):
            return
        self._granted.append((rows, new))
        self.seats -= len(rows)
        self.budget -= int(new.sum())
        self.full |= self.seats == 0

    def _acquire(self, index: int, take: Callable[[], bool], evict: bool) -> bool:
        """`take` memory for the row at `index`, evicting those behind it until it succeeds."""
        if take():
            return True
        if not evict:
            return False
        ledger, kept = self.ledger, self._kept
        mark = ledger.mark()
        evicted = []
        while kept and self._holding[kept - 1] > index:
            kept -= 1
            row = int(self.order[self._holding[kept]])
            kind = Preemption.SWAP
            if not (self.swap and ledger.swap_out(row)):
                kind = Preemption.RECOMPUTE
                ledger.drop(row)
            evicted.append((row, kind))
            if take():
                ledger.commit(mark)
                self.plan.preempted += evicted
                self._kept = kept
                return True
        ledger.rollback(mark)
        return False


def blocking(moves: list[KvMove]) -> list[KvMove]:
    """The same transfers, as vLLM 0.x executes them: the step starts when they are done."""
    return [move.held(Hold.BEFORE_STEP) for move in moves]


def landed(rows: np.ndarray, view: SystemView) -> np.ndarray:
    """`rows` (int64[n]) without those in flight over PCIe; a crowd of them is never looked at one
    by one."""
    if not (view.ready_s and len(rows)):
        return rows
    return rows[~np.isin(rows, np.fromiter(view.ready_s, np.int64, len(view.ready_s)))]
