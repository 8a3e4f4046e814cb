"""BROS with `chunk=fit`, ours: prompts in chunks as long as the time left in an iteration allows.

The paper computes prompts whole within the time that the decodes leave, so that a long one waits
until it is late (docs/bros.md). Here an iteration takes, in this order: real-time decodes; the
time, but not yet the memory, of best-effort decodes; real-time prompts; best-effort decodes;
best-effort prompts. A prompt of c seconds is in time if the time left under the bounds of the
iterations until its deadline adds up to c. Queues, deadlines and memory are those of `bros`.
"""

import numpy as np

from twinserve.policies.base import SystemView
from twinserve.policies.bros.fit_best_effort import NOBODY, REACH, FitBestEffort
from twinserve.policies.bros.fit_cost import Load
from twinserve.policies.bros.fit_step import NO_ROWS, FitStep, Rows, decodes_and_prompts
from twinserve.policies.bros.memory import find, in_want, place_plain, take_from
from twinserve.policies.bros.parts import EMPTY, Victims, least
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.parts.runs import LONGEST_RUN
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable, State

_RUNNING = int(State.RUNNING)
_PROMPTS = 4  # a fourth of the seats at most are kept free of decodes for prompts


class BrosFitPolicy(FitBestEffort):
    uses_prefix_cache = True

    def step_tokens(self, longest: int) -> int:
        return self.limits.max_num_batched_tokens

    # -- the iteration -----------------------------------------------------------------------------
    def plan(self, view: SystemView, ledger: KvLedger) -> StepPlan:
        ledger.begin_step()
        requests, limits = view.requests, self.limits
        seats, tokens = self.batch_size, limits.max_num_batched_tokens
        step = FitStep(view, ledger, self.options.swap, self.cost, seats, tokens)
        lead = self._lead(step)
        decodes, begun = decodes_and_prompts(self.queues.rt_pending.rows, requests, ledger)
        theirs, begun_be = decodes_and_prompts(self.queues.be_pending.rows, requests, ledger)
        aged = self._aged(step, theirs, begun_be)
        resting = self._serve_decodes(step, decodes, begun, lead)
        prompts, residual = self._prompts(step, begun, lead)
        if aged is not None:
            theirs, begun_be = self._serve_aged(step, aged, theirs, begun_be)
        reserved, left_out = self._reserve(step, theirs, prompts)
        cut = self._serve_prompts(step, prompts, residual, begun, aged)
        self._serve_left_out(step, step.real_time, resting)
        self._place_reserved(step, reserved)
        self._serve_left_out(step, step.best_effort, left_out)
        self._serve_best_effort_prompts(step, begun_be, begun)
        return self._answer(step, lead, cut)

    def _lead(self, step: FitStep) -> float:
        """Seconds until the iteration can begin: with asynchronous scheduling, what the step takes
        that is under way."""
        if not step.ledger.known_text_only or self._last is None:
            return 0.0
        rows, seconds = self._last
        if seconds:
            return seconds
        # It decoded, and may have done so for many steps.
        return self._seconds(step.view.requests.computed_tokens[rows] - 1)

    # -- real-time decodes -------------------------------------------------------------------------
    def _serve_decodes(self, step: FitStep, decodes: Rows, begun: Rows, lead: float) -> Rows:
        """Grant tokens to all of them, the most urgent first if seats, tokens or memory are short.
        Returns the decodes that rest so that prompts get seats, the most urgent first."""
        if not len(decodes):
            return decodes
        requests = step.view.requests
        residual = self._until_due(decodes.rows, requests, step.view.now, lead)
        rest, limit = self._resting(step, decodes, residual, len(begun))
        resting = NO_ROWS
        if len(rest):
            resting = decodes[rest]
            stay = np.ones(len(decodes), bool)
            stay[rest] = False
            decodes, residual = decodes[stay], residual[stay]
        room = min(step.seats, step.tokens)
        if (
            len(decodes) > room
            or np.count_nonzero(decodes.missing)
            or not step.ledger.grow_all(decodes.rows, decodes.resident + 1)
        ):
            order = residual.argsort(kind="stable")
            decodes, residual = decodes[order], residual[order]
            done = np.flatnonzero(self._place_decodes(step, decodes[:room], residual[:room], begun))
            behind = self._seated(step, decodes[room:], room - len(done))
            done = np.concatenate([done, room + behind])
            decodes, residual = decodes[done], residual[done]
        step.grant_decodes(step.real_time, decodes)
        if len(decodes):
            alone = self.cost.seconds(step.load)
            step.bound = min(self._bound(alone, residual, decodes.rows, requests), limit)
        return resting

    def _resting(
        self, step: FitStep, decodes: Rows, residual: np.ndarray, begun: int
    ) -> tuple[np.ndarray, float]:
        """Free seats for real-time prompts if decodes would take them all. The least urgent decodes
        rest for an iteration, if they can still be in time in the next one. Returns their indices,
        the most urgent first, and the estimated seconds that this iteration may then take.

        Prompts that wait for a seat until a decode ends are late by seconds, though the decodes
        have time to spare.
        """
        room = min(step.seats, step.tokens)
        prompts = min(begun + len(self.queues.rt_waiting), room // _PROMPTS)
        over = len(decodes) + prompts - room
        if not prompts or over <= 0:
            return NOBODY, np.inf
        everyone = self._seconds(decodes.resident)
        after = self._allowed(residual) - everyone
        rest = residual.argsort(kind="stable")[-over:]
        rest = rest[after[rest] >= everyone]
        return rest, float(after[rest].min(initial=np.inf))

    def _place_decodes(
        self, step: FitStep, decodes: Rows, residual: np.ndarray, begun: Rows
    ) -> np.ndarray:
        """bool[n]: which decodes have memory; in order of urgency. They take that of best-effort
        requests, the last to arrive first, then of real-time prompts, then of decodes after
        them."""
        batch = decodes.batch(self.limits.kv_bytes_per_token)
        urgency = np.concatenate([decodes.rows, begun.rows])
        done, others = place_plain(step, batch)
        alone, swapped = self._seconds(decodes.resident), 0
        # A late request that waits on the host for time would only get later.
        allowed = self._bound(alone, residual, decodes.rows, step.view.requests)
        for i, take in in_want(step, batch, done, others):
            row, back = int(batch.rows[i]), int(batch.swapped[i])
            if back and done.any() and self._swap_seconds(swapped + back) > allowed:
                continue  # the others would wait for it
            victims = Victims(self.queues.be_pending.rows, urgency, decodes.rows[done], row)
            done[i] = take(step, row, int(batch.context[i]), victims)
            swapped += back * int(done[i])
        return done

    def _seconds(self, resident: np.ndarray) -> float:
        """Estimated, of an iteration of decodes alone. int64[n], tokens."""
        load = Load()
        load.add_decodes(resident)
        return self.cost.seconds(load)

    def _bound(
        self, alone: float, residual: np.ndarray, rows: np.ndarray, requests: RequestTable
    ) -> float:
        """Return the estimated seconds that an iteration of decodes may take; alone: its seconds
        without prompts. This is the least residual time of the decodes that can be in time, or the
        least TPOT objective if none can."""
        allowed = self._allowed(residual)
        savable = allowed[allowed >= alone]
        if len(savable):
            return min(savable.tolist())
        return float(self._allowed(least(requests.slo_tpot_s[rows])))

    # -- real-time prompts -------------------------------------------------------------------------
    def _prompts(self, step: FitStep, begun: Rows, lead: float) -> tuple[Rows, np.ndarray]:
        """Real-time prompts in the order in which they are computed, and their residual times
        (float64[n], as estimates); they limit the bound."""
        requests = step.view.requests
        prompts = self._with_waiting(step, begun, lead) if len(self.queues.rt_waiting) else begun
        if not len(prompts):
            return prompts, np.zeros(0)
        residual = self._until_due(prompts.rows, requests, step.view.now)
        residual = self._allowed(residual - lead)
        own = self.cost.own(prompts.left, prompts.resident)
        kept = residual >= own + self.cost.seconds(step.load)
        savable = residual[kept]
        if len(savable):
            step.bound = min(step.bound, *savable.tolist())
        if len(prompts) == 1:
            return prompts, residual
        order = self._in_order(prompts.rows, residual, kept, requests)
        return prompts[order], residual[order]

    def _with_waiting(self, step: FitStep, begun: Rows, lead: float) -> Rows:
        """Real-time prompts that have been begun, then those that wait."""
        requests = step.view.requests
        if self.options.fit_order == "savable":
            waiting = self.queues.rt_waiting.open_first(step.view.now + lead, REACH)
        else:
            waiting = self.queues.rt_waiting.first(REACH)
        none = resident = np.zeros(len(waiting), np.int64)
        if step.ledger.prefix_caching:
            resident = np.array([self._expected_hit(step, row) for row in waiting.tolist()])
        left = requests.prompt_tokens[waiting] + requests.output_tokens[waiting] - resident
        if not len(begun):
            return Rows(waiting, left, resident, none)
        return Rows(
            np.concatenate((begun.rows, waiting)),
            np.concatenate((begun.left, left)),
            np.concatenate((begun.resident, resident)),
            np.concatenate((begun.missing, none)),
        )

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
        if not len(prompts):
            return False
        load, closed = step.load, aged is not None and self._keeps_others_out(step, aged)
        done, cut, state = 0, False, step.view.requests.state
        broken = self.cost.seconds(load) > step.bound
        columns = (prompts.rows, prompts.left, prompts.resident, prompts.missing, residual)
        for row, left, resident, missing, until_due in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if row in step.dropped:
                continue
            new_here = not missing and state[row] != _RUNNING
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
            if new == left and until_due < step.bound:
                step.bound = max(until_due, self.cost.seconds(load))
        return cut

    def _place_prompt(
        self, step: FitStep, row: int, new: int, resident: int, left: int, fresh: bool, begun: Rows
    ) -> bool:
        if not fresh:
            if find(step, row, resident + new):
                return True
            return take_from(step, row, resident + new, self._may_drop(step))
        if not self._has_room(step, row, resident + left, begun):
            return False
        return step.admit(row, new, resident, self._may_drop(step))

    def _may_drop(self, step: FitStep) -> np.ndarray:
        """int64[n]: best-effort requests that got nothing in this step, the last to arrive
        first."""
        victims = self.queues.be_pending.rows[::-1]
        if step.granted:
            victims = victims[[v not in step.granted for v in victims.tolist()]]
        return victims

    def _has_room(self, step: FitStep, row: int, known: int, begun: Rows) -> bool:
        """Return whether a real-time prompt can be finished with those that have begun: memory of
        best-effort requests counts as free."""
        ledger = step.ledger
        need = -(-known // ledger.block_tokens) + step.promised_blocks(begun)
        if need <= ledger.free_blocks:
            return True
        return need <= ledger.num_blocks - ledger.usage().real_time

    # -- the answer --------------------------------------------------------------------------------
    def _answer(self, step: FitStep, lead: float, cut: bool) -> StepPlan:
        if not step.real_time and not step.best_effort:
            self._place_anyone(step)
        plan, parts = step.plan, step.real_time + step.best_effort
        seconds = self.cost.seconds(step.load) if step.load.chunks else 0.0
        if not parts:
            self._fill(step, EMPTY.rows, EMPTY.new)
        else:
            rows, new = parts[0]
            if len(parts) > 1:
                rows = np.concatenate([rows for rows, _ in parts])
                new = np.concatenate([new for _, new in parts])
            if self._fill(step, rows, new) and not step.load.chunks:
                context = step.view.requests.computed_tokens[rows] + new
                real_time = sum(len(rows) for rows, _ in step.real_time)
                prefill = np.zeros(len(rows), bool)
                self._stands(step, Batch(rows, prefill, new, context, new), real_time)
            if seconds and not plan.moves:
                self.feedback.planned(step.view.now, lead > 0.0, seconds)
        self._last = (plan.rows, seconds) if len(plan.rows) else None
        self._adapt(cut)
        return plan

    def _place_anyone(self, step: FitStep) -> None:
        """All rows wait for memory that others hold: as `bros` does."""
        requests, queues = step.view.requests, self.queues
        real_time = np.concatenate([queues.rt_pending.rows, queues.rt_waiting.first(REACH)])
        best_effort = np.concatenate([queues.be_pending.rows, queues.be_waiting.first(REACH)])
        residual = queues.residual(real_time, requests, step.view.now)
        batches = [
            self._chunks(rows, requests, step.ledger)
            for rows in (real_time[residual.argsort(kind="stable")], best_effort)
        ]
        for placed, to in zip(
            self.placer.someone(step, *batches), (step.real_time, step.best_effort), strict=True
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
        """All rows decode and none waits: that stays so while the bound holds all of them."""
        options = self.options
        if options.group_size > 1 or options.adaptive_batch or len(self.queues.rt_waiting):
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
        plan.valid_for, plan.outlasts_ends = max(steps - 1, 0), type(self) is BrosFitPolicy
        order = plan.rows.argsort()
        plan.rows, plan.tokens = plan.rows[order], plan.tokens[order]
