"""Prefill apart from decode on live engines. Each replica of a simulated fleet has a real vLLM
engine, which decides by itself and hands real KV over.

The simulation sets the moments: when a request reaches an engine or leaves it, when a step begins
and ends, when a transfer completes. Each engine decides everything else: admission, preemption,
waiting, computed tokens, release of KV and failed loads. These decisions are compared with the
simulated ones.
"""

import contextlib
import dataclasses
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twinserve.backends.live.apart.decided import Decided, Ended
from twinserve.backends.live.apart.engine import Process
from twinserve.backends.live.apart.host import Part
from twinserve.backends.live.engine.engine import LiveSettings
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.requests import End, State
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation

MOST_ENGINES = 8


@dataclass(frozen=True, slots=True)
class Event:
    """at_s: simulated. what: submit (value: `Submitted`), leave, plan (value: `Decided`), end
    (value: ids that ended, in order), land (value: whether whole), free (what was kept)."""

    at_s: float
    replica: int
    what: str
    request: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """prefix: content ids of full blocks, or None. remote: its KV is elsewhere."""

    prompt_tokens: int
    output_tokens: int
    prefix: np.ndarray | None
    remote: bool


class Recorded(Simulation):
    """A simulation that records `events` for an engine of each replica. Steps are executed one by
    one, which changes no row. Raises SettingsError for what live engines here cannot do."""

    def __init__(self, inputs: Inputs, **more) -> None:
        _check(inputs)
        self.events: list[Event] = []
        super().__init__(inputs, inputs.policies[0], **more)
        if (count := len(self.fleet.replicas)) > MOST_ENGINES:
            raise SettingsError(
                f"--fleet: {count} replicas; at most {MOST_ENGINES} live engines run here"
            )

    def add(self, description, warm_up_s: float = 0.0) -> Replica:
        replica = super().add(description, warm_up_s)
        self._watch(replica)
        return replica

    def _watch(self, replica: Replica) -> None:
        engine, core = replica.engine, replica.engine.core
        table = core.requests
        submit, settle, plan, complete = engine.submit, core.settle, core.plan, core.complete
        landed, release = engine.landed, engine.release

        def note(what: str, row: int | None = None, value: Any = None) -> None:
            name = "" if row is None else table.ids[row]
            self.events.append(Event(float(self.clock.now), replica.index, what, name, value))

        def note_submit(request_id: str, output_tokens: int, /, **values) -> int:
            row = submit(request_id, output_tokens, **values)
            remote = bool(values.get("remote_tokens"))
            prompt, prefix = int(values["prompt_tokens"]), values.get("prefix")
            note("submit", row, Submitted(prompt, output_tokens, prefix, remote))
            return row

        def note_settle(now: float):
            left = settle(now)
            for row, _ in left:
                if table.end[row] != End.FAILED:  # of a load: its engine knows
                    note("leave", row)
            return left

        def note_plan(now: float):
            loading = set(core.policy.fetching) if core.policy.traits.loads_kv else ()
            made = dataclasses.replace(plan(now), valid_for=0, chunked=False)
            ids = table.ids
            joined = dict(made.admitted)
            joined |= {row: int(table.computed_tokens[row]) for row in made.begun}
            rows = made.rows.tolist()
            decided = Decided(
                {ids[r]: n for r, n in zip(rows, made.tokens.tolist(), strict=True)},
                {ids[r]: joined[r] for r in rows if r in joined},
                tuple(ids[r] for r, _ in made.preempted if r not in loading),
                core.ledger.free_blocks,
            )
            note("plan", value=decided)
            if not made:
                note("end", value=())
            return made

        def note_complete(made, outcome):
            done = complete(made, outcome)
            ended = tuple(
                table.ids[r] for r in made.rows.tolist() if table.state[r] == State.FINISHED
            )
            note("end", value=ended)
            return done

        def note_landed(row: int, whole: bool) -> None:
            note("land", row, whole)
            landed(row, whole)

        def note_release(row: int) -> None:
            note("free", row)
            release(row)

        engine.submit, engine.landed, engine.release = note_submit, note_landed, note_release
        core.settle, core.plan, core.complete = note_settle, note_plan, note_complete


def _check(inputs: Inputs) -> None:
    config = inputs.config
    if inputs.hand_over is None:
        raise SettingsError(
            "--fleet: no pool has the role prefill; give pools with the roles prefill and decode"
        )
    if config.async_scheduling:
        raise SettingsError(
            "asynchronous scheduling: these engines step one at a time; give --no-async-scheduling"
        )
    if inputs.hand_over.connector.push is not None:
        raise SettingsError("connector: transfer: the live connector reads; give pull")
    if inputs.failures is not None or config.changes_replicas is not None:
        raise SettingsError("replicas that fail or come: live engines cannot; drop the option")
    if len(inputs.policies) != 1 or inputs.policies[0].name != "vllm":
        raise SettingsError("policy: these engines decide by vLLM's own scheduler; use vllm")


