"""A plan of Echo while it is being made: who is in it, what it takes, and who had to go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from .base import SystemView
from .echo_cost import StepCost
from .kv.base import KvLedger
from .plan import Preemption, StepPlan


class StepInProgress:
    """Grants so far, and what they sum up to.

    seats, tokens   left in the batch
    bound           seconds that the iteration may take by estimate (the paper's SLO); inf without online requests
    prefills        (new, resident) tokens of each prompt or chunk
    decodes         requests that decode, resident tokens of all of them, of the longest
    benefit         tokens made available, prefix hits included (eq. 1), less what evictions lost (eq. 2); a prompt's
                    token counts 1, a decoded one `b_decode`
    """

    def __init__(
        self, view: SystemView, ledger: KvLedger, cost: StepCost | None, seats: int, tokens: int, b_decode: float = 1.0
    ) -> None:
        self.view, self.requests, self.ledger, self.cost = view, view.requests, ledger, cost
        self.plan = StepPlan()
        self.seats, self.tokens = seats, tokens
        self.bound = np.inf
        self.prefills: list[tuple[int, int]] = []
        self.decodes = (0, 0, 0)
        self.benefit = 0.0
        self.b_decode = b_decode
        self.granted: set[int] = set()  # only asked
        self.dropped: set[int] = set()  # only asked
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.granted)

    # -- what it takes -----------------------------------------------------------------------------------------
    def seconds(self) -> float:
        return self.cost.seconds(self.prefills, *self.decodes)

    def reward(self) -> float:
        """Eq. 4, tokens a second."""
        return rate(self.benefit, self.seconds())

    def with_decodes(self, n: int, total: int, longest: int) -> tuple[int, int, int]:
        return self.decodes[0] + n, self.decodes[1] + total, max(self.decodes[2], longest)

    # -- grants ------------------------------------------------------------------------------------------------
    def grant_decodes(self, rows: np.ndarray, resident: np.ndarray) -> None:
        if not len(rows):
            return
        self._add(rows, np.ones(len(rows), np.int64))
        lengths = resident.tolist()
        self.decodes = self.with_decodes(len(lengths), sum(lengths), max(lengths))
        self.benefit += self.b_decode * len(lengths)

    def grant_prompt(self, row: int, new: int, resident: int, hit: int = 0) -> None:
        self._add(np.array([row]), np.array([new]))
        self.prefills.append((new, resident))
        self.benefit += new + hit

    def _add(self, rows: np.ndarray, new: np.ndarray) -> None:
        self._rows.append(rows)
        self._tokens.append(new)
        self.granted.update(rows.tolist())
        self.seats -= len(rows)
        self.tokens -= int(new.sum())

    def finish(self) -> StepPlan:
        if self._rows:
            self.plan.rows = np.concatenate(self._rows)
            self.plan.tokens = np.concatenate(self._tokens)
        self.plan.moves = self.ledger.take_moves()
        return self.plan

    # -- memory ------------------------------------------------------------------------------------------------
    def acquire(self, take: Callable[[], bool], victims: Callable[[], Iterable[int]]) -> list[int] | None:
        """Memory by `take`, dropping `victims` one after another until it succeeds. Those that were dropped, or None, and
        nothing changed, where that is not enough."""
        if take():
            return []
        mark, dropped = self.ledger.mark(), []
        for victim in victims():
            self.ledger.drop(victim)
            dropped.append(victim)
            if take():
                self.ledger.commit(mark)
                self.dropped.update(dropped)
                self.plan.preempted += [(row, Preemption.RECOMPUTE) for row in dropped]
                return dropped
        self.ledger.rollback(mark)
        return None


def rate(benefit: float, seconds: float) -> float:
    """Tokens a second. A chunk behind cached text may be estimated to take no time (eq. 6 below c at both of its ends)."""
    if seconds > 0:
        return benefit / seconds
    return math.inf if benefit > 0 else 0.0
