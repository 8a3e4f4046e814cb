"""BROS with `chunk=fit`, ours: prompts in chunks as long as the time left in an iteration allows.

The paper computes prompts whole within the time that the decodes leave, so that a long one waits
until it is late (docs/bros.md). Here an iteration takes, in this order: real-time decodes; the
time, but not yet the memory, of best-effort decodes; real-time prompts; best-effort decodes;
best-effort prompts. A prompt of c seconds is in time if the time left under the bounds of the
iterations until its deadline adds up to c. Queues, deadlines and memory are those of `bros`.
"""

from __future__ import annotations

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.bros.fit_cost import Load, cost_of, fit_estimator
from twinserve.policies.bros.fit_options import BrosFitOptions
from twinserve.policies.bros.fit_step import Feedback, FitStep, Rows, decodes_and_prompts
from twinserve.policies.bros.memory import acquire, grow_first, place_plain, take_from
from twinserve.policies.bros.parts import EMPTY, Victims
from twinserve.policies.bros.policy import BrosPolicy, least
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.parts.runs import LONGEST_RUN
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import RequestClass, RequestTable, State

_REAL_TIME = int(RequestClass.REAL_TIME)
_RUNNING = int(State.RUNNING)
_NOBODY = np.zeros(0, np.int64)
# of fit_age_s, after which real-time newcomers leave memory to who waits so long
_PATIENCE = 4
_PROMPTS = 4  # a fourth of the seats at most are kept free of decodes for prompts
_REACH = 512  # waiting requests that are looked at: first those that are not late yet


