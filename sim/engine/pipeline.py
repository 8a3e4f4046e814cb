"""An engine of pipeline stages: several batches are under way, so that each stage has work while
another one computes.

Source: vLLM 0.32, `v1/engine/core.py` (`step_with_batch_queue`), `config/vllm.py`
(`max_concurrent_batches`), `v1/core/sched/scheduler.py`, `v1/core/sched/async_scheduler.py`.
"""

from collections import deque
from typing import TypeVar

import numpy as np

from twinserve.policies.errors import PolicyError
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import FIRST_ROWS, End, State
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine
from twinserve.sim.engine.step import Step

_FINISHED = int(State.FINISHED)
_RUNNING = int(State.RUNNING)


Batch = TypeVar("Batch")


class BatchQueue(deque[Batch | None]):
    """Batches under way, the oldest first. None stands for the empty batch of a plan that found
    nothing to compute. An empty batch takes a place and no time."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def takes_more(self, active: bool) -> bool:
        """Return whether another batch is planned before the oldest ends. Places are filled first
        while requests are unfinished (`active`)."""
        return active and len(self) < self.depth


class PipelinedCore(EngineCore):
    """With several batches between `begin` and `complete`.

    `computed_tokens` counts what a batch computes from its begin, so that the next part of a prompt
    may follow right behind; its token is shown when it is known. So a request decodes in one batch
    at a time, and while that is under way has nothing to compute.

    asynchronous  a token is shown before it is known (`in_flight`), to the plan `stages` plans
                  after its batch's. From then on vLLM's second model runner lets the request
                  decode again (`next_decode_eligible_step`); its batch is the oldest under way
    """

    def __init__(self, requests, policy, ledger, stages: int, asynchronous: bool = False) -> None:
        super().__init__(requests, policy, ledger, asynchronous)
        if not policy.traits.pipelined:
            raise PolicyError(
                f"policy {policy.name!r} plans when the last step has ended, and pipeline stages "
                "have several under way; choose policy vllm, or a profile without :ppN"
            )
        if self._ends_early:
            raise PolicyError(
                f"policy {policy.name!r} hears of an end before the last token is known, and "
                "pipeline stages have several batches under way then; give --no-async-scheduling"
            )
        self.stages = stages
        # by row: batches under way that compute for it
        self._batches = np.zeros(FIRST_ROWS, np.int64)
        self.draining: set[int] = set()
        self._plans = 0
        # (number of its plan, rows to show, start in seconds) of batches, the oldest first
        self._to_show: deque[tuple[int, np.ndarray, float]] = deque()
        # by row: whether a token is shown ahead, and the time of the one before that
        self._ahead = np.zeros(FIRST_ROWS, bool)
        self._before_s = np.zeros(FIRST_ROWS)

    @property
    def depth(self) -> int:
        """Return the most batches that can be under way."""
        return self.stages + self.asynchronous

    def submit(self, request_id: str, **values) -> int:
        row = super().submit(request_id, **values)
        if row >= len(self._batches):
            for name in ("_batches", "_ahead", "_before_s"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        return row

    def settle(self, now: float) -> list[tuple[int, float]]:
        left = super().settle(now)
        if left and self.asynchronous:
            self._hide(np.array([row for row, _ in left]))
        return left

    def plan(self, now: float) -> StepPlan:
        self._plans += 1
        while self._to_show and self._to_show[0][0] + self.stages <= self._plans:
            self._show(*self._to_show.popleft()[1:])
        plan = super().plan(now)
        for row, _ in plan.preempted:
            if self._batches[row]:
                self.draining.add(row)
        if plan.preempted and self.asynchronous:
            self._hide(np.array([row for row, _ in plan.preempted]))
        return plan

    def begin(self, plan: StepPlan, outcome: StepOutcome) -> None:
        self.requests.computed_tokens[plan.rows] += plan.tokens
        self._batches[plan.rows] += 1
        if self.asynchronous:
            going_on = outcome.emitted
            for row in outcome.finished:  # one or two
                going_on = going_on[going_on != row]
            self._to_show.append((self._plans, going_on, outcome.start_s))

    def _show(self, rows: np.ndarray, start_s: float) -> None:
        """The tokens of a batch under way, but of rows that were dropped or have left since."""
        requests = self.requests
        rows = rows[(requests.state[rows] == _RUNNING) & (self._batches[rows] > 0)]
        self._ahead[rows] = True
        self._before_s[rows] = requests.last_token_s[rows]
        requests.output_tokens[rows] += 1
        requests.in_flight[rows] = 1
        requests.last_token_s[rows] = start_s

    def _hide(self, rows: np.ndarray) -> None:
        """Take back what `_show` showed of `rows`."""
        requests = self.requests
        shown = rows[self._ahead[rows]]
        self._ahead[shown] = False
        requests.output_tokens[shown] -= requests.in_flight[shown]  # 0 once it was dropped
        requests.in_flight[shown] = 0
        requests.last_token_s[shown] = self._before_s[shown]

    def _text_tokens(self, rows: np.ndarray) -> np.ndarray:
        return super()._text_tokens(rows) - self._batches[rows]

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        """`EngineCore.complete` for one of several batches. A row that was dropped meanwhile still
        gets its token; a row that was withdrawn does not."""
        self._batches[plan.rows] -= 1
        if self.draining:
            self.draining = {row for row in self.draining if self._batches[row]}
        if self.asynchronous:
            self._hide(outcome.emitted)
        state = self.requests.state
        gone = state[outcome.emitted] == _FINISHED
        if np.count_nonzero(gone):
            outcome.emitted = outcome.emitted[~gone]
            outcome.finished = [row for row in outcome.finished if state[row] != _FINISHED]
        return super().complete(StepPlan(), outcome)  # what it computed is shown since it began

    def void(self, plan: StepPlan) -> None:
        """Discard a batch under way, because the engine fails."""
        if self.asynchronous:
            self._hide(plan.rows)
        requests = self.requests
        kept = requests.computed_tokens[plan.rows] > 0  # not dropped since
        requests.computed_tokens[plan.rows[kept]] -= plan.tokens[kept]


class PipelinedEngine(Engine):
    """With up to `depth` batches under way: as many as there are stages, and one more with
    asynchronous scheduling.

    As in vLLM, a plan that finds nothing to compute is queued as an empty batch. So plans are made
    at the ends of batches, and what arrives in between waits for the next one. vLLM sleeps 1 ms for
    each empty batch, and hears arrivals meanwhile; that is left out.
    """

    core: PipelinedCore

    def __init__(self, *given, **more) -> None:
        super().__init__(*given, **more)
        self._queue: BatchQueue[Step] = BatchQueue(self.core.depth)

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
        self._keep_loads(self._queue)
        for step in filter(None, reversed(self._queue)):
            self.recorder.void()
            self.core.void(step.plan)
        self._queue.clear()
        return super().fail(end)

    def steps_begun(self, before_s: float) -> int:
        begun = [step.executed.outcome.start_s for step in self._queue if step is not None]
        return self.recorder.steps - sum(start_s >= before_s for start_s in begun)
