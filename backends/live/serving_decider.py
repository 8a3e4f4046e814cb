"""Our side of a vLLM engine that owns its loop: request table, policy and ledger, kept in step with what vLLM does.

Nothing here needs vLLM. Requests go by vLLM's ids; times are seconds on one clock that the caller keeps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...policies.plan import Preemption, StepOutcome, StepPlan
from ...policies.requests import State
from ...sim.core import EngineCore
from .planned import PlannedStep
from .serving_applications import Applications, RequestRules
from .serving_attributes import RequestAttributes
from .serving_texts import TextNames
from .serving_withdraw import withdraw

_RUNNING, _SWAPPED = int(State.RUNNING), int(State.SWAPPED)
_KEPT_IN_RESTART = ("arrival_s", "klass", "priority", "slo_ttft_s", "slo_tpot_s", "group", "stage")


@dataclass(frozen=True, slots=True)
class EngineState:
    """A request as vLLM has it after a step: tokens computed (not counting steps still in flight) and known, hashes of
    its full KV blocks."""

    computed: int
    known: int
    hashes: Sequence[Hashable]


@dataclass(slots=True)
class _Step:
    """expected: what it will give, once the table shows it (asynchronous scheduling)."""

    plan: StepPlan
    start_s: float
    expected: StepOutcome | None = None


class Decider:
    """`submit`, then for every step `plan` and `complete`; `abort` at any time. With asynchronous scheduling a step is
    planned before the one before it is completed.

    rows   vLLM's id -> row, of unfinished requests
    decision_seconds  of the last `plan`
    restarts  requests that vLLM did something else with than planned, and that the policy got anew
    """

    def __init__(self, core: EngineCore, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None) -> None:
        self.core = core
        self.texts = TextNames(core.ledger)
        self.rows: dict[str, int] = {}
        self.decision_seconds = 0.0
        self.restarts = 0
        self._slo = {"slo_ttft_s": slo_ttft_s, "slo_tpot_s": slo_tpot_s}
        self.applications = Applications(core)
        self._rules = RequestRules.of(type(core.policy), core.policy.options)
        self._holds: dict[str, int] = {}  # id -> row, of requests that hold memory on the engine
        self._most_tokens: dict[int, int] = {}  # row -> prompt and output, at most
        self._steps: deque[_Step] = deque()  # planned and not completed, the oldest first
        self._gone: list[int] = []  # rows aborted while their step runs

    def refusal(self, attributes: RequestAttributes) -> str:
        """Why such a request cannot be served now, in one line; empty where it can."""
        return self._rules.refusal(attributes) or self.applications.contradiction(attributes)

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
        """A request arrived. most_tokens: prompt and output together, at most. hashes: of the full KV blocks of its
        text, chained, so that equal hash means equal text up to the block's end; none where prefixes are not cached.
        priority: where the attributes name none."""
        values = {name: getattr(attributes, name) for name in ("slo_ttft_s", "slo_tpot_s")}
        if not attributes.klass:
            values = {n: self._slo[n] if np.isnan(v) and self._slo[n] is not None else v for n, v in values.items()}
        group, text = self.applications.join(attributes, arrival_s)
        self._submit(
            request_id,
            hashes,
            most_tokens,
            prompt_tokens=prompt_tokens,
            arrival_s=arrival_s,
            klass=int(attributes.klass),
            priority=priority if attributes.priority is None else attributes.priority,
            group=group,
            stage=attributes.stage,
            text=text,
            **values,
        )

    def _submit(self, request_id: str, hashes: Sequence[Hashable], most_tokens: int, **values) -> None:
        row = self.core.submit(request_id, prefix=self.texts.contents(hashes), **values)
        self.texts.begin(row, len(hashes))
        self.rows[request_id] = row
        self._most_tokens[row] = most_tokens

    def plan(self, now: float) -> PlannedStep:
        """Ask the policy; the answer under vLLM's ids. An empty plan has no `complete`."""
        started = time.perf_counter()
        plan = self.core.plan(now)
        self.decision_seconds = time.perf_counter() - started
        named = self._named(plan)
        if named.grants:
            self._steps.append(_Step(plan, now))
            if self.core.asynchronous and len(self._steps) == 1:
                self._begin()
        return named

    def _named(self, plan: StepPlan) -> PlannedStep:
        requests, ids = self.core.requests, self.core.requests.ids
        preempted = {ids[row]: kind for row, kind in plan.preempted if ids[row] in self._holds}
        for name, row in self._holds.items():  # also those that were restarted
            if name not in preempted and requests.state[row] != _RUNNING:
                swapped = requests.state[row] == _SWAPPED
                preempted[name] = Preemption.SWAP if swapped else Preemption.RECOMPUTE
        admitted = [row for row, _ in plan.admitted]
        preempted |= {ids[row]: Preemption.RECOMPUTE for row in admitted if ids[row] in self._holds}
        preempted |= {ids[row]: Preemption.SWAP for row in plan.swapped_in if ids[row] in self._holds}
        for name in preempted:
            del self._holds[name]
        # Some may have been aborted while their last step still runs (asynchronous scheduling).
        grants = {name: tokens for name, tokens in plan.named(ids).items() if name in self.rows}
        self._holds |= {name: self.rows[name] for name in grants}
        hits = {ids[row]: hit for row, hit in plan.admitted}
        return PlannedStep(grants, hits, tuple(preempted.items()), tuple(ids[row] for row in plan.swapped_in))

    def _begin(self) -> None:
        """Asynchronous scheduling: the table shows the oldest step as if it had ended, for the next plan. Its rows that
        are no more, since the plan was made, are out of it."""
        step, core = self._steps[0], self.core
        requests = core.requests
        alive = requests.state[step.plan.rows] != int(State.FINISHED)
        plan = step.plan = replace(step.plan, rows=step.plan.rows[alive], tokens=step.plan.tokens[alive])
        emitted = plan.rows[core.emitting(plan)]
        last = [row for row in emitted.tolist() if requests.known_tokens(row) + 1 >= self._most_tokens[row]]
        step.expected = StepOutcome(step.start_s, np.array([step.start_s]), emitted, last)
        core.begin(plan, step.expected)

    def complete(self, now: float, emitted: set[str], ended: set[str], states: dict[str, EngineState]) -> str:
        """The oldest planned step was executed. emitted: ids that got a token; ended: ids that got their last one.
        states: of every other request of the step; where they are not what the plan leads to, the policy gets the
        request anew. Returns one line about the first of those, or nothing."""
        step = self._steps.popleft()
        ids, requests, rows = self.core.requests.ids, self.core.requests, step.plan.rows
        for name, state in states.items():
            self.texts.extend(self.rows[name], state.hashes)
        over = [row for row in rows.tolist() if ids[row] in ended and row not in self._gone]
        if step.expected is None:
            got, last = rows[[ids[row] in emitted for row in rows.tolist()]], over
        else:
            got, last = step.expected.emitted, step.expected.finished
        end = max(now, np.nextafter(step.start_s, np.inf))
        self.core.complete(step.plan, StepOutcome(step.start_s, np.array([end]), got, last))
        for row in sorted({*over, *last, *self._gone}):
            self._end(row, finished=row not in self._gone)
        self._gone.clear()
        found = ""
        for name, state in states.items():
            row = self.rows[name]
            computed, known = int(requests.computed_tokens[row]), int(requests.known_tokens(row))
            if (state.computed, state.known) != (computed, known):
                planned, real = f"{computed} of {known}", f"{state.computed} of {state.known}"
                found = found or f"{name}: {planned} tokens are computed by the plan, {real} in the engine"
                self._restart(name, state.known, state.hashes)
        if self._steps:
            self._begin()
        return found

    def _end(self, row: int, finished: bool) -> None:
        """The request is no more; finished: it got its last token."""
        self._drop(row)
        self.applications.leave(int(self.core.requests.group[row]), finished)

    def _drop(self, row: int) -> None:
        """The row is no more. The core knows of those whose last token was expected."""
        if self.core.requests.state[row] != int(State.FINISHED):
            withdraw(self.core, row)
        name = self.core.requests.ids[row]
        if self.rows.get(name) == row:
            del self.rows[name]
            self._holds.pop(name, None)
        self.texts.end(row)
        self.core.requests.text[row] = None
        del self._most_tokens[row]

    def abort(self, request_id: str) -> None:
        """The request is no more, wherever it was."""
        row = self.rows.pop(request_id)
        self._holds.pop(request_id, None)
        if self._steps and row in self._steps[0].plan.rows:
            if self._steps[0].expected is None:
                self._gone.append(row)  # first the step's outcome
                return
            self._leave(self._steps[0], row)
        self._end(row, finished=False)

    def _leave(self, step: _Step, row: int) -> None:
        """Take `row` out of a step that the table shows ahead of time: vLLM drops its token and frees its memory."""
        outcome = step.expected
        stay = outcome.emitted != row
        # What the core remembers is in order of the emitted rows.
        self.core._last_token_s = self.core._last_token_s[stay]
        last = [other for other in outcome.finished if other != row]
        step.expected = replace(outcome, emitted=outcome.emitted[stay], finished=last)
        others = step.plan.rows != row
        step.plan = replace(step.plan, rows=step.plan.rows[others], tokens=step.plan.tokens[others])

    def restart_all(self, states: dict[str, tuple[int, Sequence]]) -> None:
        """The engine forgot all KV, prefixes too. states: id -> (tokens known, hashes)."""
        self.texts.forget_all()
        for name, (known, hashes) in states.items():
            self._restart(name, known, hashes)

    def _restart(self, name: str, known: int, hashes: Sequence[Hashable]) -> None:
        """Give the request to the policy as a new one whose prompt is all that is known of it. If it holds memory on
        the engine, the next plan takes that away."""
        self.restarts += 1
        self.texts.disown(hashes)
        old = self.rows[name]
        values = {column: getattr(self.core.requests, column)[old] for column in _KEPT_IN_RESTART}
        most, held, text = self._most_tokens[old], name in self._holds, self.core.requests.text[old]
        self._drop(old)
        self._submit(name, hashes, most, prompt_tokens=known, text=text, **values)
        if held:
            self._holds[name] = self.rows[name]

    def check(self) -> None:
        """Raise AssertionError where table, policy and ledger do not add up."""
        core = self.core
        core.ledger.check()
        states = core.requests.state
        active = np.flatnonzero(states != int(State.FINISHED))
        if core.active != len(active) or core.holding != int((states == _RUNNING).sum()):
            raise AssertionError(f"{core.active} active, {core.holding} hold memory; the table says {len(active)}")
        if sorted([*self.rows.values(), *self._gone]) != active.tolist():
            raise AssertionError("the engine's requests are not the table's")
        if not core.active and core.ledger.usage().free != core.ledger.num_blocks:
            raise AssertionError("no request is left, but blocks are in use")
