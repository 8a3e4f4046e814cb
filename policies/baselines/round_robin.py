"""BROS-RR: real-time and best-effort requests in two first-come-first-served queues, served in
alternate iterations (Wan et al., BROS, IEEE version: Sec. II-B, Fig. 3; Sec. VII-A, baseline 3).

The paper describes it as BROS with its scheduling replaced and without the bidirectional cache. So
the engine is BROS's: prefills and decodes share a batch, prompts are computed whole, at most B_base
requests run in an iteration. On other points we chose:

- *Whose turn.* A queue of whose requests none can run gives its turn away, so no iteration is
  spent on nothing. The iteration after one for a class is the other class's.
- *What gives way when memory is short.* The last to arrive of the same class, by recomputation. The
  queues are independent: the class whose turn it is may not take the other's memory, which would be
  a priority. If each queue is stuck on the other's memory, nothing can run. Then the oldest request
  takes that of the youngest, of any class.
"""

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.parts.fill import fill
from twinserve.policies.parts.runs import further_steps
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestClass, RequestTable, State

_RUNNING = int(State.RUNNING)


class RoundRobinOptions(Options):
    """batch_size  requests an iteration, at most (BROS's B_base); max_num_seqs bounds it too
    chunk       prompt tokens an iteration computes at most of one request; None: whole prompts
    """

    batch_size: int = Field(128, ge=1)
    chunk: int | None = Field(None, ge=1)


class RoundRobinPolicy(Policy[RoundRobinOptions]):
    name = "round-robin"
    Options = RoundRobinOptions
    uses_estimator = False
    traits = Traits(
        no_drafts=(
            "fills the steps of a class, every second one, with one token of each request that "
            "decodes"
        )
    )

    def setup(self) -> None:
        self.queues = (RowSet(), RowSet())  # by class; unfinished rows in order of arrival
        self.turn = int(RequestClass.REAL_TIME)
        self.batch_size = min(self.options.batch_size, self.limits.max_num_seqs)

    def step_tokens(self, longest: int) -> int:
        return self.batch_size * min(longest, self.options.chunk or longest)

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self.queues[requests.service_class[row]].add(row)

    def on_finish(self, row: int) -> None:
        for queue in self.queues:
            queue.discard(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        plan = self._serve(self.turn, view, ledger) or self._serve(1 - self.turn, view, ledger)
        if not plan:
            plan = self._break_tie(view, ledger)
        if plan:
            self.turn = 1 - int(view.requests.service_class[plan.rows[0]])
        plan.moves = ledger.take_moves()
        if not len(self.queues[self.turn]) and self._everybody_runs(plan, view.requests):
            shut = len(plan.rows) == len(self.queues[1 - self.turn])  # no row waits
            plan.valid_for = further_steps(plan, view.requests, ledger, shut)
        return plan

    def _serve(self, service_class: int, view: SystemView, ledger: KvLedger) -> StepPlan:
        rows = self.queues[service_class].rows
        return fill(view, ledger, rows, seats=self.batch_size, chunk=self.options.chunk)

    def _break_tie(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        """Both queues are stuck: the oldest request that holds memory takes the youngest's."""
        rows = np.sort(np.concatenate([queue.rows for queue in self.queues]))
        holders = rows[view.requests.state[rows] == _RUNNING]
        return fill(view, ledger, holders, seats=1, chunk=self.options.chunk)

    def _everybody_runs(self, plan: StepPlan, requests: RequestTable) -> bool:
        """No row with memory is paused. (A row that waits for memory or a seat still will while
        no row ends.)"""
        rows = self.queues[1 - self.turn].rows
        return len(plan.rows) == np.count_nonzero(requests.state[rows] == _RUNNING)
