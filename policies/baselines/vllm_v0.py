"""The scheduler of vLLM 0.5 and 0.6, the engine that the papers compare with: prefills first, no
chunks, preemption by recomputation or swap.

Source: vLLM 0.6 `vllm/core/scheduler.py` (`_schedule_default` and what it calls),
`vllm/core/block_manager_v1.py` (`can_allocate`, `can_append_slots`, `can_swap_in`),
`vllm/config.py` (`SchedulerConfig`). A step is one of two kinds:

- *Prefills*, if no row is swapped out and the head of the waiting queue can be admitted. Whole
  prompts run in order while tokens, seats and blocks above the watermark last. Running requests
  pause.
- *Decodes* otherwise: each running request in order of arrival needs one free block, whether it
  will use it or not; without one the last to arrive gives way, in the end the request itself. If
  no row had to, swapped requests come back, in order of arrival, while there is room for their KV
  and one block more above the watermark.

0.6.2 stopped sorting the running and swapped queues by arrival. That changes the order only of
requests that were swapped out in one step; here they are sorted, as before.

Ours: if nothing runs, the watermark and the one block more are waived. vLLM gives up a request that
can never be admitted above the watermark, and waits for ever for one that cannot be swapped in. A
full host means recomputation (vLLM stops with an error). Left out: beam search, LoRA,
`scheduler_delay_factor`, chunked prefill, priorities.
"""

from bisect import insort
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.parts.fill import blocking
from twinserve.policies.parts.runs import LONGEST_RUN, decodes_only
from twinserve.policies.plan import Preemption, StepPlan
from twinserve.policies.requests import RequestTable


class VllmV0Options(Options):
    """Named as in vLLM 0.6 (`watermark` is an argument of its block manager).

    max_num_batched_tokens  tokens of a step; None: max(max_model_len, 2048), vLLM's default. Must
                            cover max_num_seqs and the longest request
    preemption_mode         None: recompute, vLLM's choice for single sequences
    watermark               fraction of the blocks that an admission leaves free
    """

    max_num_batched_tokens: int | None = Field(None, ge=1)
    preemption_mode: Literal["recompute", "swap"] | None = None
    watermark: float = Field(0.01, ge=0.0, lt=1.0)


class Queues:
    """Rows number requests in order of arrival, and each queue is kept sorted by row.

    swaps  a row that loses its memory goes to the host, while that has room
    """

    def __init__(self, swaps: bool) -> None:
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.swapped = RowSet()
        self._swaps = swaps
        self._rows: np.ndarray | None = None  # `running` as an array, until it changes

    @property
    def rows(self) -> np.ndarray:
        """int64[n]: `running`."""
        if self._rows is None:
            self._rows = np.array(self.running, np.int64)
        return self._rows

    def begin(self) -> None:
        """The first that waits runs."""
        insort(self.running, self.waiting.pop(0))
        self._rows = None

    def resume(self, row: int) -> None:
        """It is back from the host."""
        self.swapped.discard(row)
        insort(self.running, row)
        self._rows = None

    def end(self, row: int) -> None:
        self.running.remove(row)
        self._rows = None

    def withdraw(self, row: int) -> None:
        if row in self.swapped:
            self.swapped.discard(row)
        elif row in self.running:
            self.end(row)
        else:
            self.waiting.remove(row)

    def preempt_last(self, plan: StepPlan, ledger: KvLedger) -> int:
        """The newest that runs gives up its memory. Returns it."""
        row = self.running.pop()
        self._rows = None
        kind = Preemption.SWAP
        if self._swaps and ledger.swap_out(row):
            self.swapped.add(row)
        else:
            kind = Preemption.RECOMPUTE
            ledger.drop(row)
            insort(self.waiting, row)
        plan.preempted.append((row, kind))
        return row


