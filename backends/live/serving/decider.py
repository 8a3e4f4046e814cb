"""Our side of a vLLM engine that owns its loop: request table, policy and ledger, kept in step with
what vLLM does.

Nothing here needs vLLM. Requests go by vLLM's ids; times are seconds on one clock that the caller
keeps.
"""

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from twinserve.backends.live.engine.planned import EngineRequests, PlannedStep
from twinserve.backends.live.serving.applications import IDLE_S, Applications, RequestRules
from twinserve.backends.live.serving.attributes import RequestAttributes
from twinserve.backends.live.serving.clients import ALL_TRUSTED, Clients
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.requests import End, State
from twinserve.sim.engine.core import EngineCore

# names kept beyond what the pool can hold, before those without a block are dropped
_SPARE = 65_536


class TextNames:
    """For a ledger with prefix caching; for others every method does nothing.

    vLLM hashes a block when its last token is known, also of answers, so a later prompt that quotes
    an answer finds it. The ledger gives answers names of its own; here they get the hash's name
    before a plan can fill the block.
    """

    def __init__(self, ledger: KvLedger) -> None:
        self._ledger = ledger
        self.named = ledger.prefix_caching  # whether names are asked for
        self._id_of: dict[Hashable, int] = {}
        self._named: dict[int, int] = {}  # row -> blocks of it that have their name
        self._most = 4 * ledger.num_blocks + _SPARE

    def contents(self, hashes: Sequence[Hashable]) -> np.ndarray | None:
        """int64[n]: content ids of these blocks; None without prefix caching."""
        if not self.named:
            return None
        ids, known = np.empty(len(hashes), np.int64), self._id_of
        for i, text in enumerate(hashes):
            name = known.get(text)
            if name is None:
                name = known[text] = self._ledger.pool.new_contents(1)
            ids[i] = name
        return ids

    def begin(self, row: int, blocks: int) -> None:
        """A row was submitted with the names of its first `blocks` blocks."""
        if self.named:
            self._named[row] = blocks
            if len(self._id_of) > self._most:
                self._drop_unused()

    def extend(self, row: int, hashes: Sequence[Hashable]) -> None:
        """The text of `row` is known up to these blocks."""
        named = self._named.get(row, 0) if self.named else len(hashes)
        if len(hashes) <= named:
            return
        fresh = self.contents(hashes[named:])
        entry = self._ledger._tables.get(row)
        if entry is None:  # dropped: it may look for these blocks when it comes again
            self._ledger._contents[row] = np.concatenate(
                [self._ledger._contents_of(row)[:named], fresh]
            )
        else:
            entry.contents = np.concatenate([entry.contents[:named], fresh])
        self._named[row] = len(hashes)

    def end(self, row: int) -> None:
        """The row ended: the names of its blocks are not asked for any more."""
        self._named.pop(row, None)
        self._ledger.table.prefix[row] = None

    def disown(self, hashes: Sequence[Hashable]) -> None:
        """Give texts other names, if the ledger may have uncomputed blocks of them."""
        for text in hashes:
            self._id_of.pop(text, None)

    def forget_all(self) -> None:
        """The engine emptied its prefix cache: what the ledger still has is never found again."""
        self._id_of.clear()

    def _drop_unused(self) -> None:
        """Forget texts that no block holds and no unfinished request consists of."""
        used = set()
        for row in self._named:
            used.update(self._ledger._contents_of(row).tolist())
            if row in self._ledger._tables:
                used.update(self._ledger._tables[row].contents.tolist())
        held = self._ledger.pool.content
        used.update(held[held >= 0].tolist())
        self._id_of = {text: name for text, name in self._id_of.items() if name in used}
        self._most = max(self._most, 2 * len(self._id_of))


_RUNNING = int(State.RUNNING)
_KEPT_IN_RESTART = "arrival_s service_class priority slo_ttft_s slo_tpot_s group stage".split()


class EngineState(NamedTuple):
    """A request as vLLM has it after a step: tokens computed (not counting steps still in flight)
    and known, hashes of its full KV blocks."""

    computed: int
    known: int
    hashes: Sequence[Hashable]


@dataclass(slots=True)
class Predictions:
    """How far off predicted outputs were, of the requests that got their last token.

    missed_tokens  sum of the distances between predicted and real output
    """

    requests: int = 0
    output_tokens: int = 0
    missed_tokens: int = 0


@dataclass(slots=True)
class _Step:
    """expected: what it will give, once the table shows it (asynchronous scheduling)."""

    plan: StepPlan
    start_s: float
    expected: StepOutcome | None = None