@dataclass
class ApartLive:
    """What came of it.

    steps      of live engines, by role; differing: of these, decided otherwise than simulated;
               first: how the first one did
    polls      further steps, in which an engine that is idle hears what has landed, as vLLM's loop
               goes round; none may compute anything
    seen       how often what the comparison is for has happened
    tokens     request -> token ids of its answer, of those that completed
    alone      the same of one engine with nothing handed over
    """

    steps: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    first: str = ""
    polls: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    alone: dict[str, list[int]] = field(default_factory=dict)

    @property
    def other_answers(self) -> list[str]:
        """Requests whose answers are not those of one engine."""
        return [name for name, tokens in self.tokens.items() if tokens != self.alone.get(name)]

    @property
    def held(self) -> bool:
        return bool(self.tokens) and not self.differing and not self.other_answers

    def described(self) -> dict:
        """As plain values."""
        return {
            "steps": dict(self.steps),
            "polls": self.polls,
            "differing": self.differing,
            "first": self.first,
            "answers": len(self.tokens),
            "other_answers": self.other_answers,
            "seen": dict(sorted(self.seen.items())),
        }

    def lines(self) -> list[tuple[str, str]]:
        by_role = ", ".join(f"{role} {count:,}" for role, count in self.steps.items())
        others = self.other_answers
        lines = [
            ("steps", f"{sum(self.steps.values()):,} ({by_role})"),
            ("decided otherwise", f"{self.differing:,}" + (f": {self.first}" * bool(self.first))),
            ("answers", f"{len(self.tokens):,}"),
            ("not those of one engine", f"{len(others):,}" + (f": {others[0]}" if others else "")),
        ]
        return lines + [(what, f"{times:,}") for what, times in sorted(self.seen.items())]


class _Live:
    """One engine, and the events it has not received yet."""

    def __init__(self, index: int, role: str, process: Process) -> None:
        self.index, self.role, self.process = index, role, process
        self.untold: list[Event] = []
        self.news = False  # something has landed or may be given up, and no step ended since
        self.stepping = False


def run_apart(
    run: Recorded, settings: LiveSettings, folder: Path, on_kept=None, report=None
) -> ApartLive:
    """Simulate `run` and have live engines do the same.

    settings  of all engines, but for what their replicas say
    folder    that all engines see, best in shared memory
    on_kept   called with (request, what its `kv_transfer_params` are) when KV is handed over,
              before it is fetched
    report    called with (done, events in all) now and then

    Raises LiveEngineError if an engine fails.
    """
    run.run()
    with ExitStack() as engines:
        fleet = _Fleet(run, settings, folder, on_kept, engines)
        try:
            for number, event in enumerate(run.events):
                fleet.happens(event)
                if report is not None and number % 64 == 0:
                    report(number + 1, len(run.events))
        except LiveEngineError as error:
            if not fleet.found.first:
                raise
            raise LiveEngineError(f"{fleet.found.first}; later: {error}") from error
    return fleet.answered_alone(settings)


