"""An engine's core that speculates: rows get several tokens a step, and what was rejected is not
computed.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (`update_from_output`),
`v1/core/sched/async_scheduler.py`. Decision for decision the same: tests/identity.
"""

import numpy as np

from twinserve.policies.base import Policy
from twinserve.policies.drafting import Drafting
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import End, RequestTable
from twinserve.sim.engine.core import FINISHED, RUNNING, EngineCore


class DraftingCore(EngineCore):
    """`drafting` says how many drafts rows have.

    A row that may end with the current step is planned again. If the row does end, that plan's
    tokens are computed in vain, as in vLLM.
    """

    def __init__(
        self,
        requests: RequestTable,
        policy: Policy,
        ledger: KvLedger,
        drafting: Drafting,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(requests, policy, ledger, asynchronous)
        if self._ends_early:
            raise PolicyError(
                f"policy {policy.name!r} must know at the start of a step which rows end with "
                "it, and drafts hide that: give --no-async-scheduling, or set "
                "Traits.keeps_ending"
            )
        self.drafting = drafting
        self.padding = drafting.tokens if drafting.pads else 0
        self._batch = 0  # rows of the step that is booked
        self._before = np.zeros(0, np.int64)  # tokens computed before the step under way, by row

    def plan(self, now: float) -> StepPlan:
        plan = super().plan(now)
        self._forget_drafts(plan)
        return plan

    def _forget_drafts(self, plan: StepPlan) -> None:
        """Of rows that lost their place."""
        for row, _ in plan.preempted:
            self.requests.draft_tokens[row] = 0

    def emitting(self, plan: StepPlan) -> np.ndarray:
        requests, rows = self.requests, plan.rows
        caught_up = requests.computed_tokens[rows] + plan.tokens >= requests.known_tokens(rows)
        return caught_up & (requests.state[rows] != FINISHED)

    def begin(self, plan: StepPlan, outcome: StepOutcome) -> None:
        verified = outcome.verified
        assert verified is not None, "this backend does not support drafts"
        if verified.ahead is not None:
            raise PolicyError(
                "drafts that are looked up in a text are known when the step before has ended: "
                "give --no-async-scheduling"
            )
        requests, rows = self.requests, outcome.emitted
        self._before = requests.computed_tokens[plan.rows]
        ended = requests.state[plan.rows] == FINISHED  # with the step before, after the plan
        requests.computed_tokens[plan.rows] += np.where(ended, 0, plan.tokens)
        self._shown, self._last_token_s = rows, requests.last_token_s[rows]
        sure = rows[verified.certain]
        requests.draft_tokens[sure] = 0
        requests.computed_tokens[sure] = requests.known_tokens(sure)  # nothing is left to compute
        going_on, shown = rows[~verified.certain], 1 + verified.drafted[~verified.certain]
        requests.output_tokens[going_on] += shown
        requests.in_flight[going_on] = shown
        requests.last_token_s[going_on] = outcome.start_s
        requests.draft_tokens[going_on] = self.drafting.after(len(plan.rows))

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        self._batch = len(plan.rows)
        if self.under_way and self._dropped and outcome.verified is not None:
            alive = self.requests.state[outcome.emitted] != FINISHED
            outcome.verified = outcome.verified.only(alive)
        return super().complete(plan, outcome)

    def _book(self, outcome: StepOutcome) -> np.ndarray:
        requests, rows, verified = self.requests, outcome.emitted, outcome.verified
        assert verified is not None, "this backend does not support drafts"
        if not len(rows):
            return np.zeros(0)
        end_s = outcome.ends_s[0]
        gaps = end_s - requests.last_token_s[rows]
        requests.late_tokens[rows] += gaps > requests.slo_tpot_s[rows]
        emitted = requests.output_tokens[rows]
        requests.first_token_s[rows[emitted == 0]] = end_s
        requests.output_tokens[rows] = emitted + verified.tokens
        requests.last_token_s[rows] = end_s
        stays = requests.state[rows] == RUNNING
        here = rows[stays]
        requests.computed_tokens[here] = requests.known_tokens(here) - 1  # less what was rejected
        if verified.ahead is not None:
            requests.draft_tokens[here] = verified.ahead[stays]
        elif not self.asynchronous:
            requests.draft_tokens[here] = self.drafting.after(self._batch)
        return gaps

    def fail(
        self, end: End, now: float, plan: StepPlan | None, outcome: StepOutcome | None
    ) -> np.ndarray:
        kept, before = None, self._before
        if self.under_way and plan is not None:
            kept = self.requests.computed_tokens[plan.rows] > 0
        rows = super().fail(end, now, plan, outcome)
        if kept is not None and plan is not None:
            self.requests.computed_tokens[plan.rows[kept]] = before[kept]
        return rows
