"""The simulated backend: executes a plan by asking a step-time model how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..policies.base import EngineLimits
from ..policies.plan import Direction, Hold, KvMove, Preemption, StepOutcome, StepPlan
from ..policies.requests import RequestTable
from ..profiles.composition import STEADY, Churn, StepComposition, StepTimeModel
from .pcie import PcieLink


@dataclass(slots=True)
class Executed:
    """An outcome with what it consisted of: for the step records, and for holding back requests in transfer."""

    outcome: StepOutcome
    work: StepComposition
    to_host_bytes: int
    to_device_bytes: int
    ready_s: dict[int, float]  # rows that wait for a transfer -> when it lands


@dataclass(slots=True)
class Transfers:
    """What a plan's moves came to. Bytes; seconds on the engine's clock.

    ready_s  rows that wait for a transfer -> when it lands
    before   when the step may start
    beside   when the step may end at the earliest
    """

    to_host_bytes: int
    to_device_bytes: int
    ready_s: dict[int, float]
    before: float
    beside: float


class SimulatedBackend:
    """One engine's hardware: a step-time model, a PCIe link, and the true output lengths, which only it knows.

    layers: of the model, for moves that name layers. fast: whether runs of identical decode steps are executed at once.
    """

    def __init__(
        self,
        requests: RequestTable,
        model: StepTimeModel,
        link: PcieLink,
        limits: EngineLimits,
        layers: int = 1,
        fast: bool = True,
    ) -> None:
        self.requests = requests
        self.model = model
        self.link = link
        self.limits = limits
        self.layers = layers
        self.fast = fast
        self._outputs = np.zeros(1024, np.int64)
        self.watches_churn = getattr(model, "watches_churn", False)
        self._batch: tuple[list[int], bool] = ([], False)  # of the step before: rows, and whether they all decoded

    def expect(self, row: int, output_tokens: int) -> None:
        """The request in `row` will emit `output_tokens` tokens."""
        if row >= len(self._outputs):
            self._outputs = np.concatenate([self._outputs, np.zeros(len(self._outputs), np.int64)])
        self._outputs[row] = output_tokens

    def execute(self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0) -> Executed:
        """Run `plan` from `now` (seconds). `emitting`: bool[n], rows that emit. `overhead_s` comes before the step."""
        moved = self.transfer(plan.moves, now)
        start, beside = max(now + overhead_s, moved.before), moved.beside
        rows = plan.rows
        work = self.composition(plan, emitting)
        emitted = rows if np.count_nonzero(emitting) == len(rows) else rows[emitting]
        left = self._outputs[emitted] - self.requests.output_tokens[emitted]
        least = min(left.tolist(), default=0)
        steps = min(plan.valid_for + 1, least) if self.fast and plan.valid_for else 1
        if steps == 1:
            ends = np.array([max(start + self.model.step_seconds(work), beside)])
        else:
            seconds = self.model.decode_run_seconds(
                work.decode_requests, work.decode_context, work.decode_context_max, steps
            )
            if work.churn != STEADY:  # a request may also come back beside an unchanged batch
                seconds[0] = self.model.step_seconds(work)
            ends = self._ends(start, seconds, beside, overhead_s)
            if plan.valid_until_s < ends[-1]:
                steps = int(ends.searchsorted(plan.valid_until_s)) + 1
                ends = ends[:steps]
        finished = emitted[left == steps].tolist() if steps == least else []
        outcome = StepOutcome(now, ends, emitted, finished)
        return Executed(outcome, work, moved.to_host_bytes, moved.to_device_bytes, moved.ready_s)

    @staticmethod
    def _ends(start: float, seconds: np.ndarray, beside: float, overhead_s: float) -> np.ndarray:
        """When each step of a run ends. Added one by one, as single steps are: the sums must be the same floats."""
        parts = seconds.copy()
        if overhead_s:
            # (t + overhead) + seconds, step after step, not t + (overhead + seconds)
            parts = np.column_stack([np.full(len(seconds), overhead_s), seconds]).ravel()[1:]
        parts[0] = max(start + seconds[0], beside)
        return parts.cumsum()[::2] if overhead_s else parts.cumsum()

    def cut(self, executed: Executed, steps: int) -> None:
        """Only the first `steps` steps of a run happened: something arrived."""
        outcome = executed.outcome
        if steps < len(outcome.ends_s):
            outcome.ends_s = outcome.ends_s[:steps]
            outcome.finished = []

    def composition(self, plan: StepPlan, emitting: np.ndarray) -> StepComposition:
        """The step as a step-time model sees it: decodes pooled, prefills one by one. To be asked once for each step."""
        work = self._pooled(plan, emitting)
        return replace(work, churn=self._churn(plan, work)) if self.watches_churn else work

    def _pooled(self, plan: StepPlan, emitting: np.ndarray) -> StepComposition:
        requests, rows = self.requests, plan.rows
        resident = requests.computed_tokens[rows]
        if plan.valid_for:
            return _decodes(resident)
        decode = emitting & (plan.tokens == 1) & (requests.output_tokens[rows] > 0)
        if np.count_nonzero(decode) == len(rows):
            return _decodes(resident)
        prefill = ~decode
        return _decodes(resident[decode], plan.tokens[prefill], resident[prefill])

    def _churn(self, plan: StepPlan, work: StepComposition) -> Churn:
        batch = sorted(plan.rows.tolist()), not len(work.prefill_new)
        changed = batch != self._batch or not batch[1]
        self._batch = batch
        computed = self.requests.computed_tokens
        out = [row for row, kind in plan.preempted if kind is Preemption.SWAP]
        back = plan.swapped_in
        return Churn(
            len(plan.admitted) + len(back),
            len(out),
            len(back),
            sum(computed[out].tolist()) if out else 0,
            sum(computed[back].tolist()) if back else 0,
            bool(changed or out),
        )

    def transfer(self, moves: list[KvMove], now: float) -> Transfers:
        """Queue transfers at `now`."""
        if not moves:
            return Transfers(0, 0, {}, now, now)
        sizes = {Direction.TO_HOST: 0, Direction.TO_DEVICE: 0}
        ready: dict[int, float] = {}
        before = beside = now
        for move in moves:
            size = move.tokens * self.limits.kv_bytes_per_token
            if move.layers is not None:
                size = size * len(move.layers) // self.layers
            sizes[move.direction] += size
            end = self.link.transfer(now, size, move.direction)
            if move.hold is Hold.BEFORE_STEP:
                before = max(before, end)
            elif move.hold is Hold.STEP:
                beside = max(beside, end)
            elif move.hold is Hold.REQUEST:
                ready[move.row] = max(ready.get(move.row, 0.0), end)
        return Transfers(sizes[Direction.TO_HOST], sizes[Direction.TO_DEVICE], ready, before, beside)


def _decodes(resident: np.ndarray, *prefills: np.ndarray) -> StepComposition:
    """Decodes with so many resident tokens each, beside `prefills` (new and resident tokens, int64[p] each)."""
    tokens = resident.tolist()  # for the length of a batch, plain sums are faster than numpy's
    return StepComposition(len(tokens), sum(tokens), max(tokens, default=0), *prefills)
