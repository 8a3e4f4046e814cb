"""One replica on SimPy: plan, run, record, until nothing is left."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto

import numpy as np
import simpy

from twinserve.backends.base import Backend, Executed
from twinserve.errors import TwinserveError
from twinserve.policies.errors import PolicyError
from twinserve.policies.parts.runs import growth_of
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS, PLANS, STEPS, Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.host_tier import HostTier
from twinserve.sim.engine.step import Run, Step
from twinserve.sim.results.recorder import Load, StepRecorder


class NoProgressError(TwinserveError, RuntimeError):
    """The policy plans nothing although work waits, and nothing under way could change that."""


class Wake(Enum):
    """Why an engine's process is interrupted or its idle wait ends."""

    NEWS = auto()  # something arrived, left, or landed
    FAILURE = auto()  # the engine has failed


class Engine:
    """The engine process of one replica. Several can share a clock.

    on_ended(rows)     called with all requests that end at one boundary, however they do (column
                       `end` says it), before the next plan: closed loops submit from there
    decision_overhead  seconds a step that planning costs in simulated time; None for the time
                       measured

    An asynchronous core has a queue of one plan. Each plan is made when the step before it begins,
    and executed when that step has ended. So planning delays a step only if it takes longer than
    the step before. Events during a step reach the plan after the next one.
    """

    def __init__(
        self,
        clock: Clock,
        core: EngineCore,
        backend: Backend,
        recorder: StepRecorder,
        on_ended: Callable[[list[int]], None] = lambda rows: None,
        decision_overhead: float | None = 0.0,
    ) -> None:
        self.clock = clock
        self.core = core
        self.backend = backend
        self.recorder = recorder
        self.on_ended = on_ended
        # rows that got the first token which this engine gave them
        self.on_first_token: Callable[[list[int]], None] | None = None
        # begins to fetch what another engine computed for a row, and says when it lands (seconds);
        # its setter tells the engine then (`landed`)
        self.fetch: Callable[[int], float] | None = None
        self._fetching: set[int] = set()
        self._carried: set[int] = set()  # rows with tokens of another engine, none yet of this one
        self.tier: HostTier | None = None  # behind the ledger; set before the first request
        self.on_step: Callable[[], None] | None = None  # a step, or a run of them, is booked
        self.on_run: Callable[[], None] | None = None  # is about to be booked (`run`)
        self.decision_overhead = decision_overhead
        self.decision_seconds = array("d")  # wall time of each plan
        self._wake = clock.event()
        self._idle = False
        self._in_run = False
        self._launching = False  # a step has begun whose successor is planned when it is launched
        self._last = 0  # step of a run that is cut
        self._step: Step | None = None  # under way
        self._run_on: Run | None = None  # under way or just booked; its next step is to follow
        # of an asynchronous engine without a step under way: seconds from a step's begin until it
        # is launched
        self.launch_s = 0.0
        self.down = False
        self._void_loads: list[Load] = []  # of the steps under way when it died, by their begin
        self._news = False  # something arrived or landed since the last plan was made ...
        self._ends = False  # ... or ended
        self._since_s: float | None = None  # when planning began, if it was ahead; None: now
        if core.asynchronous and not core.policy.asynchronous:
            raise PolicyError(
                f"policy {core.policy.name!r} needs the last step's tokens to plan; give "
                "--no-async-scheduling"
            )
        if core.asynchronous and not backend.plans_ahead:
            raise PolicyError(
                f"policy {core.policy.name!r} cannot plan ahead here: its backend does not know "
                "a step's tokens when the step begins; give --no-async-scheduling"
            )
        self._steps, self._plans = STEPS + recorder.replica, PLANS + recorder.replica
        self.process = clock.process(self._life())
        clock.at_end.append(self._nothing_left)

    def submit(self, request_id: str, output_tokens: int, /, **values) -> int:
        """A request arrives now. Only the backend learns `output_tokens`, its true length. A column
        of the same name in `values` says how many tokens it already has from another engine."""
        row = self.core.submit(request_id, **values)
        self.backend.expect(row, output_tokens)
        if values.get("output_tokens"):
            self._carried.add(row)
        self.notify()
        return row

    def withdraw(self, row: int, end: End) -> bool:
        """The request's client left or gave up now. The request ends at the next step boundary.
        Returns False if it had already ended."""
        if not self.core.withdraw(row, end, self.clock.now):
            return False
        self.notify()
        return True

    def _settle(self) -> None:
        """Remove the requests withdrawn since the last step, and every request that depended on
        them (for example, the later stages of an application)."""
        now = self.clock.now
        while left := self.core.settle(now):
            for row, free_s in left:
                self.backend.withdraw(row)
                self.recorder.withdrawn(row)
                if free_s > now and row not in self._fetching:  # else `landed` frees it
                    self.clock.process(self._free(row, free_s))
            self._news = True
            self.clock.planning = self.recorder.replica
            self.on_ended([row for row, _ in left])
            self.clock.planning = -1

    def fail(self, end: End = End.FAILED) -> list[int]:
        """The engine dies now. Whole steps that ended before are booked, the rest of a run or a
        step is void, and policy and ledger are not asked. Every request that it has ends as `end`,
        unless it was withdrawn before. Returns these rows; `on_ended` is not called.

        What the void step preempted and moved is in the columns of its requests, and in no step.
        """
        self._keep_loads([self._step])
        now, step, self.down = self.clock.now, self._step, True
        if step is not None:
            steps = int(np.searchsorted(step.executed.outcome.ends_s, now))
            if self.core.under_way:
                self.recorder.void()
            elif steps:
                self.backend.cut(step.executed, steps)
                self._record_plan(step)
                gaps = self.core.book_before_failure(step.plan, step.executed.outcome)
                self.recorder.completed(step.executed, gaps, self.core.requests)
        under_way = (step.plan, step.executed.outcome) if step else (None, None)
        rows = self.core.fail(end, now, *under_way).tolist()
        self._step = None  # no client sees tokens of what is void
        if self.tier is not None:
            self.tier.fail()
        for row in rows:
            self.recorder.withdrawn(row)
        self.backend.fail(now)
        self.process.interrupt(Wake.FAILURE)
        return rows

    def _keep_loads(self, under_way: Sequence[Step | None]) -> None:
        """What steps showed that are about to be void: `load` is asked for it until the router
        knows that the engine is dead."""
        for step in filter(None, under_way):
            outcome = step.executed.outcome
            ended_s = outcome.ends_s[outcome.ends_s < self.clock.now]
            start_s = float(ended_s[-1]) if len(ended_s) else outcome.start_s
            self._void_loads.append(self.load(start_s))

    def slow(self, factor: float) -> None:
        """Make steps after the present one take `factor` times as long; 1 restores their length."""
        self.backend.slow(factor)
        self._run_on = None
        if self._in_run:
            self.notify()

    def landed(self, row: int, whole: bool) -> None:
        """The KV fetched for the row has arrived. If not `whole`, it will not arrive (`fetch`)."""
        if self.down:
            return
        self._fetching.remove(row)
        del self.core.ready_s[row]
        if self.core.fetched(row, whole):
            self.backend.fetched(row)
        self.notify()

    def loaded(self, row: int, tokens: int) -> None:
        """The KV loaded for the row has arrived: it now has KV of so many tokens."""
        self._fetching.remove(row)
        del self.core.ready_s[row]
        self.core.loaded(row, tokens)

    def release(self, row: int) -> None:
        """The memory of a row that was handed over is free (`EngineCore.release`)."""
        if not self.down:
            self.core.release(row)
            self.notify()

    def _free(self, row: int, landing: float):
        """Memory that a transfer touches is free when that has landed."""
        yield self.clock.at(landing, BEFORE_STEPS)
        if not self.down:
            self.core.landed(row)
            self.notify()

    def notify(self) -> None:
        """Something changed: end the idle wait, or the run of steps that assumed no change."""
        self._news = True
        if self._idle and not self._wake.triggered:
            self._wake.succeed(Wake.NEWS)
        elif self._in_run and (step := self._step):
            self._in_run = False
            self._last = self._boundaries(step.executed.outcome.ends_s, self.clock.now)
            self.process.interrupt(Wake.NEWS)

    def _boundaries(self, ends_s: np.ndarray, at_s: float) -> int:
        """How many of a run's steps had ended, and been followed by the next, at `at_s`. Now that
        is true of one that ends now only if single steps would have been planned before."""
        planned = at_s < self.clock.now or self.clock.planning > self.recorder.replica
        return int(ends_s.searchsorted(at_s, side="right" if planned else "left"))

    def _life(self):
        try:
            yield from self._loop()
        except simpy.Interrupt as interrupt:
            if interrupt.cause is not Wake.FAILURE:
                raise

    def _loop(self):
        clock, core = self.clock, self.core
        plan = None
        while True:
            if not clock.reach(clock.now, self._plans):
                yield clock.at(clock.now, self._plans)
            if empty := plan is None:  # nothing is under way on the GPU
                if core.unsettled:
                    self._settle()
                if core.active or core.policy.unsettled:
                    plan, self._since_s = self._plan(), None
            if not plan:
                yield from self._without_step(plan)
                plan = None
                continue
            run, self._run_on = self._run_on, None
            step = self._step = self._execute(plan) if run is None else self._follow(run, plan)
            if empty and self.launch_s and core.asynchronous:
                yield from self._launch(step)
            plan = self._plan_ahead(step) if core.asynchronous else None
            ends = step.executed.outcome.ends_s
            if len(ends) == 1:
                end_s = ends.item()
                if not clock.reach(end_s, self._steps):
                    yield clock.at(end_s, self._steps)
            else:
                yield from self._run(step.executed)
            self._record(step)

    # -- plan --------------------------------------------------------------------------------------
    def _plan(self) -> StepPlan:
        """Of an engine that is settled."""
        self._news = self._ends = False
        started = time.perf_counter()
        plan = self.core.plan(self.clock.now)
        self.decision_seconds.append(time.perf_counter() - started)
        return plan

    def _without_step(self, plan: StepPlan | None):
        """Nothing to compute: wait until something arrives or lands, or until the plan's transfers
        are done; a plan that only took memory away is followed by the next one at once.

        A policy that plans nothing for no reason is stopped with a diagnosis.
        """
        if plan is not None and plan.changes_memory:
            moved = self.backend.transfer(plan, self.clock.now)
            self._hold(moved.ready_s, moved.lands_s)
            if self.tier is None:
                self._begin_to_fetch(plan)
            else:
                self.tier.load(plan, self.tier.begin(plan))
            self.recorder.without_step(plan, moved.to_host_bytes, moved.to_device_bytes)
            done = max(moved.before, moved.beside)
            if done > self.clock.now:
                yield self.clock.at(done, self._steps)
                return
            if plan.preempted or self._since_s is not None:
                # memory is free, or the step that the plan was made in has ended: there is a new
                # plan to make
                return
        core = self.core
        if self.tier is not None:
            self.tier.begin(None)
        if (
            plan is not None
            and not core.ready_s
            and core.active
            and not (self.tier is not None and self.tier.busy)
            and core.ledger.free_blocks == core.ledger.num_blocks
        ):
            raise NoProgressError(self._diagnosis())
        self._idle = True
        usage = core.ledger.usage()
        self.recorder.idle(
            self.clock.now, core.holding, core.waiting, usage.real_time + usage.best_effort
        )
        yield self._wake
        self._idle = False
        self._wake = self.clock.event()

    def _nothing_left(self) -> None:
        if self.core.active:
            raise NoProgressError(self._diagnosis())
        if not self.down:
            self.core.check_empty()

    def _diagnosis(self) -> str:
        requests, ledger = self.core.requests, self.core.ledger
        waiting = np.flatnonzero(requests.state != 3)
        head = requests[int(waiting[0])]
        return (
            f"policy {self.core.policy.name!r} made no progress at {self.clock.now:.6f} s: "
            f"{len(waiting)} requests wait, "
            f"{ledger.free_blocks} of {ledger.num_blocks} KV blocks are free; the first is "
            f"{head.id!r} with "
            f"{head.known_tokens} tokens ({-(-head.known_tokens // ledger.block_tokens)} blocks)"
            f"{self.core.where_to_look}"
        )

    # -- run ---------------------------------------------------------------------------------------
    def _execute(self, plan: StepPlan) -> Step:
        core, now = self.core, self.clock.now
        overhead = self.decision_overhead
        if overhead is None:
            overhead = self.decision_seconds[-1]
        if core.asynchronous and self._since_s is None:
            overhead += self.backend.exposed_s(plan)
        changed = self._news or (self._ends and not plan.outlasts_ends)
        if core.asynchronous and plan.valid_for and (overhead or changed):
            # It stands for one step: what has happened since is not in it, or the next one may take
            # longer than the step.
            plan = plan.once()
        if self._since_s is not None:
            overhead = max(0.0, self._since_s + overhead - now)
        until_s = now if self.tier is None else self.tier.begin(plan)
        executed = self.backend.execute(
            plan, core.emitting(plan), now, max(overhead, until_s - now)
        )
        if executed.ready_s or executed.lands_s:
            self._hold(executed.ready_s, executed.lands_s)
        if self.tier is not None:
            self.tier.load(plan, float(executed.outcome.ends_s[-1]))
        elif plan.fetched:
            self._begin_to_fetch(plan)
        self._since_s = now + overhead
        return Step(plan, executed, core.holding, core.waiting)

    def _launch(self, step: Step):
        """Wait until the step is launched. The next step is planned afterwards, with the requests
        that have arrived by then. In vLLM, an idle engine's first `step_with_batch_queue` returns
        after `execute_model`, and inputs are read before the second call
        (vllm/v1/engine/core.py)."""
        ends_s = step.executed.outcome.ends_s
        if len(ends_s) == 1:
            self._launching = True
            yield self.clock.at(min(self.clock.now + self.launch_s, ends_s[0]), self._steps)
            self._launching = False

    def _follow(self, run: Run, plan: StepPlan) -> Step:
        """Execute the plan of a run's next step."""
        self._since_s = self.clock.now
        return run.following(plan, self.clock.now, self.core.holding, self.core.waiting)

    def _plan_ahead(self, step: Step) -> StepPlan | None:
        """Asynchronous scheduling: the plan of the next step, made now that this one begins; None
        if there is nothing to do before its outcome is known.

        In a run every next plan is the run's own, up to the last step: that one is executed by
        itself, to be planned in.
        """
        plan, executed = step.plan, step.executed
        outcome = executed.outcome
        steps = len(outcome.ends_s)
        if steps > 1:
            if self.tier is None and self.backend.keeps_time:
                self._run_on = Run(executed)
            self.backend.cut(executed, steps - 1)
            return StepPlan(plan.rows, plan.tokens)  # what it moves has moved by then
        if step.run_ends_s is None or not self.recorder.went_on(
            step.run_ends_s, step.running, step.waiting
        ):
            self._record_plan(step)
        self.core.begin(plan, outcome)
        if self.core.unsettled:
            self._settle()
        ahead = self._plan()
        return ahead if ahead or ahead.changes_memory else None

    def _hold(self, ready_s: dict[int, float], lands_s: dict[int, float]) -> None:
        """Rows that are not ready before their transfers have landed, the latest of them."""
        if lands_s:
            self.core.transferring(lands_s)
        for row, landing in ready_s.items():
            if landing > self.core.ready_s.get(row, 0.0):
                self.core.ready_s[row] = landing
                self.clock.process(self._land(row, landing))

    def _begin_to_fetch(self, plan: StepPlan) -> None:
        for row, _ in plan.fetched:
            if self.fetch is None:
                raise PolicyError(
                    f"policy {self.core.policy.name!r} fetches KV from another engine, and there "
                    "is none; give the replica the role decode"
                )
            self.fetching(row, self.fetch(row))

    def fetching(self, row: int, landing: float) -> None:
        """A fetch or load for the row has begun that lands at `landing` (seconds)."""
        self._fetching.add(row)
        self.core.ready_s[row] = landing
        self.core.transferring({row: landing})

    def _land(self, row: int, landing: float):
        yield self.clock.at(landing, BEFORE_STEPS)
        if self.core.ready_s.get(row) == landing and not self.down:
            del self.core.ready_s[row]
            self.notify()

    def _run(self, executed: Executed):
        """Let the time of a run of steps pass; an arrival cuts it at the next boundary."""
        ends = executed.outcome.ends_s
        end_s = float(ends[-1])
        if self.clock.reach(end_s, self._steps):
            return
        self._in_run = True
        try:
            yield self.clock.at(end_s, self._steps)
            self._in_run = False
        except simpy.Interrupt as interrupt:
            if interrupt.cause is not Wake.NEWS:
                raise
            self.backend.cut(executed, self._last + 1)
            yield self.clock.at(float(ends[self._last]), self._steps)

    def run(self) -> tuple[Step, int] | None:
        """Return the run of steps under way, and for how many of its steps single steps would have
        taken memory by now. None: no run whose memory is taken at its end."""
        step, core = self._step, self.core
        if self.down or step is None or core.under_way or self._launching:
            return None
        begun = 1 + self._boundaries(step.executed.outcome.ends_s[:-1], self.clock.now)
        return step, begun + core.asynchronous

    def steps_begun(self, before_s: float) -> int:
        """Return how many steps began before `before_s` (seconds, not after now), those inside a
        run of steps included."""
        step, steps = self._step, self.recorder.steps
        if step is None:
            return steps
        outcome = step.executed.outcome
        later = int(outcome.ends_s[:-1].searchsorted(before_s))
        recorded = int(self.core.under_way)
        return steps - recorded + int(outcome.start_s < before_s) + later

    def ended(self, after_s: float, until_s: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return when steps ended after `after_s` and by `until_s` (seconds, not after now), and
        their requests. The third are prompt tokens of those that got their first token. float64[n]
        each, steps inside a run included."""
        ends_s, requests = self.recorder.ended(after_s, until_s)
        known = self.recorder.first_prompts or {}
        prompts = [known.get(end_s, 0) for end_s in ends_s]
        step = self._step
        if step is not None and self.core.under_way:
            outcome = step.executed.outcome
            if ends_s and ends_s[-1] == outcome.ends_s[0]:  # recorded already, and not booked
                prompts[-1] = self._prompts_without_token(outcome.emitted)
        elif step is not None:
            executed = step.executed
            more = executed.outcome.ends_s
            more = more[(more > after_s) & (more <= until_s)]
            ends_s += more.tolist()
            work = executed.work
            requests += [work.decode_requests + len(work.prefill_new)] * len(more)
            first = self._prompts_without_token(executed.outcome.emitted)
            begin_s = executed.outcome.ends_s[0]
            prompts += [first if end_s == begin_s else 0 for end_s in more.tolist()]
        ends, counts, firsts = (np.array(c, np.float64) for c in (ends_s, requests, prompts))
        return ends, counts, firsts

    def _prompts_without_token(self, rows: np.ndarray) -> int:
        """Prompt tokens of those of `rows` that had no token before the step under way."""
        table = self.core.requests
        before = table.output_tokens[rows] - table.in_flight[rows]
        return int(table.prompt_tokens[rows[before == 0]].sum())

    def load(self, at_s: float) -> Load:
        """Return running requests, waiting requests and held memory at `at_s` (seconds, not after
        now), as of the last step that had begun. Inside a run of steps the values are those of
        single steps."""
        core, step = self.core, self._step
        if self.down:
            for load in reversed(self._void_loads):
                if load.at_s <= at_s:
                    return replace(load, at_s=at_s)
        if self.down or step is None or core.under_way or step.executed.outcome.start_s > at_s:
            return self.recorder.load(at_s, core.ledger.num_blocks)
        usage, outcome = core.ledger.usage(), step.executed.outcome
        used = usage.real_time + usage.best_effort
        begun = 1 + self._boundaries(outcome.ends_s[:-1], at_s)
        if len(outcome.ends_s) > 1:
            used += int(growth_of(step.plan, core.ledger, begun).sum())
        return Load(at_s, step.running, step.waiting, used, core.ledger.num_blocks)

    # -- record ------------------------------------------------------------------------------------
    def _record_plan(self, step: Step) -> None:
        """While memory is as the plan left it: nothing of a later plan, and no outcome booked."""
        core = self.core
        self.recorder.planned(
            step.plan,
            step.executed,
            step.running,
            step.waiting,
            core.requests,
            core.ledger,
            goes_on=self._run_on is not None,
        )

    def _record(self, step: Step) -> None:
        if not self.core.under_way:
            self._record_plan(step)
            if self.on_run is not None:
                self.on_run()
        self._book(step)

    def _book(self, step: Step) -> None:
        core, executed = self.core, step.executed
        self._news = self._news or bool(core.fenced)  # memory comes back
        gaps = core.complete(step.plan, executed.outcome)
        self.recorder.completed(executed, gaps, core.requests)
        self._step = None
        if self.on_first_token is not None and len(fresh := self._first_here(executed, gaps)):
            self.on_first_token(fresh)
        if executed.outcome.finished:
            self._ends = True
            self.on_ended(executed.outcome.finished)
        if self.on_step is not None:
            self.on_step()

    def _first_here(self, executed: Executed, gaps: np.ndarray) -> list[int]:
        """Rows that this outcome gives their first token of this engine: those with no gap before
        it, and those whose earlier tokens another engine gave them."""
        emitted = executed.outcome.emitted
        first = np.isnan(gaps)
        if self._carried:
            rows = [row for row in emitted.tolist() if row in self._carried]
            self._carried.difference_update(rows)
            first |= np.isin(emitted, rows)
        return emitted[first].tolist()
