"""A step of an engine, or a run of steps, during its execution."""

from dataclasses import dataclass

import numpy as np

from twinserve.backends.base import Executed
from twinserve.policies.plan import StepOutcome, StepPlan


@dataclass(slots=True)
class Step:
    """A plan that is being executed; running, waiting: requests, when it began. run_ends_s: ends of
    the run that it ends, if it does, its own the last."""

    plan: StepPlan
    executed: Executed
    running: int
    waiting: int
    run_ends_s: np.ndarray | None = None


class Run:
    """A run of steps before something cuts it. The end and the tokens of each step are known from
    its begin."""

    def __init__(self, executed: Executed) -> None:
        outcome = executed.outcome
        self._executed = executed
        self._ends_s, self._finished = outcome.ends_s, outcome.finished

    def following(self, plan: StepPlan, now: float, running: int, waiting: int) -> Step:
        """Return the step that follows the rest of the run, whose steps are booked."""
        before = self._executed.outcome
        done = len(before.ends_s)
        ends_s = self._ends_s[: done + 1]
        finished = self._finished if len(ends_s) == len(self._ends_s) else []
        outcome = StepOutcome(now, ends_s[done:], before.emitted, finished)
        return Step(plan, Executed(outcome, self._executed.work), running, waiting, ends_s)