class BrosFitPolicy(BrosPolicy):
    Options = BrosFitOptions
    options: BrosFitOptions
    uses_prefix_cache = True
    fit_estimator = staticmethod(fit_estimator)

    def setup(self) -> None:
        super().setup()
        self.cost = cost_of(self.estimator, self.options.fit_estimator == "printed")
        self.feedback = Feedback(self.options.fit_feedback)
        self._least_ttft = np.inf  # seconds, of the real-time requests so far
        self._last: tuple[np.ndarray, float] | None = None  # rows, seconds of the last plan
        self._hits: dict[int, int] = {}  # tokens of waiting rows found in the cache when they came
        if not self.options.adaptive_batch:
            self.batch_size = self.limits.max_num_seqs

    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    # -- events ------------------------------------------------------------------------------------
    def on_arrival(self, row: int, requests: RequestTable) -> None:
        super().on_arrival(row, requests)
        if requests.service_class[row] == _REAL_TIME:
            self._least_ttft = min(self._least_ttft, least(requests.slo_ttft_s[row : row + 1]))

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        self._hits.pop(row, None)

    def on_outcome(self, outcome: StepOutcome) -> None:
        super().on_outcome(outcome)
        self.feedback.happened(outcome)

    # -- the iteration -----------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        requests, limits = view.requests, self.limits
        seats, tokens = self.batch_size, limits.max_num_batched_tokens
        step = FitStep(view, ledger, self.options.swap, self.cost, seats, tokens)
        lead = self._lead(step)
        decodes, begun = decodes_and_prompts(self.rt_pending.rows, requests, ledger)
        theirs, begun_be = decodes_and_prompts(self.be_pending.rows, requests, ledger)
        aged = self._aged(step, theirs, begun_be)
        self._serve_decodes(step, decodes, begun, lead)
        prompts, residual = self._prompts(step, begun, lead)
        if aged is not None:
            theirs, begun_be = self._serve_aged(step, aged, theirs, begun_be)
        reserved = self._reserve(step, theirs, prompts)
        cut = self._serve_prompts(step, prompts, residual, begun, aged)
        self._place_reserved(step, reserved)
        self._serve_best_effort_prompts(step, begun_be, begun)
        return self._answer(step, lead, cut)

    def _allowed(self, seconds):
        """Of an iteration that should take at most so many seconds, the estimate."""
        return seconds * ((1.0 - self.options.fit_margin) / self.feedback.factor)

    def _longest_step(self) -> float:
        """Estimated seconds of one with a best-effort prompt: a share of the least TTFT objective,
        since who arrives in it waits for its end; never so little that nothing could be done."""
        if self._least_ttft == np.inf:
            return np.inf
        shortest = self.cost.seconds(Load(decodes=1, context=1, longest=1))
        return max(self._allowed(self.options.fit_share * self._least_ttft), 2.0 * shortest)

    def _lead(self, step: FitStep) -> float:
        """Seconds until the iteration can begin: with asynchronous scheduling, what the step takes
        that is under way."""
        if not step.ledger.known_text_only or self._last is None:
            return 0.0
        rows, seconds = self._last
        if seconds:
            return seconds
        # It decoded, and may have done so for many steps.
        load = Load()
        load.add_decodes(step.view.requests.computed_tokens[rows] - 1)
        return self.cost.seconds(load)

    # -- real-time decodes -------------------------------------------------------------------------
    def _serve_decodes(self, step: FitStep, decodes: Rows, begun: Rows, lead: float) -> None:
        """All of them, most urgent first where seats, tokens or memory are short."""
        if not len(decodes):
            return
        requests = step.view.requests
        residual = self._residual(decodes.rows, requests, step.view.now)
        if lead:
            residual = residual - np.where(requests.in_flight[decodes.rows] > 0, 0.0, lead)
        decodes, residual, limit = self._resting(step, decodes, residual, len(begun))
        room = min(step.seats, step.tokens)
        batch = decodes.batch(self.limits.kv_bytes_per_token)
        if (
            len(decodes) > room
            or np.count_nonzero(decodes.missing)
            or not step.ledger.grow_all(batch.rows, batch.context)
        ):
            order = residual.argsort(kind="stable")[:room]
            decodes, residual = decodes[order], residual[order]
            done = self._place_decodes(step, decodes, residual, begun)
            decodes, residual = decodes[done], residual[done]
        step.grant_decodes(step.real_time, decodes)
        if len(decodes):
            bound = self._bound(step, residual, requests.slo_tpot_s[decodes.rows])
            step.bound = min(bound, limit)

    def _resting(
        self, step: FitStep, decodes: Rows, residual: np.ndarray, begun: int
    ) -> tuple[Rows, np.ndarray, float]:
        """Seats for real-time prompts where decodes would take them all: the least urgent decodes
        rest for an iteration, if they can still be in time in the next one. Returns the others, and
        the estimated seconds that this iteration may then take.

        Prompts that wait for a seat until a decode ends are late by seconds, though the decodes
        have time to spare.
        """
        room = min(step.seats, step.tokens)
        prompts = min(begun + len(self.rt_waiting), room // _PROMPTS)
        over = len(decodes) + prompts - room
        if not prompts or over <= 0:
            return decodes, residual, np.inf
        everyone = Load()
        everyone.add_decodes(decodes.resident)
        after = self._allowed(residual) - self.cost.seconds(everyone)
        order = residual.argsort(kind="stable")
        rest = order[-over:]
        rest = rest[after[rest] >= self.cost.seconds(everyone)]
        if not len(rest):
            return decodes, residual, np.inf
        stay = np.ones(len(decodes), bool)
        stay[rest] = False
        return decodes[stay], residual[stay], float(after[rest].min())

    def _place_decodes(
        self, step: FitStep, decodes: Rows, residual: np.ndarray, begun: Rows
    ) -> np.ndarray:
        """bool[n]: who has memory; in order of urgency. They take that of best-effort requests,
        the last to arrive first, then of real-time prompts, then of decodes after them."""
        batch = decodes.batch(self.limits.kv_bytes_per_token)
        urgency = np.concatenate([decodes.rows, begun.rows])
        done, others = place_plain(step, batch)
        allowed, swapped = self._allowed(float(residual.min())), 0
        left = np.array(others, np.int64)
        while len(left):
            left, tried = grow_first(step, batch, done, left)
            if not len(left):
                break
            i, left = int(left[0]), left[1:]
            row, back = int(batch.rows[i]), int(batch.swapped[i])
            if row in step.dropped:
                continue
            if back and done.any() and self._swap_seconds(swapped + back) > allowed:
                continue  # the others would wait for it
            victims = Victims(self.be_pending.rows, urgency, decodes.rows[done], row)
            find = take_from if tried else acquire
            done[i] = find(step, row, int(batch.context[i]), victims)
            swapped += back * int(done[i])
        return done

    def _swap_seconds(self, swapped: int) -> float:
        return self.estimator.swap.seconds(swapped)

    def _bound(self, step: FitStep, residual: np.ndarray, tpot: np.ndarray) -> float:
        """Estimated seconds that the decodes leave an iteration: the least residual time of those
        that can be in time, and where none can the least TPOT objective."""
        alone = self.cost.seconds(step.load)
        allowed = self._allowed(residual)
        savable = allowed >= alone
        if np.count_nonzero(savable):
            return float(allowed[savable].min())
        return float(self._allowed(least(tpot)))

    # -- real-time prompts -------------------------------------------------------------------------
    def _prompts(self, step: FitStep, begun: Rows, lead: float) -> tuple[Rows, np.ndarray]:
        """Real-time prompts in the order in which they are computed, and their residual times
        (float64[n], as estimates); they limit the bound."""
        requests = step.view.requests
        if self.options.fit_order == "savable":
            waiting = self.rt_waiting.open_first(step.view.now + lead, _REACH)
        else:
            waiting = self.rt_waiting.rows[:_REACH]
        if not len(waiting) and not len(begun):
            return begun, np.zeros(0)
        rows, resident = np.concatenate([begun.rows, waiting]), np.zeros(len(waiting), np.int64)
        if step.ledger.prefix_caching and len(waiting):
            resident = np.array([self._expected_hit(step, row) for row in waiting.tolist()])
        left = requests.prompt_tokens[waiting] + requests.output_tokens[waiting] - resident
        none = np.zeros(len(waiting), np.int64)
        columns = ((begun.left, left), (begun.resident, resident), (begun.missing, none))
        prompts = Rows(rows, *(np.concatenate(pair) for pair in columns))
        residual = self._allowed(self._residual(rows, requests, step.view.now) - lead)
        own = self.cost.own(prompts.left, prompts.resident)
        alone = self.cost.seconds(step.load)
        kept = residual >= own + alone
        if self.options.fit_bound == "printed":
            ends = kept
        else:
            ends = kept & (residual < step.bound)
        if np.count_nonzero(ends):
            step.bound = min(step.bound, float(residual[ends].min()))
        order = self._in_order(rows, residual, kept, requests)
        return prompts[order], residual[order]

    def _in_order(
        self, rows: np.ndarray, residual: np.ndarray, kept: np.ndarray, requests: RequestTable
    ) -> np.ndarray:
        if self.options.fit_order == "arrival":
            return requests.arrival_s[rows].argsort(kind="stable")
        if self.options.fit_order == "residual" or np.count_nonzero(kept) == len(kept):
            return residual.argsort(kind="stable")
        return np.lexsort((residual, ~kept))

    def _expected_hit(self, step: FitStep, row: int) -> int:
        if row not in self._hits:
            self._hits[row] = step.hit(row)
        return self._hits[row]

    def _serve_prompts(
        self, step: FitStep, prompts: Rows, residual: np.ndarray, begun: Rows, aged: int | None
    ) -> bool:
        """Each as far as the time left allows. Returns whether the bound ended it."""
        load, closed = step.load, aged is not None and self._keeps_others_out(step, aged)
        done, cut = 0, False
        broken = self.cost.seconds(load) > step.bound
        for i, (row, left, resident) in enumerate(
            zip(
                prompts.rows.tolist(), prompts.left.tolist(), prompts.resident.tolist(), strict=True
            )
        ):
            if row in step.dropped:
                continue
            new_here = step.view.requests.state[row] != _RUNNING and not prompts.missing[i]
            if new_here and closed:
                continue
            if new_here and step.ledger.prefix_caching:
                hit = step.hit(row)
                left, resident = left + resident - hit, hit
            most, bound = left, step.bound
            if broken and not done:  # no decode can be saved, and a prompt must go on
                most, bound = min(left, self.options.fit_least), np.inf
            new = step.chunk(most, resident, self.options.fit_least, load, bound)
            if not new:
                cut = True
                break
            if not self._place_prompt(step, row, new, resident, left, new_here, begun):
                closed = closed or new_here
                continue
            step.grant_chunk(step.real_time, row, new, resident)
            done += 1
            if new == left and residual[i] < step.bound:
                step.bound = max(float(residual[i]), self.cost.seconds(load))
        return cut

    def _keeps_others_out(self, step: FitStep, aged: int) -> bool:
        """Whether newcomers must leave memory to the one that has waited longest and found none."""
        since = self._waits_since(np.array([aged]), step.view.requests)[0]
        late = step.view.now - since > _PATIENCE * self.options.fit_age_s
        return late and aged not in step.granted

    def _place_prompt(
        self, step: FitStep, row: int, new: int, resident: int, left: int, fresh: bool, begun: Rows
    ) -> bool:
        victims = self.be_pending.rows[::-1]
        if step.granted:
            victims = victims[[v not in step.granted for v in victims.tolist()]]
        if not fresh:
            return acquire(step, row, resident + new, victims)
        if not self._has_room(step, row, resident + left, begun):
            return False
        return step.admit(row, new, resident, victims)

    def _has_room(self, step: FitStep, row: int, known: int, begun: Rows) -> bool:
        """Whether a real-time prompt can be finished beside those that have been begun: memory of
        best-effort requests counts as free."""
        ledger = step.ledger
        need = -(-known // ledger.block_tokens) + step.promised_blocks(begun)
        if need <= ledger.free_blocks:
            return True
        return need <= ledger.num_blocks - ledger.usage().real_time

    # -- best-effort decodes -----------------------------------------------------------------------
    def _reserve(self, step: FitStep, theirs: Rows, prompts: Rows) -> Rows:
        """Best-effort decodes that the bound has time for, those without transfers first; the first
        real-time prompt keeps its shortest chunk."""
        if not len(theirs):
            return theirs
        missing = np.count_nonzero(theirs.missing)
        if missing:
            theirs = theirs[np.lexsort((theirs.rows, theirs.missing))]
        room = min(step.seats, step.tokens) - min(
            len(prompts), step.tokens // self.options.fit_least
        )
        theirs = theirs[: max(room, 0)]
        bound = step.bound
        if len(prompts) and bound < np.inf:
            shortest = np.minimum(prompts.left[:1], self.options.fit_least)
            bound -= float(self.cost.own(shortest, prompts.resident[:1])[0])
        fits = self.cost.decodes(step.load, theirs.resident, bound)
        if missing and fits:
            swapped = theirs.missing[:fits].cumsum() * self.limits.kv_bytes_per_token
            swap = self.estimator.swap
            seconds = np.where(swapped > 0, swap.base_s + swapped * swap.seconds_per_byte, 0.0)
            limit = max(bound, self.cost.seconds(step.load))
            fits = int(seconds.searchsorted(limit, side="right"))
        step.reserve(theirs[:fits])
        return theirs[:fits]

    def _place_reserved(self, step: FitStep, reserved: Rows) -> None:
        """Memory for them, after the real-time requests; time that they cannot use is free."""
        if not len(reserved):
            return
        step.reserve(reserved, -1)
        if step.dropped:
            reserved = reserved[step.keeps(reserved.rows)]
        batch = reserved.batch(self.limits.kv_bytes_per_token)
        done, others = place_plain(step, batch)
        for i in others:
            row = int(batch.rows[i])
            if row in step.dropped:
                continue
            whole = not batch.swapped[i]
            victims = _NOBODY
            if whole:
                victims = self._later_ones(
                    row, np.array(list(step.granted), np.int64), reserved.rows[done]
                )
            done[i] = acquire(step, row, int(batch.context[i]), victims)
        if len(others):
            reserved = reserved[done]
        step.grant_decodes(step.best_effort, reserved)

    # -- best-effort prompts -----------------------------------------------------------------------
    def _serve_best_effort_prompts(self, step: FitStep, begun: Rows, begun_rt: Rows) -> None:
        waiting = self.be_waiting.rows[:_REACH]
        if not len(waiting) and not len(begun):
            return
        bound = min(step.bound, self._longest_step())
        if len(begun) and np.count_nonzero(begun.missing):
            begun = begun[begun.missing.argsort(kind="stable")]
        for row, left, resident in zip(
            begun.rows.tolist(), begun.left.tolist(), begun.resident.tolist(), strict=True
        ):
            if row in step.dropped or row in step.granted:
                continue
            new = step.chunk(left, resident, self.options.fit_least, step.load, bound)
            if not new:
                return
            placed = self._later_ones(
                row, np.array(list(step.granted), np.int64), *(r for r, _ in step.best_effort)
            )
            if acquire(step, row, resident + new, placed):
                step.grant_chunk(step.best_effort, row, new, resident)
        if not len(waiting):
            return
        promised = step.promised_blocks(begun) + step.promised_blocks(begun_rt)
        for row in waiting.tolist():
            if row in step.granted:
                continue
            hit = step.hit(row)
            known = int(step.view.requests.known_tokens(row))
            new = step.chunk(known - hit, hit, self.options.fit_least, step.load, bound)
            if not new or not step.ledger.admit(row, hit + new, hit, promised, known):
                return
            step.plan.admitted.append((row, hit))
            step.grant_chunk(step.best_effort, row, new, hit)
            size, held = step.ledger.block_tokens, step.ledger.held_blocks(row)
            promised += max(0, -(-known // size) - held)

    # -- best-effort requests that have waited long ------------------------------------------------
    def _aged(self, step: FitStep, theirs: Rows, begun: Rows) -> int | None:
        """The best-effort request that has waited longest for a token, if for too long."""
        requests = step.view.requests
        rows = np.concatenate([theirs.rows, begun.rows, self.be_waiting.rows[:1]])
        if not len(rows):
            return None
        since = self._waits_since(rows, requests)
        first = int(since.argmin())
        if step.view.now - since[first] <= self.options.fit_age_s:
            return None
        return int(rows[first])

    def _waits_since(self, rows: np.ndarray, requests: RequestTable) -> np.ndarray:
        """float64[n], seconds: for its next token."""
        return np.fmax(requests.placed_s[rows], requests.last_token_s[rows])

    def _serve_aged(self, step: FitStep, row: int, theirs: Rows, begun: Rows) -> tuple[Rows, Rows]:
        """It goes before real-time prompts, and takes the memory of best-effort requests that came
        later. Returns the others."""
        others = theirs[theirs.rows != row], begun[begun.rows != row]
        if row in step.dropped:  # a real-time decode has just taken its memory
            return others
        requests = step.view.requests
        known, computed = int(requests.known_tokens(row)), int(requests.computed_tokens[row])
        victims = (
            self._later_ones(row, _NOBODY) if row in self.be_pending else self.be_pending.rows[::-1]
        )
        victims = victims[victims > row]
        fresh = row in self.be_waiting
        hit = step.hit(row) if fresh else computed
        new = min(known - hit, self.options.fit_least, step.tokens)
        if new > 0 and step.seats > 0:
            done = (
                step.admit(row, new, hit, victims)
                if fresh
                else acquire(step, row, hit + new, victims)
            )
            if done:
                step.grant_chunk(step.best_effort, row, new, hit)
        return others

    # -- the answer --------------------------------------------------------------------------------
    def _answer(self, step: FitStep, lead: float, cut: bool) -> StepPlan:
        if not step.real_time and not step.best_effort:
            self._place_anyone(step)
        plan, parts = step.plan, step.real_time + step.best_effort
        seconds = self.cost.seconds(step.load) if step.load.chunks else 0.0
        if parts:
            rows = np.concatenate([rows for rows, _ in parts]) if len(parts) > 1 else parts[0][0]
            new = np.concatenate([new for _, new in parts]) if len(parts) > 1 else parts[0][1]
            context = step.view.requests.computed_tokens[rows] + new
            prefill = np.zeros(len(rows), bool)
            prefill[:] = bool(step.load.chunks)
            real_time = sum(len(rows) for rows, _ in step.real_time)
            self._finish(step, Batch(rows, prefill, new, context, new), real_time)
            if seconds and not plan.moves:
                self.feedback.planned(step.view.now, lead > 0.0, seconds)
        else:
            self._finish(step, EMPTY, 0)
        self._last = (plan.rows, seconds) if len(plan.rows) else None
        self._adapt(cut)
        return plan

    def _place_anyone(self, step: FitStep) -> None:
        """Everybody waits for memory that others hold: as `bros` does."""
        requests = step.view.requests
        real_time = np.concatenate([self.rt_pending.rows, self.rt_waiting.rows[:_REACH]])
        best_effort = np.concatenate([self.be_pending.rows, self.be_waiting.rows[:_REACH]])
        residual = self._residual(real_time, requests, step.view.now)
        batches = [
            self._chunks(rows, requests, step.ledger)
            for rows in (real_time[residual.argsort(kind="stable")], best_effort)
        ]
        for placed, to in zip(
            self._place_someone(step, *batches), (step.real_time, step.best_effort), strict=True
        ):
            for row, new, context in zip(
                placed.rows.tolist(), placed.new.tolist(), placed.context.tolist(), strict=True
            ):
                step.grant_chunk(to, row, new, context - new)

    def _chunks(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger) -> Batch:
        batch = self._whole(rows, requests, ledger)
        new = np.minimum(batch.new, self.limits.max_num_batched_tokens)
        return Batch(rows, batch.is_prefill, new, batch.context - batch.new + new, batch.swapped)

    def _whole(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger) -> Batch:
        computed = requests.computed_tokens[rows]
        left = requests.known_tokens(rows) - computed
        return Batch(rows, left > 1, left, computed + left, ledger.missing_tokens(rows))

    def _stands(self, step, batch: Batch, real_time: int) -> None:
        """Everybody decodes and nobody waits: that stays so while the bound holds all of them."""
        if self.options.group_size > 1 or self.options.adaptive_batch or len(self.rt_waiting):
            return
        plan, requests = step.plan, step.view.requests
        steps = step.ledger.decode_steps(batch.rows, LONGEST_RUN)
        if steps > 1 and real_time < len(batch):
            resident = batch.context - 1
            run = self.cost.model.decode_run_seconds(
                len(batch), int(resident.sum()), int(resident.max()), steps
            )
            bound = self._allowed(least(requests.slo_tpot_s[batch.rows[:real_time]]))
            steps = int(run.searchsorted(bound, side="right"))
        plan.valid_for = max(steps - 1, 0)
        order = plan.rows.argsort()
        plan.rows, plan.tokens = plan.rows[order], plan.tokens[order]
