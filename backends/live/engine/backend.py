"""The live backend: has a vLLM engine execute plans, and measures how long that takes."""

import time
from dataclasses import dataclass, replace

import numpy as np

from twinserve.backends.base import Backend, Executed, Transfers
from twinserve.backends.counts import Counts
from twinserve.backends.live.engine.engine import StepAnswer, VllmEngine
from twinserve.backends.live.engine.planned import EngineRequests
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.physical.layers import LayerMemory
from twinserve.backends.live.physical.layout import PhysicalMemory
from twinserve.backends.live.versions import LiveEngineError
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.plan import Place, Preemption, StepOutcome, StepPlan, Verified
from twinserve.policies.requests import RequestTable
from twinserve.profiles.composition import StepComposition


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One live step: what it computed, seconds measured, and what the profile's step-time model
    says of it.

    off_core_s      of these, seconds in which this thread had no core; other programs had it, or a
                    GPU was waited for
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

    def row(self) -> dict:
        """Return the step as a row of a table."""
        return {
            "start_s": self.start_s,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "off_core_s": self.off_core_s,
            "prefill_tokens": self.prefill_tokens,
            "decode_requests": self.work.decode_requests,
            "moved": self.physical_moves,
        }


class LiveBackend(Backend):
    """`twin` predicts; `engine` acts.

    With asynchronous scheduling the engine has done its step when the next plan is made. That plan
    sees what it would see if the step were under way, so decisions and memory are those of an
    engine that does both at once; the time that this saves is not in what is measured.

    texts   token ids of the prompts
    pace    seconds on the clock that paces the run, e.g. time.monotonic less its value at the
            start; None: the clock runs on measured step times alone, and idle time costs nothing
    """

    plans_ahead = True

    def __init__(
        self,
        requests: RequestTable,
        engine: VllmEngine,
        twin: SimulatedBackend,
        texts: PromptTexts,
        pace=None,
    ) -> None:
        self.requests = requests
        self.engine = engine
        self.twin = twin
        # steps are recorded with it, whether or not the model knows what it costs
        twin.watches_churn = True
        self.texts = texts
        self.pace = pace
        self.steps: list[TimedStep] = []
        # of each copy that was made: where to, bytes, seconds
        self.transfers: list[tuple[Place, int, float]] = []
        self.on_answer = lambda answer: None
        self._on_engine = EngineRequests(requests.ids)
        self._rows: dict[str, int] = {}
        self.expected: dict[str, int] = {}  # request id -> tokens that its answer is to have
        self.memory: PhysicalMemory | LayerMemory | None = None
        self.predicted = False  # True: steps take as long as `twin` says, whatever the engine needs

    @property
    def moved(self) -> Counts:
        """Return all moves so far, as the ledger accounts for them."""
        return self.twin.moved

    def lay_out(self, ledger) -> None:
        """From now on KV lies where `ledger` says (for an engine that was built for it). Raises
        LiveEngineError for a ledger without a layout of its own."""
        layered = isinstance(ledger, LayerwiseLedger)
        staging = self.engine.settings.staging
        self.memory = LayerMemory(ledger, staging) if layered else PhysicalMemory(ledger)

    def expect(self, row: int, output_tokens: int) -> None:
        """The request in `row` was submitted: hand it to the engine."""
        self.twin.expect(row, output_tokens)
        requests = self.requests
        name, prompt = requests.ids[row], int(requests.prompt_tokens[row])
        self._rows[name], self.expected[name] = row, output_tokens
        self.engine.submit(
            name,
            self.texts.tokens(name, prompt, requests.prefix[row]),
            output_tokens,
            float(requests.arrival_s[row]),
        )

    def withdraw(self, row: int) -> None:
        """Free the request's memory, host copies too. Nothing happens if the engine has already
        done the step that ends the request (asynchronous scheduling)."""
        name = self.requests.ids[row]
        if self._rows.pop(name, None) is None:
            return
        self._on_engine.forget(name)
        self.engine.abort(name)

    def execute(
        self, plan: StepPlan, emitting: np.ndarray, now: float, overhead_s: float = 0.0
    ) -> Executed:
        """Run `plan` on the engine. `emitting`: bool[n]. `overhead_s`: only without wall clock."""
        ids = self.requests.ids
        planned = self._on_engine.of_plan(plan)
        if self.memory is not None:
            planned = replace(planned, layout=self.memory.step(plan))
        elif (
            not self.engine.settings.swap_blocks
            and Preemption.SWAP in dict(planned.preempted).values()
        ):
            raise LiveEngineError(
                "the policy swaps, but the engine was built without host memory: give it "
                "--host-blocks"
            )
        room = self.engine.settings.max_step_tokens
        if plan.tokens.sum() > room:
            raise LiveEngineError(
                f"a step of {plan.tokens.sum()} tokens was planned, and the engine was built for "
                f"{room}: give the policy a "
                "token limit or chunk"
            )
        on_core, started = time.thread_time(), time.perf_counter()
        answer = self.engine.step(planned)
        seconds = time.perf_counter() - started
        off_core = max(seconds - (time.thread_time() - on_core), 0.0)
        for name in answer.finished:
            self._on_engine.forget(name)
        rows = plan.rows[emitting]
        emitted = {name for name, tokens in answer.tokens.items() if tokens}
        if emitted != {ids[row] for row in rows.tolist()}:
            odd = sorted(emitted ^ {ids[row] for row in rows.tolist()})
            raise LiveEngineError(
                f"the engine emitted other tokens than planned: {', '.join(odd[:3])} "
                f"({self.drift()})"
            )
        verified = self.verified(plan.tokens[emitting], rows, answer)
        twin = self.twin.execute(plan, emitting, now, overhead_s) if self.predicted else None
        # accounted bytes; what the engine really moves is measured with it
        moved = twin or self.twin.transfer(plan, now)
        work = twin.work if twin else self.twin.composition(plan, emitting)
        predicted = self.twin.model.step_seconds(work)
        self.steps.append(TimedStep(now, work, seconds, off_core, predicted, planned.moves))
        for report in answer.transfers:
            self.transfers.append((report.target, report.nbytes, report.seconds))
        self.on_answer(answer)
        end = (
            now + overhead_s + seconds
            if self.pace is None
            else max(self.pace(), np.nextafter(now, np.inf))
        )
        finished = [self._rows.pop(name) for name in answer.finished]
        outcome = StepOutcome(
            now,
            np.array([end]),
            rows,
            [row for row in plan.rows.tolist() if row in set(finished)],
            verified,
        )
        if twin is not None:
            if set(twin.outcome.finished) != set(finished):
                raise LiveEngineError(
                    f"the engine ended other requests than predicted ({self.drift()})"
                )
            return twin
        return Executed(outcome, work, moved.to_host_bytes, moved.to_device_bytes, {}, {})

    def verified(
        self, granted: np.ndarray, rows: np.ndarray, answer: StepAnswer
    ) -> Verified | None:
        """What the step made of drafts, of the `rows` that emit and were granted so many tokens,
        before it is booked; None of an engine that has none."""
        return None

    def transfer(self, plan: StepPlan, now: float) -> Transfers:
        """Account for a plan without a step. The engine carries it out with the next step, so the
        next plan is made at once: nothing else may come that would ask for one."""
        self._on_engine.follow(plan.preempted, plan.admitted, plan.swapped_in)
        if self.memory is not None:
            self.memory.follow(plan.moves)
        moved = self.twin.transfer(plan, now)
        if self.predicted:
            return moved
        moved.ready_s, moved.lands_s = {}, {}
        moved.before = moved.beside = float(np.nextafter(now, np.inf))
        return moved

    def cut(self, executed: Executed, steps: int) -> None:
        """Live steps come one by one; there is no run to cut."""

    def drift(self) -> str:
        """Return a line: in how many steps the engine did something else than planned."""
        scheduler = self.engine.scheduler
        first = f"; {scheduler.first_drift}" if scheduler.first_drift else ""
        return f"drift {scheduler.drift} of {scheduler.steps} steps{first}"
