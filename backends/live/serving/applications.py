"""Applications of requests: the policy's facts on them, and which are open. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from twinserve.backends.live.serving.attributes import RequestAttributes
from twinserve.backends.live.serving.clients import Client
from twinserve.policies.base import Options, Policy
from twinserve.policies.justitia.demand import DemandPolicy
from twinserve.policies.parts.predictors import read_training
from twinserve.policies.requests import Application
from twinserve.sim.engine.core import EngineCore
from twinserve.traces.apps.classes import KINDS

IDLE_S = 3600.0  # an application without requests for so long has ended
MOST_IDLE = 1000  # applications of a client that stay open without requests


@dataclass(frozen=True)
class RequestRules:
    """What the server's policy asks of a request.

    best_effort  whether it serves that class
    classes      of applications, which its predictor has learned; None: it has no need of a class
    """

    best_effort: bool = True
    classes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, policy: type[Policy], options: Options) -> RequestRules:
        """Return a policy's rules. Raises PolicyError if its training file cannot be read."""
        classes = None
        if issubclass(policy, DemandPolicy):
            training = options.training
            classes = tuple(sorted(KINDS if training is None else read_training(training)))
        return cls(options.serves_best_effort, classes)

    def refusal(self, attributes: RequestAttributes) -> str:
        """Return why the policy cannot serve a request, in one line, or an empty text."""
        if attributes.service_class and not self.best_effort:
            return "the server's policy runs with best_effort=false; send no vllm_xargs.class 'be'"
        if attributes.app is None or self.classes is None or attributes.app_class in self.classes:
            return ""
        known = ", ".join(self.classes)
        if attributes.app_class is None:
            return (
                "vllm_xargs.app_class is missing: the server's policy predicts what an "
                "application needs by its class; "
                f"name one of {known}, or send no app"
            )
        return (
            f"vllm_xargs.app_class: class {attributes.app_class!r} is unknown; name one of "
            f"{known}, or start the server's policy with training=FILE that has samples of it"
        )


@dataclass(slots=True)
class _Open:
    """client: its owner; text: if the policy reads texts; here: unfinished requests; finished:
    those with their last token; total: announced, if at all; idle_s: when the last one left."""

    group: int
    client: str
    name: str
    kind: str
    text: str | None
    here: int = 0
    finished: int = 0
    total: int | None = None
    idle_s: float = 0.0


class Applications:
    """Those that are open, by client and name: no client can join, end or outlast another one's. An
    application begins with its first request, which has its class and input text; the policy hears
    of it once. It ends when all announced requests have finished and none is here. If nothing is
    announced, the next stage may always come. Then it stays open until it had no request for
    `idle_s` seconds, or until `most_idle` others of its client have been idle for a shorter time. A
    name is free again after the end.

    Requests of a named client that belong to no application belong to the client: it is their owner
    for `vtc` and `kv-share`; for other policies each stands alone.
    """

    def __init__(
        self, core: EngineCore, idle_s: float = IDLE_S, most_idle: int = MOST_IDLE
    ) -> None:
        self._core = core
        self._idle_s, self._most_idle = idle_s, most_idle
        predictor = core.policy.predictor
        self._keeps_texts = predictor is not None and predictor.reads_texts
        self._named: dict[tuple[str, str], _Open] = {}  # by client and name
        self._grouped: dict[int, _Open] = {}
        # those without requests here, by when the last one left: the first has waited longest
        self._idle: dict[int, _Open] = {}
        self._idle_of: dict[str, dict[int, _Open]] = {}  # by client
        self._owners: dict[str, int] = {}  # client -> group of its requests without an application
        self._groups = 0  # numbers given so far

    def __len__(self) -> int:
        return len(self._named)

    @property
    def text_characters(self) -> int:
        """Return the characters of all texts that are kept."""
        return sum(len(known.text or "") for known in self._grouped.values())

    def contradiction(self, attributes: RequestAttributes, client: Client) -> str:
        """Return how the request contradicts its application, in one line, or an empty text."""
        known = self._named.get((client.name, attributes.app or ""))
        if not known or not known.kind or attributes.app_class in (None, known.kind):
            return ""
        return (
            f"vllm_xargs.app_class is {attributes.app_class!r}, but application "
            f"{attributes.app!r} began as {known.kind!r}; "
            "send the same, or choose another name for the application"
        )

    def join(
        self, attributes: RequestAttributes, client: Client, arrival_s: float
    ) -> tuple[int, str | None]:
        """A request arrived, of which this is believed. Returns the number of its application, or
        of its client (-1 for one without a name), and the application's input text or None."""
        self.expire(arrival_s)
        if attributes.app is None:
            return self._owner(client, arrival_s), None
        known = self._named.get((client.name, attributes.app))
        if known is None:
            known = self._begin(attributes, attributes.app, client, arrival_s)
        self._idle.pop(known.group, None)
        self._idle_of.get(client.name, {}).pop(known.group, None)
        known.here += 1
        known.total = attributes.app_requests or known.total
        return known.group, known.text

    def _begin(
        self, attributes: RequestAttributes, name: str, client: Client, arrival_s: float
    ) -> _Open:
        # "": an application of no named class. None would be a session, of which policies think
        # otherwise.
        kind = attributes.app_class or ""
        text = attributes.app_text if self._keeps_texts else None
        known = _Open(self._next_group(), client.name, name, kind, text)
        self._named[client.name, name] = self._grouped[known.group] = known
        self._core.announce(Application(known.group, name, arrival_s, kind, text))
        return known

    def _next_group(self) -> int:
        self._groups += 1
        return self._groups - 1

    def _owner(self, client: Client, arrival_s: float) -> int:
        if not client.named:
            return -1
        group = self._owners.get(client.name)
        if group is None:
            group = self._owners[client.name] = self._next_group()
            self._core.announce(Application(group, client.name, arrival_s))
        return group

    def leave(self, group: int, finished: bool, now: float) -> None:
        """A request of application `group` ended; finished: with its last token."""
        known = self._grouped.get(group)
        if known is None:
            return
        known.here -= 1
        known.finished += finished
        if known.here:
            return
        if known.total is not None and known.finished >= known.total:
            self._end(known)
            return
        known.idle_s = now
        mine = self._idle_of.setdefault(known.client, {})
        self._idle[group] = mine[group] = known
        if len(mine) > self._most_idle:
            self._end(next(iter(mine.values())))
        self.expire(now)

    def expire(self, now: float) -> None:
        """End applications that have had no request for too long."""
        while self._idle:
            longest = next(iter(self._idle.values()))
            if now - longest.idle_s <= self._idle_s:
                return
            self._end(longest)

    def _end(self, known: _Open) -> None:
        self._core.close(known.group)
        del self._grouped[known.group], self._named[known.client, known.name]
        self._idle.pop(known.group, None)
        self._idle_of.get(known.client, {}).pop(known.group, None)
