"""How KV goes from a prompt's replica to its decode replica: the side that begins the transfer,
leases of unfetched KV and their ends. Some prompts are computed on their decode replica.

Source: vLLM 0.32, `distributed/kv_transfer/kv_connector/v1/nixl`. Pull: the decode replica reads.
Push: it names its free blocks to the prefill replica, which writes. Leases are those of
`nixl/base_scheduler.py` and `base_worker.py` (`_handle_heartbeat`, `_reap_expired_send_leases`).
An engine sends one heartbeat for all that it waits for (`build_connector_meta`).
There are two differences. vLLM sends and looks once a step, and its first heartbeat to a new engine
only shakes hands.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Generic, TypeVar

from pydantic import Field

from twinserve.backends.ports import Port, Transfer
from twinserve.policies.base import NoOptions, Options
from twinserve.policies.names import built
from twinserve.sim.fleet.replica import Replica

# -- which prompts are computed where they are decoded ---------------------------------------------
RuleOptions = TypeVar("RuleOptions", bound=Options)


class LocalPrefill(ABC, Generic[RuleOptions]):
    """asks     it wants to know the decode replica, and so what of the prompt is cached there
    reserves    the request goes to that replica when its prompt has been computed; else one is
                chosen then
    """

    name: ClassVar[str]
    Options: type[RuleOptions] = NoOptions  # type: ignore[assignment]  # as of a Policy
    asks: ClassVar[bool] = True
    reserves: ClassVar[bool] = False

    def __init__(self, options: RuleOptions | None = None) -> None:
        self.options: RuleOptions = options or self.Options()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.options == self.options

    @abstractmethod
    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        """cached_tokens  of the prompt, at the decode replica
        least_in_flight   requests of the prefill replica that has the fewest
        """


class NoneLocal(LocalPrefill[NoOptions]):
    """Compute every prompt apart. The decode replica is chosen afterwards, as in vLLM's proxy for
    disaggregated prefill."""

    name = "none"
    asks = False

    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        return False


class LlmDOptions(Options):
    """threshold  tokens: a prompt with at least so many that are not cached is computed apart"""

    threshold: int = Field(0, ge=0)


class LlmD(LocalPrefill[LlmDOptions]):
    """Decide by prefixes, as llm-d does (llm-d-inference-scheduler, `pd-profile-handler`): the
    decode replica is chosen first and stays with the request."""

    name = "llm-d"
    Options = LlmDOptions
    reserves = True

    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        return prompt_tokens - cached_tokens < self.options.threshold


class DynamoOptions(Options):
    """tokens, share  a prompt is computed on its decode replica if fewer tokens are not cached than
                      both of these, the second of the whole prompt
    busy              and also if every prefill replica has so many requests; None: never for that
    """

    tokens: int = Field(2048, ge=0)
    share: float = Field(0.7, ge=0, le=1)
    busy: int | None = Field(None, ge=1)


class Dynamo(LocalPrefill[DynamoOptions]):
    """Dynamo's conditional disaggregation: look at a decode replica to decide, and choose one anew
    when the prompt has been computed."""

    name = "dynamo"
    Options = DynamoOptions

    def local(self, prompt_tokens: int, cached_tokens: int, least_in_flight: int) -> bool:
        options, new = self.options, prompt_tokens - cached_tokens
        short = new < options.tokens and new < options.share * prompt_tokens
        return short or (options.busy is not None and least_in_flight >= options.busy)


RULES: dict[str, type[LocalPrefill]] = {rule.name: rule for rule in (NoneLocal, LlmD, Dynamo)}


def parse_rule(text: str) -> LocalPrefill:
    """Read `dynamo`, or `llm-d:threshold=512`. Raises RegistryError."""
    return built("rule {} for local prefill", "local prefill", RULES, text)


# -- the transfer ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Push:
    """The prefill replica writes (`NixlPushConnector`).

    poll_s     how often it looks for requests, while it keeps KV that was not asked
               for (`_PUSH_WRITER_POLL_INTERVAL_MS`); 0: it knows at once
    timeout_s  how long the decode replica waits for a write that never comes
               (`push_registration_timeout`): a side that drops the KV does not say so
    """

    poll_s: float = 1e-3
    timeout_s: float = 480.0

    def seen_s(self, since_s: float, heard_s: float) -> float:
        """Return when a prefill replica notices a message that came at `heard_s`. It keeps the
        prompt since `since_s` (seconds, not later)."""
        if not self.poll_s:
            return heard_s
        looks = math.ceil((heard_s - since_s) / self.poll_s)
        return max(since_s + looks * self.poll_s, heard_s)


@dataclass(frozen=True)
class Connector:
    """lease_s    seconds for which a prefill replica keeps unfetched KV (`kv_lease_duration`)
    recompute  a request whose KV cannot be fetched computes it, and does not fail
               (`kv_load_failure_policy`)
    rule       which prompts are computed on their decode replica
    push       None: the decode replica reads"""

    lease_s: float = 30.0
    recompute: bool = False
    rule: LocalPrefill = field(default_factory=NoneLocal)
    push: Push | None = None

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a decode replica that waits for KV."""
        return self.lease_s / 6

    @property
    def extension_s(self) -> float:
        """Least seconds by which a heartbeat extends a lease."""
        return self.lease_s * 2 / 3

    def described(self) -> dict[str, object]:
        """Return the content for run.json."""
        push = self.push
        pushed = {"push_poll_s": push.poll_s, "push_timeout_s": push.timeout_s} if push else {}
        return {
            "transfer": "push" if push else "pull",
            "lease_s": self.lease_s,
            "load_failures": "recompute" if self.recompute else "fail",
            **pushed,
        }


