"""vLLM V1's scheduler on the decode side of a pull connector: requests wait for KV that another
engine has computed.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (`schedule`, `_handle_blocked_waiting_request`,
`_update_waiting_for_remote_kv`), `nixl/pull_scheduler.py` (`get_num_new_matched_tokens`).

- A request whose KV is elsewhere takes all its blocks at once, beside what prompts under way still
  need, or the waiting loop ends. It then waits in a queue of those that hold KV, takes no tokens
  and no seat, and cannot be preempted.
- That queue is drained before all other requests. Who has landed has its blocks cached, and its
  last token left to compute. Of a failed load only the local hit is valid: with one the request
  computes the rest in the blocks that it holds; without, they are freed and it starts over.
- After a preemption the prompt is computed here: KV is fetched once.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queues import FcfsQueue, PriorityQueue, make_queue
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable, State

_RUNNING = int(State.RUNNING)


class VllmDecode(VllmPolicy):
    fetching: FcfsQueue | PriorityQueue  # `kv_holding_waiting`

    def setup(self) -> None:
        super().setup()
        self.fetching = make_queue(self.options.scheduling)
        self._away: Container[int] = ()  # of these, whose KV has not landed

    def on_finish(self, row: int) -> None:
        if row in self.fetching:
            self.fetching.remove(row)
        else:
            super().on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        self._away = view.ready_s
        plan = super().plan(view, ledger)
        if plan.fetched or plan.begun:
            plan.valid_for, plan.chunked = 0, False
        return plan

    def _admit_waiting(
        self, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        open_ = True
        for row in [row for row in self.fetching if row not in self._away]:
            open_ = budget > 0 and len(self.running) < self.limits.max_num_seqs
            new = self._go_on(row, plan, budget, requests, ledger) if open_ else 0
            if not new:
                open_ = False
                break
            self.fetching.remove(row)
            rows.append(row)
            tokens.append(new)
            budget -= new
        while open_ and budget > 0 and self.waiting and self._has_seat():
            row = self.waiting.peek()
            if requests.remote_tokens[row]:
                open_ = self._fetch(row, plan, requests, ledger)
                continue
            new = self._admit(row, plan, budget, requests, ledger)
            if not new:
                break
            self.waiting.pop()
            rows.append(row)
            tokens.append(new)
            budget -= new
        self._join(plan, rows, tokens)

    def _has_seat(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _fetch(self, row: int, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> bool:
        hit, known = ledger.hit_tokens(row), int(requests.known_tokens(row))
        keep_free = self._kept_free(ledger) + self._still_needed(requests, ledger)
        if not ledger.admit_remote(row, known, hit, keep_free):
            return False
        self.waiting.pop()
        self.fetching.add(row, requests)
        plan.fetched.append((row, hit))
        return True

    def _still_needed(self, requests: RequestTable, ledger: KvLedger) -> int:
        """Blocks that the prompts under way will take (`_inflight_prefill_reserved_blocks`)."""
        rows = np.array(self.running, np.int64)
        known = requests.known_tokens(rows).tolist()
        size = ledger.block_tokens
        held = [ledger.held_blocks(row) for row in self.running]
        return sum(max(-(-n // size) - h, 0) for n, h in zip(known, held, strict=True))

    def _go_on(
        self, row: int, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        """What a row computes whose KV has landed, or will not; 0: it waits on."""
        computed = int(requests.computed_tokens[row])
        if not computed:
            if ledger.held_blocks(row):  # the load failed, and there was nothing before it
                ledger.drop(row)
                plan.preempted.append((row, Preemption.RECOMPUTE))
            return self._admit(row, plan, budget, requests, ledger)
        known = int(requests.known_tokens(row))
        ledger.grow(row, known if computed == known - 1 else computed)  # others find it from now on
        new = self._part(known - computed, budget)
        if not new or self._kept_free(ledger) > ledger.free_blocks:
            return 0
        ledger.grow(row, computed + new)
        self.running.append(row)
        plan.begun.append(row)
        return new
