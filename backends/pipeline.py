"""Pipeline stages: a batch goes through one after another, and each works on one at a time."""

import numpy as np

from twinserve.backends.base import Executed
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import FIRST_ROWS
from twinserve.profiles.forms.pipeline import PipelineModel


class PipelineBackend(SimulatedBackend):
    """A batch begins on a stage when the batch before it has left that, and its activations have
    come from the stage before. They are sent during the next batch's work. The host prepares one
    batch at a time, before the first stage and during the work of all. A batch planned ahead begins
    when the last stage has given the tokens that it goes on from; their way back is left out, a few
    bytes."""

    model: PipelineModel

    def __init__(self, requests, model: PipelineModel, link, limits, **more) -> None:
        super().__init__(requests, model, link, limits, **more)
        self._free_s = [0.0] * (1 + len(model.stages))  # of the host, then of each stage
        self._known_s = np.zeros(FIRST_ROWS)  # by row: when its last token was
        self._slowdown = 1.0

    def expect(self, row: int, output_tokens: int) -> None:
        super().expect(row, output_tokens)
        if row >= len(self._known_s):
            self._known_s = np.concatenate([self._known_s, np.zeros_like(self._known_s)])

    def slow(self, factor: float) -> None:
        """Of batches that begin from now on: host, stages and transfers alike."""
        self._slowdown = factor

    def execute(
        self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0
    ) -> Executed:
        work = self.composition(plan, emitting)
        model, free, slowdown = self.model, self._free_s, self._slowdown
        parts = (model.step_host_seconds(work), *model.stage_seconds(work))
        seconds = [slowdown * part for part in parts]
        self._warm_up(seconds)
        sent = slowdown * model.transfer_seconds(work.new_tokens)
        at = max(now + overhead_s, self._known_s[plan.rows].max())
        for i, taken in enumerate(seconds):
            free[i] = end = max(at, free[i]) + taken
            at = end + sent if i else end
        emitted = plan.rows[emitting]
        self._known_s[emitted] = free[-1]
        left = self._outputs[emitted] - self.requests.output_tokens[emitted]
        outcome = StepOutcome(now, np.array([free[-1]]), emitted, emitted[left == 1].tolist())
        return Executed(outcome, work, 0, 0, {}, {})