class Stage(Enum):
    """How far a decode replica has got with the KV that a prefill replica keeps."""

    AWAITED = auto()  # it has the request, and no room yet; its heartbeats renew the lease
    ANNOUNCED = auto()  # push alone: it has told where the KV goes, and nothing is written yet
    COMING = auto()  # the transfer is queued, or under way


class Gone(Enum):
    """Why the KV will not be used."""

    LEFT = auto()  # the request left the decode replica: its client did, or it goes on elsewhere
    DIED = auto()  # the decode replica


class Freed(Enum):
    """When the prefill replica's memory is free, at the latest when its lease ends."""

    AT_ONCE = auto()  # the decode replica says that it will not fetch
    LANDED = auto()  # when the transfer is over
    LEASE = auto()  # no word comes, and the lease is not renewed


# Which side frees what the prefill replica keeps: by pull, by push. The decode replica's own
# memory of the request, in the comments, is free at its next step boundary, when the KV has landed
# or is waited for no more (`EngineCore.fetched`), or is gone.
#
# Not in the table:
#   no decode replica has the request  no side renews the lease, and it runs out, whether the client
#                                      waits or not
#   the KV has landed                  there is nothing to free
#   the lease is over                  likewise; a read fails at once, a write is waited for
#   the prefill replica dies           likewise
#
# vLLM 0.32: `request_finished` in pull_scheduler.py and push_scheduler.py ends the heartbeats and
# asks for an empty read, which the worker of a push ignores (`start_load_kv`);
# `get_transfer_results` in push_worker.py frees after writes that succeed;
# `Scheduler.finish_requests` keeps the blocks of a request that waits for remote KV.
FREED: Mapping[tuple[Gone, Stage], tuple[Freed, Freed]] = {
    (Gone.LEFT, Stage.AWAITED): (Freed.AT_ONCE, Freed.LEASE),  # has none
    (Gone.LEFT, Stage.ANNOUNCED): (Freed.LANDED, Freed.LANDED),  # landed, or waited for no more
    (Gone.LEFT, Stage.COMING): (Freed.LANDED, Freed.LANDED),  # landed
    (Gone.DIED, Stage.AWAITED): (Freed.LEASE, Freed.LEASE),  # gone
    (Gone.DIED, Stage.ANNOUNCED): (Freed.LEASE, Freed.LEASE),  # gone
    (Gone.DIED, Stage.COMING): (Freed.LEASE, Freed.LEASE),  # gone
}


