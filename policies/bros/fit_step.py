"""An iteration of `chunk=fit` while it is composed: its rows, what it takes, what it still has
room for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import SystemView
from twinserve.policies.bros.fit_cost import Load, StepCost
from twinserve.policies.bros.memory import acquire
from twinserve.policies.bros.parts import PlanInProgress
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.plan import Preemption, StepOutcome, StepPlan
from twinserve.policies.requests import RequestTable, State

_RUNNING = int(State.RUNNING)
_WORST = 2.0  # a single iteration says no more than that the estimate is off by this factor


@dataclass(slots=True)
class Rows:
    """Requests as an iteration sees them; int64[n] each.

    left      known tokens that are not computed yet
    resident  tokens computed, or found in the prefix cache
    missing   tokens of them that are on the host
    """

    rows: np.ndarray
    left: np.ndarray
    resident: np.ndarray
    missing: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen) -> Rows:
        return Rows(
            self.rows[chosen], self.left[chosen], self.resident[chosen], self.missing[chosen]
        )

    def batch(self, kv_bytes_per_token: int) -> Batch:
        """As decodes."""
        new = np.ones(len(self.rows), np.int64)
        prefill = np.zeros(len(self.rows), bool)
        swapped = self.missing * kv_bytes_per_token
        return Batch(self.rows, prefill, new, self.resident + 1, swapped)


_NONE = np.zeros(0, np.int64)
NO_ROWS = Rows(_NONE, _NONE, _NONE, _NONE)


def decodes_and_prompts(
    rows: np.ndarray, requests: RequestTable, ledger: KvLedger
) -> tuple[Rows, Rows]:
    """Those that compute the one token after their last, and the others."""
    if not len(rows):
        return NO_ROWS, NO_ROWS
    decodes, prompts = kernels.split(requests, rows, ledger.missing_tokens(rows))
    return Rows(*decodes), Rows(*prompts)


class FitStep(PlanInProgress):
    """load    what the iteration computes so far
    bound      estimated seconds that it may take
    seats, tokens  left in it
    """

    def __init__(
        self,
        view: SystemView,
        ledger: KvLedger,
        swap: bool,
        cost: StepCost,
        seats: int,
        tokens: int,
    ) -> None:
        super().__init__(view, ledger, StepPlan(), swap)
        self.cost = cost
        self.load = Load()
        self.bound = np.inf
        self.seats, self.tokens = seats, tokens
        self.granted: set[int] = set()  # prompts; only asked
        self.real_time: list[tuple[np.ndarray, np.ndarray]] = []
        self.best_effort: list[tuple[np.ndarray, np.ndarray]] = []

    # -- decodes -----------------------------------------------------------------------------------
    def grant_decodes(self, to: list, found: Rows) -> None:
        """They have their memory. to: `real_time` or `best_effort`."""
        if not len(found):
            return
        to.append((found.rows, found.left))  # one token each
        self.load.add_decodes(found.resident)
        self.seats -= len(found)
        self.tokens -= len(found)

    def reserve(self, found: Rows, sign: int = 1) -> None:
        """Time, seats and tokens for decodes whose memory comes later; sign=-1 gives them back."""
        lengths = found.resident.tolist()
        self.load.decodes += sign * len(found)
        self.load.context += sign * sum(lengths)
        self.load.longest = max(self.load.longest, *lengths, 0)
        self.seats -= sign * len(found)
        self.tokens -= sign * len(found)

    # -- prompts -----------------------------------------------------------------------------------
    def chunk(self, left: int, resident: int, least: int, load: Load, bound: float) -> int:
        """Return the tokens of a chunk with `load` that is neither shorter than `least`, but for
        the last of a prompt, nor too long for the bound; 0 if there is none."""
        most = min(left, self.tokens)
        if self.seats <= 0 or most < min(left, least):
            return 0
        new = self.cost.chunk(load, resident, most, bound)
        return new if new >= min(left, least) else 0

    def grant_chunk(self, to: list, row: int, new: int, resident: int) -> None:
        to.append((np.array([row]), np.array([new])))
        self.granted.add(row)
        self.load.add_chunk(new, resident)
        self.seats -= 1
        self.tokens -= new

    # -- memory ------------------------------------------------------------------------------------
    def hit(self, row: int) -> int:
        """Tokens of a row without memory that the prefix cache has."""
        return self.ledger.hit_tokens(row) if self.ledger.prefix_caching else 0

    def admit(self, row: int, new: int, hit: int, victims: np.ndarray) -> bool:
        """Memory for a chunk of a row that has none; `victims` (int64[n], in order) are dropped
        until there is some."""
        if not hit:
            return acquire(self, row, new, victims)
        if self.ledger.admit(row, hit + new, hit):
            self.plan.admitted.append((row, hit))
            return True
        return self._admit_for(row, new, hit, victims)

    def _admit_for(self, row: int, new: int, hit: int, victims: np.ndarray) -> bool:
        ledger = self.ledger
        victims = victims[self.view.requests.state[victims] == _RUNNING]
        victims = victims[self.keeps(victims)] if self.dropped else victims
        mark, lost = ledger.mark(), []
        for victim in victims.tolist():
            kind = Preemption.SWAP
            if not (self.swap and ledger.swap_out(victim)):
                kind = Preemption.RECOMPUTE
                ledger.drop(victim)
            lost.append((victim, kind))
            if ledger.admit(row, hit + new, hit):
                ledger.commit(mark)
                self.plan.admitted.append((row, hit))
                self.plan.preempted += lost
                self.dropped.update(victim for victim, _ in lost)
                return True
        ledger.rollback(mark)
        return False

    def promised_blocks(self, prompts: Rows) -> int:
        """Blocks that prompts which have been begun still need."""
        size, ledger = self.ledger.block_tokens, self.ledger
        known = (prompts.resident + prompts.left).tolist()
        return sum(
            max(0, -(-tokens // size) - ledger.held_blocks(row))
            for row, tokens in zip(prompts.rows.tolist(), known, strict=True)
            if row not in self.dropped
        )


@dataclass(slots=True)
class _Expected:
    """planned_s  when the plan was made; ahead: while the step before its own ran
    seconds       that its step should take
    """

    planned_s: float
    ahead: bool
    seconds: float


class Feedback:
    """factor: actual over estimated time of the iterations that compute prompts, an exponential
    mean. Those that only decode are not looked at: they never fill a bound, and whole runs of them
    are one plan."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.factor = 1.0
        self._expected: deque[_Expected] = deque()  # of plans whose outcome is to come

    def planned(self, now: float, ahead: bool, seconds: float) -> None:
        if self.weight and seconds > 0.0:
            self._expected.append(_Expected(now, ahead, seconds))

    def happened(self, outcome: StepOutcome) -> None:
        """An outcome belongs to the last plan that was made before its step began."""
        found = None
        while self._expected and _before(self._expected[0], outcome.start_s):
            found = self._expected.popleft()
        if found is not None and len(outcome.ends_s) == 1:
            ratio = float(outcome.seconds[0]) / found.seconds
            ratio = min(max(ratio, 1.0 / _WORST), _WORST)
            self.factor += self.weight * (ratio - self.factor)


def _before(expected: _Expected, start_s: float) -> bool:
    if expected.ahead:
        return expected.planned_s < start_s
    return expected.planned_s <= start_s
