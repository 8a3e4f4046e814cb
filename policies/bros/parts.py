"""What BROS's Algorithm 1 (Wan et al., IEEE version, Sec. IV-B) carries from one part of a plan to
the next."""

from dataclasses import dataclass

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import SystemView
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.plan import StepPlan


@dataclass(slots=True)
class Urgent:
    """Real-time requests by residual time; never changed.

    residual  float64[n], seconds
    costs     float64[m], seconds: of a batch of the first 1, 2, .. m of them, where m are as many
              as an iteration may take
    bound     what the iteration may take, seconds
    """

    batch: Batch
    residual: np.ndarray
    costs: np.ndarray
    bound: float

    def fitting(self, size: int) -> int:
        """How many of the first `size` stay within the bound."""
        return int(np.searchsorted(self.costs[:size], self.bound, side="right"))


@dataclass(slots=True)
class Choice:
    """Rows that an iteration should serve, memory permitting: the first `fits` real-time requests
    and the first `packed` candidates.

    replaced      so many of the last of these real-time requests give their places to the last of
                  these candidates
    early_return  lines 11-12: a deadline, and neither size nor tokens, ended the search for
                  real-time requests
    by_deadline   where `urgent` is in another order: the one of residual times
    """

    urgent: Urgent
    candidates: Batch
    fits: int
    packed: int
    replaced: int
    early_return: bool
    by_deadline: Urgent | None = None


class PlanInProgress:
    """What one call of `plan` carries around.

    dropped  rows that lost their memory in this step; only asked, never walked through
    next     the first real-time request that waits, alone or none
    swap     dropped requests keep their KV on the host
    reach    requests from the front of a waiting queue that are looked at
    """

    def __init__(self, view: SystemView, ledger: KvLedger, plan: StepPlan, swap: bool) -> None:
        self.view = view
        self.ledger = ledger
        self.plan = plan
        self.dropped: set[int] = set()
        self.next = EMPTY
        self.swap = swap
        self.reach = 0

    def keeps(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: which of `rows` have not been dropped in this step."""
        return ~among(rows, np.fromiter(self.dropped, np.int64, len(self.dropped)))


class Victims:
    """Rows that an urgent real-time request may drop, in order. First come best-effort requests,
    the last to arrive first; then real-time ones that are not in this batch, most residual time
    first, down to its own."""

    def __init__(
        self, best_effort: np.ndarray, urgency: np.ndarray, placed: np.ndarray, row: int
    ) -> None:
        self.best_effort = best_effort
        self.urgency = urgency
        self.placed = placed
        self.row = row

    @property
    def rows(self) -> np.ndarray:
        """int64[n]; some may have no memory."""
        own = (self.urgency == self.row).nonzero()[0]
        less = self.urgency[own[0] + 1 if len(own) else 0 :][::-1]
        return np.concatenate([self.best_effort[::-1], less[~among(less, self.placed)]])


_NONE = np.zeros(0, np.int64)
EMPTY = Batch(_NONE, np.zeros(0, bool), _NONE, _NONE, _NONE)


def among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool[n]: which of `rows` are among `others`; np.isin takes several times as long."""
    found = np.zeros(int(max(rows.max(initial=-1), others.max(initial=-1))) + 1, bool)
    found[others] = True
    return found[rows]


def within_tokens(batch: Batch, limit: int, behind: Batch | None = None) -> int:
    """Return how many requests from the front of `batch` the engine can compute in one step,
    together with those of `behind`. All but the longest must keep to `limit` tokens. The longest
    may exceed it, because prompts are not cut and one of any length must get its turn."""
    return kernels.within(batch.new, limit, _NONE if behind is None else behind.new)


def least(objectives: np.ndarray) -> float:
    """Seconds; infinite if no row has an objective (NaN)."""
    return float(np.fmin.reduce(objectives, initial=np.inf))