class Decider:
    """`submit`, then for every step `plan` and `complete`; `abort` at any time. With asynchronous
    scheduling a step is planned before the one before it is completed.

    rows   vLLM's id -> row, of unfinished requests
    decision_seconds  of the last `plan`
    restarts  requests that vLLM did not treat as planned, and that the policy got anew
    predictions  of the policy's predictor, if any
    """

    def __init__(
        self,
        core: EngineCore,
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
        app_idle_s: float = IDLE_S,
        clients: Clients = ALL_TRUSTED,
    ) -> None:
        self.core = core
        self.texts = TextNames(core.ledger)
        self.rows: dict[str, int] = {}
        self.decision_seconds = 0.0
        self.restarts = 0
        self.predictions = Predictions()
        self._expected: dict[str, tuple[float, int]] = {}  # vLLM's id -> output, prompt tokens
        self._slo = {"slo_ttft_s": slo_ttft_s, "slo_tpot_s": slo_tpot_s}
        self._clients = clients
        self.applications = Applications(core, app_idle_s)
        self._rules = RequestRules.of(type(core.policy), core.policy.options)
        self._on_engine = EngineRequests(core.requests.ids)
        self._most_tokens: dict[int, int] = {}  # row -> prompt and output, at most
        self._steps: deque[_Step] = deque()  # planned and not completed, the oldest first

    def waiting(self) -> dict[str, int]:
        """Requests without memory, by class."""
        rows = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        table = self.core.requests
        best_effort = table.service_class[rows[table.state[rows] != State.RUNNING]] == 1
        be = int(np.count_nonzero(best_effort))
        return {"rt": len(best_effort) - be, "be": be}

    def refusal(self, attributes: RequestAttributes) -> str:
        """Why such a request cannot be served now, in one line; empty if it can."""
        fault = self._clients.refusal(attributes.client)
        if fault:
            return fault
        believed, client = self._clients.believed(attributes), self._clients.of(attributes.client)
        return self._rules.refusal(believed) or self.applications.contradiction(believed, client)

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        attributes: RequestAttributes,
        arrival_s: float,
        priority: int = 0,
        hashes: Sequence[Hashable] = (),
        most_tokens: int = 2**62,
    ) -> None:
        """A request arrived. most_tokens: prompt and output together, at most. hashes: of the full
        KV blocks of its text, chained, so that equal hashes mean equal text up to the block's end;
        none if prefixes are not cached. priority: used if the attributes name none. Priorities
        count only as far as the client is believed."""
        client = self._clients.of(attributes.client)
        attributes = self._clients.believed(attributes, priority)
        values = {name: getattr(attributes, name) for name in ("slo_ttft_s", "slo_tpot_s")}
        if not attributes.service_class:
            values = {
                n: self._slo[n] if np.isnan(v) and self._slo[n] is not None else v
                for n, v in values.items()
            }
        group, text = self.applications.join(attributes, client, arrival_s)
        self._submit(
            request_id,
            hashes,
            most_tokens,
            prompt_tokens=prompt_tokens,
            arrival_s=arrival_s,
            service_class=int(attributes.service_class),
            priority=attributes.priority,
            group=group,
            stage=attributes.stage,
            text=text,
            **values,
        )
        predictor, requests = self.core.policy.predictor, self.core.requests
        if predictor is not None:
            row = self.rows[request_id]
            expected = predictor.expected_output(row, requests, attributes.app_class)
            if expected is not None:
                self._expected[request_id] = expected, prompt_tokens

    def _submit(
        self, request_id: str, hashes: Sequence[Hashable], most_tokens: int, **values
    ) -> None:
        row = self.core.submit(request_id, prefix=self.texts.contents(hashes), **values)
        self.texts.begin(row, len(hashes))
        self.rows[request_id] = row
        self._most_tokens[row] = most_tokens

    def plan(self, now: float) -> PlannedStep:
        """Ask the policy; the answer under vLLM's ids. An empty plan has no `complete`."""
        started = time.perf_counter()
        plan = self.core.plan(now)
        self.decision_seconds = time.perf_counter() - started
        # some may have been aborted while their last step still runs (asynchronous scheduling)
        ids = self.core.requests.ids
        gone = [row for row in plan.rows.tolist() if self.rows.get(ids[row]) != row]
        named = self._on_engine.of_plan(plan, gone)
        if named.grants:
            self._steps.append(_Step(plan, now))
            if self.core.asynchronous and len(self._steps) == 1:
                self._begin()
        return named

    def _begin(self) -> None:
        """Asynchronous scheduling: the table shows the oldest step as if it had ended, for the next
        plan. Its rows that are no more, since the plan was made, are out of it."""
        step, core = self._steps[0], self.core
        requests = core.requests
        alive = requests.state[step.plan.rows] != int(State.FINISHED)
        plan = step.plan = replace(
            step.plan, rows=step.plan.rows[alive], tokens=step.plan.tokens[alive]
        )
        emitted = plan.rows[core.emitting(plan)]
        last = [
            row
            for row in emitted.tolist()
            if requests.known_tokens(row) + 1 >= self._most_tokens[row]
        ]
        step.expected = StepOutcome(step.start_s, np.array([step.start_s]), emitted, last)
        core.begin(plan, step.expected)

    def complete(
        self, now: float, emitted: set[str], ended: set[str], states: dict[str, EngineState]
    ) -> str:
        """The oldest planned step was executed. emitted: ids that got a token; ended: ids that got
        their last one. states: of every other request of the step; a request in another state than
        planned goes to the policy anew. Returns one line about the first of those, or nothing."""
        step = self._steps.popleft()
        ids, requests, rows = self.core.requests.ids, self.core.requests, step.plan.rows
        if self.texts.named:
            for name, state in states.items():
                self.texts.extend(self.rows[name], state.hashes)
        over = [
            row for row in rows.tolist() if ids[row] in ended and self.rows.get(ids[row]) == row
        ]
        got, last = rows[[ids[row] in emitted for row in rows.tolist()]], over
        if step.expected is not None:
            got, last = step.expected.emitted, step.expected.finished
        end = max(now, np.nextafter(step.start_s, np.inf))
        outcome = StepOutcome(step.start_s, np.array([end]), got, last)
        self.core.complete(step.plan, outcome)
        for row in over:
            self.core.withdraw(row, End.COMPLETED, end)  # nothing where that was expected
        for row in outcome.finished:
            self._forget(row, True, end)
        self._settle(end)
        found = ""
        left = np.array([self.rows[name] for name in states], np.int64)
        on_paper = zip(
            requests.computed_tokens[left].tolist(),
            requests.known_tokens(left).tolist(),
            strict=True,
        )
        for (name, state), (computed, known) in zip(states.items(), on_paper, strict=True):
            if state.computed != computed or state.known != known:
                planned, real = f"{computed} of {known}", f"{state.computed} of {state.known}"
                found = (
                    found
                    or f"{name}: {planned} tokens are computed by the plan, {real} in the engine"
                )
                self.restart(name, state.known, state.hashes, end)
        if self._steps:
            self._steps[0].start_s = end  # it was planned when the step before it began
            self._begin()
        return found

    def _settle(self, now: float) -> None:
        """End the withdrawn requests."""
        for row, _ in self.core.settle(now):
            end = self.core.requests.end[row]
            if end == End.MOVED:
                self._drop(row)
            else:
                self._forget(row, end == End.COMPLETED, now)

    def _forget(self, row: int, finished: bool, now: float) -> None:
        """The request has ended; finished: it got its last token."""
        requests = self.core.requests
        name = requests.ids[row]
        if self.rows.get(name) == row:
            self._on_engine.forget(name)
            expected, prompt = self._expected.pop(name, (None, 0))
            if finished and expected is not None:
                # of a request that the policy got anew, its first tokens are part of the prompt
                output = int(requests.known_tokens(row)) - prompt
                self.predictions.requests += 1
                self.predictions.output_tokens += output
                self.predictions.missed_tokens += round(abs(expected - output))
        self._drop(row)
        self.applications.leave(int(self.core.requests.group[row]), finished, now)

    def _drop(self, row: int) -> None:
        """The row has ended."""
        name = self.core.requests.ids[row]
        if self.rows.get(name) == row:
            del self.rows[name]
        self.texts.end(row)
        self.core.requests.text[row] = None
        del self._most_tokens[row]

    def abort(self, request_id: str, now: float) -> None:
        """The request was cancelled, wherever it was: its client left. If its step is under way,
        and the table does not show that, first comes the step's outcome."""
        row = self.rows.pop(request_id)
        self._expected.pop(request_id, None)
        self._on_engine.forget(request_id)
        self.core.withdraw(row, End.DISCONNECTED, now)
        if not self._steps or self.core.under_way:
            self._settle(now)

    def restart_all(self, states: dict[str, tuple[int, Sequence]], now: float) -> None:
        """The engine forgot all KV, prefixes too. states: id -> (tokens known, hashes)."""
        self.texts.forget_all()
        for name, (known, hashes) in states.items():
            self.restart(name, known, hashes, now)

    def restart(self, name: str, known: int, hashes: Sequence[Hashable], now: float) -> None:
        """Give the request to the policy as a new one whose prompt is all that is known of it:
        `known` tokens. If it holds memory on the engine, the next plan takes that away."""
        self.restarts += 1
        self.texts.disown(hashes)
        old = self.rows[name]
        values = {column: getattr(self.core.requests, column)[old] for column in _KEPT_IN_RESTART}
        most, text = self._most_tokens[old], self.core.requests.text[old]
        self.core.withdraw(old, End.MOVED, now)
        self._settle(now)
        self._submit(name, hashes, most, prompt_tokens=known, text=text, **values)
        self._on_engine.begin_anew(name)

    def check(self) -> None:
        """Raise AssertionError where table, policy and ledger do not add up."""
        core = self.core
        core.ledger.check()
        states = core.requests.state
        active = np.flatnonzero(states != int(State.FINISHED))
        if core.active != len(active) or core.holding != int((states == _RUNNING).sum()):
            raise AssertionError(
                f"{core.active} active, {core.holding} hold memory; the table says {len(active)}"
            )
        if sorted([*self.rows.values(), *self.core.leaving]) != active.tolist():
            raise AssertionError("the engine's requests are not the table's")
        if not core.active and core.ledger.usage().free != core.ledger.num_blocks:
            raise AssertionError("no request is left, but blocks are in use")
