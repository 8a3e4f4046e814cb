"""FastServe: iteration-level preemption by a skip-join multi-level feedback queue, with proactive
swapping.

Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (arXiv 2305.05920;
NSDI 2026 as FastServe), Sec. 4.1 to 4.3; on other points the authors' `fastserve/scheduler.py`.

- *Skip-join.* A request enters the first queue whose quantum covers its first iteration, which its
  prompt's length foretells, and so skips those that it would only be demoted from. Quanta double
  from queue to queue.
- *Demotion* when the quantum is used up, one queue down. *Promotion* to the first queue after
  `starve_limit` seconds without an iteration.
- *Batch.* By queue, then by when a request entered it; prefills and decodes together, prompts
  whole; at most max_num_seqs requests and max_num_batched_tokens tokens (a longer prompt runs
  alone).
- *Swapping.* A row left out keeps its KV while there is room; for a more urgent one it goes to the
  host, from the end of the order. *Proactively*, `min_free_blocks` blocks are kept free. During the
  step, requests that are left out go to the host, the largest ENST (estimated next scheduled time)
  first; with more than twice as much free, they come back, the smallest first.

docs/policies.md has our choices for the paper's open points.
"""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from twinserve.policies.base import Options, Policy, SystemView, Traits
from twinserve.policies.baselines.mlfq_queues import FeedbackQueues
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import RowSet
from twinserve.policies.parts.estimators import Batch, BatchEstimator
from twinserve.policies.parts.fill import fill, landed
from twinserve.policies.parts.runs import LONGEST_RUN, further_decodes
from twinserve.policies.plan import Hold, Preemption, StepPlan
from twinserve.policies.requests import RequestTable, State

_RUNNING, _SWAPPED = int(State.RUNNING), int(State.SWAPPED)


class MlfqOptions(Options):
    """quantum          seconds of the first queue
    quantum_ratio    of a queue's quantum to that of the queue before
    queues           how many; None: as many as the longest prompt (max_model_len) needs
    starve_limit     seconds without an iteration after which a request enters the first queue;
                     none: no promotion
    skip_join        off: every request joins the first queue (a plain MLFQ)
    preemption_mode  what happens to the KV of a request that gives way; with the host full it is
                     recomputed
    proactive        swap before memory is short, during the steps
    min_free_blocks  blocks kept free by that; None: max_num_seqs, a block for each request of a
                     batch"""

    # far below a step, counting the quanta that one used up takes for ever
    quantum: float = Field(0.01, ge=1e-6)
    quantum_ratio: float = Field(2.0, gt=1.0)
    queues: int | None = Field(None, ge=1, le=64)
    starve_limit: float | None = Field(3.0, gt=0.0)
    skip_join: bool = True
    preemption_mode: Literal["swap", "recompute"] = "swap"
    proactive: bool = True
    min_free_blocks: int | None = Field(None, ge=0)


