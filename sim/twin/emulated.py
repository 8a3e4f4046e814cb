"""A run whose scheduler and engine loop are vLLM's, on an emulated GPU in virtual time.

The workload's source, the records and the metrics are those of a simulation. vLLM's own EngineCore
decides, and its worker only waits: while it waits, the simulation's clock goes on. Where such a run
differs from the simulation, our engine's loop or policy differs from vLLM's.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simpy

from twinserve.backends.base import Executed
from twinserve.backends.live.emulate.model import VOCAB, write_model
from twinserve.backends.live.emulate.settings import EXECUTOR, KEY, WORKER, emulated
from twinserve.backends.live.emulate.steps import EmulatedStep
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.native.chosen import columns
from twinserve.policies.kv.base import KvUsage
from twinserve.policies.plan import Preemption, StepOutcome, StepPlan
from twinserve.policies.registry import PolicySpec
from twinserve.policies.requests import Application, End, RequestTable, State
from twinserve.sim.engine.clock import PLANS, STEPS, Clock
from twinserve.sim.engine.loop import Engine
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Report, Simulation
from twinserve.sim.setup.serving import scheduler_class
from twinserve.traces.workload import Workload


def let_happen(clock: Clock, event: simpy.Event) -> None:
    """All that comes before `event`, and the event."""
    while not event.processed:
        clock.step()


def said_of(requests: RequestTable | Workload, row: int) -> dict:
    """Return class and objectives of a request, as its client says them (`vllm_xargs`)."""
    said: dict = {"class": ("rt", "be")[int(requests.service_class[row])]}
    for name in ("slo_ttft_s", "slo_tpot_s"):
        seconds = float(getattr(requests, name)[row])
        if not np.isnan(seconds):
            said[name] = seconds
    return said


class VirtualPace:
    """The clock of `engine`: waiting for a step's end, or for a launch that takes time, first lets
    all earlier events happen. begins: of launched steps that are not booked, seconds."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine, self.clock = engine, engine.clock
        self.begins: deque[float] = deque()
        self._end_s = 0.0

    def launch(self, seconds: float, goes_on: bool) -> float:
        now = self.clock.now
        begin_s = max(self._end_s, now)
        if not self.begins:  # no step is under way
            seconds += self.engine.exposed_s()
        self.begins.append(begin_s)
        self._end_s = begin_s + seconds
        if self.engine.launch_s:
            self.wait(min(now + self.engine.launch_s, self._end_s))
        return self._end_s

    def wait(self, end_s: float) -> None:
        if end_s > self.clock.now:
            let_happen(self.clock, self.clock.at(end_s, STEPS))


class _OnDemand:
    """Replace the thread in which older releases await a step: virtual time passes only when the
    engine's loop asks for the outcome."""

    def submit(self, outcome: Callable[[], object]) -> Future:
        future: Future = Future()
        future.result = lambda timeout=None: outcome()  # type: ignore[method-assign]
        return future


@dataclass(slots=True)
class _Pool:
    """vLLM's block pool at a moment, as a recorder of steps asks a ledger."""

    total: int
    free_blocks: int

    def usage(self) -> KvUsage:
        return KvUsage(self.total, self.free_blocks, self.total - self.free_blocks, 0, 0)


@dataclass(slots=True)
class _Step:
    """A step that vLLM scheduled. withdrawn: since the one before; pool: when it begins."""

    plan: StepPlan
    holding: int
    waiting: int
    withdrawn: list[int]
    pool: _Pool | None = None


