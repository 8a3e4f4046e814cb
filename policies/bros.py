"""BROS: priority-based packing of real-time and best-effort requests (Wan et al., "BROS: Efficient LLM Serving on Hybrid
Real-time and Best-effort Requests", Sec. IV, Algorithm 1; IEEE and ACM versions).

Each iteration takes real-time requests by residual time, as many as the most urgent deadline that can still be kept
allows, then fills up with best-effort requests in order of the KV that would have to be swapped in, and tries to
replace the least urgent real-time request by one more of them. Where the paper is open, docs/bros.md says what was
chosen and why.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from pydantic import Field

from .base import EngineLimits, Options, Policy, SystemView
from .deadlines import DeadlineQueue, RowSet
from .estimators import Batch, BatchEstimator
from .kv.base import KvLedger
from .plan import Preemption, StepOutcome, StepPlan
from .requests import RequestClass, RequestTable
from .vllm import LONGEST_RUN

_REAL_TIME = int(RequestClass.REAL_TIME)


class BrosOptions(Options):
    """Names of the paper where it has one.

    base_batch      B_base, requests
    adaptive_batch  double B_curr after an iteration without the early return of lines 11-12, reset it after one
    replacement     lines 27-34
    best_effort     the second part (lines 15-36); off for pure real-time loads
    group_size      tokens returned to the user together (ACM version); 1: every token counts
    chunk           prompt tokens an iteration computes at most of one request; None: whole prompts, as in the paper
    avg_window      iterations that T_avg averages over
    swap            dropped requests keep their KV on the host; False: they are recomputed
    """

    base_batch: int = Field(128, ge=1)
    adaptive_batch: bool = True
    replacement: bool = True
    best_effort: bool = True
    group_size: int = Field(1, ge=1)
    chunk: int | None = Field(None, ge=1)
    avg_window: int = Field(32, ge=1)
    swap: bool = True


class BrosPolicy(Policy):
    name = "bros"
    Options = BrosOptions
    default_kv = "bidirectional"

    def __init__(self, limits: EngineLimits, options: BrosOptions | None = None, estimator: BatchEstimator = None):
        super().__init__(limits, options, estimator)
        self.rt_waiting = DeadlineQueue()
        self.be_waiting = RowSet()
        self.rt_pending = RowSet()
        self.be_pending = RowSet()
        self.batch_size = min(self.options.base_batch, limits.max_num_seqs)
        self._iterations: deque[float] = deque(maxlen=self.options.avg_window)

    # -- events ------------------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        if requests.klass[row] == _REAL_TIME:
            self._wait_real_time(row, requests)
        elif self.options.best_effort:
            self.be_waiting.add(row)
        else:
            raise ValueError(
                f"request {requests.ids[row]!r} is best-effort, but the policy runs with best_effort=false"
            )

    def _wait_real_time(self, row: int, requests: RequestTable) -> None:
        alone = self.estimator.alone(self._batch(np.array([row]), requests, None))[0]
        since, slo = self._due(np.array([row]), requests)
        self.rt_waiting.add(row, float(since[0] + slo[0]), float(alone))

    def on_finish(self, row: int) -> None:
        self.rt_pending.discard(row)
        self.be_pending.discard(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self._iterations.extend(outcome.seconds.tolist())

    @property
    def average_iteration_s(self) -> float:
        """T_avg, seconds."""
        return sum(self._iterations) / len(self._iterations) if self._iterations else 0.0

    # -- what the algorithm looks at ---------------------------------------------------------------------------
    def _batch(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger | None) -> Batch:
        computed = requests.computed_tokens[rows]
        left = requests.known_tokens(rows) - computed
        new = left if self.options.chunk is None else np.minimum(left, self.options.chunk)
        prefill = (left > 1) | (requests.output_tokens[rows] == 0)
        missing = np.zeros(len(rows), np.int64) if ledger is None else ledger.missing_tokens(rows)
        return Batch(rows, prefill, new, computed + new, missing * self.limits.kv_bytes_per_token)

    def _due(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """Since when each row waits for its next token or group (seconds), and how long it may (T_SLO)."""
        emitted = requests.output_tokens[rows]
        started = emitted > 0
        since = np.where(started, requests.last_token_s[rows], requests.arrival_s[rows])
        slo = np.where(started, requests.slo_tpot_s[rows], requests.slo_ttft_s[rows])
        size = self.options.group_size
        if size > 1:
            # The first token is a group of its own. A later group of g tokens has g times as long, of which the tokens
            # of it that are out already have used their share.
            slo = np.where(started, slo * (size - (emitted - 1) % size), slo)
        return since, np.where(np.isnan(slo), np.inf, slo)

    def _residual(self, rows: np.ndarray, requests: RequestTable, now: float) -> np.ndarray:
        """T_SLO - t_i - (k_i - 1) T_avg of each row, seconds (line 3)."""
        since, slo = self._due(rows, requests)
        residual = slo - (now - since)
        size = self.options.group_size
        if size > 1:
            emitted = requests.output_tokens[rows]
            remaining = np.where(emitted > 0, size - (emitted - 1) % size, 1)
            residual = residual - (remaining - 1) * self.average_iteration_s
        return residual

    # -- Algorithm 1 -------------------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        step = _Step(view, ledger, StepPlan())
        size = self.batch_size
        real_time, bound = self._by_urgency(step, size)
        fits = self.estimator.fitting(real_time[:size], bound)
        early_return = fits < min(len(real_time), size)
        chosen = real_time[:fits]
        candidates = self._by_swap(step, size)
        packed, replaced = self._pack(chosen, candidates, bound, size)
        kept = chosen[:-1] if replaced else chosen
        placed, complete = self._place_real_time(step, kept, real_time.rows)
        best_effort = self._place_best_effort(step, placed, candidates, packed, bound, size)
        if replaced and len(best_effort) < packed:
            # The one that was to take the real-time request's place found no block (line 19): it keeps its place.
            last = chosen[-1:]
            if self.estimator.seconds(placed + best_effort + last) <= bound:
                others = np.setdiff1d(self.be_pending.rows, best_effort.rows)
                victims = _Victims(others, real_time.rows, placed.rows, int(last.rows[0]))
                if self._acquire(step, int(last.rows[0]), int(last.context[0]), victims):
                    placed = placed + last
        self._finish(step, placed, best_effort, bound)
        if self.options.adaptive_batch:
            self._adapt(early_return and complete)
        return step.plan

    def _adapt(self, early_return: bool) -> None:
        base = min(self.options.base_batch, self.limits.max_num_seqs)
        self.batch_size = base if early_return else min(2 * self.batch_size, self.limits.max_num_seqs)

    def _by_urgency(self, step: _Step, size: int) -> tuple[Batch, float]:
        """Real-time requests by residual time, as far as the batch can reach, and the bound on the iteration (seconds).

        The waiting queue is kept in order of its deadlines, so only the pending ones are sorted anew and the waiting
        ones are pulled from the front (the paper's queue polling).
        """
        requests, now = step.view.requests, step.view.now
        pending = self.rt_pending.rows
        rows = np.concatenate([pending, self.rt_waiting.rows[:size]])
        if not len(rows):
            return _empty(), np.inf
        residual = self._residual(rows, requests, now)
        order = np.argsort(residual, kind="stable")
        batch = self._batch(rows, requests, step.ledger)[order]
        residual = residual[order]
        alone = self.estimator.alone(batch)
        savable = residual >= alone
        smallest = residual[savable].min() if savable.any() else np.inf
        smallest = min(smallest, self.rt_waiting.smallest_savable(now, size))
        if smallest == np.inf and np.isfinite(residual).any():
            # Nobody can keep its deadline: hold the pace that running requests were promised.
            slo = requests.slo_tpot_s[rows]
            smallest = np.nanmin(slo) if not np.isnan(slo).all() else np.inf
        return batch, max(float(smallest), float(alone[0]))

    def _by_swap(self, step: _Step, size: int) -> Batch:
        """Best-effort requests by the KV to be swapped in, then arrival (line 17)."""
        rows = np.concatenate([self.be_pending.rows, self.be_waiting.rows[:size]])
        if not len(rows):
            return _empty()
        batch = self._batch(rows, step.view.requests, step.ledger)
        return batch[np.lexsort((rows, batch.swapped))]

    def _pack(self, chosen: Batch, candidates: Batch, bound: float, size: int) -> tuple[int, bool]:
        """How many best-effort candidates fit behind `chosen` (lines 21-24), and whether the next one takes the place of
        the last chosen real-time request (lines 26-34)."""
        if not len(candidates):
            return 0, False
        together = chosen + candidates
        packed = min(self.estimator.fitting(together, bound), size) - len(chosen)
        packed = max(packed, 0)
        if packed == len(candidates) or not len(chosen) or not self.options.replacement:
            return packed, False
        swapped = chosen[:-1] + candidates[: packed + 1]
        if self.estimator.seconds(swapped) <= bound:
            return packed + 1, True
        return packed, False

    # -- memory ------------------------------------------------------------------------------------------------
    def _place_real_time(self, step: _Step, chosen: Batch, urgency: np.ndarray) -> tuple[Batch, bool]:
        """Memory for the chosen ones, most urgent first (line 8). Those that need none run in any case; the first that
        finds none ends the search (line 9). Returns the placed ones and whether all were."""
        if not len(chosen):
            return chosen, True
        placed, others = self._place_plain(step, chosen)
        for i in others:
            row = int(chosen.rows[i])
            if row in step.dropped:
                continue
            victims = _Victims(self.be_pending.rows, urgency, chosen.rows[placed], row)
            if not self._acquire(step, row, int(chosen.context[i]), victims):
                return chosen[placed], False
            placed[i] = True
        return chosen[placed], bool(placed.all())

    def _place_plain(self, step: _Step, batch: Batch) -> tuple[np.ndarray, list[int]]:
        """Rows that hold all their KV and have room in it are placed at once; the indices of the others are returned."""
        requests, ledger = step.view.requests, step.ledger
        holding = (requests.computed_tokens[batch.rows] > 0) & (batch.swapped == 0)
        if holding.all() and ledger.grow_all(batch.rows, batch.context):
            return np.ones(len(batch), bool), []
        placed = np.zeros(len(batch), bool)
        roomy = np.flatnonzero(holding)
        roomy = roomy[ledger.slack_tokens(batch.rows[roomy]) >= batch.new[roomy]]
        if len(roomy) and ledger.grow_all(batch.rows[roomy], batch.context[roomy]):
            placed[roomy] = True
        return placed, np.flatnonzero(~placed).tolist()

    def _place_best_effort(
        self, step: _Step, placed: Batch, candidates: Batch, packed: int, bound: float, size: int
    ) -> Batch:
        """Memory for best-effort candidates (line 19). One that finds none is skipped, and the next is considered in
        its place: a single stuck request must not starve the others."""
        accepted = _empty()
        if step.dropped:
            candidates = candidates[[row not in step.dropped for row in candidates.rows.tolist()]]
        hopeless = np.inf  # tokens: a newcomer of this size found no room, so none that is larger will
        while packed > 0:
            group, candidates = candidates[:packed], candidates[packed:]
            done, others = self._place_plain(step, group)
            for i in others:
                row, tokens = int(group.rows[i]), int(group.context[i])
                if row in step.dropped:
                    continue
                newcomer = not step.ledger.held_blocks(row)
                if newcomer and tokens >= hopeless:
                    continue
                victims = () if newcomer else self._later_ones(row, accepted.rows, group.rows[done])
                done[i] = self._acquire(step, row, tokens, victims)
                if newcomer and not done[i]:
                    hopeless = tokens
            accepted = accepted + group[done]
            if done.all() or not len(candidates):
                break
            running = placed + accepted
            packed = min(self.estimator.fitting(running + candidates, bound), size) - len(running)
        return accepted

    def _later_ones(self, row: int, *running: np.ndarray):
        """Best-effort requests that arrived after `row` and are not in the batch, the last one first: a running request
        that cannot grow takes their memory, or all would hold some and none go on."""
        rows = self.be_pending.rows
        later = rows[np.searchsorted(rows, row, side="right") :]
        return later[~np.isin(later, np.concatenate(running))][::-1].tolist()

    def _acquire(self, step: _Step, row: int, tokens: int, victims) -> bool:
        """Room for `row` up to `tokens`; if there is none, drop `victims` one after another until there is (Sec. V-B)."""
        if self._find(step, row, tokens):
            return True
        mark = step.ledger.mark()
        dropped = []
        for victim in victims:
            if victim in step.dropped or not step.ledger.held_blocks(victim):
                continue
            kind = Preemption.SWAP
            if not (self.options.swap and step.ledger.swap_out(victim)):
                kind = Preemption.RECOMPUTE
                step.ledger.drop(victim)
            dropped.append((victim, kind))
            if self._find(step, row, tokens):
                step.ledger.commit(mark)
                step.plan.preempted += dropped
                step.dropped.update(victim for victim, _ in dropped)
                return True
        step.ledger.rollback(mark)
        return False

    def _find(self, step: _Step, row: int, tokens: int) -> bool:
        """FindBlock / FindPreemptBlock: what the ledger can give without dropping anybody."""
        requests = step.view.requests
        swapped = requests.computed_tokens[row] > 0 and not step.ledger.held_blocks(row)
        fresh = requests.computed_tokens[row] == 0
        if not self._change(step, row, tokens):
            return False
        if fresh:
            step.plan.admitted.append((row, 0))
        elif swapped:
            step.plan.swapped_in.append(row)
        return True

    @staticmethod
    def _change(step: _Step, row: int, tokens: int) -> bool:
        ledger = step.ledger
        if step.view.requests.computed_tokens[row] == 0:
            return ledger.admit(row, tokens)
        if ledger.held_blocks(row):
            return ledger.grow(row, tokens)
        mark = ledger.mark()
        if ledger.swap_in(row) and ledger.grow(row, tokens):
            ledger.commit(mark)
            return True
        ledger.rollback(mark)
        return False

    # -- the answer --------------------------------------------------------------------------------------------
    def _finish(self, step: _Step, real_time: Batch, best_effort: Batch, bound: float) -> None:
        plan, requests = step.plan, step.view.requests
        batch = real_time + best_effort
        plan.rows, plan.tokens = batch.rows, batch.new
        plan.moves = step.ledger.take_moves()
        for row, _ in plan.admitted:
            if requests.klass[row] == _REAL_TIME:
                self.rt_waiting.remove(row)
                self.rt_pending.add(row)
            else:
                self.be_waiting.discard(row)
                self.be_pending.add(row)
        for row, kind in plan.preempted:
            if kind is Preemption.RECOMPUTE:
                self._wait_again(row, requests)
        everyone = len(self.rt_pending) + len(self.be_pending)
        changed = plan.admitted or plan.preempted or plan.moves
        idle = len(self.rt_waiting) + len(self.be_waiting)
        if not changed and not idle and len(batch) == everyone and len(batch) and not batch.is_prefill.any():
            self._stands(step, batch, len(real_time))

    def _wait_again(self, row: int, requests: RequestTable) -> None:
        if requests.klass[row] == _REAL_TIME:
            self.rt_pending.discard(row)
            # Its KV is gone: what it costs to bring back is the computation of all it knows.
            known = np.array([requests.known_tokens(row)])
            lone = Batch(np.array([row]), np.array([True]), known, known, np.zeros(1, np.int64))
            since, slo = self._due(np.array([row]), requests)
            self.rt_waiting.add(row, float(since[0] + slo[0]), float(self.estimator.alone(lone)[0]))
        else:
            self.be_pending.discard(row)
            self.be_waiting.add(row)

    def _stands(self, step: _Step, batch: Batch, real_time: int) -> None:
        """Everybody decodes: the same batch will be chosen again while it stays within the bound and finds memory."""
        if self.options.group_size > 1 or len(batch) > self.batch_size:
            return
        # After this step every real-time request has just got a token, so the bound is the smallest TPOT objective.
        slo = step.view.requests.slo_tpot_s[batch.rows[:real_time]]
        bound = np.inf if not real_time or np.isnan(slo).all() else float(np.nanmin(slo))
        plan = step.plan
        steps = step.ledger.decode_steps(batch.rows, LONGEST_RUN)
        if steps > 1:
            later = self.estimator.decode_run(batch, steps)[1:]
            plan.valid_for = int(np.searchsorted(later, bound, side="right"))
        order = np.argsort(plan.rows)  # any order will do, and this one stays the same from step to step
        plan.rows, plan.tokens = plan.rows[order], plan.tokens[order]


class _Step:
    """What one call of `plan` carries around. dropped: rows that lost their memory in this step; only asked, never
    walked through."""

    def __init__(self, view: SystemView, ledger: KvLedger, plan: StepPlan) -> None:
        self.view = view
        self.ledger = ledger
        self.plan = plan
        self.dropped: set[int] = set()


class _Victims:
    """Whom an urgent real-time request may drop, in order: best-effort requests, the last to arrive first, then real-time
    ones that are not in this batch, most residual time first, down to its own."""

    def __init__(self, best_effort: np.ndarray, urgency: np.ndarray, placed: np.ndarray, row: int) -> None:
        self.best_effort = best_effort
        self.urgency = urgency
        self.placed = placed
        self.row = row

    def __iter__(self):
        yield from self.best_effort[::-1].tolist()
        running = set(self.placed.tolist())
        for row in self.urgency[::-1].tolist():
            if row == self.row:
                return
            if row not in running:
                yield row


def _empty() -> Batch:
    none = np.zeros(0, np.int64)
    return Batch(none, np.zeros(0, bool), none, none, none)