class VllmV0Policy(Policy[VllmV0Options]):
    name = "vllm-v0"
    Options: type[VllmV0Options] = VllmV0Options
    uses_estimator = False
    traits = Traits(
        no_drafts="is vLLM 0.x, whose speculation had a scheduler and workers of its own"
    )

    def setup(self) -> None:
        tokens = self.options.max_num_batched_tokens
        self.token_budget = max(self.limits.max_model_len, 2048) if tokens is None else tokens
        if self.token_budget < self.limits.max_num_seqs:
            raise PolicyError(
                f"policy 'vllm-v0': max_num_batched_tokens ({self.token_budget}) is below "
                f"max_num_seqs ({self.limits.max_num_seqs}): a decode step of all of them is "
                "impossible; raise it or lower --max-num-seqs"
            )
        # vLLM wants max_model_len within it; what a run needs is its longest request.
        self.traits = replace(
            self.traits, prompt_limit=(self.token_budget, "the option max_num_batched_tokens")
        )
        self.queues = Queues(self.options.preemption_mode == "swap")

    def step_tokens(self, longest: int) -> int:
        return self.token_budget

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        insort(self.queues.waiting, row)

    def on_finish(self, row: int) -> None:
        self.queues.end(row)

    def on_withdraw(self, row: int) -> None:
        self.queues.withdraw(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        plan = StepPlan()
        if not len(self.queues.swapped):
            self._prefill(plan, view.requests, ledger)
        if not plan:
            self._decode(plan, view.requests, ledger)
            if not plan.preempted:
                self._swap_in(plan, view.requests, ledger)
        plan.moves = blocking(ledger.take_moves())
        if decodes_only(plan, view.requests) and not self._may_enter_others_blocks(
            view.requests, ledger
        ):
            # Whatever keeps the others out (seats, memory) still does while nothing ends or comes.
            plan.valid_for = self._further_decodes(ledger)
        return plan

    def _keep_free(self, ledger: KvLedger) -> int:
        return int(self.options.watermark * ledger.num_blocks) if self.queues.running else 0

    # -- prefills --------------------------------------------------------------------------------
    def _prefill(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> None:
        budget, tokens, admitted = self.token_budget, [], []
        queues = self.queues
        while queues.waiting and len(queues.running) < self.limits.max_num_seqs:
            row = queues.waiting[0]
            known = int(requests.known_tokens(row))
            hit = ledger.hit_tokens(row)
            if known > budget or not ledger.admit(row, known, hit, self._keep_free(ledger)):
                break
            queues.begin()
            plan.admitted.append((row, hit))
            admitted.append(row)
            tokens.append(known - hit)
            budget -= known
        if admitted:
            plan.rows, plan.tokens = np.array(admitted, np.int64), np.array(tokens, np.int64)

    # -- decodes ---------------------------------------------------------------------------------
    def _decode(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> None:
        rows = self.queues.rows
        if not len(rows):
            return
        new_blocks = np.count_nonzero(ledger.slack_tokens(rows) < 1)
        # With a block left over at the end, each row saw a free one.
        if new_blocks >= ledger.free_blocks or not ledger.grow_all(
            rows, requests.computed_tokens[rows] + 1
        ):
            rows = self._decode_one_by_one(plan, requests, ledger)
        plan.rows, plan.tokens = rows, np.ones(len(rows), np.int64)

    def _decode_one_by_one(
        self, plan: StepPlan, requests: RequestTable, ledger: KvLedger
    ) -> np.ndarray:
        index, queues = 0, self.queues
        while index < len(queues.running):
            row = queues.running[index]
            while not self._append_slot(row, requests, ledger):
                if queues.preempt_last(plan, ledger) == row:
                    break
            else:
                index += 1
        return queues.rows

    def _append_slot(self, row: int, requests: RequestTable, ledger: KvLedger) -> bool:
        if not ledger.free_blocks and len(self.queues.running) > 1:
            return False
        return ledger.grow(row, int(requests.computed_tokens[row]) + 1)

    def _swap_in(self, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> None:
        back: list[int] = []
        queues = self.queues
        for row in queues.swapped.rows.tolist():
            if len(queues.running) + len(back) >= self.limits.max_num_seqs:
                break
            alone = not queues.running and not back
            keep_free = 0 if alone else int(self.options.watermark * ledger.num_blocks) + 1
            mark = ledger.mark()
            computed = int(requests.computed_tokens[row])
            if not (ledger.swap_in(row, keep_free) and ledger.grow(row, computed + 1)):
                ledger.rollback(mark)
                break
            ledger.commit(mark)
            back.append(row)
        for row in back:
            queues.resume(row)
        plan.swapped_in = back
        plan.rows = np.concatenate([plan.rows, np.array(back, np.int64)])
        plan.tokens = np.ones(len(plan.rows), np.int64)

    def _may_enter_others_blocks(self, requests: RequestTable, ledger: KvLedger) -> bool:
        """The head of the waiting queue may find new room in blocks that others hold: these change
        while they are filled."""
        queues, seats = self.queues, self.limits.max_num_seqs
        if not queues.waiting or len(queues.swapped) or len(queues.running) >= seats:
            return False
        row = queues.waiting[0]
        blocks = ledger.obtainable_blocks(row)
        return (
            blocks > ledger.free_blocks
            and int(requests.known_tokens(row)) <= blocks * ledger.block_tokens
        )

    def _further_decodes(self, ledger: KvLedger) -> int:
        """Steps after this one in which every row will see a free block before it appends."""
        rows, spare = self.queues.rows, ledger.free_blocks - (len(self.queues.running) > 1)
        steps = ledger.decode_steps(rows, LONGEST_RUN)
        if steps and len(rows) * -(-steps // ledger.block_tokens) > spare:
            taken = np.cumsum(ledger.block_growth(rows, steps))
            steps = int(np.searchsorted(taken, spare, side="right"))
        return max(0, steps - 1)
