"""vLLM V1's scheduler with KV offloaded to the host: OffloadingConnector's semantics.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (`schedule`), and what `policies/kv/offload` names.

- A request without KV first takes what the device has, then asks the tier for what follows. What
  the tier has is loaded while others compute: the request waits, as one does for KV that another
  engine has computed, with blocks for its hits alone. Then it computes the rest.
- If the tier has no answer yet the request is passed over, and the next one is asked.
- After a preemption a request asks again: its own KV may be on the host.

The decode side of a pull connector:

Source: `schedule`, `_handle_blocked_waiting_request`, `_update_waiting_for_remote_kv`;
`nixl/pull_scheduler.py` (`get_num_new_matched_tokens`).

- A request whose KV is elsewhere takes all its blocks at once, on top of those that prompts under
  way still need, or the waiting loop ends. It then waits in a queue of those that hold KV, takes no
  tokens and no seat, and cannot be preempted.
- That queue is drained before all other requests. When a request's KV has landed, its blocks are
  cached, and its last token left to compute. Of a failed load only the local hit is valid: with
  one the request computes the rest in the blocks that it holds; without, they are freed and it
  starts over.
- After a preemption the prompt is computed here: KV is fetched once.
- With asynchronous scheduling, a row computed in the current step is not preempted
  (`_request_blocks_can_be_freed`): a load could write into its blocks at once. If it would be the
  victim, no other row is granted anything, and others are admitted.
"""

from collections.abc import Container
from dataclasses import replace

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.kv.offload.ledger import TieredLedger
from twinserve.policies.parts.queues import FcfsQueue, PriorityQueue, make_queue
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable, State

_RUNNING = int(State.RUNNING)


class VllmDecode(VllmPolicy):
    traits = replace(VllmPolicy.traits, loads_kv=True, pipelined=False)
    fetching: FcfsQueue | PriorityQueue  # `kv_holding_waiting`

    def setup(self) -> None:
        super().setup()
        self.fetching = make_queue(self.options.scheduling)
        self._away: Container[int] = ()  # of these, whose KV has not landed
        self._in_prompt: set[int] = set()  # running, with a part of the prompt computed

    def on_finish(self, row: int) -> None:
        self._in_prompt.discard(row)
        if row in self.fetching:
            self.fetching.remove(row)
        else:
            super().on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        self._away = view.ready_s
        self._computing = view.under_way
        plan = super().plan(view, ledger)
        if plan.fetched or plan.begun:
            plan.valid_for, plan.chunked = 0, False
        if self._in_prompt:
            self._leave_prompts(plan, view.requests)
        return plan

    def _leave_prompts(self, plan: StepPlan, requests: RequestTable) -> None:
        """Rows whose prompt ends with this plan, or that it preempts."""
        again = {row for row, _ in plan.admitted}  # after a load that failed
        self._in_prompt.difference_update(r for r, _ in plan.preempted if r not in again)
        granted = dict(zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True))
        for row in list(self._in_prompt):  # a row admitted just now stays in any case
            computed = int(requests.computed_tokens[row]) + granted.get(row, 0)
            if computed >= requests.known_tokens(row):
                self._in_prompt.remove(row)

    def _admit_waiting(
        self, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        rows: list[int] = []
        tokens: list[int] = []
        open_ = True
        for row in [row for row in self.fetching if row not in self._away]:
            open_ = budget > 0 and self._has_seat()
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
            fetched = self._fetch(row, plan, requests, ledger)
            if fetched is not None:
                open_ = fetched
                continue
            new = self._admit(row, plan, budget, requests, ledger)
            if not new:
                break
            self.waiting.pop()
            rows.append(row)
            tokens.append(new)
            budget -= new
        while self._passed:
            self.waiting.put_back(self._passed.pop(), requests)
        self._join(plan, rows, tokens)
        return budget

    def _has_seat(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _fetch(
        self, row: int, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> bool | None:
        """Whether the first of the waiting rows, which has KV elsewhere, has left the queue; False:
        there is no room for it. None: it has none."""
        if not requests.remote_tokens[row]:
            return None
        hit, known = ledger.hit_tokens(row), int(requests.known_tokens(row))
        keep_free = self._kept_free(ledger) + self._still_needed(requests, ledger)
        if not ledger.admit_remote(row, known, hit, keep_free):
            return False
        self._wait_for_kv(row, hit, plan, requests)
        return True

    def _wait_for_kv(self, row: int, hit: int, plan: StepPlan, requests: RequestTable) -> None:
        """The first of the waiting rows has blocks, and KV on its way behind `hit` tokens."""
        self.waiting.pop()
        self.fetching.add(row, requests)
        plan.fetched.append((row, hit))

    def _still_needed(self, requests: RequestTable, ledger: KvLedger) -> int:
        """Blocks that the prompts under way will take (`_inflight_prefill_reserved_blocks`)."""
        size, rows = ledger.block_tokens, self._in_prompt
        return sum(
            max(-(-int(requests.known_tokens(row)) // size) - ledger.held_blocks(row), 0)
            for row in rows
        )

    def _admit(
        self, row: int, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        new = super()._admit(row, plan, budget, requests, ledger)
        if new and plan.admitted[-1][1] + new < requests.known_tokens(row):
            self._in_prompt.add(row)
        return new

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
        self._begin(row, computed + new, plan, requests, ledger)
        return new

    def _begin(
        self, row: int, tokens: int, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> None:
        """A row whose KV has landed, or will not, joins those that run; it holds `tokens` with this
        step."""
        ledger.grow(row, tokens)
        self.running.append(row)
        if tokens < requests.known_tokens(row):
            self._in_prompt.add(row)
        plan.begun.append(row)


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
