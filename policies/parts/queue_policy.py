"""The engine that Justitia and the schedulers that it is compared with share: what differs is the
order of the queue.

As in vLLM (Justitia, Sec. IV-C, footnote 3): requests that run go on, those that lost their memory
come next, and the waiting queue is looked at only when there are none; no waiting row takes
memory or a seat from one that runs. A step mixes prefills and decodes within one token budget. The
head of the queue that does not fit ends the step's admissions: no row overtakes it. Where memory
runs out while requests grow, the one that ranks last gives way.

With drafts (ours; none of the papers has any) a row is granted its drafts as well, and the budget
cuts them off as it cuts off prompts. Rows that end keep their seat until their last token is known.
A row that gives way is recomputed, since engines with drafts do not swap.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

import numpy as np
from pydantic import Field

from twinserve.policies.base import EngineLimits, Options, Policy, SystemView, Traits
from twinserve.policies.drafting import DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.fill import blocking
from twinserve.policies.parts.runs import further_steps
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable, State

_SWAPPED = int(State.SWAPPED)


class QueueOptions(Options):
    """enable_chunked_prefill  a prompt may be computed in parts, as the token budget allows; off:
                               whole
    preemption_mode         what happens to the KV of a request that gives way; with the host full
                            it is recomputed
    watermark               fraction of the blocks that an admission leaves free
    """

    enable_chunked_prefill: bool = True
    preemption_mode: Literal["swap", "recompute"] = "swap"
    watermark: float = Field(0.01, ge=0.0, lt=1.0)


class Waiting(Protocol):
    """A waiting queue as the engine needs it: justitia/queues.py has some. `peek` only while it is
    not empty."""

    def peek(self) -> int: ...
    def remove(self, row: int) -> None: ...
    def __len__(self) -> int: ...


OptionsOfQueue = TypeVar("OptionsOfQueue", bound=QueueOptions)


class QueuePolicy(Policy[OptionsOfQueue]):
    """A subclass keeps `waiting` in its order, and says with `rank` which row gives way."""

    uses_estimator = False
    traits = Traits(no_drafts="")
    waiting: Waiting
    _drafts = False  # rows may have drafts
    _slots = 0  # of the token budget, that each row of a step takes besides

    def setup(self) -> None:
        self._swaps = self.options.preemption_mode == "swap"
        if isinstance(self.limits, DraftingLimits):
            self._begin_to_draft(self.limits)
        if not self.options.enable_chunked_prefill:
            whole = (self.limits.max_num_batched_tokens, "--max-num-batched-tokens")
            self.traits = replace(self.traits, prompt_limit=whole)
        self.running: list[int] = []
        self.paused: list[int] = []  # lost their memory; first to come back
        self._order: np.ndarray | None = None  # `running` by rank, until it changes

    def _begin_to_draft(self, limits: DraftingLimits) -> None:
        if self._swaps and "preemption_mode" in self.options.model_fields_set:
            raise PolicyError(
                f"policy {self.name!r}, option preemption_mode=swap: engines that speculate do not "
                "swap; write recompute, or drop it"
            )
        self._drafts, self._slots, self._swaps = True, limits.drafting.slots, False
        # which rows end with a step is known when it has ended
        self.traits = replace(self.traits, keeps_ending=True)

    # -- for subclasses ----------------------------------------------------------------------------
    @abstractmethod
    def rank(self, row: int) -> tuple:
        """Sorts the rows that have begun: the first is served first, the last gives way first.
        Constant while a row runs, unless `reorder` is called."""

    def admitted(self, row: int, requests: RequestTable) -> None:
        """A row left the waiting queue for the batch."""

    def preempts(self, ledger: KvLedger) -> list[int]:
        """Running rows that must give up their memory although it is not short."""
        return []

    def may_begin(self, row: int, requests: RequestTable, ledger: KvLedger) -> bool:
        """Whether the head of the queue may be admitted at all."""
        return True

    def quiet_steps(self, plan: StepPlan, ledger: KvLedger) -> float:
        """For how many further steps of decodes alone the same row stays the head of the queue, if
        nothing else happens."""
        return math.inf

    def reorder(self) -> None:
        """Ranks have changed."""
        self._order = None

    # -- the policy's interface --------------------------------------------------------------------
    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    def on_finish(self, row: int) -> None:
        if row in self.running:
            self.running.remove(row)
            self._order = None
        elif row in self.paused:
            self.paused.remove(row)
        else:
            self.waiting.remove(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        requests, plan = view.requests, StepPlan()
        ledger.begin_step()
        if self._order is None:
            self.running.sort(key=self.rank)
            self.paused.sort(key=self.rank)
            self._order = np.array(self.running, np.int64)
        for row in self.preempts(ledger):
            self._evict(row, plan, ledger)
        batch = _Batch(self.limits, self._slots)
        self._go_on(batch, plan, requests, ledger)
        if not plan.preempted:
            if self._come_back(batch, plan, requests, ledger):
                self._admit(batch, plan, requests, ledger)
        plan.rows, plan.tokens = batch.arrays()
        plan.moves = blocking(ledger.take_moves())
        if len(plan.rows) == len(self.running) and not self._drafts:
            # Memory, seats or budget keep the others out, and still do while nothing ends or comes.
            further = further_steps(plan, requests, ledger, self._shut(batch, plan, ledger))
            plan.valid_for = int(min(further, self.quiet_steps(plan, ledger))) if further else 0
        return plan

    def _shut(self, batch: _Batch, plan: StepPlan, ledger: KvLedger) -> bool:
        """Return whether the next plan has the same chunks. No row has just come, which may rank
        elsewhere in the batch. Waiting rows are held back by more than memory, of which they need
        less if more of their text is cached."""
        if plan.admitted:
            return False
        alone = not (self.waiting or self.paused)
        held_back = alone or not ledger.prefix_caching or not self._seat(batch)
        return held_back and self.quiet_steps(plan, ledger) == math.inf

    # -- running requests --------------------------------------------------------------------------
    def _go_on(
        self, batch: _Batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> None:
        rows = np.array(self.running, np.int64) if self._order is None else self._order
        if not len(rows):
            return
        computed = requests.computed_tokens[rows]
        wanted = requests.known_tokens(rows) - computed
        if self._drafts:
            wanted += requests.draft_tokens[rows]
            # the last token that a request can have is never computed
            wanted = np.minimum(wanted, self.limits.max_model_len - 1 - computed)
            some = wanted > 0
            rows, computed, wanted = rows[some], computed[some], wanted[some]
        slots = self._slots
        total = sum(wanted.tolist()) + slots * len(rows)
        if total > batch.budget:
            used = np.cumsum(wanted + slots)
            last = int(np.searchsorted(used, batch.budget))  # the row that the budget ends in
            left = batch.budget - (int(used[last - 1]) if last else 0)
            kept = last + (left > slots)
            rows, computed, wanted = rows[:kept], computed[:kept], wanted[:kept].copy()
            if kept > last:
                wanted[last] = min(int(wanted[last]), left - slots)
            total = sum(wanted.tolist()) + slots * len(rows)
        if ledger.grow_all(rows, computed + wanted):
            batch.grant(rows, wanted, total)
            return
        for row, target, new in zip(
            rows.tolist(), (computed + wanted).tolist(), wanted.tolist(), strict=True
        ):
            if any(row == gone for gone, _ in plan.preempted):
                return  # and so are all behind it
            while not ledger.grow(row, target):
                last = self.running[-1]  # never one that was granted: those rank before `row`
                self._evict(last, plan, ledger)
                if last == row:
                    return
            batch.grant([row], [new], new + self._slots)

    def _evict(self, row: int, plan: StepPlan, ledger: KvLedger) -> None:
        kind = Preemption.SWAP
        if not self._swaps or not ledger.swap_out(row):
            kind = Preemption.RECOMPUTE
            ledger.drop(row)
        self.running.remove(row)
        self.paused.append(row)
        self.paused.sort(key=self.rank)
        self._order = None
        plan.preempted.append((row, kind))

    # -- requests that wait ------------------------------------------------------------------------
    def _keep_free(self, ledger: KvLedger) -> int:
        """Blocks; none where nothing runs, or a request might never be admitted."""
        return int(self.options.watermark * ledger.num_blocks) if self.running else 0

    def _seat(self, batch: _Batch) -> bool:
        return batch.room > 0 and len(self.running) < self.limits.max_num_seqs

    def _come_back(
        self, batch: _Batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> bool:
        """Resume rows that lost their memory; returns whether the waiting queue may be looked
        at."""
        while (
            self.paused
            and self._seat(batch)
            and self._resume(self.paused[0], batch, plan, requests, ledger)
        ):
            del self.paused[0]
        return not self.paused

    def _resume(
        self, row: int, batch: _Batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> bool:
        if requests.state[row] == _SWAPPED:
            return self._swap_in(row, batch, plan, requests, ledger)
        return self._begin(row, batch, plan, requests, ledger)

    def _admit(
        self, batch: _Batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> None:
        while self.waiting and self._seat(batch):
            row = self.waiting.peek()
            if not (
                self.may_begin(row, requests, ledger)
                and self._begin(row, batch, plan, requests, ledger)
            ):
                break
            self.waiting.remove(row)
            self.admitted(row, requests)

    def _begin(
        self, row: int, batch: _Batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> bool:
        """Admit a row without KV. All of its text must fit now, or more would be begun than can be
        finished."""
        known = int(requests.known_tokens(row))
        hit = ledger.hit_tokens(row)
        new = known - hit
        if new > batch.room:
            if not self.options.enable_chunked_prefill:
                return False
            new = batch.room
        if not ledger.admit(row, hit + new, hit, self._keep_free(ledger), known):
            return False
        plan.admitted.append((row, hit))
        self._run(row, new, batch)
        return True

    def _swap_in(
        self, row: int, batch: _Batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> bool:
        computed = int(requests.computed_tokens[row])
        new = min(int(requests.known_tokens(row)) - computed, batch.room)
        keep_free = self._keep_free(ledger) + 1 if self.running else 0
        mark = ledger.mark()
        if not (ledger.swap_in(row, keep_free) and ledger.grow(row, computed + new)):
            ledger.rollback(mark)
            return False
        ledger.commit(mark)
        plan.swapped_in.append(row)
        self._run(row, new, batch)
        return True

    def _run(self, row: int, new: int, batch: _Batch) -> None:
        self.running.append(row)
        self._order = None
        batch.grant([row], [new], new + self._slots)


class _Batch:
    """The grants of one step.

    budget  new tokens left
    slots   of them that each row takes besides those that it computes
    """

    def __init__(self, limits: EngineLimits, slots: int = 0) -> None:
        self.budget = limits.max_num_batched_tokens
        self.slots = slots
        self._rows: list = []
        self._tokens: list = []

    @property
    def room(self) -> int:
        """Tokens that another row may compute; none if not above 0."""
        return self.budget - self.slots

    def grant(self, rows, tokens, total: int) -> None:
        """total: of the budget, that `tokens` of `rows` take."""
        self._rows.append(rows)
        self._tokens.append(tokens)
        self.budget -= total

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        if len(self._rows) > 1:
            return np.concatenate(self._rows), np.concatenate(self._tokens)
        rows, tokens = (self._rows[0], self._tokens[0]) if self._rows else ((), ())
        return np.asarray(rows, np.int64), np.asarray(tokens, np.int64)
