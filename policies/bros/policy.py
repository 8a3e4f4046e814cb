"""BROS: priority-based packing of real-time and best-effort requests (Wan et al., "BROS: Efficient
LLM Serving on Hybrid Real-time and Best-effort Requests", Sec. IV, Algorithm 1; IEEE and ACM
versions).

Each iteration takes real-time requests by residual time, as many as the most urgent deadline that
can still be kept allows, then fills up with best-effort requests in order of the KV that would have
to be swapped in, and tries to replace the least urgent real-time request by one more of them. Where
the paper is open, docs/bros.md says what was chosen and why. Lines are those of the IEEE listing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from twinserve.policies.base import Options, Policy, SystemView
from twinserve.policies.bros.memory import Hopeless, acquire, grow_first, place_plain, take_from
from twinserve.policies.bros.parts import (
    EMPTY,
    Choice,
    PlanInProgress,
    Urgent,
    Victims,
    among,
    within_tokens,
)
from twinserve.policies.bros.plain import all_fit, nobody_joins, place_all
from twinserve.policies.bros.runs import chunks_stand
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import DeadlineQueue, RowSet
from twinserve.policies.parts.estimators import Batch, BatchEstimator
from twinserve.policies.parts.runs import LONGEST_RUN
from twinserve.policies.plan import Preemption, StepOutcome, StepPlan
from twinserve.policies.requests import RequestClass, RequestTable, State

_REAL_TIME = int(RequestClass.REAL_TIME)
_RUNNING = int(State.RUNNING)
_NOBODY = np.zeros(0, np.int64)
_REPLACEMENT = {"true": "once", "false": "none", "none": "none"}
# a run of steps ends this much before an order of deadlines changes, and is planned anew
_CLOCK_SLACK_S = 1e-6


class BrosOptions(Options):
    """Names of the paper where it has one.

    base_batch      B_base, requests
    adaptive_batch  double B_curr after an iteration without the early return of lines 11-12, reset
                    it after one
    replacement     lines 27-34: once (IEEE version), all: until one fails (ACM version), or none;
                    true is once, false none
    best_effort     the second part (lines 15-36); off for pure real-time loads
    group_size      tokens returned to the user together (ACM version); 1: every token counts
    chunk           prompt tokens an iteration computes at most of one request; None: whole prompts,
                    as in the paper
    avg_window      iterations that T_avg averages over
    swap            dropped requests keep their KV on the host; False: they are recomputed
    late_drops      a request that is late already and holds nothing yet may drop real-time ones too
    """

    base_batch: int = Field(128, ge=1)
    adaptive_batch: bool = True
    replacement: Annotated[
        Literal["all", "once", "none"],
        BeforeValidator(lambda name: _REPLACEMENT.get(str(name).lower(), name)),
    ] = "once"
    best_effort: bool = True
    group_size: int = Field(1, ge=1)
    chunk: int | None = Field(None, ge=1)
    avg_window: int = Field(32, ge=1)
    swap: bool = True
    late_drops: bool = False


class BrosPolicy(Policy[BrosOptions]):
    name = "bros"
    Options: type[BrosOptions] = BrosOptions
    estimator: BatchEstimator
    default_kv = "bidirectional"
    uses_prefix_cache = False

    def setup(self) -> None:
        self.rt_waiting = DeadlineQueue()
        self.be_waiting = RowSet()
        self.rt_pending = RowSet()
        self.be_pending = RowSet()
        self.batch_size = min(self.options.base_batch, self.limits.max_num_seqs)
        self._iterations: deque[float] = deque(maxlen=self.options.avg_window)

    @classmethod
    def serves_best_effort(cls, options: BrosOptions) -> bool:
        return options.best_effort

    # -- events ------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        if requests.service_class[row] == _REAL_TIME:
            self._wait_real_time(row, requests)
        elif self.options.best_effort:
            self.be_waiting.add(row)
        else:
            raise PolicyError(
                f"policy 'bros': request {requests.ids[row]!r} is best-effort, and "
                "best_effort=false leaves those out; "
                "drop that option, or the best-effort requests"
            )

    def _wait_real_time(self, row: int, requests: RequestTable) -> None:
        since, slo = self._due(np.array([row]), requests)
        self.rt_waiting.add(row, float(since[0] + slo[0]))

    def on_finish(self, row: int) -> None:
        self.rt_pending.discard(row)
        self.be_pending.discard(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)
        self.rt_waiting.remove(row)
        self.be_waiting.discard(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self._iterations.extend(outcome.seconds.tolist())

    @property
    def average_iteration_s(self) -> float:
        """T_avg, seconds."""
        return sum(self._iterations) / len(self._iterations) if self._iterations else 0.0

    # -- what the algorithm looks at ---------------------------------------------------------------
    def _batch(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger) -> Batch:
        computed, emitted = requests.computed_tokens[rows], requests.output_tokens[rows]
        left = requests.prompt_tokens[rows] + emitted - computed
        new = left if self.options.chunk is None else np.minimum(left, self.options.chunk)
        prefill = (left > 1) | (emitted == 0)
        return Batch(rows, prefill, new, computed + new, self._missing(rows, ledger))

    def _missing(self, rows: np.ndarray, ledger: KvLedger) -> np.ndarray:
        """int64[n]: bytes of each row that must come back before it can run."""
        missing = ledger.missing_tokens(rows)
        return missing * self.limits.kv_bytes_per_token if np.count_nonzero(missing) else missing

    def _due(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """Since when each row waits for its next token or group (seconds), and how long it may
        (T_SLO)."""
        emitted = requests.output_tokens[rows]
        started = emitted > 0
        since = np.where(started, requests.last_token_s[rows], requests.arrival_s[rows])
        slo = np.where(started, requests.slo_tpot_s[rows], requests.slo_ttft_s[rows])
        size = self.options.group_size
        if size > 1:
            # The first token is a group of its own. A later group of g tokens has g times as long,
            # of which the tokens of it that are out already have used their share.
            slo = np.where(started, slo * (size - (emitted - 1) % size), slo)
        return since, np.fmin(slo, np.inf)  # NaN: no objective

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

    # -- Algorithm 1 -------------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        step = PlanInProgress(view, ledger, StepPlan(), self.options.swap)
        size = self.batch_size
        requests, pending, reach = view.requests, len(self.rt_pending), self._reach(size)
        rows = (
            self.rt_pending.rows,
            self.rt_waiting.rows[:reach],
            self.be_pending.rows,
            self.be_waiting.rows[:reach],
        )
        everyone = self._batch(np.concatenate(rows), requests, ledger)
        n = pending + len(rows[1])
        real_time, best_effort = everyone[:n], everyone[n:]
        step.next = real_time[pending : pending + 1]
        residual = self._residual(real_time.rows, requests, view.now)
        if not self._plainly(step, everyone, n, residual, size):
            urgent, candidates = (
                self._by_urgency(real_time, residual, requests),
                self._by_swap(best_effort),
            )
            self._place(step, self._choose(step, urgent, candidates, size), size)
        if self.batch_size != size:  # the next iteration decides with another batch size
            step.plan.valid_for = 0
        return step.plan

    def _reach(self, size: int) -> int:
        """How many requests from the front of a waiting queue are looked at: more could not be
        chosen."""
        return size

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
        if not len(self.be_waiting) and not np.count_nonzero(everyone.swapped):
            pending = len(self.rt_pending)
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
            and len(everyone) == len(self.rt_pending) + len(self.be_pending)
            and np.count_nonzero(everyone.is_prefill)
        )

    def _choose(self, step: PlanInProgress, urgent: Urgent, candidates: Batch, size: int) -> Choice:
        return self._greedy(urgent, candidates, size)

    def _greedy(self, urgent: Urgent, candidates: Batch, size: int) -> Choice:
        """Algorithm 1 proper, without memory."""
        reach = self._within_tokens(urgent.batch[:size])
        fits = min(urgent.fitting(size), reach)
        packed, replaced = self._pack(urgent, fits, candidates, size)
        return Choice(urgent, candidates, fits, packed, replaced, early_return=fits < reach)

    def _place(self, step: PlanInProgress, choice: Choice, size: int) -> None:
        """Memory for those that were chosen (lines 8 and 19), and what follows where there is
        none."""
        urgent, candidates, packed, replaced = (
            choice.urgent,
            choice.candidates,
            choice.packed,
            choice.replaced,
        )
        chosen = urgent.batch[: choice.fits]
        kept = chosen[: len(chosen) - replaced]
        placed, complete = self._place_real_time(step, urgent, kept)
        if not complete:
            placed = self._place_residents(step, urgent, placed, size)
            packed = self._room(placed, candidates, urgent.bound, size)
            replaced = 0  # all that could run has been considered again
        best_effort = self._place_best_effort(step, placed, candidates, packed, urgent.bound, size)
        if replaced and len(best_effort) < packed:
            last = chosen[len(chosen) - replaced :]
            placed = self._give_places_back(step, urgent, placed, best_effort, last)
        if not len(placed) and not len(best_effort):
            placed, best_effort = self._place_someone(step, urgent.batch, choice.candidates)
        self._finish(step, placed + best_effort, len(placed))
        self._adapt(choice.early_return and complete)

    def _give_places_back(
        self, step: PlanInProgress, urgent: Urgent, placed: Batch, best_effort: Batch, last: Batch
    ) -> Batch:
        """Some that were to take the places of real-time requests `last` found no block (line 19):
        these keep them, the most urgent first. Returns the real-time requests placed now."""
        others = np.setdiff1d(self.be_pending.rows, best_effort.rows)
        for i in range(len(last)):
            one = last[i : i + 1]
            row, whole = int(one.rows[0]), placed + best_effort + one
            fits = self.estimator.seconds(whole) <= urgent.bound
            if not fits or self._within_tokens(whole) < len(whole) or row in step.dropped:
                break
            victims = Victims(others, urgent.batch.rows, placed.rows, row)
            if not acquire(step, row, int(one.context[0]), victims):
                break
            placed = placed + one
        return placed

    def _place_someone(
        self, step: PlanInProgress, urgent: Batch, candidates: Batch
    ) -> tuple[Batch, Batch]:
        """Everybody waits for memory that others hold: the most urgent one gets it, from whomever;
        where no real-time request can have it, the best-effort one that arrived first. Returns the
        real-time and the best-effort requests placed."""
        candidates = candidates[candidates.rows.argsort()]
        pending = self.be_pending.rows
        for batch, owners in (
            (urgent, np.append(pending, urgent.rows[::-1])),
            (candidates, pending[::-1]),
        ):
            for i, row in enumerate(batch.rows.tolist()):
                victims = owners[owners != row]
                if row not in step.dropped and acquire(step, row, int(batch.context[i]), victims):
                    placed = batch[i : i + 1]
                    return (placed, EMPTY) if batch is urgent else (EMPTY, placed)
        return EMPTY, EMPTY

    def _within_tokens(self, batch: Batch) -> int:
        """How many requests from the front the engine can compute in one step."""
        return within_tokens(batch, self.limits.max_num_batched_tokens)

    def _room(self, chosen: Batch, candidates: Batch, bound: float, size: int) -> int:
        """How many candidates from the front stay, behind the chosen ones, within the bound
        (seconds), the batch size and the step's tokens."""
        candidates = candidates[: max(size - len(chosen), 0)]
        fitting = self.estimator.fitting(candidates, bound, chosen)
        return min(fitting, within_tokens(candidates, self.limits.max_num_batched_tokens, chosen))

    def _adapt(self, early_return: bool) -> None:
        if not self.options.adaptive_batch:
            return
        base = min(self.options.base_batch, self.limits.max_num_seqs)
        self.batch_size = (
            base if early_return else min(2 * self.batch_size, self.limits.max_num_seqs)
        )

    def _by_urgency(self, batch: Batch, residual: np.ndarray, requests: RequestTable) -> Urgent:
        """Real-time requests by residual time (line 3).

        The waiting queue is kept in order of its deadlines, so the batch is the pending ones and as
        many from the front of the queue as an iteration can hold (the paper's queue polling): a
        long queue is never sorted.
        """
        order = residual.argsort(kind="stable")
        return self._urgent(batch[order], residual[order], requests)

    def _urgent(self, batch: Batch, residual: np.ndarray, requests: RequestTable) -> Urgent:
        """What the deadlines of `batch`, in order of urgency, allow an iteration to take
        (T_min^res)."""
        if not len(batch):
            return Urgent(batch, residual, residual, np.inf)
        reach = self._reach(self.batch_size)
        costs = self.estimator.prefixes(batch[:reach])
        # A deadline bounds the iteration only if it can still be kept with all that is more urgent
        # in the batch too. Others would bound it for nothing: the batch would shrink to the late
        # ones alone, and stay there.
        savable = (residual[:reach] >= costs).nonzero()[0]
        if not len(savable) and reach < len(batch):
            costs = self.estimator.prefixes(batch)
            savable = (residual >= costs).nonzero()[0]
        if len(savable):
            bound = float(residual[savable[0]])  # in order, so the first is the least
        else:
            bound = least(requests.slo_tpot_s[batch.rows])
        return Urgent(batch, residual, costs, max(bound, float(costs[0])))

    def _by_swap(self, batch: Batch) -> Batch:
        """Best-effort requests by the KV to be swapped in, then arrival (line 17)."""
        if not len(self.be_waiting) and not np.count_nonzero(batch.swapped):
            return batch  # that is how they come
        return batch[np.lexsort((batch.rows, batch.swapped))]

    def _pack(self, urgent: Urgent, fits: int, candidates: Batch, size: int) -> tuple[int, int]:
        """How many best-effort candidates fit behind the first `fits` real-time requests (lines
        21-24), and how many of the last of these give their places to further ones (lines
        26-34)."""
        if not len(candidates):
            return 0, 0
        chosen = urgent.batch[:fits]
        packed, replaced = self._room(chosen, candidates, urgent.bound, size), 0
        limit = {"none": 0, "once": min(fits, 1), "all": fits}[self.options.replacement]
        while packed < len(candidates) and replaced < limit:
            if not self._exchangeable(urgent, fits - replaced - 1, fits, candidates[: packed + 1]):
                break
            replaced, packed = replaced + 1, packed + 1
            if replaced < limit:
                rest = urgent.batch[: fits - replaced]
                packed = max(packed, self._room(rest, candidates, urgent.bound, size))
        return packed, replaced

    def _exchangeable(self, urgent: Urgent, kept: int, fits: int, packed: Batch) -> bool:
        """Whether the candidates `packed` may run with the first `kept` real-time requests alone in
        place of the first `fits`."""
        chosen, left = urgent.batch[:kept], urgent.batch[kept:fits]
        if within_tokens(packed, self.limits.max_num_batched_tokens, chosen) < len(packed):
            return False
        exchanged = self.estimator.seconds(packed, chosen)
        # Those left out must keep their deadlines in the next iteration (constraint 6), which takes
        # at least the time that they need themselves: one that is late, or cannot but be, is never
        # replaced.
        following = max(self.average_iteration_s, self.estimator.seconds(left))
        return exchanged <= urgent.bound and exchanged + following <= urgent.residual[kept]

    # -- memory ------------------------------------------------------------------------------------
    def _place_real_time(
        self, step: PlanInProgress, urgent: Urgent, chosen: Batch
    ) -> tuple[Batch, bool]:
        """Memory for the chosen ones, most urgent first (line 8). Those that need none run in any
        case; the first that finds none ends the search (line 9). Returns the placed ones and
        whether all were."""
        if not len(chosen):
            return chosen, True
        placed, others = place_plain(step, chosen)
        if not others:
            return chosen, True
        left = np.array(others, np.int64)
        while len(left):
            left, tried = grow_first(step, chosen, placed, left)
            if not len(left):
                break
            i, left = int(left[0]), left[1:]
            row = int(chosen.rows[i])
            # A request that is too late already, and holds nothing yet, does not push out others
            # that are not.
            late = urgent.residual[i] < urgent.costs[i] and not step.ledger.held_blocks(row)
            rivals = (
                urgent.batch.rows[:0] if late and not self.options.late_drops else urgent.batch.rows
            )
            victims = Victims(self.be_pending.rows, rivals, chosen.rows[placed], row)
            if not (take_from if tried else acquire)(step, row, int(chosen.context[i]), victims):
                return chosen[placed], False
            placed[i] = True
        return chosen[placed], bool(placed.all())

    def _place_residents(
        self, step: PlanInProgress, urgent: Urgent, placed: Batch, size: int
    ) -> Batch:
        """A more urgent request found no memory. Those that have theirs go on, in order, so that it
        gets free."""
        rows, requests = urgent.batch.rows, step.view.requests
        # On the device, though others may have written over a few of their slots, which then come
        # back.
        holding = (requests.computed_tokens[rows] > 0) & (requests.state[rows] == _RUNNING)
        here = among(rows, placed.rows)
        if step.dropped:
            holding &= step.keeps(rows)
        again = np.flatnonzero(here | holding)
        reduced = self._urgent(urgent.batch[again], urgent.residual[again], requests)
        chosen = reduced.batch[
            : min(reduced.fitting(size), self._within_tokens(reduced.batch[:size]))
        ]
        others = chosen[~among(chosen.rows, placed.rows)]
        done, growing = place_plain(step, others)
        left = np.array(growing, np.int64)
        while len(left):
            left, _ = grow_first(step, others, done, left)
            if len(left):
                i, left = int(left[0]), left[1:]
                row, running = int(others.rows[i]), np.concatenate([placed.rows, others.rows[done]])
                victims = Victims(self.be_pending.rows, rows, running, row)
                done[i] = take_from(step, row, int(others.context[i]), victims)
        return placed + others[done]

    def _place_best_effort(
        self,
        step: PlanInProgress,
        placed: Batch,
        candidates: Batch,
        packed: int,
        bound: float,
        size: int,
    ) -> Batch:
        """Memory for best-effort candidates (line 19). One that finds none is skipped, and the next
        is considered in its place: a single stuck request must not starve the others."""
        accepted = EMPTY
        dropped, blocked = len(step.dropped), EMPTY
        if dropped:
            candidates = candidates[step.keeps(candidates.rows)]
        if step.ledger.overwrites:
            candidates, blocked = self._returning(step, candidates)
            packed = self._room(placed, candidates, bound, size)
        elif dropped:
            packed = min(packed, self._room(placed, candidates, bound, size))
        running = step.view.requests.state[candidates.rows] == _RUNNING
        hopeless = Hopeless(step)
        while packed > 0:
            group, candidates = candidates[:packed], candidates[packed:]
            newcomer, running = ~running[:packed], running[packed:]
            done, others = place_plain(step, group)
            left = np.array(others, np.int64)
            while len(left):
                left = left[hopeless.first_skipped(newcomer[left], group.context[left]) :]
                if not len(left):
                    break
                i, left = int(left[0]), left[1:]
                row, tokens = int(group.rows[i]), int(group.context[i])
                if row in step.dropped:
                    continue
                whole = not newcomer[i] and not group.swapped[i]
                victims = (
                    self._later_ones(row, accepted.rows, group.rows[done]) if whole else _NOBODY
                )
                done[i] = acquire(step, row, tokens, victims)
                if newcomer[i] and not done[i]:
                    hopeless.found_none(row, tokens)
            accepted = accepted + (group[done] if others else group)
            if len(blocked) and len(step.dropped) > dropped:
                dropped = len(step.dropped)
                freed, blocked = self._returning(step, blocked)
                candidates = self._by_swap(candidates + freed)
                running = step.view.requests.state[candidates.rows] == _RUNNING
            elif done.all():
                break
            ask = running | (candidates.context < hopeless.tokens)
            candidates, running = candidates[ask], running[ask]
            packed = self._room(placed + accepted, candidates, bound, size)
        return accepted

    def _returning(self, step: PlanInProgress, candidates: Batch) -> tuple[Batch, Batch]:
        """Best-effort candidates by what must come back before they run now that others have
        overwritten it; and those for whose KV there is no place beside the others."""
        candidates = replace(candidates, swapped=self._missing(candidates.rows, step.ledger))
        blocked = step.ledger.cannot_return(candidates.rows)
        return self._by_swap(candidates[~blocked]), candidates[blocked]

    def _later_ones(self, row: int, *running: np.ndarray) -> np.ndarray:
        """Best-effort requests that arrived after `row` and are not in the batch, the last one
        first: a running request that cannot grow takes their memory, or all would hold some and
        none go on."""
        rows = self.be_pending.rows
        later = rows[np.searchsorted(rows, row, side="right") :]
        return later[~among(later, np.concatenate(running))][::-1]

    # -- the answer --------------------------------------------------------------------------------
    def _finish(self, step: PlanInProgress, batch: Batch, real_time: int) -> None:
        """The plan of `batch`, whose first `real_time` rows are real-time."""
        plan, requests = step.plan, step.view.requests
        plan.rows, plan.tokens = batch.rows, batch.new
        plan.moves = step.ledger.take_moves()
        for row, _ in plan.admitted:
            if requests.service_class[row] == _REAL_TIME:
                self.rt_waiting.remove(row)
                self.rt_pending.add(row)
            else:
                self.be_waiting.discard(row)
                self.be_pending.add(row)
        for row, kind in plan.preempted:
            if kind is Preemption.RECOMPUTE:
                self._wait_again(row, requests)
        everyone = len(self.rt_pending) + len(self.be_pending)
        changed = plan.admitted or plan.preempted or plan.moves or len(self.be_waiting)
        if not changed and len(batch) == everyone and len(batch) and not batch.is_prefill.any():
            self._stands(step, batch, real_time)

    def _wait_again(self, row: int, requests: RequestTable) -> None:
        if requests.service_class[row] == _REAL_TIME:
            self.rt_pending.discard(row)
            self._wait_real_time(row, requests)
        else:
            self.be_pending.discard(row)
            self.be_waiting.add(row)

    def _stands(self, step: PlanInProgress, batch: Batch, real_time: int) -> None:
        """Everybody who has memory decodes: the same batch will be chosen again while it stays
        within the bound and finds memory, and nobody else gets in."""
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
        if len(self.rt_waiting) and not self._keeps_out(step, batch[:real_time], residual, bound):
            return
        steps = step.ledger.decode_steps(batch.rows, LONGEST_RUN)
        if steps > 1:
            plan.valid_for = self.estimator.decodes_within(batch, bound, steps - 1)
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
            self.rt_waiting.first_deadline - float(residual.max()) - _CLOCK_SLACK_S
            if len(residual)
            else -np.inf
        )
        if not until > step.view.now or self.estimator.seconds(step.next, running) <= bound:
            return False
        step.plan.valid_until_s = until
        return True


def least(objectives: np.ndarray) -> float:
    """Seconds; infinite where nobody has an objective (NaN)."""
    return float(np.fmin.reduce(objectives, initial=np.inf))
