"""BROS: priority-based packing of real-time and best-effort requests (Wan et al., "BROS: Efficient
LLM Serving on Hybrid Real-time and Best-effort Requests", Sec. IV, Algorithm 1; IEEE and ACM
versions).

Each iteration takes real-time requests by residual time, as many as the most urgent deadline that
can still be kept allows. It fills up with best-effort requests in order of the KV to swap in, and
tries to replace the least urgent real-time request by one more of them. Our choices for the paper's
open points are in docs/bros.md. Lines are those of the IEEE listing.
"""

from dataclasses import replace

import numpy as np

from twinserve.policies.base import Policy, SystemView
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.bros.packing import Packer
from twinserve.policies.bros.parts import Choice, PlanInProgress, Urgent, least, within_tokens
from twinserve.policies.bros.placing import Placer
from twinserve.policies.bros.queues import Queues
from twinserve.policies.drafting import DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import Batch, BatchEstimator
from twinserve.policies.parts.runs import LONGEST_RUN, further_steps
from twinserve.policies.plan import Preemption, StepOutcome, StepPlan
from twinserve.policies.requests import RequestTable


def all_fit(
    everyone: Batch, residual: np.ndarray, size: int, tokens: int, estimator: BatchEstimator
) -> bool:
    """Whether the batch of all requests, real-time ones first, keeps every deadline: neither order
    nor replacement matters.

    residual  float64[real-time requests], seconds
    size      requests in a batch; tokens: of a step
    """
    if not 0 < len(everyone) <= size or np.count_nonzero(everyone.swapped):
        return False
    if len(residual) and estimator.seconds(everyone) > residual.min():
        return False
    return within_tokens(everyone, tokens) == len(everyone)


def place_all(step: PlanInProgress, everyone: Batch) -> bool:
    """Place all without dropping or restoring anything; False and nothing changed if memory is too
    little."""
    requests, ledger = step.view.requests, step.ledger
    holding = requests.computed_tokens[everyone.rows] > 0
    if holding.all():
        return ledger.grow_all(everyone.rows, everyone.context)
    mark = ledger.mark()
    newcomers = everyone[~holding]
    done = ledger.grow_all(everyone.rows[holding], everyone.context[holding]) and all(
        ledger.admit(row, tokens)
        for row, tokens in zip(newcomers.rows.tolist(), newcomers.context.tolist(), strict=True)
    )
    if not done:
        ledger.rollback(mark)
        return False
    ledger.commit(mark)
    step.plan.admitted += [(row, 0) for row in newcomers.rows.tolist()]
    return True


def nobody_joins(
    real_time: Batch,
    residual: np.ndarray,
    pending: int,
    best_effort: Batch,
    size: int,
    tokens: int,
    estimator: BatchEstimator,
) -> Batch | None:
    """Return the batch of all that hold memory, real-time requests by residual time, if just these
    are chosen. They decode, together they keep the nearest deadline, and the first one that waits
    comes after them and would break it.

    real_time    the first `pending` of them hold memory, the others wait; residual: float64[n],
                 theirs, seconds
    best_effort  all of them, by arrival; none waits
    None         if it is not that plain, for any reason
    """
    if not 0 < pending < min(size, len(real_time)) or pending + len(best_effort) > min(
        size, tokens
    ):
        return None
    running = real_time[:pending]
    if np.count_nonzero(running.is_prefill) or np.count_nonzero(best_effort.is_prefill):
        return None
    order = residual[:pending].argsort(kind="stable")
    first = pending + int(residual[pending:].argmin())
    bound = residual[order[0]]  # the nearest deadline; kept by the whole batch, so it can be kept
    if (
        residual[first] < residual[order[-1]]
        or estimator.seconds(real_time[first : first + 1], running) <= bound
    ):
        return None
    running = running[order] + best_effort
    return running if estimator.seconds(running) <= bound else None


# a run of steps ends this much before an order of deadlines changes, and is planned anew
_CLOCK_SLACK_S = 1e-6


