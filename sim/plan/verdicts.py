"""Three answers: an objective is met, failed, or not decided by what was run.

Requests of one run depend on each other: a burst makes many of them late at once. So a share of
kept requests is judged by parts of the run, WINDOWS of each, and by draws, not by requests: the
ratio of two sums over parts, with Student's interval for it. Parts still depend on their neighbours
where a queue lasts longer than one of them, and the interval is too narrow then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from twinserve.sim.plan.trial import Trial
from twinserve.sim.results.options import Objective

Answer = Literal["meets", "fails", "undecided"]
# Student's t, two-sided, 95 %, by degrees of freedom (no scipy here: loading it takes as long as a
# trial); between two of them the larger one.
_STUDENT = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 15: 2.131, 19: 2.093, 24: 2.064, 29: 2.045, 39: 2.023, 49: 2.010,
    59: 2.001, 79: 1.990, 99: 1.984,
}  # fmt: skip


@dataclass(frozen=True)
class Attained:
    """An objective over all draws of a size. share: of the requests, low and high: its 95 %
    interval; value_s: what the asked share of the recorded draw keeps, None where some never ended;
    slack: how far that is below the bound, as a share of it, negative where it is above."""

    objective: Objective
    share: float
    low: float
    high: float
    value_s: float | None
    answer: Answer

    @property
    def slack(self) -> float | None:
        """Of objectives with one bound for all; None where it grows with the prompt."""
        if self.value_s is None or self.objective.prefills:
            return None
        return 1.0 - self.value_s / self.objective.bound_s


def attained(objectives: Sequence[Objective], draws: Sequence[Trial]) -> tuple[Attained, ...]:
    """Of trials that ran to their end, the recorded draw first; objectives that no request has are
    left out."""
    found = []
    for i, objective in enumerate(objectives):
        kept = [trial.objectives[i] for trial in draws]
        parts = [part for one in kept for part in one.windows if part[0]]
        if not parts:
            continue
        share, half = ratio(parts)
        low, high = max(share - half, 0.0), min(share + half, 1.0)
        needs = objective.share or 0.0
        answer: Answer = "meets" if low >= needs else "fails" if high < needs else "undecided"
        found.append(Attained(objective, share, low, high, kept[0].value_s, answer))
    return tuple(found)


def together(found: Sequence[Attained]) -> Answer:
    """Of all objectives: all are met, one has failed, or neither is known."""
    answers = {one.answer for one in found}
    return "fails" if "fails" in answers else "undecided" if "undecided" in answers else "meets"


def ratio(parts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(kept / due over all parts, half width of its 95 % interval; infinite of a single part)."""
    due, kept = sum(n for n, _ in parts), sum(k for _, k in parts)
    share, count = kept / due, len(parts)
    if count < 2:
        return share, math.inf
    squares = sum((k - share * n) ** 2 for n, k in parts)
    return share, student(count - 1) * math.sqrt(count / (count - 1) * squares) / due


def student(freedom: int) -> float:
    """The table's value at the next smaller number of degrees of freedom."""
    return _STUDENT[max(n for n in _STUDENT if n <= freedom)]
