"""One engine's state and its step, without a clock: submit, plan, complete. Both engines' loops are built on it."""

from __future__ import annotations

import numpy as np

from ..policies.base import Policy, SystemView
from ..policies.kv.base import KvLedger
from ..policies.plan import Preemption, StepOutcome, StepPlan
from ..policies.requests import Application, RequestTable, State

# plain integers: looking a member up in an enum costs more than the assignment it is for
WAITING, RUNNING, SWAPPED, FINISHED = (int(s) for s in (State.WAITING, State.RUNNING, State.SWAPPED, State.FINISHED))


class EngineCore:
    """Applies plans and outcomes to the request table, and keeps policy and ledger informed.

    The only writer of the table. `active` counts unfinished requests, `holding` those with KV on the device.
    """

    def __init__(self, requests: RequestTable, policy: Policy, ledger: KvLedger) -> None:
        self.requests = requests
        self.policy = policy
        self.ledger = ledger
        self.ready_s: dict[int, float] = {}
        self.active = 0
        self.holding = 0
        self._arrived: list[int | Application] = []  # what the policy has not been told of yet, in order

    @property
    def waiting(self) -> int:
        return self.active - self.holding

    def announce(self, application: Application) -> None:
        """An application arrives; its first requests are submitted right after."""
        self._arrived.append(application)

    def submit(self, request_id: str, **values) -> int:
        """A new request; `values` as for RequestTable.submit. Returns its row.

        The policy hears of it at the next plan, when the table is as the last step left it: in the middle of a step, or
        of a run of steps, it would see its running requests as they were when that began.
        """
        row = self.requests.submit(request_id, **values)
        self.active += 1
        self._arrived.append(row)
        return row

    def plan(self, now: float) -> StepPlan:
        """Ask the policy, and apply what its plan changes at once (who lost and who got memory)."""
        requests = self.requests
        for arrival in self._arrived:
            if isinstance(arrival, Application):
                self.policy.on_application(arrival)
            else:
                self.policy.on_arrival(arrival, requests)
        self._arrived.clear()
        plan = self.policy.plan(SystemView(now, requests, self.ready_s), self.ledger)
        for row, kind in plan.preempted:
            self.holding -= 1
            if kind is Preemption.RECOMPUTE:
                requests.computed_tokens[row] = 0
                requests.state[row] = WAITING
                requests.recomputes[row] += 1
            else:
                requests.state[row] = SWAPPED
                requests.swaps[row] += 1
        for row, hit_tokens in plan.admitted:
            self.holding += 1
            requests.computed_tokens[row] = hit_tokens
            requests.state[row] = RUNNING
            if np.isnan(requests.first_scheduled_s[row]):
                requests.first_scheduled_s[row] = now
                requests.hit_tokens[row] = hit_tokens
        for row in plan.swapped_in:
            self.holding += 1
            requests.state[row] = RUNNING
        for move in plan.moves:
            requests.swapped_tokens[move.row] += move.tokens
        return plan

    def emitting(self, plan: StepPlan) -> np.ndarray:
        """bool[n]: which of the plan's rows catch up with their known text, and so emit a token."""
        rows = plan.rows
        return self.requests.computed_tokens[rows] + plan.tokens == self.requests.known_tokens(rows)

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        """Book what was executed. Returns float64[e]: the gap of each emitted row's first token in this outcome (NaN
        for a request's very first token)."""
        requests, steps = self.requests, len(outcome.ends_s)
        if steps > 1:
            self.ledger.extend(plan.rows, steps)
            requests.computed_tokens[plan.rows] += steps
        else:
            requests.computed_tokens[plan.rows] += plan.tokens
        rows = outcome.emitted
        gaps = outcome.ends_s[0] - requests.last_token_s[rows]
        slo = requests.slo_tpot_s[rows]
        late = (gaps > slo).astype(np.int64)
        if steps > 1:
            later = outcome.ends_s[1:] - outcome.ends_s[:-1]
            if not later.max() <= slo.min():  # also where an objective is NaN: that sorts last, and nothing is late
                later.sort()
                late += len(later) - later.searchsorted(slo, side="right")
        requests.late_tokens[rows] += late
        fresh = rows[requests.output_tokens[rows] == 0]
        if len(fresh):
            requests.first_token_s[fresh] = outcome.ends_s[0]
        requests.output_tokens[rows] += steps
        requests.last_token_s[rows] = outcome.ends_s[-1]
        for row in outcome.finished:
            self.ledger.free(row)
            self.policy.on_finish(row)
            requests.state[row] = FINISHED
            self.active -= 1
            self.holding -= 1
        self.policy.on_outcome(outcome)
        return gaps