class BrosPolicy(Policy[BrosOptions]):
    """Queues, a packer that chooses from them, and a placer that finds memory for what was
    chosen."""

    name = "bros"
    Options: type[BrosOptions] = BrosOptions
    default_kv = "bidirectional"
    uses_prefix_cache = False
    estimator: BatchEstimator
    _parts: tuple[type[Queues], type[Packer]] = (Queues, Packer)

    def setup(self) -> None:
        given = sorted(self.options.model_fields_set & {"drafts", "draft_pace"})
        if given and not isinstance(self.limits, DraftingLimits):
            raise PolicyError(
                f"policy {self.name!r}, option {given[0]}: without drafts it does nothing; give "
                "--speculate, or drop it"
            )
        self.batch_size = min(self.options.base_batch, self.limits.max_num_seqs)
        queues, packer = self._parts
        self.queues = queues(self.limits, self.options)
        self.packer = packer(self.queues, self.limits, self.options, self.estimator)
        self.placer = Placer(self.queues, self.packer)

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self.queues.arrives(row, requests)

    def on_finish(self, row: int) -> None:
        self.queues.ends(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)
        self.queues.leaves(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self.queues.iterations.extend(outcome.seconds[-self.options.avg_window :].tolist())

    # -- Algorithm 1 -------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        step = PlanInProgress(view, ledger, StepPlan(), self.options.swap)
        size = self.batch_size
        requests, queues = view.requests, self.queues
        pending, reach = len(queues.rt_pending), self._reach(size)
        step.reach = reach
        rows = (
            queues.rt_pending.rows,
            queues.first_waiting(view.now, reach),
            queues.be_pending.rows,
            queues.newcomers(view, ledger, reach),
        )
        everyone = queues.batch(np.concatenate(rows), requests, ledger)
        n = pending + len(rows[1])
        real_time, best_effort = everyone[:n], everyone[n:]
        step.next = real_time[pending : pending + 1]
        residual = queues.residual(real_time.rows, requests, view.now)
        if not self._plainly(step, everyone, n, residual, size):
            urgent, candidates = (
                self.packer.by_urgency(real_time, residual, requests, reach),
                self.packer.by_swap(best_effort),
            )
            self._place(step, self._choose(step, urgent, candidates, size), size)
        if self.batch_size != size:  # the next iteration decides with another batch size
            step.plan.valid_for = 0
        return step.plan

    def _reach(self, size: int) -> int:
        """How many requests from the front of a waiting queue are looked at: more could not be
        chosen."""
        return size

    def _choose(self, step: PlanInProgress, urgent: Urgent, candidates: Batch, size: int) -> Choice:
        return self.packer.choose(urgent, candidates, size)

    def _plainly(
        self, step: PlanInProgress, everyone: Batch, n: int, residual: np.ndarray, size: int
    ) -> bool:
        """Whether the plan is plain to see, and made. The first `n` of `everyone` are real-time;
        residual: theirs, seconds."""
        tokens, ledger = self.limits.max_num_batched_tokens, step.ledger
        if all_fit(everyone, residual, size, tokens, self.estimator) and place_all(step, everyone):
            self._finish(step, everyone, n)
            if self._computes_chunks(step, everyone):
                chunks_stand(step, everyone, n, self.estimator)
            self._adapt(early_return=False)
            return True
        if not len(self.queues.be_waiting) and not np.count_nonzero(everyone.swapped):
            pending = len(self.queues.rt_pending)
            running = nobody_joins(
                everyone[:n], residual, pending, everyone[n:], size, tokens, self.estimator
            )
            if running is not None and ledger.grow_all(running.rows, running.context):
                self._finish(step, running, pending)
                self._adapt(early_return=True)
                return True
        return False

    def _computes_chunks(self, step: PlanInProgress, everyone: Batch) -> bool:
        """Whether the batch is the same in the next step, prompts in chunks among it."""
        plan, options = step.plan, self.options
        return bool(
            options.chunk is not None
            and options.group_size == 1
            and not (plan.admitted or plan.preempted or plan.moves)
            and len(everyone) == len(self.queues.rt_pending) + len(self.queues.be_pending)
            and np.count_nonzero(everyone.is_prefill)
        )

    def _place(self, step: PlanInProgress, choice: Choice, size: int) -> None:
        """Find memory for the chosen requests (lines 8 and 19), or handle its lack."""
        urgent, candidates, packed, replaced = (
            choice.urgent,
            choice.candidates,
            choice.packed,
            choice.replaced,
        )
        chosen = urgent.batch[: choice.fits]
        kept = chosen[: len(chosen) - replaced]
        placed, complete = self.placer.real_time(step, urgent, kept)
        if not complete:
            order = choice.by_deadline or urgent
            placed = self.placer.residents(step, order, placed, size)
            packed = self.packer.room(placed, candidates, urgent.bound, size)
            replaced = 0  # all that could run has been considered again
        best_effort = self.placer.best_effort(step, placed, candidates, packed, urgent.bound, size)
        if replaced and len(best_effort) < packed:
            last = chosen[len(chosen) - replaced :]
            placed = self.placer.give_places_back(step, urgent, placed, best_effort, last)
        if not len(placed) and not len(best_effort):
            placed, best_effort = self.placer.someone(step, urgent.batch, choice.candidates)
        self._finish(step, placed + best_effort, len(placed))
        self._adapt(choice.early_return and complete)

    def _adapt(self, early_return: bool) -> None:
        if not self.options.adaptive_batch:
            return
        base = min(self.options.base_batch, self.limits.max_num_seqs)
        self.batch_size = (
            base if early_return else min(2 * self.batch_size, self.limits.max_num_seqs)
        )

    # -- the answer --------------------------------------------------------------------------------
    def _finish(self, step: PlanInProgress, batch: Batch, real_time: int) -> None:
        """The plan of `batch`, whose first `real_time` rows are real-time."""
        if self._fill(step, batch.rows, batch.new) and not batch.is_prefill.any():
            self._stands(step, batch, real_time)

    def _fill(self, step: PlanInProgress, rows: np.ndarray, tokens: np.ndarray) -> bool:
        """The plan of these rows; the queues follow what it admits and drops. Returns whether it is
        of all rows with memory and changes nothing else."""
        plan, requests = step.plan, step.view.requests
        plan.rows, plan.tokens = rows, tokens
        plan.moves = step.ledger.take_moves()
        for row, _ in plan.admitted:
            self.queues.begins(row, requests)
        for row, kind in plan.preempted:
            if kind is Preemption.RECOMPUTE:
                self.queues.begins_anew(row, requests)
        queues = self.queues
        if plan.admitted or plan.preempted or plan.moves or len(queues.be_waiting):
            return False
        return len(rows) == len(queues.rt_pending) + len(queues.be_pending) and len(rows) > 0

    def _stands(self, step: PlanInProgress, batch: Batch, real_time: int) -> None:
        """All rows with memory decode: the same batch will be chosen again while it stays
        within the bound and finds memory, and no other row gets in."""
        size = (
            min(self.options.base_batch, self.limits.max_num_seqs)
            if self.options.adaptive_batch
            else self.batch_size
        )
        if self.options.group_size > 1 or len(batch) > size:
            return
        plan, requests = step.plan, step.view.requests
        # After this step every real-time request has just got a token, so its residual time is its
        # TPOT objective.
        residual = requests.slo_tpot_s[batch.rows[:real_time]]
        bound = least(residual)
        waits = len(self.queues.rt_waiting) > 0
        if waits and not self._keeps_out(step, batch[:real_time], residual, bound):
            return
        steps = step.ledger.decode_steps(batch.rows, LONGEST_RUN)
        if steps > 1:
            plan.valid_for = self.estimator.decodes_within(batch, bound, steps - 1)
            # A request that waits is kept out by time, not by memory. A subclass may do otherwise.
            plan.outlasts_ends = type(self) is BrosPolicy
        # any order will do, and this one stays the same from step to step
        order = plan.rows.argsort()
        plan.rows, plan.tokens = plan.rows[order], plan.tokens[order]

    def _keeps_out(
        self, step: PlanInProgress, running: Batch, residual: np.ndarray, bound: float
    ) -> bool:
        """Whether the first waiting request comes after all running ones and is too long to join
        them. That lasts until its own deadline is the nearer one, which goes into the plan; all
        others wait behind it."""
        until = (
            self.queues.rt_waiting.first_deadline - float(residual.max()) - _CLOCK_SLACK_S
            if len(residual)
            else -np.inf
        )
        if not until > step.view.now or self.estimator.seconds(step.next, running) <= bound:
            return False
        step.plan.valid_until_s = until
        return True


_LONGEST = 16  # steps that are estimated one by one: more are seldom used


def chunks_stand(
    step: PlanInProgress, everyone: Batch, real_time: int, estimator: BatchEstimator
) -> None:
    """Let the plan stand while its prompts compute as many tokens again and the batch still keeps
    every deadline. It serves `everyone`, the first `real_time` of them real-time, and no row waits.

    In a run each step gives every request that decodes a token, so that its residual time is TPOT
    at each of them; that of a prompt melts.
    """
    plan, requests = step.plan, step.view.requests
    steps = min(further_steps(plan, requests, step.ledger, shut=True), _LONGEST)
    if not steps:
        return
    rows, prompt = everyone.rows[:real_time], everyone.is_prefill[:real_time]
    pace = float(np.fmin.reduce(requests.slo_tpot_s[rows[~prompt]], initial=np.inf))
    most = 0.0
    for further in range(1, steps + 1):
        later = replace(everyone, context=everyone.context + everyone.new * further)
        seconds = estimator.seconds(later)
        if seconds > pace:
            steps = further - 1
            break
        most = max(most, seconds)
    plan.valid_for = steps
    begun = requests.output_tokens[rows] > 0  # and were dropped since
    due = np.where(
        begun,
        requests.last_token_s[rows] + requests.slo_tpot_s[rows],
        requests.arrival_s[rows] + requests.slo_ttft_s[rows],
    )[prompt]
    plan.valid_until_s = float(np.fmin.reduce(due, initial=np.inf)) - most - _CLOCK_SLACK_S
