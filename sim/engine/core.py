"""One engine's state and its step, without a clock: submit, plan, complete. Both engines' loops are
built on it."""

from collections.abc import Container

import numpy as np

from twinserve.native.chosen import columns
from twinserve.policies.base import Policy, SystemView
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger, LedgerError
from twinserve.policies.plan import Preemption, StepOutcome, StepPlan
from twinserve.policies.requests import Application, ApplicationEnd, End, RequestTable, State

# plain integers: looking a member up in an enum costs more than the assignment it is for
WAITING, RUNNING, SWAPPED, FINISHED = (
    int(s) for s in (State.WAITING, State.RUNNING, State.SWAPPED, State.FINISHED)
)


_NO_ROWS = np.zeros(0, np.int64)
_NOT_ENDED, _COMPLETED, _MOVED = int(End.NONE), int(End.COMPLETED), int(End.MOVED)
_HANDED_OVER = int(End.HANDED_OVER)


class EngineCore:
    """Applies plans and outcomes to the request table, and keeps policy and ledger informed.

    The only writer of the table. `active` counts unfinished requests, `holding` those with KV on
    the device.

    asynchronous  plans are made while the step before them runs: between `begin` and `complete` of
                  that step, as the request table describes it
    hands_over    set for an engine that computes prompts for others: its requests end as handed
                  over, and keep their memory until `release` (vLLM's delayed free). A request
                  that loses it while its token is computed computes the prompt again
                  (`requires_kv_delivery`)
    kept          rows that have ended and keep their memory
    fenced        rows that have left and keep it until the step under way, which computes them, has
                  ended (`Traits.loads_kv`; vLLM's `deferred_frees`)
    draining      `SystemView.draining`
    """

    hands_over = False
    padding = 0  # most tokens that a row is granted beyond those it lacks when it is admitted
    draining: Container[int] = ()

    def __init__(
        self, requests: RequestTable, policy: Policy, ledger: KvLedger, asynchronous: bool = False
    ) -> None:
        self.requests = requests
        self.policy = policy
        self.ledger = ledger
        self.asynchronous = asynchronous
        self.ready_s: dict[int, float] = {}
        self.active = 0
        self.holding = 0
        self.kept: set[int] = set()
        self._released: list[int] = []  # of these, whose memory is free at the next boundary
        # what the policy has not been told of yet, in order
        self._arrived: list[int | Application | ApplicationEnd] = []
        # rows that emit in the step under way, and their last token times before it began
        self._shown = np.zeros(0, np.int64)
        self._last_token_s: np.ndarray | None = None
        # of those that end with the step under way: which the policy has been told of
        self._told: list[int] = []
        self._leaving: list[int] = []  # withdrawn, which takes effect at the next boundary
        self._dropped = False  # of the step under way some rows are no more, or ...
        self._void: list[int] = []  # ... were preempted, with nothing left to hand over
        # row -> when the last transfer that touches its memory lands, if no step waits for it
        self._lands_s: dict[int, float] = {}
        self._under_way_rows = _NO_ROWS  # that the step under way computes
        self.fenced: list[int] = []
        # a plan of a user's own policy is looked at: steps of no token would never end
        self._own = not type(policy).__module__.startswith("twinserve.")
        self._ends_early = asynchronous and not policy.traits.keeps_ending
        if asynchronous:
            ledger.known_text_only = True
        if not policy.traits.blank_blocks_first:
            ledger.reuse_in_order()
        self._publishes = asynchronous and ledger.prefix_caching

    @property
    def where_to_look(self) -> str:
        """Return what finds the fault of a user's own policy; nothing for others."""
        return "; twinserve.check_policy names the first plan that is wrong" if self._own else ""

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun whose outcome is not booked. The table shows that step
        ahead of time."""
        return self._last_token_s is not None

    @property
    def unsettled(self) -> bool:
        """Return whether `settle` has something to do."""
        return bool(self._leaving or self._released)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Return the rows withdrawn since the last boundary."""
        return tuple(self._leaving)

    @property
    def waiting(self) -> int:
        return self.active - self.holding

    def announce(self, application: Application) -> None:
        """An application arrives. Its first requests are submitted right after."""
        self._arrived.append(application)

    def close(self, group: int) -> None:
        """No further request of an announced application will be submitted."""
        self._arrived.append(ApplicationEnd(group))

    def submit(self, request_id: str, **values) -> int:
        """Add a request and return its row; `values` as for RequestTable.submit. The policy hears
        of the request at the next plan, when the table is as the last step left it. In the middle
        of a step the policy would see running requests as they were at its begin.
        """
        row = self.requests.submit(request_id, **values)
        self.active += 1
        self._arrived.append(row)
        return row

    def withdraw(self, row: int, end: End, now: float) -> bool:
        """Cancel the request at time `now`, or take it from this engine since it moved to another.
        It ends before its last token, at the next step boundary (`settle`). Tokens of the step
        under way count. If its last token is among them, it has completed and has not moved.
        Returns False if it had ended before. A request that is about to move can still be
        cancelled."""
        requests = self.requests
        before = requests.end[row]
        if before == _NOT_ENDED:
            self._leaving.append(row)
        elif before != _MOVED or requests.state[row] == FINISHED:
            return False
        requests.end[row], requests.ended_s[row] = end, now
        return True

    def settle(self, now: float) -> list[tuple[int, float]]:
        """At a boundary, remove withdrawn requests wherever they are. Returns each with the time
        (seconds) at which its memory is free. That is `now`, or the end of a transfer that touches
        the memory, which the caller reports (`landed`). `plan` calls this itself if transfers take
        no time."""
        if self._released:
            self._free_released()
        if not self._leaving:
            return []
        leaving, self._leaving = self._leaving, []
        self._tell_arrivals()
        requests, left = self.requests, []
        for row in leaving:
            if requests.state[row] == FINISHED:
                continue  # its last token came first
            if row in self._told:
                pass  # that it ends, when the step under way began
            elif requests.end[row] == _COMPLETED and requests.state[row] == RUNNING:
                self.policy.on_finish(row)  # earlier than expected: an end-of-text token
            else:
                self.policy.on_withdraw(row)
            free_s = max(self._lands_s.get(row, now), now)
            if self.policy.traits.loads_kv and row in self._under_way_rows:
                self.fenced.append(row)
            elif free_s == now:
                self.ledger.free(row)
            self._end(row)
            if self.under_way:
                self._dropped = True
                self._unshow_one(row)
            left.append((row, free_s))
        return left

    def transferring(self, lands_s: dict[int, float]) -> None:
        """Transfers began that no step waits for: row -> when its last one lands (seconds)."""
        for row, landing in lands_s.items():
            self._lands_s[row] = max(landing, self._lands_s.get(row, 0.0))

    def landed(self, row: int) -> None:
        """The last transfer that touched a withdrawn row's memory has landed."""
        self.ledger.free(row)

    def fetched(self, row: int, whole: bool) -> bool:
        """KV that another engine computed for the row has arrived. If `whole`, only the last token
        is left to compute, and True is returned. Otherwise none of it can be used. If the row was
        withdrawn meanwhile, its memory is free at the next boundary."""
        requests = self.requests
        self._lands_s.pop(row, None)
        if requests.state[row] == FINISHED:
            self._released.append(row)
            return False
        if whole:
            requests.computed_tokens[row] = requests.known_tokens(row) - 1
        return whole

    def loaded(self, row: int, tokens: int) -> None:
        """`fetched` for KV that came from the host: the row now has KV of its first `tokens`
        tokens."""
        requests = self.requests
        self._lands_s.pop(row, None)
        if requests.state[row] == FINISHED:
            self._released.append(row)
            return
        if np.isnan(requests.first_scheduled_s[row]):
            requests.host_tokens[row] = tokens - requests.hit_tokens[row]
        # of a text that is here as a whole the last token is computed again, for the next one
        requests.computed_tokens[row] = min(tokens, int(requests.known_tokens(row)) - 1)

    def release(self, row: int) -> None:
        """Release KV kept for a remote reader that has fetched it or given up. The memory is free
        at the next boundary (`settle`), as vLLM hears of it with a step's output."""
        self.kept.remove(row)
        self._released.append(row)

    def _free_fenced(self) -> None:
        fenced, self.fenced = self.fenced, []
        for row in fenced:
            self.ledger.free(row)

    def _free_released(self) -> None:
        released, self._released = self._released, []
        for row in released:
            self.ledger.free(row)

    def fail(
        self, end: End, now: float, plan: StepPlan | None, outcome: StepOutcome | None
    ) -> np.ndarray:
        """The engine has failed. Policy and ledger are lost with it and are not asked. Its requests
        end as `end` unless they were withdrawn before. Returns int64[n]: the rows that ended.

        plan, outcome  of the step under way, which is void
        """
        requests = self.requests
        if self.under_way and plan is not None and outcome is not None:
            self._unshow(outcome.emitted)
            kept = requests.computed_tokens[plan.rows] > 0  # not dropped since by the next plan
            requests.computed_tokens[plan.rows[kept]] -= plan.tokens[kept]
        rows = np.flatnonzero(requests.state != FINISHED)
        open_rows = rows[requests.end[rows] == _NOT_ENDED]
        requests.end[open_rows], requests.ended_s[open_rows] = end, now
        requests.state[rows] = FINISHED
        self.active = self.holding = 0
        self._leaving = []
        return rows

    def check_empty(self) -> None:
        """Check after a run that no ended request holds memory. Raises LedgerError."""
        ledger = self.ledger
        if ledger.free_blocks < ledger.num_blocks:
            ledger.begin_step()  # a layer that moved out gives its room to the next plan
        held, on_host = ledger.num_blocks - ledger.free_blocks, ledger.usage().host_tokens
        if held or on_host:
            raise LedgerError(
                f"all requests have ended, and {held} of {ledger.num_blocks} KV blocks and "
                f"{on_host} tokens on the host are still held (kept rows: {sorted(self.kept)})"
            )

    def _end(self, row: int) -> None:
        self.active -= 1
        self._lands_s.pop(row, None)
        # it may have been preempted while its last token came
        self.holding -= int(self.requests.state[row] == RUNNING)
        self.requests.state[row] = FINISHED

    def _tell_arrivals(self) -> None:
        for arrival in self._arrived:
            if isinstance(arrival, Application):
                self.policy.on_application(arrival)
            elif isinstance(arrival, ApplicationEnd):
                self.policy.on_application_end(arrival.group)
            else:
                self.policy.on_arrival(arrival, self.requests)
        self._arrived.clear()

    def _check_own(self, plan: object, now: float) -> None:
        """Raises PolicyError if a user's own policy returned what cannot be executed."""
        where = f"policy {self.policy.name!r} at {now:.6f} s: "
        if not isinstance(plan, StepPlan):
            raise PolicyError(
                f"{where}plan returned {type(plan).__name__}, not a StepPlan; return the plan that "
                "it made"
            )
        if not (np.asarray(plan.tokens) > 0).all():
            row = plan.rows[np.argmin(plan.tokens)]
            raise PolicyError(
                f"{where}grants request {self.requests[int(row)].id!r} no token; leave it out of "
                "the plan"
            )

    def plan(self, now: float) -> StepPlan:
        """Ask the policy for a plan, and apply what changes at once: which rows lost and got
        memory."""
        requests = self.requests
        if self.unsettled:
            self.settle(now)
        if self._arrived:
            self._tell_arrivals()
        view = SystemView(now, requests, self.ready_s, self._under_way_rows, self.draining)
        plan = self.policy.plan(view, self.ledger)
        if self._own:
            self._check_own(plan, now)
        for row, kind in plan.preempted:
            self.holding -= 1
            if kind is Preemption.RECOMPUTE:
                requests.computed_tokens[row] = 0
                # it still comes, but nothing is built on it
                requests.output_tokens[row] -= requests.in_flight[row]
                requests.in_flight[row] = 0
                requests.state[row] = WAITING
                requests.recomputes[row] += 1
                if self.hands_over and self.under_way:
                    self._void.append(row)
                    self._dropped = True
            else:
                requests.state[row] = SWAPPED
                requests.swaps[row] += 1
        for row, hit_tokens in plan.admitted:
            self.holding += 1
            requests.computed_tokens[row] = hit_tokens
            requests.state[row] = RUNNING
            if np.isnan(requests.first_scheduled_s[row]):
                requests.first_scheduled_s[row] = now
                requests.hit_tokens[row] = hit_tokens
        for row in plan.swapped_in:
            self.holding += 1
            requests.state[row] = RUNNING
        if plan.fetched or plan.begun:
            self._apply_fetches(plan, now)
        for move in plan.moves:
            share = 1.0 if move.layers is None else len(move.layers) / self.ledger.layers
            requests.swapped_tokens[move.row] += move.tokens * share
        return plan

    def _apply_fetches(self, plan: StepPlan, now: float) -> None:
        requests = self.requests
        for row, hit_tokens in plan.fetched:
            self.holding += 1
            requests.computed_tokens[row] = hit_tokens
            if np.isnan(requests.first_scheduled_s[row]):
                requests.hit_tokens[row] = hit_tokens
            requests.remote_tokens[row] = 0
            requests.state[row] = RUNNING
        for row in plan.begun:
            if np.isnan(requests.first_scheduled_s[row]):
                requests.first_scheduled_s[row] = now

    def emitting(self, plan: StepPlan) -> np.ndarray:
        """Return bool[n]: the rows of the plan that catch up with their known text and so emit a
        token."""
        return columns.emitting(self.requests, plan.rows, plan.tokens)

    def begin(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Begin a step whose successor is planned before it ends. Until `complete`, the table shows
        the step as if it had ended at once. For single steps of an asynchronous engine."""
        shown = (plan.rows, plan.tokens, outcome.emitted, outcome.finished, outcome.start_s)
        self._last_token_s = columns.begin(self.requests, *shown)
        self._under_way_rows, self._shown = plan.rows, outcome.emitted
        if self._ends_early:
            self._told = list(outcome.finished)
            for row in outcome.finished:
                self.policy.on_finish(row)

    def _unshow_one(self, row: int) -> None:
        """The same for a row that leaves meanwhile: that token belongs to no request."""
        requests = self.requests
        requests.output_tokens[row] -= requests.in_flight[row]
        requests.in_flight[row] = 0
        if self._last_token_s is not None and (shown := self._shown == row).any():
            requests.last_token_s[row] = self._last_token_s[shown][0]

    def _unshow(self, rows: np.ndarray) -> None:
        """Take back from the emitted `rows` what `begin` showed ahead of time."""
        columns.unshow(self.requests, rows, self._last_token_s)
        self._last_token_s = None

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        """Book an executed plan. Returns float64[e]: for each row that emitted, the gap before its
        first token of this outcome (NaN for a request's very first token)."""
        requests, steps = self.requests, len(outcome.ends_s)
        rows = outcome.emitted
        if self.under_way:
            self._unshow(rows)
            self._told, self._under_way_rows = [], _NO_ROWS
            if self.fenced:
                self._free_fenced()
            if self._dropped:  # their tokens belong to no request
                alive = requests.state != FINISHED
                alive[self._void] = False
                rows = outcome.emitted = rows[alive[rows]]
                outcome.finished = [row for row in outcome.finished if alive[row]]
                self._dropped, self._void = False, []
        else:
            # the plan that follows a run is the run's own, and made in it
            granted = steps + self.asynchronous
            if granted > 1:
                if plan.chunked:
                    self.ledger.extend_chunks(plan.rows, plan.tokens, granted)
                else:
                    self.ledger.extend(plan.rows, granted)
            columns.advance(requests, plan.rows, plan.tokens, steps)
        gaps = self._book(outcome)
        if self._publishes:
            holders = columns.in_state(requests, rows, RUNNING)
            self.ledger.publish(holders, self._text_tokens(holders))
        for row in outcome.finished:
            if self.hands_over:
                self.kept.add(row)
            else:
                self.ledger.free(row)
            if not self._ends_early:
                self.policy.on_finish(row)
            if requests.end[row] in (_NOT_ENDED, _MOVED):
                requests.end[row] = _HANDED_OVER if self.hands_over else _COMPLETED
                requests.ended_s[row] = outcome.ends_s[-1]
            self._end(row)
        self.policy.on_outcome(outcome)
        return gaps

    def _text_tokens(self, rows: np.ndarray) -> np.ndarray:
        """int64[n]: of rows whose tokens came, those whose KV is computed and whose text known."""
        return self.requests.computed_tokens[rows]

    def book_before_failure(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        """Book, in the table alone, the steps of a run that ended before the engine failed. Policy
        and ledger are not asked. Returns as `complete`."""
        self.requests.computed_tokens[plan.rows] += plan.tokens * len(outcome.ends_s)
        return self._book(outcome)

    def _book(self, outcome: StepOutcome) -> np.ndarray:
        if not len(outcome.emitted):  # nothing but chunks of prompts
            return np.zeros(0)
        return columns.book(self.requests, outcome.emitted, outcome.ends_s)