class EmulatedEngine(Engine):
    """A replica that vLLM decides for, step by step. Give it the engine with `attach`, and call
    `step` as vLLM's process calls its own loop."""

    def _life(self):
        return
        yield  # the simulator's own loop has nothing to do

    def attach(
        self, vllm: VllmEngine, texts: PromptTexts, application: Callable[[int], Application | None]
    ) -> None:
        """application: of a group of requests, as the fleet knows it."""
        self.vllm, self.scheduler, self._texts = vllm, vllm.scheduler, texts
        self._application = application
        self._arrived: list[int] = []  # rows that the engine's loop has not read yet
        self._left: list[str] = []  # requests whose clients left, not read yet
        self._gone: list[int] = []  # rows that left since the latest schedule
        self._freed = 0  # blocks of such requests, since the step that is planned ahead
        self._rows: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._under_way: deque[_Step] = deque()  # scheduled and not booked, the oldest first
        self._victims: list[str] = []  # of the latest schedule
        self._held: set[str] = set()  # requests with KV memory
        self.launched: list[EmulatedStep] = []
        worker = vllm.worker
        self._pace = worker.pace = VirtualPace(self)
        worker.stepped = self.launched.append
        if getattr(vllm.executor, "async_output_thread", None) is not None:  # up to 0.19
            vllm.executor.async_output_thread = _OnDemand()
        worker.steps.model = self.backend.model  # type: ignore[attr-defined]
        if hasattr(self.scheduler, "keep_time"):  # one of ours
            self.scheduler.keep_time(lambda: self.clock.now)
        self._watch()

    def _watch(self) -> None:
        """Note the scheduler's inputs and decisions, and call through."""
        scheduler = self.scheduler
        preempt, schedule = scheduler._preempt_request, scheduler.schedule
        update, finish = scheduler.update_from_output, scheduler.finish_requests

        def noting(request, *args, **kwargs):
            self._victims.append(request.request_id)
            return preempt(request, *args, **kwargs)

        def scheduling(*args, **kwargs):
            self._victims = []
            self._begin()
            output = schedule(*args, **kwargs)
            self._planned(output.num_scheduled_tokens)
            return output

        def updating(scheduled, answer):
            self._begin()
            outputs = update(scheduled, answer)
            if scheduled.num_scheduled_tokens:
                self._ended(self._under_way.popleft(), outputs)
            return outputs

        def finishing(names, status):
            self._begin()
            known = [name for name in dict.fromkeys(names) if name in scheduler.requests]
            before = self._pool().free_blocks
            done = finish(names, status)
            if len(self._under_way) > 1:
                self._freed += self._pool().free_blocks - before
            self._finished(known)
            return done

        if hasattr(scheduler, "decider"):  # one of ours, which takes memory as its policy says
            take = scheduler._take_memory

            def taking(request, kind):
                self._victims.append(request.request_id)
                take(request, kind)

            scheduler._take_memory = taking
        scheduler._preempt_request, scheduler.finish_requests = noting, finishing
        scheduler.schedule, scheduler.update_from_output = scheduling, updating

    # -- requests ----------------------------------------------------------------------------------
    def submit(self, request_id: str, output_tokens: int, /, **values) -> int:
        row = self.core.submit(request_id, **values)
        self._rows[request_id], self._expected[request_id] = row, output_tokens
        self._arrived.append(row)
        return row

    def withdraw(self, row: int, end: End) -> bool:
        """As vLLM's process hears of it: before it books a step, and again between two."""
        requests = self.core.requests
        if requests.state[row] == State.FINISHED or requests.end[row] == End.TIMED_OUT:
            return False
        requests.end[row], requests.ended_s[row] = end, self.clock.now
        self._left.append(requests.ids[row])
        self.vllm.core.aborts_queue.put([requests.ids[row]])
        return True

    def _finished(self, names: list[str]) -> None:
        """vLLM has dropped these."""
        requests, rows = self.core.requests, []
        for name in names:
            row = self._rows[name]
            self._held.discard(name)
            requests.state[row] = State.FINISHED
            self.core.active -= 1
            rows.append(row)
        self.core.holding = len(self._held)
        self._gone += rows
        if rows:
            self.on_ended(rows)

    def notify(self) -> None:
        """vLLM's loop looks for itself."""

    def exposed_s(self) -> float:
        """Of the launched step, if it is the first of an idle engine."""
        return self.backend.model.hidden_seconds(len(self.launched[-1].names))  # type: ignore[attr-defined]

    def _read(self) -> None:
        """What arrived since, as the engine's process reads its queue between two steps."""
        requests = self.core.requests
        arrived, self._arrived = self._arrived, []
        for row in arrived:
            name, prompt = requests.ids[row], int(requests.prompt_tokens[row])
            self.vllm.submit(
                name,
                self._texts.tokens(name, prompt, requests.prefix[row]),
                self._expected[name],
                float(requests.arrival_s[row]),
                attributes=self._said(row),
            )
        left, self._left = self._left, []
        if left:
            self.vllm.core.abort_requests(left)

    def _said(self, row: int) -> dict:
        """What the client says of its request to a scheduler of ours (`vllm_xargs`)."""
        requests = self.core.requests
        said = said_of(requests, row)
        application = self._application(int(requests.group[row]))
        if application is not None and application.kind is not None:
            said |= {"app": application.name, "app_class": application.kind}
            said["stage"] = int(requests.stage[row])
            if application.text is not None:
                said["app_text"] = application.text
        return said

    # -- a step ------------------------------------------------------------------------------------
    def step(self) -> bool:
        """One call of vLLM's loop. False if there is nothing to do before the next arrival."""
        self._read()
        before, waits = len(self.launched), bool(self._under_way)
        if not (waits or self.scheduler.has_requests()):
            return False
        self.vllm.cycle()
        return waits or len(self.launched) > before

    def _planned(self, grants: dict[str, int]) -> None:
        """The scheduler has decided; the worker gets the step next."""
        requests, rows, held, now = self.core.requests, self._rows, self._held, self.clock.now
        preempted, admitted = [], []
        for name in self._victims:
            row = rows[name]
            preempted.append((row, Preemption.RECOMPUTE))
            held.discard(name)
            requests.state[row] = State.WAITING
            requests.recomputes[row] += 1
        for name, tokens in grants.items():
            if name in held:
                continue
            row = rows[name]
            held.add(name)
            # vLLM has counted this step's tokens as computed already
            hit = self.scheduler.requests[name].num_computed_tokens - tokens
            admitted.append((row, hit))
            requests.state[row] = State.RUNNING
            if np.isnan(requests.first_scheduled_s[row]):
                requests.first_scheduled_s[row], requests.hit_tokens[row] = now, hit
        self.core.holding = len(held)
        chosen = np.array([rows[name] for name in grants], np.int64)
        tokens = np.fromiter(grants.values(), np.int64, len(grants))
        plan = StepPlan(chosen, tokens, admitted=admitted, preempted=preempted)
        if grants:
            gone, self._gone = self._gone, []
            self._under_way.append(_Step(plan, len(held), self.core.active - len(held), gone))
        elif preempted:
            self.recorder.without_step(plan, 0, 0)

    def _begin(self) -> None:
        """Memory is as the plan of the oldest step left it, and as steps before it freed it. What
        clients left behind while it was planned ahead is free one step later."""
        if self._under_way and self._under_way[0].pool is None:
            pool = self._under_way[0].pool = self._pool()
            pool.free_blocks -= self._freed
            self._freed = 0

    def _pool(self) -> _Pool:
        decider = getattr(self.scheduler, "decider", None)
        if decider is not None:  # one of ours: what its policy has to give
            ledger = decider.core.ledger
            return _Pool(ledger.num_blocks, ledger.free_blocks)
        pool = self.scheduler.kv_cache_manager.block_pool
        return _Pool(pool.num_gpu_blocks - 1, pool.get_num_free_blocks())

    def _ended(self, step: _Step, outputs) -> None:
        """vLLM has booked what the step gave, now."""
        core, requests, now = self.core, self.core.requests, self.clock.now
        given = [output for client in outputs.values() for output in client.outputs]
        emitted = {self._rows[one.request_id] for one in given if one.new_token_ids}
        ended = {self._rows[one.request_id] for one in given if one.finish_reason is not None}
        order = step.plan.rows.tolist()
        outcome = StepOutcome(
            self._pace.begins.popleft(),
            np.array([now]),
            np.array([row for row in order if row in emitted], np.int64),
            [row for row in order if row in ended],
        )
        work = self.launched[self.recorder.steps].work
        executed = Executed(outcome, work, 0, 0, {}, {})
        pool = step.pool
        for row in step.withdrawn:
            self.recorder.withdrawn(row)
        self.recorder.planned(step.plan, executed, step.holding, step.waiting, requests, pool)
        gaps = columns.book(requests, outcome.emitted, outcome.ends_s)
        for row in outcome.finished:
            requests.end[row], requests.ended_s[row] = End.COMPLETED, now
            requests.state[row] = State.FINISHED
            core.active -= 1
            self._held.discard(requests.ids[row])
        core.holding = len(self._held)
        self.recorder.completed(executed, gaps, requests)
        if self.on_first_token is not None and len(fresh := self._first_here(executed, gaps)):
            self.on_first_token(fresh)
        if outcome.finished:
            self.on_ended(outcome.finished)
        if self.on_step is not None:
            self.on_step()


