"""What BROS's algorithm carries from one part of a plan to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import SystemView
from .estimators import Batch
from .kv.base import KvLedger
from .plan import StepPlan


@dataclass(frozen=True, slots=True)
class Urgent:
    """Real-time requests by residual time. residual, costs: float64[n], seconds; costs[i] is that of a batch of the first
    i + 1 of them. bound: what the iteration may take, seconds."""

    batch: Batch
    residual: np.ndarray
    costs: np.ndarray
    bound: float

    def fitting(self, size: int) -> int:
        """How many of the first `size` stay within the bound."""
        return int(np.searchsorted(self.costs[:size], self.bound, side="right"))


class PlanInProgress:
    """What one call of `plan` carries around. dropped: rows that lost their memory in this step; only asked, never
    walked through."""

    def __init__(self, view: SystemView, ledger: KvLedger, plan: StepPlan) -> None:
        self.view = view
        self.ledger = ledger
        self.plan = plan
        self.dropped: set[int] = set()

    def keeps(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: which of `rows` have not been dropped in this step."""
        if not self.dropped:
            return np.ones(len(rows), bool)
        return np.array([row not in self.dropped for row in rows.tolist()], bool)


class Victims:
    """Whom an urgent real-time request may drop, in order: best-effort requests, the last to arrive first, then real-time
    ones that are not in this batch, most residual time first, down to its own."""

    def __init__(self, best_effort: np.ndarray, urgency: np.ndarray, placed: np.ndarray, row: int) -> None:
        self.best_effort = best_effort
        self.urgency = urgency
        self.placed = placed
        self.row = row

    def __iter__(self):
        yield from self.best_effort[::-1].tolist()
        running = set(self.placed.tolist())
        for row in self.urgency[::-1].tolist():
            if row == self.row:
                return
            if row not in running:
                yield row


def empty_batch() -> Batch:
    none = np.zeros(0, np.int64)
    return Batch(none, np.zeros(0, bool), none, none, none)
