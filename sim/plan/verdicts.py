"""Three answers: an objective is met, failed, or not decided by these runs.

Requests of one run depend on each other: a burst delays many at once. So a share of kept requests
is judged by ten parts of each run, and by draws. It is the ratio of two sums over parts, with
Student's interval for it. Parts still depend on their neighbours if a queue outlasts one of them;
the interval is then too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from twinserve.sim.plan.trial import Trial
from twinserve.sim.results.options import Objective
from twinserve.sim.results.parts import ratio

Answer = Literal["meets", "fails", "undecided"]


@dataclass(frozen=True)
class Attained:
    """An objective over all draws of a size. share: of the requests; low, high: its 95 % interval;
    value_s: what the asked share of the recorded draw keeps, None if some never ended; slack: how
    far that is below the bound, as a share of it, negative above the bound."""

    objective: Objective
    share: float
    low: float
    high: float
    value_s: float | None
    answer: Answer

    @property
    def slack(self) -> float | None:
        """Return how far below the bound the objective stays, if one bound holds for all requests.
        None if the bound grows with the prompt."""
        if self.value_s is None or self.objective.prefills:
            return None
        return 1.0 - self.value_s / self.objective.bound_s


def attained(objectives: Sequence[Objective], draws: Sequence[Trial]) -> tuple[Attained, ...]:
    """Return the objectives over trials that ran to their end, the recorded draw first. Objectives
    that no request has are left out."""
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
    """Return one verdict for all objectives: all are met, one has failed, or neither is known."""
    answers = {one.answer for one in found}
    return "fails" if "fails" in answers else "undecided" if "undecided" in answers else "meets"