class EmulatedRun(Simulation):
    """One policy in one vLLM on an emulated GPU, in virtual time. engine: of `emulated_engine` for
    the same inputs and policy."""

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        engine: VllmEngine,
        report: Report | None = None,
        texts: PromptTexts | None = None,
    ) -> None:
        check_emulated(inputs)
        super().__init__(inputs, spec, report, decisions=True, engine_of=EmulatedEngine)
        block = inputs.hardware.block_tokens
        texts = texts or PromptTexts(engine.vocab, block, inputs.config.seed)
        (self.replica,) = self.engines
        self.replica.attach(engine, texts, self._application)

    def _application(self, group: int) -> Application | None:
        return self.fleet.application(group) if group >= 0 else None

    def _advance(self) -> None:
        clock, replica = self.clock, self.replica
        while True:
            let_happen(clock, clock.at(clock.now, PLANS))  # all that comes before a decision, now
            if replica.step():
                continue
            if clock.empty:
                break
            clock.step()
        for check in clock.at_end:
            check()


def check_emulated(inputs: Inputs) -> None:
    """Raises SettingsError for what an emulated engine in virtual time does not do."""
    config = inputs.config
    for flag, given in {
        "--replicas": config.replicas != 1,
        "--fleet": bool(inputs.pools),
        "--front-end": inputs.front_end is not None,
        "--failures": inputs.failures is not None,
        "--shared-prefix": config.shared_prefix,
        "--kv-offloading-size": config.kv_offloading_size is not None,
        "--host-blocks": bool(inputs.hardware.host_blocks),
    }.items():
        if given:
            what = {"--host-blocks": "give 0", "--front-end": "drop it, or add --served"}
            raise SettingsError(
                f"{flag}: one emulated engine in virtual time has none; {what.get(flag, 'drop it')}"
            )


