"""vLLM V1's scheduler with KV offloaded to the host: OffloadingConnector's semantics.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (`schedule`), and what `policies/kv/offload` names.

- A request without KV first takes what the device has, then asks the tier for what follows. What
  the tier has is loaded while others compute: the request waits, as one does for KV that another
  engine has computed, with blocks for its hits alone. Then it computes the rest.
- Where the tier has no answer yet the request is passed over, and the next one is asked.
- After a preemption a request asks again: its own KV may be on the host.
"""

from __future__ import annotations

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.baselines.vllm_decode import VllmDecode
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.kv.offload.ledger import TieredLedger
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable


class VllmOffloading(VllmDecode):
    def setup(self) -> None:
        super().setup()
        self._gone: list[tuple[int, bool]] = []  # rows that ended since the last plan; withdrawn?

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self._gone.append((row, False))

    def on_withdraw(self, row: int) -> None:
        super().on_finish(row)
        self._gone.append((row, True))

    @property
    def unsettled(self) -> bool:
        return bool(self._gone)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        offload = _tiered(ledger).offload
        requests, self.counters = view.requests, offload.counts
        for row, withdrawn in self._gone:
            computed = int(requests.computed_tokens[row])
            if not withdrawn:  # the KV of its last token was never computed
                computed = max(
                    int(requests.prompt_tokens[row]), int(requests.known_tokens(row)) - 1
                )
            offload.ended(row, computed)
        self._gone.clear()
        plan = super().plan(view, ledger)
        plan.offload = offload.begin(plan)
        if plan.valid_for and not offload.steady(plan, plan.offload):
            plan.valid_for, plan.chunked = 0, False
        return plan

    def _fetch(
        self, row: int, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> bool | None:
        tiered, hit = _tiered(ledger), ledger.hit_tokens(row)
        loaded = tiered.offload.lookup(row, hit)
        if loaded is None:
            self._passed.append(self.waiting.pop())
            return True
        if not loaded:
            return None
        whole = int(requests.known_tokens(row)) if self._reserves else 0
        beside = self._still_needed(requests, ledger)
        if not tiered.admit_load(row, hit + loaded, hit, self._kept_free(ledger), whole, beside):
            return False
        tiered.offload.load(row, hit, loaded)
        self._wait_for_kv(row, hit, plan, requests)
        self._in_prompt.add(row)
        return True

    def _go_on(
        self, row: int, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        """What a row computes whose load has landed; 0: it waits on."""
        tiered, computed = _tiered(ledger), int(requests.computed_tokens[row])
        tiered.publish(np.array([row]), np.array([tiered.offload.loaded(row)]))
        known = int(requests.known_tokens(row))
        new = self._part(known - computed, budget)
        whole = known if self._reserves else 0
        lacking = -(-max(whole, computed + new) // ledger.block_tokens) - ledger.held_blocks(row)
        if not new or max(lacking, 0) + self._kept_free(ledger) > ledger.free_blocks:
            return 0
        self._begin(row, computed + new, plan, requests, ledger)
        return new


def _tiered(ledger: KvLedger) -> TieredLedger:
    if not isinstance(ledger, TieredLedger):
        raise PolicyError(f"the {ledger.name} ledger has no host tier; use kv=paged")
    return ledger
