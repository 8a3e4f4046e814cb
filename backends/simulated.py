"""The simulated backend: executes a plan by asking a step-time model how long it takes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from twinserve.backends.base import Backend, Executed, Transfers
from twinserve.backends.counts import Counts, count, kind_of
from twinserve.backends.links import Computing, PcieLink
from twinserve.native.chosen import columns
from twinserve.policies.base import EngineLimits
from twinserve.policies.plan import DEVICE, HOST, Hold, KvMove, Preemption, StepOutcome, StepPlan
from twinserve.policies.requests import FIRST_ROWS, RequestTable
from twinserve.profiles.composition import (
    NO_PREFILLS,
    STEADY,
    AroundModel,
    Churn,
    StepComposition,
    StepTimeModel,
)


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

    def hidden_seconds(self, requests: int) -> float:
        return self.model.hidden_seconds(requests) * self.factor

    def allreduce_seconds(self, work: StepComposition) -> float:
        return self.model.allreduce_seconds(work) * self.factor


_BEFORE_STEP, _STEP, _REQUEST = Hold.BEFORE_STEP, Hold.STEP, Hold.REQUEST  # to look up once


class SimulatedBackend(Backend):
    """One engine's hardware: a step-time model, a PCIe link, and the true output lengths, which
    only it knows.

    layers      of the model, for moves that name layers
    fast        whether runs of identical steps are executed at once
    allreduces  seconds of a step's all-reduces by its composition, if they share the link
                (`links.allreduces_of`)
    layered     the ledger moves single layers
    cold_start_s  the first step takes so much longer
    """

    plans_ahead = True

    def __init__(
        self,
        requests: RequestTable,
        model: StepTimeModel,
        link: PcieLink,
        limits: EngineLimits,
        layers: int = 1,
        fast: bool = True,
        allreduces: Callable[[StepComposition], float] | None = None,
        layered: bool = False,
        cold_start_s: float = 0.0,
    ) -> None:
        self.requests = requests
        self.model = model
        self.link = link
        self.limits = limits
        self.layers = layers
        self.fast = fast
        self.allreduces = allreduces
        self.keeps_time = allreduces is None  # else what uses the link meanwhile delays them
        self.layered = layered
        self._cold_s = cold_start_s  # until the first step
        self.moved: Counts = {}  # all moves so far
        self._fetched: set[int] = set()  # rows whose first step is a decode, and is still to come
        self._outputs = np.zeros(FIRST_ROWS, np.int64)
        self.watches_churn = model.watches_churn
        # of the step before: rows, and whether they all decoded
        self._batch: tuple[list[int], bool] = ([], False)

    def expect(self, row: int, output_tokens: int) -> None:
        if row >= len(self._outputs):
            self._outputs = np.concatenate([self._outputs, np.zeros(len(self._outputs), np.int64)])
        self._outputs[row] = output_tokens

    def withdraw(self, row: int) -> None:
        """Nothing of it is here but its length, and that it was fetched."""
        self._fetched.discard(row)

    def fetched(self, row: int) -> None:
        self._fetched.add(row)

    def exposed_s(self, plan: StepPlan) -> float:
        return self.model.hidden_seconds(len(plan.rows))

    def fail(self, now: float) -> None:
        self.link.lose(now)

    def slow(self, factor: float) -> None:
        whole = self.model.model if isinstance(self.model, Slowed) else self.model
        self.model = whole if factor == 1.0 else Slowed(whole, factor)

    def execute(
        self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0
    ) -> Executed:
        rows = plan.rows
        work = self.composition(plan, emitting)
        moved = self.transfer(plan, now, overhead_s, work) if plan.moves else None
        start, beside = now + overhead_s, now
        if moved is not None:
            start, beside = max(start, moved.before), moved.beside
        emitted, left, least = columns.leaving(self.requests, rows, emitting, self._outputs)
        steps = plan.valid_for + 1 if self.fast else 1
        if steps > 1 and least:
            steps = min(steps, least)
        if steps == 1:
            seconds = [self.model.step_seconds(work)]
            if self._cold_s:
                self._warm_up(seconds)
            if self.allreduces is not None:
                self._delay(work, seconds, start, beside, overhead_s)
            ends = np.array([max(start + seconds[0], beside)])
        else:
            seconds = self._run_seconds(work, steps)
            self._warm_up(seconds)
            self._delay(work, seconds, start, beside, overhead_s)
            ends = self._ends(start, seconds, beside, overhead_s)
            if plan.valid_until_s < ends[-1]:
                steps = int(ends.searchsorted(plan.valid_until_s)) + 1
                ends = ends[:steps]
        finished = emitted[left == steps].tolist() if steps == least else []
        outcome = StepOutcome(now, ends, emitted, finished)
        if moved is None:
            return Executed(outcome, work)
        return Executed(
            outcome, work, moved.to_host_bytes, moved.to_device_bytes, moved.ready_s, moved.lands_s
        )

    def _run_seconds(self, work: StepComposition, steps: int) -> np.ndarray:
        """float64[steps]: of a run that begins with `work`."""
        if len(work.prefill_new):
            seconds = np.empty(steps)
            for i in range(steps):
                seconds[i] = self.model.step_seconds(work)
                work = _after(work, _GOING_ON if self.watches_churn else STEADY)
            return seconds
        seconds = self.model.decode_run_seconds(
            work.decode_requests, work.decode_context, work.decode_context_max, steps
        )
        # a request may also come back into an unchanged batch
        if self.watches_churn and work.churn != STEADY:
            seconds[0] = self.model.step_seconds(work)
        return seconds

    def _warm_up(self, seconds) -> None:
        """The first of the `seconds` is the engine's first step, if there was none before."""
        if self._cold_s:
            seconds[0] += self._cold_s
            self._cold_s = 0.0

    def _delay(
        self, work: StepComposition, seconds, start: float, beside: float, overhead_s: float
    ) -> None:
        """All-reduces on the link make steps longer while it is in use: the `seconds` of a run that
        begins with `work`."""
        if self.allreduces is None:
            return
        busy = self.link.free_at
        for i, alone in enumerate(seconds):
            if start >= busy:
                return
            if i:
                work = _after(work)
            seconds[i] = self.link.computing_seconds(start, float(alone), self.allreduces(work))
            end = start + float(seconds[i])
            start = (end if i else max(end, beside)) + overhead_s

    @staticmethod
    def _ends(start: float, seconds: np.ndarray, beside: float, overhead_s: float) -> np.ndarray:
        """When each step of a run ends. Added one by one, as single steps are: the sums must be the
        same floats."""
        parts = seconds.copy()
        if overhead_s:
            # (t + overhead) + seconds, step after step, not t + (overhead + seconds)
            parts = np.column_stack([np.full(len(seconds), overhead_s), seconds]).ravel()[1:]
        parts[0] = max(start + seconds[0], beside)
        return parts.cumsum()[::2] if overhead_s else parts.cumsum()

    def cut(self, executed: Executed, steps: int) -> None:
        outcome = executed.outcome
        if steps < len(outcome.ends_s):
            outcome.ends_s = outcome.ends_s[:steps]
            outcome.finished = []

    def composition(self, plan: StepPlan, emitting: np.ndarray) -> StepComposition:
        """The step as a step-time model sees it: decodes pooled, prefills one by one. To be asked
        once for each step."""
        work = self._pooled(plan, emitting)
        return replace(work, churn=self._churn(plan, work)) if self.watches_churn else work

    def _pooled(self, plan: StepPlan, emitting: np.ndarray) -> StepComposition:
        rows = plan.rows
        first: list[int] = []  # of those fetched, each decodes with its first step
        if self._fetched:
            first = [row for row in rows.tolist() if row in self._fetched]
            self._fetched.difference_update(first)
        found = columns.pooled(self.requests, rows, plan.tokens, emitting, first)
        if len(found) == 3:
            found = *found, NO_PREFILLS, NO_PREFILLS  # a default made by a call takes longer
        return StepComposition(*found)

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

    def transfer(
        self,
        plan: StepPlan,
        now: float,
        overhead_s: float = 0.0,
        work: StepComposition | None = None,
    ) -> Transfers:
        """Queue the transfers of `plan` at `now`. work: of the step that they are queued with,
        `overhead_s` after them; None: no step."""
        moves = plan.moves
        if not moves:
            return Transfers(0, 0, {}, {}, now, now)
        sizes = {HOST: 0, DEVICE: 0}
        ready: dict[int, float] = {}
        lands: dict[int, float] = {}
        before = beside = now
        step = (
            None
            if work is None or self.allreduces is None
            else self._computing(moves, now, overhead_s, work)
        )
        back = set(plan.swapped_in)  # asked for each move: a crowd brings back hundreds at a time
        for move in moves:
            size = self._bytes(move)
            end = self.link.transfer(now, size, move.source, move.target, step, move.hold is _STEP)
            sizes[move.target] += size
            count(
                self.moved,
                kind_of(move, self.requests.state[move.row], back, self.layered),
                move.target,
                size,
            )
            if move.hold is _BEFORE_STEP:
                before = max(before, end)
            elif move.hold is _STEP:
                beside = max(beside, end)
            else:
                lands[move.row] = max(lands.get(move.row, 0.0), end)
                if move.hold is _REQUEST:
                    ready[move.row] = max(ready.get(move.row, 0.0), end)
        return Transfers(sizes[HOST], sizes[DEVICE], ready, lands, before, beside)

    def _bytes(self, move: KvMove) -> int:
        size = move.tokens * self.limits.kv_bytes_per_token
        return size if move.layers is None else size * len(move.layers) // self.layers

    def _computing(
        self, moves: Sequence[KvMove], now: float, overhead_s: float, work: StepComposition
    ) -> Computing | None:
        """The step with `moves`: it begins when those that it waits for have landed, and nothing
        computes until then."""
        allreduce = self.allreduces(work)
        if not allreduce:
            return None
        start = now + overhead_s
        waited_for = [i for i, move in enumerate(moves) if move.hold is Hold.BEFORE_STEP]
        if waited_for:
            first = [(self._bytes(m), m.source, m.target) for m in moves[: waited_for[-1] + 1]]
            landings = self.link.landings(now, first)
            start = max(start, *[landings[i] for i in waited_for])
        return self.link.computing(start, self.model.step_seconds(work), allreduce)


_GOING_ON = Churn(changed=True)  # of a step with prompts that were in the one before


def _after(work: StepComposition, churn: Churn = STEADY) -> StepComposition:
    """The next step of a run."""
    n = work.decode_requests
    return StepComposition(
        n,
        work.decode_context + n,
        work.decode_context_max + 1 if n else 0,
        work.prefill_new,
        work.prefill_resident + work.prefill_new,
        churn,
    )
