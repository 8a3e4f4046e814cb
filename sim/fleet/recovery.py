"""Decides what happens to requests of a failed replica, and records what each failure cost
(docs/fleet.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from twinserve.policies.errors import PolicyError
from twinserve.policies.requests import End
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.request import Request


class Action(StrEnum):
    ERROR = "error"  # the request fails
    RETRY = "retry"  # it begins anew on another replica: its tokens so far are thrown away
    MIGRATE = "migrate"  # it goes on elsewhere, where prompt and tokens so far are computed again


@dataclass(frozen=True)
class Recovery:
    """limit       failures that one request survives; None: any number
    detection_s  from a failure until the router learns of it. Until then it sends requests there
    """

    action: Action = Action.ERROR
    limit: int | None = None
    detection_s: float = 0.0

    @property
    def goes_on(self) -> bool:
        return self.action is not Action.ERROR

    @property
    def end(self) -> End:
        """Of rows on a replica that fails."""
        return End.MOVED if self.goes_on else End.FAILED

    def again(self, request: Request, loss: Loss | None) -> bool:
        """Return whether a request that lost its replica is placed again. loss: None after a drain,
        which does not count towards the limit."""
        if loss is not None:
            request.failures += 1
            most = self.limit if self.goes_on else 0
            if most is not None and request.failures > most:
                return False
            loss.placed_again += 1
        if self.action is Action.RETRY:
            thrown_away = request.begin_anew()
            if loss is not None:
                loss.discarded_tokens += thrown_away
        return True


def needs_withdrawal(replica: Replica) -> None:
    """Raises PolicyError if requests cannot be withdrawn from this policy."""
    policy = replica.engine.core.policy
    if not policy.withdraws():
        raise PolicyError(
            f"policy {policy.name!r} has no on_withdraw: its requests cannot leave a replica "
            "that drains or fails; add the method, or let requests fail with their replica"
        )


@dataclass(slots=True, eq=False)
class Loss:
    """A replica that failed, and what was lost with it.

    rows        that it ended
    at_s, seen_s  when it failed, and when its router learned of it (seconds)
    unseen      until then: requests that it has, and the rows that they had there; None: it was
                sent there later, and never came
    requests    that it had, or that were sent there before the router knew
    placed_again, left  of these: placed again; gone because the client left before the router knew
    kv_tokens   tokens with KV on it, of its unfinished requests
    discarded_tokens  output tokens of requests that began anew
    """

    replica: Replica
    at_s: float
    rows: set[int] = field(default_factory=set)
    seen_s: float = math.nan
    unseen: dict[int, tuple[Request, int | None]] = field(default_factory=dict)
    requests: int = 0
    placed_again: int = 0
    left: int = 0
    kv_tokens: int = 0
    discarded_tokens: int = 0

    def fails(self, end: End) -> tuple[list[int], list[int]]:
        """Its engine dies, and ends its rows as `end`: these, and others whose clients had left, or
        that were on their way elsewhere."""
        engine = self.replica.engine
        table = engine.core.requests
        here = set(np.flatnonzero(table.end == End.NONE).tolist())
        rows = engine.fail(end)
        lost = [row for row in rows if row in here]
        self.rows = set(lost)
        self.requests += len(lost)
        self.kv_tokens += sum(table.computed_tokens[lost].tolist())
        return lost, [row for row in rows if row not in here]

    def wait(self, rows: Iterable[int]) -> None:
        """Wait until the router knows of the failure."""
        for row in rows:
            request = self.replica.requests[row]
            self.unseen[request.number] = request, row

    def sent(self, request: Request) -> None:
        """A request was sent there by a router that does not know of the failure."""
        self.requests += 1
        self.unseen[request.number] = request, None
