"""Data-parallel ranks that share experts: they meet in every layer, so no rank starts a step before
all have ended theirs, and a rank's experts work on the tokens of all."""

from __future__ import annotations

import numpy as np

from twinserve.backends.base import Executed
from twinserve.backends.links import PcieLink
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.kv.base import KvLedger
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.operators.model import OperatorModel
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import BackendOf


class SharedExperts(StepTimeModel):
    """One rank: the tables are for ranks with as many tokens each; `others` says
    how many the others bring to the step. The mean over ranks stands for all, for projections too:
    they are a small part."""

    def __init__(self, model: OperatorModel) -> None:
        self.model = model
        self.others: list[int] = []

    def step_seconds(self, work: StepComposition) -> float:
        own = work.new_tokens
        mean = round((own + sum(self.others)) / (1 + len(self.others)))
        return (
            self.model.step_seconds(work)
            + self.model.token_seconds(mean)
            - self.model.token_seconds(own)
        )

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        works = (StepComposition(n, context + n * j, context_max + j) for j in range(steps))
        return np.array([self.step_seconds(work) for work in works])


class LockstepBackend(SimulatedBackend):
    """`steps` is shared by the ranks: start, end (seconds), tokens and decodes of each one's latest
    step. A rank waits for steps that began before it could, and joins those that begin now; one
    without work is not waited for. Of a rank that it waits for, the next step is not known yet: its
    decodes go on."""

    steps: dict[int, tuple[float, float, int, int]]
    rank: int

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


def lockstep() -> BackendOf:
    """Makes the backends of one simulation whose replicas are expert-parallel ranks."""
    steps: dict[int, tuple[float, float, int, int]] = {}

    def backend(inputs: Inputs, spec, policy, ledger: KvLedger) -> SimulatedBackend:
        hardware = inputs.hardware
        rank = LockstepBackend(
            ledger.table,
            SharedExperts(hardware.model),
            PcieLink(hardware.profile.pcie_bytes_per_s),
            hardware.limits,
            layers=hardware.profile.llm.layers,
            fast=False,  # a run of steps would not wait for the others
        )
        rank.rank, rank.steps = len(steps), steps
        steps[rank.rank] = (0.0, 0.0, 0, 0)
        return rank

    return backend
