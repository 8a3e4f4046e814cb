"""How KV goes from the replica that computed a prompt to the one that decodes it: which side begins
the transfer, how long unfetched KV is kept, and what became of each.

Source: vLLM 0.32, `distributed/kv_transfer/kv_connector/v1/nixl`. Pull: the decode replica reads.
Push: it tells the prefill replica which blocks are free for the KV, and that one writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from twinserve.backends.ports import Port, Transfer
from twinserve.sim.fleet.leases import Lease
from twinserve.sim.fleet.local_prefill import LocalPrefill, NoneLocal
from twinserve.sim.fleet.replica import Replica


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
        """When a prefill replica that keeps a prompt since `since_s` sees what it heard at
        `heard_s` (seconds, not before)."""
        if not self.poll_s:
            return heard_s
        looks = math.ceil((heard_s - since_s) / self.poll_s)
        return max(since_s + looks * self.poll_s, heard_s)


@dataclass(frozen=True)
class Connector:
    """lease_s    how long a prefill replica keeps what is not fetched (`kv_lease_duration`)
    recompute  a request whose KV cannot be fetched computes it, and does not fail
               (`kv_load_failure_policy`)
    rule       which prompts are computed where they are decoded
    push       None: the decode replica reads
    """

    lease_s: float = 30.0
    recompute: bool = False
    rule: LocalPrefill = field(default_factory=NoneLocal)
    push: Push | None = None

    @property
    def heartbeat_s(self) -> float:
        """How often a decode replica asks to keep what it will fetch."""
        return self.lease_s / 6

    @property
    def extension_s(self) -> float:
        """How long that is kept from then on, at least."""
        return self.lease_s * 2 / 3

    def described(self) -> dict[str, object]:
        """For run.json."""
        push = self.push
        pushed = {"push_poll_s": push.poll_s, "push_timeout_s": push.timeout_s} if push else {}
        return {
            "transfer": "push" if push else "pull",
            "lease_s": self.lease_s,
            "load_failures": "recompute" if self.recompute else "fail",
            **pushed,
        }


class Stage(Enum):
    """How far a decode replica is with the KV that a prefill replica keeps."""

    AWAITED = auto()  # it has the request, and no room yet; its heartbeats renew the lease
    ANNOUNCED = auto()  # push alone: it has told where the KV goes, and nothing is written yet
    COMING = auto()  # the transfer is queued, or under way


class Gone(Enum):
    """Why the KV will not be used."""

    LEFT = auto()  # the request left the decode replica: its client did, or it goes on elsewhere
    DIED = auto()  # the decode replica


class Freed(Enum):
    """When the prefill replica's memory is free. If its lease is over before, it is free then."""

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