@dataclass(slots=True, eq=False)
class Kept:
    """The KV of a prompt, on the replica that computed it.

    lease       while it is not fetched
    since_s     when the prompt ended
    released_s  when its memory was given back; NaN: it has not been, or was lost
    expired     by the lease
    """

    replica: Replica
    row: int
    lease: Lease
    since_s: float
    released_s: float = math.nan
    expired: bool = False
    lost: bool = False  # its replica failed

    @property
    def there(self) -> bool:
        return math.isnan(self.released_s) and not self.lost


@dataclass(slots=True, eq=False)
class Load:
    """A prompt's KV on its way to a decode replica. begin_s: when that had room and asked for it.
    tokens: of whole blocks. end_s: when it had come, or was known to have failed; NaN: neither."""

    kept: Kept
    replica: Replica
    row: int
    begin_s: float
    tokens: int
    end_s: float = math.nan
    whole: bool = False
    transfer: Transfer | None = None

    @property
    def stage(self) -> Stage:
        return Stage.ANNOUNCED if self.transfer is None else Stage.COMING


def path(load: Load) -> tuple[Port, Port]:
    source, target = load.kept.replica.network, load.replica.network
    assert source is not None and target is not None  # `Disaggregated._check`
    return source.out, target.into


# -- how long a prefill replica keeps KV that was not fetched --------------------------------------
@dataclass(slots=True)
class Heartbeats:
    """Heartbeats of a decode replica: one for all KV that it waits for, every `every_s` seconds,
    the first at once."""

    every_s: float
    _waits_for: int = 0
    _last_s: float = -math.inf

    def begin(self, now: float) -> None:
        """The replica waits for the KV of one more prompt."""
        self._go_on(now)
        if not self._waits_for and now - self._last_s >= self.every_s:
            self._last_s = now
        self._waits_for += 1

    def end(self, now: float) -> None:
        """The replica waits for one prompt less, and sends no further heartbeat for it."""
        self._go_on(now, but_now=True)
        self._waits_for -= 1

    def last_s(self, now: float, but_now: bool = False) -> float:
        """Return when the latest heartbeat was sent (`now` included or not), or minus infinity."""
        self._go_on(now, but_now)
        return self._last_s

    def _go_on(self, now: float, but_now: bool = False) -> None:
        if self._waits_for:
            since = (now - self._last_s) / self.every_s
            beats = math.ceil(since) - 1 if but_now else math.floor(since)
            self._last_s += self.every_s * max(beats, 0)


@dataclass(slots=True)
class Lease:
    """expires_s    unless a heartbeat comes; as of the time when its last one was counted
    extension_s  for so long a heartbeat renews it, at least
    """

    expires_s: float
    extension_s: float
    _beats: Heartbeats | None = None  # of the requests that wait for it
    _since_s: float = math.nan

    @property
    def tracked(self) -> bool:
        return self._beats is not None

    def renewed_by(self, beats: Heartbeats) -> bool:
        return self._beats is beats

    def track(self, beats: Heartbeats, now: float) -> None:
        """A decode replica waits for the KV from now on."""
        beats.begin(now)
        self._beats, self._since_s = beats, now

    def let_go(self, now: float) -> None:
        """The decode replica no longer waits for the KV."""
        if self._beats is not None:
            self.renew(now, but_now=True)
            self._beats.end(now)
            self._beats = None

    def renew(self, now: float, but_now: bool = False) -> float:
        """Return when the lease ends (seconds), given the heartbeats so far. A heartbeat of this
        instant counts or not, as asked."""
        if self._beats is not None:
            last_s = self._beats.last_s(now, but_now)
            if last_s >= self._since_s:
                self.expires_s = max(self.expires_s, last_s + self.extension_s)
        return self.expires_s
