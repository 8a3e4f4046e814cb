"""The engine without time: one call, one step. For comparing decisions with another engine, step by
step."""

from dataclasses import dataclass

import numpy as np

from twinserve.policies.base import Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import End, RequestTable
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.pipeline import BatchQueue, PipelinedCore


@dataclass(frozen=True)
class SteppedPlan:
    """What one step decided: ids in order, tokens; free blocks after it; ids that ended with it;
    how many wait then."""

    scheduled: dict[str, int]
    preempted: list[str]
    hits: dict[str, int]
    free_blocks: int
    finished: list[str]
    waiting: int


def granted(plan: StepPlan, ids: list[str]) -> dict[str, int]:
    """{request id: tokens} in plan order."""
    return {ids[row]: int(n) for row, n in zip(plan.rows, plan.tokens, strict=True)}


class Stepper:
    """Submit requests, call `step()`; every row that catches up emits one token and ends at its
    output length.

    asynchronous  a call makes the plan of a step while the step before it is under way, and then
                  ends that one: the rows that it lists as finished are those of the step before
    stages        of a pipeline: a call makes a plan, and ends the oldest batch once as many are
                  under way, or one more with `asynchronous`
    """

    def __init__(
        self,
        requests: RequestTable,
        policy: Policy,
        ledger: KvLedger,
        asynchronous: bool = False,
        stages: int = 1,
    ) -> None:
        if stages > 1:
            core = PipelinedCore(requests, policy, ledger, stages, asynchronous)
            self._over(core, core.depth)
        else:
            self._over(EngineCore(requests, policy, ledger, asynchronous))

    def _over(self, core: EngineCore, depth: int = 1) -> None:
        self.core, self.requests = core, core.requests
        self.queue: BatchQueue[tuple[StepPlan, StepOutcome]] = BatchQueue(depth)
        self._outputs: list[int] = []
        self._steps = 0
        self._under_way: tuple[StepPlan, StepOutcome] | None = None

    def submit(self, request_id: str, prompt_tokens: int, output_tokens: int, **values) -> int:
        """Returns the row. `output_tokens` is how many it will emit; the policy does not see it."""
        row = self.core.submit(request_id, prompt_tokens=prompt_tokens, **values)
        self._outputs.append(output_tokens)
        return row

    def withdraw(self, row: int) -> None:
        """Its client leaves before the next step is planned."""
        self.core.withdraw(row, End.DISCONNECTED, float(self._steps))

    def step(self) -> SteppedPlan:
        ids = self.requests.ids
        plan = self.core.plan(float(self._steps))
        free = self.core.ledger.free_blocks
        finished = self._execute(plan)
        return SteppedPlan(
            granted(plan, ids),
            [ids[row] for row, _ in plan.preempted],
            {ids[row]: hit for row, hit in plan.admitted},
            free,
            [ids[row] for row in finished],
            self.core.waiting,
        )

    def _execute(self, plan: StepPlan) -> list[int]:
        """The rows that ended, by what this call books: the plan's own outcome, or that of the plan
        before."""
        if self.queue.depth > 1:
            return self._pass_on(plan)
        if not self.core.asynchronous:
            outcome = self._outcome(plan)
            self.core.complete(plan, outcome)
            return outcome.finished
        finished: list[int] = []
        if self._under_way is not None:
            self.core.complete(*self._under_way)
            finished, self._under_way = self._under_way[1].finished, None
        if plan:
            self._under_way = (plan, self._outcome(plan))
            self.core.begin(*self._under_way)
        return finished

    def _pass_on(self, plan: StepPlan) -> list[int]:
        batch = (plan, self._outcome(plan)) if plan else None
        if batch is not None:
            self.core.begin(*batch)
        self.queue.append(batch)
        if self.queue.takes_more(self.core.active > 0) or (oldest := self.queue.popleft()) is None:
            return []
        self.core.complete(*oldest)
        return oldest[1].finished

    def _outcome(self, plan: StepPlan) -> StepOutcome:
        emitted = plan.rows[self.core.emitting(plan)]
        finished = [
            r for r in emitted.tolist() if self.requests.output_tokens[r] + 1 >= self._outputs[r]
        ]
        start, self._steps = float(self._steps), self._steps + 1
        return StepOutcome(start, np.array([start + 1.0]), emitted, finished)
