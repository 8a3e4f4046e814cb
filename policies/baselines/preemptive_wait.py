"""Iteration-level preemption by waiting time (Wan et al., BROS, IEEE version: Sec. II-B, Fig. 2).

A request's priority is the time since its last iteration ended, or since its arrival if it had
none. Each iteration runs those that have waited longest. The paper ran this on vLLM and says no
more about it. We chose:

- *Batch.* Prefills and decodes mix; whole prompts; at most max_num_seqs requests and
  max_num_batched_tokens tokens. The first request that exceeds the tokens ends the batch (it comes
  earlier in the next one); a prompt longer than the budget runs alone.
- *Ties.* By arrival. All of the last batch have waited for the same time, none.
- *What gives way when memory is short.* The request that has waited least, also to a new one.
  Preemption of the iteration alone would leave newcomers waiting for the memory of others, as under
  first come, first served. Under memory pressure that means much recomputation or swapping, the
  cost that the paper holds against such preemption (Observation #3); `newcomers_preempt=false`
  shows the rule without it.
"""

from typing import Literal

import numpy as np

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.parts.fill import blocking, fill
from twinserve.policies.parts.runs import further_decodes
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import FIRST_ROWS, RequestTable


class PreemptiveWaitOptions(Options):
    """preemption_mode    what happens to the KV of a request that gives way; swapping falls back to
                       recomputation while the host is full
    newcomers_preempt  requests without KV take that of others; off: they wait for free memory
    """

    preemption_mode: Literal["recompute", "swap"] = "recompute"
    newcomers_preempt: bool = True


class PreemptiveWaitPolicy(Policy[PreemptiveWaitOptions]):
    name = "preemptive-wait"
    Options = PreemptiveWaitOptions
    uses_estimator = False
    traits = Traits(no_drafts="fills each step anew with one token of each request that decodes")

    def setup(self) -> None:
        self.active = RowSet()
        self._waits_since = np.zeros(FIRST_ROWS)  # row -> seconds on the engine's clock
        self._batch = np.zeros(0, np.int64)

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        if row >= len(self._waits_since):
            room = np.zeros(max(row + 1 - len(self._waits_since), len(self._waits_since)))
            self._waits_since = np.concatenate([self._waits_since, room])
        self.active.add(row)
        self._waits_since[row] = requests.arrival_s[row]

    def on_finish(self, row: int) -> None:
        self.active.discard(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self._waits_since[self._batch] = outcome.ends_s[-1]

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        rows = self.active.rows
        longest_wait_first = np.lexsort((rows, self._waits_since[rows]))
        plan = fill(
            view,
            ledger,
            rows[longest_wait_first],
            seats=self.limits.max_num_seqs,
            token_budget=self.limits.max_num_batched_tokens,
            swap=self.options.preemption_mode == "swap",
            newcomers_evict=self.options.newcomers_preempt,
        )
        plan.moves = blocking(ledger.take_moves())
        if len(plan.rows) == len(rows):
            plan.valid_for = further_decodes(plan, view.requests, ledger)
        if plan.valid_for:
            plan.rows = np.sort(plan.rows)  # from the next step on all have waited equally long
        self._batch = plan.rows
        return plan