class MlfqPolicy(Policy[MlfqOptions]):
    name = "mlfq"
    Options = MlfqOptions
    estimator: BatchEstimator
    traits = Traits(
        no_drafts=(
            "fills each step anew with one token of each request that decodes, and swaps ahead of "
            "time"
        )
    )

    @classmethod
    def estimates(cls, options: MlfqOptions) -> bool:
        return options.skip_join or options.queues is None

    def setup(self) -> None:
        given = self.options
        count = given.queues
        if count is None:
            steps = math.log(
                max(1.0, self._first_iteration(self.limits.max_model_len) / given.quantum),
                given.quantum_ratio,
            )
            count = 1 + min(63, math.ceil(steps))
        quanta = given.quantum * given.quantum_ratio ** np.arange(count)
        self.queues = FeedbackQueues(
            quanta, math.inf if given.starve_limit is None else given.starve_limit
        )
        self.active = RowSet()
        self.reserve = (
            self.limits.max_num_seqs if given.min_free_blocks is None else given.min_free_blocks
        )
        self._proactive = given.proactive and given.preemption_mode == "swap"

    def _first_iteration(self, prompt_tokens: int) -> float:
        """Seconds, as the policy believes."""
        tokens = np.array([prompt_tokens])
        return self.estimator.seconds(
            Batch(np.zeros(1, np.int64), np.ones(1, bool), tokens, tokens, np.zeros(1, np.int64))
        )

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        level = 0
        if self.options.skip_join:
            level = self.queues.joined(self._first_iteration(int(requests.prompt_tokens[row])))
        self.queues.add(row, level, float(requests.arrival_s[row]))
        self.active.add(row)

    def on_finish(self, row: int) -> None:
        self.active.discard(row)
        self.queues.end(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)

    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        self.queues.advance(view.now)
        plan = self._everybody(self.active.rows, view, ledger)
        if plan is not None:
            self.queues.run(plan.rows, view.now)
            plan.valid_for = further_decodes(plan, view.requests, ledger)
            return plan
        order = landed(self.queues.order(), view)
        plan = fill(
            view,
            ledger,
            order,
            seats=self.limits.max_num_seqs,
            token_budget=self.limits.max_num_batched_tokens,
            swap=self.options.preemption_mode == "swap",
        )
        self.queues.run(plan.rows, view.now)
        paused = self._paused(order, plan, view.requests)
        ahead: dict[int, Hold] = {}
        if self._proactive and ledger.host_blocks:
            ahead = self._swap_ahead(paused, order, plan, view, ledger)
        plan.moves = [
            move.held(ahead.get(move.row, Hold.BEFORE_STEP)) for move in ledger.take_moves()
        ]
        self._stands(paused, order, plan, view, ledger)
        return plan

    def _everybody(self, rows: np.ndarray, view: SystemView, ledger: KvLedger) -> StepPlan | None:
        """Where all decode and find memory, their order does not matter."""
        requests, n = view.requests, len(rows)
        if (
            not n
            or n > min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
            or view.ready_s
        ):
            return None
        computed = requests.computed_tokens[rows]
        one = (requests.state[rows] == _RUNNING) & (requests.known_tokens(rows) - computed == 1)
        if np.count_nonzero(one) < n or not ledger.grow_all(rows, computed + 1):
            return None
        return StepPlan(rows, np.ones(n, np.int64), moves=ledger.take_moves())

    @staticmethod
    def _paused(order: np.ndarray, plan: StepPlan, requests: RequestTable) -> np.ndarray:
        """Rows that hold memory and do not run in this step."""
        holds = requests.state[order] == _RUNNING
        if np.count_nonzero(holds) == len(plan.rows) and not (
            plan.admitted or plan.swapped_in or plan.preempted
        ):
            return order[:0]
        lost = np.array([row for row, _ in plan.preempted], np.int64)
        holders = order[holds]
        return holders[~np.isin(holders, np.concatenate([plan.rows, lost]))]

    # -- proactive swapping (Sec. 4.3) -------------------------------------------------------------
    def _swap_ahead(
        self,
        paused: np.ndarray,
        order: np.ndarray,
        plan: StepPlan,
        view: SystemView,
        ledger: KvLedger,
    ) -> dict[int, Hold]:
        """Swap after all grants of the step, and during it: memory freed here serves the next plan
        at the earliest. Returns which rows wait for the transfers of the rows that are swapped."""
        requests, swapped = view.requests, {}
        if len(paused) and ledger.free_blocks < self.reserve:
            for row in self._by_next_scheduled(paused, view)[::-1].tolist():
                if ledger.free_blocks >= self.reserve or not ledger.swap_out(row):
                    break
                plan.preempted.append((row, Preemption.SWAP))
                swapped[row] = Hold.STEP
        elif not plan.preempted:
            away = order[requests.state[order] == _SWAPPED]
            if plan.swapped_in:
                away = away[~np.isin(away, plan.swapped_in)]
            waits = np.count_nonzero(requests.state[order] == int(State.WAITING)) > len(
                plan.admitted
            )
            if len(away) and not waits:
                for row in self._by_next_scheduled(away, view).tolist():
                    if ledger.swap_in(row, 2 * self.reserve):
                        plan.swapped_in.append(row)
                        swapped[row] = Hold.REQUEST
        return swapped

    def _by_next_scheduled(self, rows: np.ndarray, view: SystemView) -> np.ndarray:
        """`rows`, in the order of the queues, by ENST, smallest first; ties stay as they are."""
        enst = self.queues.next_scheduled(rows, self.limits.max_num_seqs, view.now)
        return rows[np.argsort(enst, kind="stable")]

    # -- runs --------------------------------------------------------------------------------------
    def _stands(
        self,
        paused: np.ndarray,
        order: np.ndarray,
        plan: StepPlan,
        view: SystemView,
        ledger: KvLedger,
    ) -> None:
        """The batch stands until the order changes if it is the first of the order, and one of
        three holds. It has all the seats; no other row holds memory (a row that has none now finds
        none later); or the next in order has too long a prompt to join."""
        n = len(plan.rows)
        if not np.array_equal(plan.rows, order[:n]):
            return
        if (
            len(paused)
            and n < self.limits.max_num_seqs
            and not self._too_long(int(order[n]), n, view.requests, ledger)
        ):
            return
        further = further_decodes(plan, view.requests, ledger)
        if further and len(paused) and self._proactive and ledger.host_blocks:
            spare = ledger.free_blocks - self.reserve
            used = ledger.block_growth(plan.rows, LONGEST_RUN).cumsum()
            further = (
                min(further, int(np.searchsorted(used, spare, side="right")) - 1)
                if spare >= 0
                else 0
            )
        plan.valid_for = max(0, further)
        plan.valid_until_s = self.queues.next_change()

    def _too_long(self, row: int, decodes: int, requests: RequestTable, ledger: KvLedger) -> bool:
        """The row, which must come into memory before it runs, exceeds what so many decodes leave
        of the tokens of a step."""
        if not decodes or requests.state[row] == _RUNNING:
            return False
        there = (
            requests.computed_tokens[row]
            if requests.state[row] == _SWAPPED
            else ledger.hit_tokens(row)
        )
        return requests.known_tokens(row) - there > self.limits.max_num_batched_tokens - decodes
