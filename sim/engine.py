"""One replica on SimPy: plan, run, record, until nothing is left."""

from __future__ import annotations

import time

import numpy as np
import simpy

from ..backends.simulated import Executed, SimulatedBackend
from ..policies.plan import StepPlan
from .clock import BEFORE_STEPS, PLANS, STEPS, Clock
from .core import EngineCore
from .recorder import StepRecorder


class NoProgressError(RuntimeError):
    """The policy plans nothing although work waits and nothing that could change its mind is under way."""


class Engine:
    """The engine process of one replica. Several can share a clock.

    on_finish(row): called when a request ends, before the next plan (closed loops submit from there).
    decision_overhead: seconds a step that planning costs in simulated time; None for the time measured.
    """

    def __init__(
        self,
        clock: Clock,
        core: EngineCore,
        backend: SimulatedBackend,
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
        self._steps = STEPS + recorder.replica
        self.process = clock.process(self._loop())
        clock.at_end.append(self._nothing_left)

    def submit(self, request_id: str, output_tokens: int, **values) -> int:
        """A request arrives now. `output_tokens` goes to the backend alone."""
        row = self.core.submit(request_id, **values)
        self.backend.expect(row, output_tokens)
        self._notify()
        return row

    def _notify(self) -> None:
        """Something changed: end the idle wait, or the run of steps that rests on nothing changing."""
        if self._idle and not self._wake.triggered:
            self._wake.succeed()
        elif self._in_run:
            self._in_run = False
            self.process.interrupt()

    def _loop(self):
        while True:
            yield self.clock.at(self.clock.now, PLANS)
            plan = self._plan() if self.core.active else None
            if not plan:
                yield from self._without_step(plan)
                continue
            running, waiting = self.core.holding, self.core.waiting
            executed = self._execute(plan)
            yield from self._run(executed)
            self._record(plan, executed, running, waiting)

    # -- plan --------------------------------------------------------------------------------------------------
    def _plan(self) -> StepPlan:
        started = time.perf_counter()
        plan = self.core.plan(self.clock.now)
        self.decision_seconds.append(time.perf_counter() - started)
        return plan

    def _without_step(self, plan: StepPlan | None):
        """Nothing to compute: wait until something arrives or lands, or until the plan's transfers are done; a plan that
        only took memory away is followed by the next one at once.

        A policy that plans nothing for no reason is stopped with a diagnosis.
        """
        if plan is not None and (plan.moves or plan.preempted):
            moved = self.backend.transfer(plan.moves, self.clock.now)
            self._hold(moved.ready_s)
            self.recorder.without_step(plan, moved.to_host_bytes, moved.to_device_bytes)
            done = max(moved.before, moved.beside)
            if done > self.clock.now:
                yield self.clock.at(done, self._steps)
                return
            if plan.preempted:
                return
        core = self.core
        if plan is not None and not core.ready_s and core.ledger.free_blocks == core.ledger.num_blocks:
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
            f"policy {self.core.policy.name!r} made no progress at {self.clock.now:.6f} s: {len(waiting)} requests wait, "
            f"{ledger.free_blocks} of {ledger.num_blocks} KV blocks are free; the first is {head.id!r} with "
            f"{head.known_tokens} tokens ({-(-head.known_tokens // ledger.block_tokens)} blocks)"
        )

    # -- run ---------------------------------------------------------------------------------------------------
    def _execute(self, plan: StepPlan) -> Executed:
        overhead = self.decision_overhead
        if overhead is None:
            overhead = self.decision_seconds[-1]
        executed = self.backend.execute(plan, self.core.emitting(plan), self.clock.now, overhead)
        self._hold(executed.ready_s)
        return executed

    def _hold(self, landings: dict[int, float]) -> None:
        """Rows that are not ready before their transfers have landed, the latest of them."""
        for row, landing in landings.items():
            if landing > self.core.ready_s.get(row, 0.0):
                self.core.ready_s[row] = landing
                self.clock.process(self._land(row, landing))

    def _land(self, row: int, landing: float):
        yield self.clock.at(landing, BEFORE_STEPS)
        if self.core.ready_s.get(row) == landing:
            del self.core.ready_s[row]
            self._notify()

    def _run(self, executed: Executed):
        """Let the time of the step, or of the run of steps, pass; an arrival cuts a run at the next boundary."""
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

    # -- record ------------------------------------------------------------------------------------------------
    def _record(self, plan: StepPlan, executed: Executed, running: int, waiting: int) -> None:
        core = self.core
        self.recorder.planned(plan, executed, running, waiting, core.requests, core.ledger)
        gaps = core.complete(plan, executed.outcome)
        self.recorder.completed(executed, gaps, core.requests)
        for row in executed.outcome.finished:
            self.on_finish(row)
