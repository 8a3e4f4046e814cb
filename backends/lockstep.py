"""Data-parallel ranks that share experts: they meet in every layer, so no rank starts a step before
all have ended theirs, and a rank's experts work on the tokens of all."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from twinserve.backends.base import Executed
from twinserve.backends.simulated import SimulatedBackend
from twinserve.profiles.composition import StepComposition, StepTimeModel


class RankModel(Protocol):
    """Step times of a rank among others with as many tokens each: the roofline, operator tables."""

    def step_seconds(self, work: StepComposition) -> float: ...

    def token_seconds(self, tokens: float) -> float:
        """The part of a step that depends on the tokens of all ranks, if each has so many."""
        ...


class SharedExperts(StepTimeModel):
    """One rank: `model` is of ranks with as many tokens each; `others` says how many the others
    bring to the step. The mean over ranks stands for all; where tables do not tell experts from
    projections, for these too: they are a small part. whole: the mean is rounded, as tables are of
    whole tokens."""

    def __init__(self, model: RankModel, whole: bool = False) -> None:
        self.model, self.whole = model, whole
        self.others: list[int] = []

    def step_seconds(self, work: StepComposition) -> float:
        own = work.new_tokens
        mean = (own + sum(self.others)) / (1 + len(self.others))
        if self.whole:
            mean = round(mean)
        return (
            self.model.step_seconds(work)
            + self.model.token_seconds(mean)
            - self.model.token_seconds(own)
        )

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        works = (StepComposition(n, context + n * j, context_max + j) for j in range(steps))
        return np.array([self.step_seconds(work) for work in works])


# start, end (seconds), tokens and decodes of each rank's latest step
Steps = dict[int, tuple[float, float, int, int]]


class LockstepBackend(SimulatedBackend):
    """A rank of a group, to be made with a model of SharedExperts and without runs of steps, which
    would not wait for the others.

    It waits for steps that began before it could, and joins those that begin now; one without work
    is not waited for. Of a rank that it waits for, the next step is not known yet: its decodes go
    on. A step ends when its own work is done, and not when the longest rank's is: the others are
    waited for before the next one.
    """

    model: SharedExperts
    steps: Steps
    rank: int

    def join(self, steps: Steps) -> None:
        """Become the next rank of a group. steps: shared by all of them."""
        self.rank, self.steps = len(steps), steps
        steps[self.rank] = (0.0, 0.0, 0, 0)

    def execute(self, plan, emitting, now: float, overhead_s: float = 0.0) -> Executed:
        others = [step for rank, step in self.steps.items() if rank != self.rank]
        start = max([now + overhead_s, *(end for began, end, *_ in others if began < now)])
        self.model.others = [
            (tokens if began >= now else decodes) if end >= now else 0
            for began, end, tokens, decodes in others
        ]
        executed = super().execute(plan, emitting, now, start - now)
        work, end = executed.work, float(executed.outcome.ends_s[-1])
        self.steps[self.rank] = (start, end, work.new_tokens, work.decode_requests)
        return executed

    def fail(self, now: float) -> None:
        """Nobody waits for it any more."""
        super().fail(now)
        self.steps[self.rank] = (0.0, 0.0, 0, 0)
