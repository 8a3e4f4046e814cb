"""vLLM V1's scheduler with speculative decoding.

Source: vLLM 0.32, `v1/core/sched/scheduler.py` (`schedule`), `v1/core/sched/async_scheduler.py`.

- A row is granted its known tokens and its drafts, less what is computed. Chunk cap, budget and the
  longest request cut drafts off.
- Each row of a step takes `Drafting.slots` of the budget besides, and gets nothing if no more
  than that is left.
- A row that is admitted with one token to compute, among decodes alone, gets drafts that cannot be
  right. If the budget lacks room for them no other row is admitted.
- No plan stands for further steps: how many tokens the next one gives is not known.
"""

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.drafting import DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable


class VllmDrafts(VllmPolicy):
    def setup(self) -> None:
        super().setup()
        if not isinstance(self.limits, DraftingLimits):
            raise PolicyError(f"policy {self.name!r} got no DraftingLimits; pass them")
        if self.options.release != "0.32":
            raise PolicyError(
                f"policy {self.name!r}, option release={self.options.release}: speculation is known"
                " as vLLM 0.32 has it; drop release or --speculate"
            )
        self._drafting = self.limits.drafting
        self._slots = self._drafting.slots
        self._prompts = False  # a running row of this plan computes a part of its prompt
        # rows whose last step left a part of their text to compute (vLLM's `is_prefill_chunk`)
        self._behind: set[int] = set()

    def on_finish(self, row: int) -> None:  # and where a client leaves
        super().on_finish(row)
        self._behind.discard(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        requests, plan = view.requests, StepPlan()
        ledger.begin_step()
        budget = self._grant_running(plan, requests, ledger)
        if not plan.preempted and budget > self._slots and self.waiting:
            self._admit_waiting(plan, budget, requests, ledger)
        plan.moves = ledger.take_moves()
        self._note_behind(plan, requests)
        return plan

    def _note_behind(self, plan: StepPlan, requests: RequestTable) -> None:
        rows = plan.rows
        reached = requests.computed_tokens[rows] + plan.tokens
        if plan.admitted:  # whose prefix hits are not in the table yet
            hits = dict(plan.admitted)
            reached += [hits.get(row, 0) for row in rows.tolist()]
        behind = rows[reached < requests.known_tokens(rows)].tolist()
        if behind or self._behind:
            self._behind = self._behind.difference(rows.tolist()).union(behind)

    def _on_prompts(self, rows: np.ndarray) -> bool:
        """Whether one of these running rows computes a part of its prompt: a row without drafts may
        also decode, if the drafter found none."""
        return bool(self._behind) and not self._behind.isdisjoint(rows.tolist())

    # -- running requests --------------------------------------------------------------------------
    def _grant_running(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> int:
        budget, slots = self.limits.max_num_batched_tokens, self._slots
        self._prompts = False
        if not self.running:
            return budget
        if self._rows is None:
            self._rows = np.array(self.running, np.int64)
        rows, wanted = self._wanted(self._rows, requests)
        used = np.cumsum(wanted + slots)
        if len(rows) and used[-1] > budget:
            # the row that the budget ends in, if more than its slots are left for it
            last = int(np.searchsorted(used, budget))
            left = budget - (int(used[last - 1]) if last else 0)
            kept = last + (left > slots)
            rows, wanted = rows[:kept], wanted[:kept].copy()
            if kept > last:
                wanted[last] = min(int(wanted[last]), left - slots)
        if ledger.grow_all(rows, requests.computed_tokens[rows] + wanted):
            plan.rows, plan.tokens = rows, wanted
            self._prompts = self._on_prompts(rows)
            return budget - int(wanted.sum()) - slots * len(rows)
        return self._grant_one_by_one(plan, requests, ledger, self._long_prefill_cap())

    def _wanted(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """Of `rows` those that may compute something, and how much, the budget left aside."""
        computed = requests.computed_tokens[rows]
        wanted = requests.known_tokens(rows) + requests.draft_tokens[rows] - computed
        cap = self._long_prefill_cap()
        if cap:
            wanted = np.minimum(wanted, cap)
        # the last token that a request can have is never computed
        wanted = np.minimum(wanted, self.limits.max_model_len - 1 - computed)
        some = wanted > 0
        return rows[some], wanted[some]

    def _grant_one_by_one(
        self, plan: StepPlan, requests: RequestTable, ledger: KvLedger, cap: int
    ) -> int:
        budget = super()._grant_one_by_one(plan, requests, ledger, cap)
        self._prompts = self._on_prompts(plan.rows)
        return budget

    def _wanted_by(self, row: int, requests: RequestTable, cap: int) -> int:
        return int(self._wanted(np.array([row]), requests)[1].sum())

    def _grant_ahead(self, index: int, budget: int, *others) -> tuple[int, int]:
        return index, budget

    # -- waiting requests --------------------------------------------------------------------------
    def _first_step(self, plan: StepPlan, lacking: int, hit: int, budget: int) -> int:
        if lacking == 1 and self._pads(plan, hit):
            lacking += self._drafting.tokens
            if lacking > budget:
                return 0
        return self._part(lacking, budget)

    def _pads(self, plan: StepPlan, hit: int) -> bool:
        """Whether a row with `hit` tokens found and one to compute gets drafts that are wrong."""
        fits = hit + self._drafting.tokens + 2 <= self.limits.max_model_len
        beside = len(plan.rows) > 0 or hit > 0
        return self._drafting.pads and fits and beside and not self._prompts
