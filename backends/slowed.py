"""A step-time model whose steps take longer: hardware that is hot, shared, or about to fail."""

from __future__ import annotations

import numpy as np

from twinserve.profiles.composition import AroundModel, StepComposition, StepTimeModel


class Slowed(AroundModel):
    """`model`, each of whose steps takes `factor` times as long, the host's part too."""

    def __init__(self, model: StepTimeModel, factor: float) -> None:
        super().__init__(model)
        self.factor = factor

    def step_seconds(self, work: StepComposition) -> float:
        return self.model.step_seconds(work) * self.factor

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        return self.model.decode_run_seconds(n, context, context_max, steps) * self.factor

    def host_seconds(self, requests: int) -> float:
        return self.model.host_seconds(requests) * self.factor

    def allreduce_seconds(self, work: StepComposition) -> float:
        return self.model.allreduce_seconds(work) * self.factor