class _Fleet:
    """engines  closes them"""

    def __init__(
        self, run: Recorded, settings: LiveSettings, folder: Path, on_kept, engines: ExitStack
    ) -> None:
        self.found = ApartLive()
        self.on_kept = on_kept
        replicas = run.fleet.replicas
        connector = run.fleet.connector
        self.longest = max(len(r.prompt) + r.output for r in _asked(run, PromptTexts(2, 1)))
        self.engines = []
        for replica in replicas:
            part = Part(
                f"{replica.role}-{replica.index}",
                "kv_producer" if replica.prefills else "kv_consumer",
                folder,
                connector.lease_s,
                connector.recompute,
            )
            process = Process(_settings_of(replica, settings, self.longest), part)
            engines.callback(process.close)
            self.engines.append(_Live(replica.index, str(replica.role), process))
        (vocab,) = {live.process.wait() for live in self.engines}
        self.block_tokens = replicas[0].engine.core.ledger.block_tokens
        self.texts = PromptTexts(vocab, self.block_tokens, run.inputs.config.seed)
        self.requests = {one.name: one for one in _asked(run, self.texts)}
        self._params: dict[str, dict] = {}
        self._partial: dict[str, list[int]] = {}

    # -- events ------------------------------------------------------------------------------------
    def happens(self, event: Event) -> None:
        live = self.engines[event.replica]
        if event.what in ("submit", "leave"):
            live.untold.append(event)  # an engine hears of it between two steps
        elif event.what == "plan":
            self._begin(live, event)
        elif event.what == "end":
            self._end(live, event)
        elif event.what == "land":
            whole = live.process.land(event.request)
            self.found.seen["loads" if whole else "loads that failed"] += 1
            if whole != event.value:
                self._differs(live, event, f"{event.request} came {'whole' if whole else 'not'}")
            live.news = not live.stepping
        else:
            live.news = live.news or not live.stepping

    def _begin(self, live: _Live, event: Event) -> None:
        if live.news:
            self._poll(live, event)
        for untold in live.untold:
            self._tell(live, untold)
        live.untold.clear()
        decided, live.stepping = live.process.step(event.at_s), True
        self.found.steps[live.role] += 1
        if difference := event.value.differs(decided):
            self._differs(live, event, difference)
        seen = self.found.seen
        seen[f"preempted on {live.role}"] += len(decided.preempted)
        if live.role == "decode":
            seen["prefix hits of loads"] += sum(
                0 < hit < self.requests[name].known - 1 for name, hit in decided.hits.items()
            )

    def _poll(self, live: _Live, event: Event) -> None:
        decided = live.process.step(event.at_s)
        self._take(live, live.process.end(event.at_s), event.at_s)
        self.found.polls += 1
        live.news = False
        if decided.grants:
            self._differs(live, event, f"an idle engine computed {decided.grants}")

    def _tell(self, live: _Live, event: Event) -> None:
        name = event.request
        if event.what == "leave":
            live.process.abort(name)
            self.found.seen[f"left {live.role}"] += 1
            return
        asked, value = self.requests[name], event.value
        params = None
        if live.role == "prefill":
            params = {"do_remote_decode": True}
        elif value.remote:
            params = self._params.get(name)
            if params is None:
                raise LiveEngineError(f"no live engine has handed {name} over")
        live.process.submit(name, asked.prompt, value.output_tokens, event.at_s, params)

    def _end(self, live: _Live, event: Event) -> None:
        ended, live.stepping = live.process.end(event.at_s), False
        live.news = False
        known = tuple(name for name in ended.finished if name in event.value)
        if known != event.value:
            self._differs(live, event, f"ended {event.value} / {ended.finished}")
        self.found.seen["requests that failed"] += len(ended.finished) - len(known)
        self._take(live, ended, event.at_s)

    def _take(self, live: _Live, ended: Ended, at_s: float) -> None:
        for name, params in ended.handed_over.items():
            self._params[name] = params
            self.found.seen["handed over"] += 1
            if self.on_kept is not None:
                self.on_kept(name, params)
        if live.role == "prefill":
            return  # its token is discarded
        for name, tokens in ended.tokens.items():
            self._partial.setdefault(name, []).extend(tokens)
        for name in ended.finished:
            tokens = self._partial.pop(name, [])
            if len(tokens) == self.requests[name].output:
                self.found.tokens[name] = tokens

    def _differs(self, live: _Live, event: Event, how: str) -> None:
        self.found.differing += 1
        if not self.found.first:
            self.found.first = (
                f"{live.process.name} at {event.at_s:.6f} s: {how} (simulated / live)"
            )

    # -- one engine --------------------------------------------------------------------------------
    def answered_alone(self, settings: LiveSettings) -> ApartLive:
        """With what one engine answers, given memory for all."""
        size = self.block_tokens
        blocks = sum(-(-(len(r.prompt) + r.output) // size) for r in self.requests.values()) + 1
        alone = dataclasses.replace(
            settings,
            num_blocks=min(blocks, 4096),
            block_tokens=size,
            max_num_seqs=16,
            max_step_tokens=2048,
            max_model_len=self.longest,
            prefix_caching=False,
        )
        with contextlib.closing(Process(alone)) as process:
            process.wait()
            asked = [self.requests[name] for name in self.found.tokens]
            self.found.alone = process.answers([(r.name, r.prompt, r.output) for r in asked])
        return self.found


@dataclass(frozen=True)
class _Asked:
    name: str
    prompt: list[int]
    output: int

    @property
    def known(self) -> int:
        return len(self.prompt)


def _asked(run: Recorded, texts: PromptTexts) -> list[_Asked]:
    """All requests, each with its prompt and the tokens of its answer."""
    found: dict[str, _Asked] = {}
    for event in run.events:
        if event.what == "submit":
            one, name = event.value, event.request
            prompt = texts.tokens(name, one.prompt_tokens, one.prefix)
            output = max(one.output_tokens, found[name].output if name in found else 0)
            found[name] = _Asked(name, prompt, output)
    return list(found.values())


def _settings_of(replica: Replica, settings: LiveSettings, longest: int) -> LiveSettings:
    core = replica.engine.core
    limits, ledger = core.policy.limits, core.ledger
    return dataclasses.replace(
        settings,
        num_blocks=ledger.num_blocks,
        block_tokens=ledger.block_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_num_batched_tokens,
        max_model_len=longest,
        prefix_caching=ledger.prefix_caching,
    )
