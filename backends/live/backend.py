"""The live backend: executes a plan by having a vLLM engine do it, and measures how long that takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from ...policies.plan import Direction, Preemption, StepOutcome, StepPlan
from ...policies.requests import RequestTable, State
from ...profiles.composition import StepComposition
from ..simulated import Executed, SimulatedBackend, Transfers
from .engine import VllmEngine
from .physical_layout import PhysicalMemory
from .planned import PlannedStep
from .prompts import PromptTexts
from .versions import LiveEngineError


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One live step: what it computed, seconds measured, and what the profile's step-time model says of it.

    off_core_s      of these, seconds in which this thread had no core; other programs had it, or a GPU was waited for
    physical_moves  KV went over the link in this step
    """

    start_s: float
    work: StepComposition
    measured_s: float
    off_core_s: float
    predicted_s: float
    physical_moves: bool

    @property
    def prefill_tokens(self) -> int:
        return int(self.work.prefill_new.sum())


class LiveBackend:
    """Stands where SimulatedBackend stands. `twin` predicts; `engine` acts.

    texts   token ids of the prompts
    pace    seconds on the clock that paces the run, e.g. time.monotonic less its value at the start; None: the clock
            runs on measured step times alone, and idle time costs nothing
    """

    def __init__(
        self, requests: RequestTable, engine: VllmEngine, twin: SimulatedBackend, texts: PromptTexts, pace=None
    ) -> None:
        self.requests = requests
        self.engine = engine
        self.twin = twin
        twin.watches_churn = True  # steps are recorded with it, whether or not the model knows what it costs
        self.texts = texts
        self.pace = pace
        self.steps: list[TimedStep] = []
        self.transfers: list[tuple[Direction, int, float]] = []  # bytes and seconds of each copy that was made
        self.on_answer = lambda answer: None
        self._holds: dict[str, int] = {}  # id -> row, of requests that hold memory on the engine
        self._coming: set[str] = set()  # swapped in on paper, not granted yet; only asked, never walked through
        self._rows: dict[str, int] = {}
        self._logprobs: int | None = None
        self.memory: PhysicalMemory | None = None
        self.predicted = False  # True: steps take as long as `twin` says, whatever the engine needs

    def lay_out(self, ledger) -> None:
        """From now on KV lies where `ledger` says (for an engine that was built for it). Raises LiveEngineError for a
        ledger without a layout of its own."""
        self.memory = PhysicalMemory(ledger)

    def expect(self, row: int, output_tokens: int) -> None:
        """The request in `row` was submitted: hand it to the engine."""
        self.twin.expect(row, output_tokens)
        requests = self.requests
        name, prompt = requests.ids[row], int(requests.prompt_tokens[row])
        self._rows[name] = row
        self.engine.submit(
            name,
            self.texts.tokens(name, prompt, requests.prefix[row]),
            output_tokens,
            float(requests.arrival_s[row]),
            self._logprobs,
        )

    def record_logprobs(self, best: int) -> None:
        """Ask the engine for the log probabilities of the `best` tokens of every output (before any request)."""
        self._logprobs = best

    def execute(self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0) -> Executed:
        """Run `plan` on the engine. `emitting`: bool[n]. `overhead_s` counts only where no wall clock paces the run."""
        ids = self.requests.ids
        twin = self.twin.execute(plan, emitting, now, overhead_s) if self.predicted else None
        # accounted bytes; what the engine really moves is measured with it
        moved = twin or self.twin.transfer(plan.moves, now, plan.swapped_in)
        work = twin.work if twin else self.twin.composition(plan, emitting)
        planned = self.planned(plan)
        if self.memory is not None:
            planned = replace(planned, layout=self.memory.step(plan))
        room = self.engine.settings.max_step_tokens
        if plan.tokens.sum() > room:
            raise LiveEngineError(
                f"a step of {plan.tokens.sum()} tokens was planned, and the engine was built for {room}: give the policy a "
                "token limit or chunk"
            )
        on_core, started = time.thread_time(), time.perf_counter()
        answer = self.engine.step(planned)
        seconds = time.perf_counter() - started
        off_core = max(seconds - (time.thread_time() - on_core), 0.0)
        for name in answer.finished:
            del self._holds[name]
        rows = plan.rows[emitting]
        emitted = {name for name, tokens in answer.tokens.items() if tokens}
        if emitted != {ids[row] for row in rows.tolist()}:
            odd = sorted(emitted ^ {ids[row] for row in rows.tolist()})
            raise LiveEngineError(f"the engine emitted other tokens than planned: {', '.join(odd[:3])} ({self.drift()})")
        predicted = self.twin.model.step_seconds(work)
        physical = self._moves(planned)
        self.steps.append(TimedStep(now, work, seconds, off_core, predicted, physical))
        for report in answer.transfers:
            self.transfers.append((report.direction, report.nbytes, report.seconds))
        self.on_answer(answer)
        end = now + overhead_s + seconds if self.pace is None else max(self.pace(), np.nextafter(now, np.inf))
        finished = [self._rows.pop(name) for name in answer.finished]
        outcome = StepOutcome(now, np.array([end]), rows, [row for row in plan.rows.tolist() if row in set(finished)])
        if twin is not None:
            if set(twin.outcome.finished) != set(finished):
                raise LiveEngineError(f"the engine ended other requests than predicted ({self.drift()})")
            return twin
        return Executed(outcome, work, moved.to_host_bytes, moved.to_device_bytes, {})

    def planned(self, plan: StepPlan) -> PlannedStep:
        """`plan` under the engine's ids. Memory that plans without a step took away is taken with this one."""
        requests, ids = self.requests, self.requests.ids
        preempted = {ids[row]: kind for row, kind in plan.preempted if ids[row] in self._holds}
        # A plan without a step may have taken memory that this one gives back.
        preempted |= {ids[row]: Preemption.RECOMPUTE for row, _ in plan.admitted if ids[row] in self._holds}
        preempted |= {ids[row]: Preemption.SWAP for row in plan.swapped_in if ids[row] in self._holds}
        for name, row in self._holds.items():
            if requests.state[row] != State.RUNNING and name not in preempted:
                preempted[name] = Preemption.SWAP if requests.state[row] == State.SWAPPED else Preemption.RECOMPUTE
        if self.memory is None and not self.engine.settings.swap_blocks and Preemption.SWAP in preempted.values():
            raise LiveEngineError("the policy swaps, but the engine was built without host memory: give it --host-blocks")
        for name in preempted:
            del self._holds[name]
        # A row may come back some steps before it is granted anything; its KV then comes with the first grant.
        self._coming |= {ids[row] for row in plan.swapped_in}
        granted = [ids[row] for row in plan.rows.tolist()]
        swapped_in = tuple(name for name in granted if name in self._coming)
        self._coming.difference_update(granted)
        self._coming.difference_update(ids[row] for row, _ in plan.preempted)
        hits = {ids[row]: hit for row, hit in plan.admitted}
        for row in plan.rows.tolist():
            self._holds[ids[row]] = row
        return PlannedStep(plan.named(ids), hits, tuple(preempted.items()), swapped_in)

    @staticmethod
    def _moves(planned: PlannedStep) -> bool:
        """Whether the engine copies KV in this step."""
        if planned.layout is not None:
            return planned.layout.moves
        return bool(planned.swapped_in) or any(kind is Preemption.SWAP for _, kind in planned.preempted)

    def transfer(self, moves, now: float) -> Transfers:
        """Moves of a plan without a step: accounted; the engine makes them with the next step."""
        if self.memory is not None:
            self.memory.follow(moves)
        moved = self.twin.transfer(moves, now)
        if self.predicted:
            return moved
        moved.ready_s = {}
        moved.before = moved.beside = now
        return moved

    def cut(self, executed: Executed, steps: int) -> None:
        """Live steps come one by one; there is no run to cut."""

    def drift(self) -> str:
        """One line: in how many steps the engine did something else than planned."""
        scheduler = self.engine.scheduler
        first = f"; {scheduler.first_drift}" if scheduler.first_drift else ""
        return f"drift {scheduler.drift} of {scheduler.steps} steps{first}"
