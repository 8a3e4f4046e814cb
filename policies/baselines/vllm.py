"""vLLM V1's scheduler as released: running requests first, one token budget, chunked prefill,
prefix caching, preemption by recomputation. 0.32's rules, or with `release` those of an older one.

Source: vLLM `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`. Decision for decision the
same as the real class: tests/identity steps both side by side, with any release installed.
"""

import re
from collections.abc import Container, Sized
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queues import make_queue
from twinserve.policies.parts.runs import further_steps
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable

Release = Literal["0.15", "0.19", "0.25", "0.29", "0.32"]


def rules_of(version: str) -> Release:
    """The release of RULES whose rules a version of vLLM has: the last one that is not later; the
    first for older ones."""
    known = {name: _numbers(name) for name in RULES}
    earlier = [name for name, numbers in known.items() if numbers <= _numbers(version)]
    return earlier[-1] if earlier else next(iter(known))


def _numbers(version: str) -> tuple[int, ...]:
    """Of 0.11.0rc2 the first three: as 0.11.0."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@dataclass(frozen=True)
class VllmRules:
    """What a release does; the defaults are those of 0.32.

    reserves_whole_prompts  a request is admitted only if all its known text would fit now; before,
                            its first chunk was enough
    knows_watermark         blocks can be kept free of admissions
    blank_blocks_first      freed blocks without reusable text go to the front of the free queue;
                            before, they waited their turn among the cached ones
    cursor_follows_victims  under priorities, a victim that was passed over in this step (its last
                            token is on its way) moves the scan back by one, as others do; before,
                            the request behind it was left out of the step
    lone_prompt_uncapped    long_prefill_token_threshold does not bind a request without company
    """

    reserves_whole_prompts: bool = True
    knows_watermark: bool = True
    blank_blocks_first: bool = True
    cursor_follows_victims: bool = True
    lone_prompt_uncapped: bool = True


RULES: dict[Release, VllmRules] = {
    "0.15": VllmRules(False, False, False, False, False),
    "0.19": VllmRules(True, False, False, False, False),
    "0.25": VllmRules(True, True, True, False, False),
    "0.29": VllmRules(True, True, True, True, False),
    "0.32": VllmRules(),
}


class VllmOptions(Options):
    """Named as vLLM's SchedulerConfig names them."""

    scheduling: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = Field(0, ge=0)  # tokens a step of one prompt; 0: no cap
    watermark: float = Field(0.0, ge=0.0, lt=1.0)  # fraction of blocks an admission leaves free
    scheduler_reserve_full_isl: bool = True  # admit only if all known tokens would fit now
    release: Release = "0.32"  # whose rules


