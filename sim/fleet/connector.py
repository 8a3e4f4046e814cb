"""How KV goes from the replica that computed a prompt to the one that decodes it: who begins the
transfer, how long what nobody fetches is kept, and what became of each.

Source: vLLM 0.32, `distributed/kv_transfer/kv_connector/v1/nixl`. Pull: the decode replica reads.
Push: it tells the prefill replica which blocks are free for the KV, and that one writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from twinserve.backends.ports import Port, Transfer
from twinserve.sim.fleet.leases import Lease
from twinserve.sim.fleet.local_prefill import LocalPrefill, NoneLocal
from twinserve.sim.fleet.replica import Replica


@dataclass(frozen=True)
class Push:
    """The prefill replica writes (`NixlPushConnector`).

    poll_s     how often it looks whether somebody has asked, while it keeps what nobody has asked
               for (`_PUSH_WRITER_POLL_INTERVAL_MS`); 0: it knows at once
    timeout_s  how long the decode replica waits for a write that never comes
               (`push_registration_timeout`): who keeps the KV no more does not say so
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
    """lease_s    how long a prefill replica keeps what nobody fetches (`kv_lease_duration`)
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


def path(load: Load) -> tuple[Port, Port]:
    source, target = load.kept.replica.network, load.replica.network
    assert source is not None and target is not None  # `Disaggregated._check`
    return source.out, target.into
