"""An engine of pipeline stages: several batches are under way, so that each stage has work while
another one computes.

Source: vLLM 0.32, `v1/engine/core.py` (`step_with_batch_queue`), `config/vllm.py`
(`max_concurrent_batches`), `v1/core/sched/scheduler.py`; synchronous scheduling.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import numpy as np

from twinserve.policies.errors import PolicyError
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import FIRST_ROWS, End, State
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine, _Step

_FINISHED = int(State.FINISHED)


Batch = TypeVar("Batch")


class BatchQueue(deque[Batch | None]):
    """Batches under way, the oldest first. None: an empty one, of a plan that found nothing to
    compute. It takes no time, and a place."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def takes_more(self, active: bool) -> bool:
        """Whether another one is planned before the oldest ends: while requests are unfinished
        (`active`), places are filled first."""
        return active and len(self) < self.depth


class PipelinedCore(EngineCore):
    """With several batches between `begin` and `complete`.

    `computed_tokens` counts what a batch computes from its begin, so that the next part of a prompt
    may follow right behind; its token is shown when it is known. So a request decodes in one batch
    at a time, and while that is under way has nothing to compute.
    """

    def __init__(self, requests, policy, ledger) -> None:
        super().__init__(requests, policy, ledger)
        if not policy.pipelined:
            raise PolicyError(
                f"policy {policy.name!r} plans when the last step has ended, and pipeline stages "
                "have several under way; choose policy vllm, or a profile without :ppN"
            )
        # by row: batches under way that compute for it
        self._batches = np.zeros(FIRST_ROWS, np.int64)
        self.draining: set[int] = set()

    def submit(self, request_id: str, **values) -> int:
        row = super().submit(request_id, **values)
        if row >= len(self._batches):
            self._batches = np.concatenate([self._batches, np.zeros_like(self._batches)])
        return row

    def plan(self, now: float) -> StepPlan:
        plan = super().plan(now)
        for row, _ in plan.preempted:
            if self._batches[row]:
                self.draining.add(row)
        return plan

    def begin(self, plan: StepPlan, outcome: StepOutcome) -> None:
        self.requests.computed_tokens[plan.rows] += plan.tokens
        self._batches[plan.rows] += 1

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        """As `EngineCore.complete`. A row that was dropped meanwhile gets its token where it waits;
        one that was withdrawn gets none."""
        self._batches[plan.rows] -= 1
        if self.draining:
            self.draining = {row for row in self.draining if self._batches[row]}
        state = self.requests.state
        gone = state[outcome.emitted] == _FINISHED
        if np.count_nonzero(gone):
            outcome.emitted = outcome.emitted[~gone]
            outcome.finished = [row for row in outcome.finished if state[row] != _FINISHED]
        return super().complete(StepPlan(), outcome)  # what it computed is shown since it began

    def void(self, plan: StepPlan) -> None:
        """A batch under way is lost: the engine fails."""
        requests = self.requests
        kept = requests.computed_tokens[plan.rows] > 0  # not dropped since
        requests.computed_tokens[plan.rows[kept]] -= plan.tokens[kept]


class PipelinedEngine(Engine):
    """With up to `depth` batches under way, as many as there are stages.

    As in vLLM, a plan that finds nothing to compute is queued as an empty batch. So plans are made
    at the ends of batches, and what arrives in between waits for the next one. vLLM sleeps 1 ms for
    each empty batch, and hears arrivals meanwhile; that is left out.
    """

    core: PipelinedCore

    def __init__(self, *given, depth: int, **more) -> None:
        super().__init__(*given, **more)
        self._queue: BatchQueue[_Step] = BatchQueue(depth)

    def _loop(self):
        queue = self._queue
        while True:
            yield self.clock.at(self.clock.now, self._plans)
            self._settle()
            plan = self._begin() if self.core.active else None
            if not any(queue):
                queue.clear()
                self._since_s = None
                yield from self._without_step(plan)
                continue
            if queue.takes_more(self.core.active > 0):
                continue
            if (step := queue[0]) is not None:
                yield self.clock.at(step.executed.outcome.ends_s[-1], self._steps)
            queue.popleft()
            if step is not None:
                self._book(step)

    def _begin(self) -> StepPlan:
        """Plan a batch, and put it into the queue."""
        now = self.clock.now
        plan = self._plan()
        # one plan after another, where planning takes time
        self._since_s = max(now, now if self._since_s is None else self._since_s)
        if not plan:
            self._queue.append(None)
            if plan.preempted and any(self._queue):
                self.recorder.without_step(plan, 0, 0)
            return plan
        plan.valid_for, plan.chunked = 0, False
        step = self._execute(plan)
        self._record_plan(step)
        self.core.begin(plan, step.executed.outcome)
        self._queue.append(step)
        return plan

    def fail(self, end: End = End.FAILED) -> list[int]:
        for step in filter(None, reversed(self._queue)):
            self.recorder.void()
            self.core.void(step.plan)
        self._queue.clear()
        return super().fail(end)

    def steps_begun(self, before_s: float) -> int:
        begun = [step.executed.outcome.start_s for step in self._queue if step is not None]
        return self.recorder.steps - sum(start_s >= before_s for start_s in begun)
