"""One replica on SimPy: plan, run, record, until nothing is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import simpy

from twinserve.backends.base import Backend, Executed
from twinserve.policies.errors import PolicyError
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS, PLANS, STEPS, Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.results.recorder import StepRecorder


class NoProgressError(RuntimeError):
    """The policy plans nothing although work waits and nothing that could change its mind is under
    way."""


@dataclass(slots=True)
class _Step:
    """A plan that is being executed; running, waiting: requests, when it began."""

    plan: StepPlan
    executed: Executed
    running: int
    waiting: int


class Engine:
    """The engine process of one replica. Several can share a clock.

    on_finish(row)     called when a request ends, however it does (column `end` says it), before
                       the next plan: closed loops submit from there
    decision_overhead  seconds a step that planning costs in simulated time; None for the time
                       measured

    With an asynchronous core the loop is the same with a queue of one plan: each is made when the
    step before it begins, and executed when that has ended. So planning takes time only where it
    takes longer than the step, and what happens during a step is seen by the plan after the next
    one.
    """

    def __init__(
        self,
        clock: Clock,
        core: EngineCore,
        backend: Backend,
        recorder: StepRecorder,
        on_finish=lambda row: None,
        decision_overhead: float | None = 0.0,
    ) -> None:
        self.clock = clock
        self.core = core
        self.backend = backend
        self.recorder = recorder
        self.on_finish = on_finish
        self.decision_overhead = decision_overhead
        self.decision_seconds: list[float] = []  # wall time of each plan
        self._wake = clock.event()
        self._idle = False
        self._in_run = False
        self._news = False  # something arrived, landed or ended since the last plan was made
        self._since_s: float | None = None  # when planning began, if it was ahead; None: now
        if core.asynchronous and not core.policy.asynchronous:
            raise PolicyError(
                f"policy {core.policy.name!r} needs the last step's tokens to plan; drop "
                "--async-scheduling"
            )
        if core.asynchronous and not backend.plans_ahead:
            raise PolicyError(
                f"policy {core.policy.name!r} cannot plan ahead here: --async-scheduling is for "
                "simulated engines; drop it to have a live one execute the plans"
            )
        self._steps = STEPS + recorder.replica
        self.process = clock.process(self._loop())
        clock.at_end.append(self._nothing_left)

    def submit(self, request_id: str, output_tokens: int, **values) -> int:
        """A request arrives now. `output_tokens` goes to the backend alone."""
        row = self.core.submit(request_id, **values)
        self.backend.expect(row, output_tokens)
        self._notify()
        return row

    def withdraw(self, row: int, end: End) -> bool:
        """The request's client left or gave up, now; it is gone at the next step boundary. False
        where it had ended."""
        if not self.core.withdraw(row, end, self.clock.now):
            return False
        self._notify()
        return True

    def _settle(self) -> None:
        """What was withdrawn since the last boundary is no more."""
        now = self.clock.now
        for row, free_s in self.core.settle(now):
            self.backend.withdraw(row)
            self.recorder.withdrawn(row)
            self._news = True
            if free_s > now:
                self.clock.process(self._free(row, free_s))
            self.on_finish(row)

    def _free(self, row: int, landing: float):
        """Memory that a transfer touches is free when that has landed."""
        yield self.clock.at(landing, BEFORE_STEPS)
        self.core.landed(row)
        self._notify()

    def _notify(self) -> None:
        """Something changed: end the idle wait, or the run of steps that rests on nothing
        changing."""
        self._news = True
        if self._idle and not self._wake.triggered:
            self._wake.succeed()
        elif self._in_run:
            self._in_run = False
            self.process.interrupt()

    def _loop(self):
        plan = None
        while True:
            yield self.clock.at(self.clock.now, PLANS)
            if plan is None:
                self._settle()
            if plan is None and self.core.active:
                plan, self._since_s = self._plan(), None
            if not plan:
                yield from self._without_step(plan)
                plan = None
                continue
            step = self._execute(plan)
            plan = self._plan_ahead(step) if self.core.asynchronous else None
            yield from self._run(step.executed)
            self._record(step)

    # -- plan --------------------------------------------------------------------------------------
    def _plan(self) -> StepPlan:
        self._settle()
        self._news = False
        started = time.perf_counter()
        plan = self.core.plan(self.clock.now)
        self.decision_seconds.append(time.perf_counter() - started)
        return plan

    def _without_step(self, plan: StepPlan | None):
        """Nothing to compute: wait until something arrives or lands, or until the plan's transfers
        are done; a plan that only took memory away is followed by the next one at once.

        A policy that plans nothing for no reason is stopped with a diagnosis.
        """
        if plan is not None and (plan.moves or plan.preempted):
            moved = self.backend.transfer(plan.moves, self.clock.now)
            self._hold(moved.ready_s, moved.lands_s)
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
        if (
            plan is not None
            and not core.ready_s
            and core.ledger.free_blocks == core.ledger.num_blocks
        ):
            raise NoProgressError(self._diagnosis())
        self._idle = True
        yield self._wake
        self._idle = False
        self._wake = self.clock.event()

    def _nothing_left(self) -> None:
        if self.core.active:
            raise NoProgressError(self._diagnosis())

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
        )

    # -- run ---------------------------------------------------------------------------------------
    def _execute(self, plan: StepPlan) -> _Step:
        core, now = self.core, self.clock.now
        overhead = self.decision_overhead
        if overhead is None:
            overhead = self.decision_seconds[-1]
        if core.asynchronous and plan.valid_for and (overhead or self._news):
            # It stands for one step: what has happened since is not in it, or the next one may take
            # longer than the step.
            plan = replace(plan, valid_for=0)
        if self._since_s is not None:
            overhead = max(0.0, self._since_s + overhead - now)
        executed = self.backend.execute(plan, core.emitting(plan), now, overhead)
        self._hold(executed.ready_s, executed.lands_s)
        self._since_s = now + overhead
        return _Step(plan, executed, core.holding, core.waiting)

    def _plan_ahead(self, step: _Step) -> StepPlan | None:
        """Asynchronous scheduling: the plan of the next step, made now that this one begins; None
        if there is nothing to do before its outcome is known.

        In a run every next plan is the run's own, up to the last step: that one is executed by
        itself, to be planned in.
        """
        plan, executed = step.plan, step.executed
        steps = len(executed.outcome.ends_s)
        if steps > 1:
            self.backend.cut(executed, steps - 1)
            return StepPlan(plan.rows, plan.tokens)  # what it moves has moved by then
        self._record_plan(step)
        self.core.begin(plan, executed.outcome)
        ahead = self._plan()
        return ahead if ahead or ahead.moves or ahead.preempted else None

    def _hold(self, ready_s: dict[int, float], lands_s: dict[int, float]) -> None:
        """Rows that are not ready before their transfers have landed, the latest of them."""
        if lands_s:
            self.core.transferring(lands_s)
        for row, landing in ready_s.items():
            if landing > self.core.ready_s.get(row, 0.0):
                self.core.ready_s[row] = landing
                self.clock.process(self._land(row, landing))

    def _land(self, row: int, landing: float):
        yield self.clock.at(landing, BEFORE_STEPS)
        if self.core.ready_s.get(row) == landing:
            del self.core.ready_s[row]
            self._notify()

    def _run(self, executed: Executed):
        """Let the time of the step, or of the run of steps, pass; an arrival cuts a run at the next
        boundary."""
        ends = executed.outcome.ends_s
        if len(ends) == 1:
            yield self.clock.at(ends[0], self._steps)
            return
        self._in_run = True
        try:
            yield self.clock.at(ends[-1], self._steps)
            self._in_run = False
        except simpy.Interrupt:
            steps = int(np.searchsorted(ends, self.clock.now)) + 1
            self.backend.cut(executed, steps)
            yield self.clock.at(ends[steps - 1], self._steps)

    # -- record ------------------------------------------------------------------------------------
    def _record_plan(self, step: _Step) -> None:
        """While memory is as the plan left it: nothing of a later plan, and no outcome booked."""
        core = self.core
        self.recorder.planned(
            step.plan, step.executed, step.running, step.waiting, core.requests, core.ledger
        )

    def _record(self, step: _Step) -> None:
        core, executed = self.core, step.executed
        if not core.under_way:
            self._record_plan(step)
        gaps = core.complete(step.plan, executed.outcome)
        self.recorder.completed(executed, gaps, core.requests)
        for row in executed.outcome.finished:
            self._news = True
            self.on_finish(row)