class VllmPolicy(Policy[VllmOptions]):
    name = "vllm"
    Options = VllmOptions
    prefix_caching = True
    uses_estimator = False
    traits = Traits(keeps_ending=True, pipelined=True)
    # rows with memory that do not run yet, and rows that may not lose it now; only `VllmDecode` has
    # any
    fetching: Sized = ()
    _computing = np.zeros(0, np.int64)
    _slots = 0  # of the token budget, that each row of a step takes besides: `VllmDrafts`

    def setup(self) -> None:
        self._rules = rules = RULES[self.options.release]
        self.traits = replace(self.traits, blank_blocks_first=rules.blank_blocks_first)
        self._reserves = rules.reserves_whole_prompts and self.options.scheduler_reserve_full_isl
        if self.options.watermark and not rules.knows_watermark:
            raise PolicyError(
                f"policy {self.name!r}, option watermark={self.options.watermark}: vLLM "
                f"{self.options.release} has no watermark; leave it out"
            )
        if not self.options.enable_chunked_prefill:
            whole = (self.limits.max_num_batched_tokens, "--max-num-batched-tokens")
            self.traits = replace(self.traits, prompt_limit=whole)
        self.waiting = make_queue(self.options.scheduling)
        self.running: list[int] = []
        self._rows: np.ndarray | None = None  # `running` as an array, until it changes
        # A subclass may decide by who ended, and a cap by how many run.
        capped = self.options.long_prefill_token_threshold
        self._ends_free_memory_only = type(self) is VllmPolicy and not capped
        self._draining: Container[int] = ()
        self._passed: list[int] = []  # of these, taken out of `waiting` while others are admitted

    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self.waiting.add(row, requests)

    def on_finish(self, row: int) -> None:
        if row in self.running:
            self.running.remove(row)
            self._rows = None
        else:  # preempted while its last token was computed, and that token has come
            self.waiting.remove(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        requests = view.requests
        plan = StepPlan()
        self._draining = view.draining
        ledger.begin_step()
        left = budget = self._grant_running(plan, requests, ledger)
        if not plan.preempted and budget > 0 and (self.waiting or self.fetching):
            left = self._admit_waiting(plan, budget, requests, ledger)
        # Of running rows only those whose last token is being computed lack none.
        plan.outlasts_ends = self._ends_free_memory_only and budget > 0 and not self.waiting
        if len(plan.rows) == len(self.running) or plan.outlasts_ends:
            # Whatever holds the queue back now (seats, memory, budget) still does while nothing
            # ends or arrives. Of a prompt's chunk it is the budget or the cap.
            plan.valid_for = further_steps(plan, requests, ledger, self._shut(left, ledger))
        plan.moves = ledger.take_moves()
        return plan

    def _shut(self, budget: int, ledger: KvLedger) -> bool:
        """Whether the queue is held back by more than memory, of which it would need less if more
        of its text were cached."""
        return (
            not self.waiting
            or not ledger.prefix_caching
            or len(self.running) >= self.limits.max_num_seqs
            or budget <= 0
        )

    # -- running requests --------------------------------------------------------------------------
    def _grant_running(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> int:
        """Grant running requests their next tokens in order; returns the token budget left."""
        budget = self.limits.max_num_batched_tokens
        if not self.running:
            return budget
        if self._rows is None:
            self._rows = np.array(self.running, np.int64)
        # a row whose last token is being computed lacks none
        rows, computed, wanted = requests.lacking(self._rows)
        cap = self._long_prefill_cap()
        if cap:
            wanted = np.minimum(wanted, cap)
        total = sum(wanted.tolist())
        if total > budget:
            used = wanted.cumsum()
            last = int(used.searchsorted(budget))  # the request that the budget ends in
            rows, computed, wanted = (
                rows[: last + 1],
                computed[: last + 1],
                wanted[: last + 1].copy(),
            )
            wanted[last] -= used[last] - budget
            total = budget
        if ledger.grow_all(rows, computed + wanted):
            plan.rows, plan.tokens = rows, wanted
            return budget - total
        return self._grant_one_by_one(plan, requests, ledger, cap)

    def _long_prefill_cap(self) -> int:
        """A lone request starves no other: it may use the whole budget."""
        if not self.options.long_prefill_token_threshold:
            return 0
        here = len(self.running) + len(self.waiting) + len(self.fetching) + len(self._passed)
        alone = self._rules.lone_prompt_uncapped and here <= 1
        return 0 if alone else self.options.long_prefill_token_threshold

    def _grant_one_by_one(
        self, plan: StepPlan, requests: RequestTable, ledger: KvLedger, cap: int
    ) -> int:
        """Memory is short: grant in order, and preempt from the end (or the least urgent) until a
        grant fits. Of a thousand rows few need a new block: only those are looked at singly that
        find none."""
        budget, slots = self.limits.max_num_batched_tokens, self._slots
        granted: dict[int, int] = {}
        follows = self._rules.cursor_follows_victims
        index = 0
        while index < len(self.running) and budget > slots:
            index, budget = self._grant_ahead(index, budget, granted, requests, ledger, cap)
            if index == len(self.running) or budget <= slots:
                break
            row = self.running[index]
            computed = int(requests.computed_tokens[row])
            new = min(self._wanted_by(row, requests, cap), budget - slots)
            if not new:
                index += 1
                continue
            fits = ledger.grow(row, computed + new)
            while not fits:
                victim_index = self._victim(requests)
                if self.running[victim_index] in self._computing:
                    break
                victim = self.running.pop(victim_index)
                if victim_index < index and (follows or victim in granted):
                    index -= 1
                if victim in granted:
                    budget += granted.pop(victim) + slots
                ledger.drop(victim)
                self.waiting.put_back(victim, requests)
                plan.preempted.append((victim, Preemption.RECOMPUTE))
                if victim == row:
                    break
                fits = ledger.grow(row, computed + new)
            if not fits:
                break
            granted[row] = new
            budget -= new + slots
            index += 1
        if plan.preempted:
            self._rows = None
        plan.rows = np.fromiter(granted.keys(), np.int64, len(granted))
        plan.tokens = np.fromiter(granted.values(), np.int64, len(granted))
        return budget

    def _wanted_by(self, row: int, requests: RequestTable, cap: int) -> int:
        """Tokens that a running row may compute, the budget left aside."""
        lacking = int(requests.known_tokens(row)) - int(requests.computed_tokens[row])
        return min(lacking, cap) if cap else lacking

    def _grant_ahead(
        self,
        index: int,
        budget: int,
        granted: dict[int, int],
        requests: RequestTable,
        ledger: KvLedger,
        cap: int,
    ) -> tuple[int, int]:
        """From `index` on, grant those that free memory and whole parts of the budget reach.
        Returns the first one that is not granted, and the rest of the budget."""
        rows = np.array(self.running[index:], np.int64)
        computed = requests.computed_tokens[rows]
        wanted = requests.known_tokens(rows) - computed
        if cap:
            wanted = np.minimum(wanted, cap)
        some = wanted.nonzero()[0]
        affordable = int(wanted[some].cumsum().searchsorted(budget, side="right"))
        able = some[:affordable]
        done = ledger.grow_each(rows[able], (computed + wanted)[able])
        served = able[:done]
        granted.update(zip(rows[served].tolist(), wanted[served].tolist(), strict=True))
        stopped = int(some[done]) if done < len(some) else len(rows)
        return index + stopped, budget - int(wanted[served].sum())

    def _victim(self, requests: RequestTable) -> int:
        """Index into `running` of the row that goes first: the last one, or the least urgent
        (later arrival on a tie)."""
        if self.options.scheduling == "fcfs":
            return len(self.running) - 1
        rows = self.running
        return max(
            range(len(rows)),
            key=lambda i: (requests.priority[rows[i]], requests.arrival_s[rows[i]]),
        )

    # -- waiting requests --------------------------------------------------------------------------
    def _admit_waiting(
        self, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        """Returns the token budget left."""
        rows, tokens, slots = [], [], self._slots
        while budget > slots and self.waiting and len(self.running) < self.limits.max_num_seqs:
            row = self.waiting.peek()
            if row in self._draining:
                self._passed.append(self.waiting.pop())
                continue
            new = self._admit(row, plan, budget - slots, requests, ledger)
            if not new:
                break
            self.waiting.pop()
            rows.append(row)
            tokens.append(new)
            budget -= new + slots
        while self._passed:
            self.waiting.put_back(self._passed.pop(), requests)
        self._join(plan, rows, tokens)
        return budget

    def _admit(
        self, row: int, plan: StepPlan, budget: int, requests: RequestTable, ledger: KvLedger
    ) -> int:
        """The tokens that a row without memory computes in this step; 0: it waits on."""
        known = int(requests.known_tokens(row))
        hit = ledger.hit_tokens(row)
        new = self._first_step(plan, known - hit, hit, budget)
        reserve = known if self._reserves else 0
        if not new or not ledger.admit(row, hit + new, hit, self._kept_free(ledger), reserve):
            return 0
        self.running.append(row)
        plan.admitted.append((row, hit))
        return new

    def _first_step(self, plan: StepPlan, lacking: int, hit: int, budget: int) -> int:
        """Of a row that lacks so many tokens behind its prefix hit, what it computes first."""
        return self._part(lacking, budget)

    def _part(self, lacking: int, budget: int) -> int:
        """Of the tokens that a row lacks, those of its first step; 0: none may be computed."""
        cap = self._long_prefill_cap()
        new = min(lacking, cap) if cap else lacking
        if new > budget and not self.options.enable_chunked_prefill:
            return 0
        return min(new, budget)

    def _kept_free(self, ledger: KvLedger) -> int:
        """Blocks that an admission leaves free."""
        return int(self.options.watermark * (ledger.num_blocks + 1)) if self.running else 0

    def _join(self, plan: StepPlan, rows: list[int], tokens: list[int]) -> None:
        if not rows:
            return
        joining = np.array(rows, np.int64)
        if self._rows is not None:
            self._rows = np.concatenate([self._rows, joining])
        plan.rows = np.concatenate([plan.rows, joining])
        plan.tokens = np.concatenate([plan.tokens, np.array(tokens, np.int64)])
