"""Data-parallel ranks that share experts. They meet in every layer: no rank starts a step before
all have ended theirs, and a rank's experts work on the tokens of all."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twinserve.backends.base import Executed
from twinserve.backends.simulated import SimulatedBackend
from twinserve.errors import TwinserveError
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


class RankError(TwinserveError, RuntimeError):
    """A rank is to step without another one that failed."""


@dataclass
class RankGroup:
    """Data-parallel ranks that step together: those that were started as one, with experts on all.

    name   of their profile
    steps  start, end (seconds), tokens and decodes of each rank's latest step
    failed rank -> when it failed (seconds)
    """

    name: str
    steps: dict[int, tuple[float, float, int, int]] = field(default_factory=dict)
    failed: dict[int, float] = field(default_factory=dict)

    def check(self) -> None:
        """RankError, one line, if a rank has failed: the others wait for it in every layer."""
        if not self.failed:
            return
        rank, when = min(self.failed.items(), key=lambda entry: entry[1])
        raise RankError(
            f"{self.name}: rank {rank} of {len(self.steps)} failed at {when:.6f} s, and the others "
            "cannot step without its experts; let all ranks of the group fail at once"
        )


class LockstepBackend(SimulatedBackend):
    """A rank of a group, to be made with a model of SharedExperts and without runs of steps, which
    would not wait for the others.

    It waits for steps that began before it could, and joins those that begin now; one without work
    is not waited for. Of a rank that it waits for, the next step is not known yet: its decodes go
    on. A step ends when its own work is done, and not when the longest rank's is: the others are
    waited for before the next one. After a rank has failed no other one begins a step; one under
    way ends.
    """

    model: SharedExperts
    group: RankGroup
    rank: int

    def join(self, group: RankGroup) -> None:
        """Become the next rank of a group."""
        self.rank, self.group = len(group.steps), group
        group.steps[self.rank] = (0.0, 0.0, 0, 0)

    def execute(self, plan, emitting, now: float, overhead_s: float = 0.0) -> Executed:
        self.group.check()
        others = [step for rank, step in self.group.steps.items() if rank != self.rank]
        start = max([now + overhead_s, *(end for began, end, *_ in others if began < now)])
        self.model.others = [
            (tokens if began >= now else decodes) if end >= now else 0
            for began, end, tokens, decodes in others
        ]
        executed = super().execute(plan, emitting, now, start - now)
        work, end = executed.work, float(executed.outcome.ends_s[-1])
        self.group.steps[self.rank] = (start, end, work.new_tokens, work.decode_requests)
        return executed

    def fail(self, now: float) -> None:
        super().fail(now)
        self.group.failed[self.rank] = now