@contextmanager
def emulated_engine(inputs: Inputs, spec: PolicySpec) -> Iterator[VllmEngine]:
    """A vLLM engine in this process on the GPU of `inputs`. Policy vllm is vLLM's own scheduler;
    another one schedules by the classes of `vllm serve --scheduler-cls`. Raises LiveEngineError and
    SettingsError, one line each."""
    check_emulated(inputs)
    with tempfile.TemporaryDirectory(prefix="twinserve-") as folder:
        with contextlib.closing(VllmEngine(_settings(inputs, spec, Path(folder)))) as engine:
            yield engine


def _settings(inputs: Inputs, spec: PolicySpec, folder: Path) -> LiveSettings:
    config, hardware = inputs.config, inputs.hardware
    limits, blocks = hardware.limits, hardware.num_blocks
    ours = spec.name != "vllm"
    options: dict = {}
    scheduler: str | None = None
    if ours:
        scheduler = scheduler_class(config.async_scheduling)
        options = {"policy": spec.text, "clients": "trusted", "num_blocks": blocks}
        if config.prefix_caching is not None:
            options["prefix_caching"] = config.prefix_caching
        if spec.uses_estimator:
            options |= {"profile": config.profile, "estimator": config.estimator}
        blocks = 2 * blocks + limits.max_num_seqs  # the engine's own pool must not bind
    gpu = emulated(config, hardware, named_tokens=True)
    options[KEY] = gpu.model_copy(update={"num_blocks": blocks}).model_dump()
    caching = config.prefix_caching
    return LiveSettings(
        write_model(folder, hardware.profile.llm, limits.max_model_len, VOCAB),
        num_blocks=blocks,
        block_tokens=hardware.block_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        weights="dummy",
        dtype="bfloat16",
        prefix_caching=spec.policy.prefix_caching if caching is None else caching,
        extra={
            "scheduler_cls": scheduler,
            "worker_cls": WORKER,
            "distributed_executor_backend": EXECUTOR,
            "additional_config": options,
        },
    )
