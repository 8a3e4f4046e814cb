"""A request of the fleet, and its stays on replicas."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twinserve.policies.requests import End

if TYPE_CHECKING:
    from twinserve.sim.fleet.replica import Replica


class Placement(NamedTuple):
    """A request's stay on a replica: the row of the engine's table that it is there. The row says
    when it began (`placed_s`), when it ended, and why.

    before_tokens  output tokens that the request had when it came
    """

    replica: Replica
    row: int
    before_tokens: int


def _none(block_tokens: int) -> np.ndarray | None:
    return None


@dataclass(slots=True, eq=False)
class Request:
    """number: in the order in which the fleet got them. output_tokens: how many it will have.

    values    further columns of its rows (prompt_tokens, service_class, ...)
    contents  block tokens -> int64 content ids of its prompt's full KV blocks, or None
    group     session or application; -1: none
    affinity  requests with the same number share a prefix, and are better served on one replica;
              -1: none
    order     the stamp of its application (`RequestTable.order`); NaN: none
    end, ended_s  how and when (seconds) it ended
    sent_s    when its client sent it; `arrival_s` is when the fleet got it
    failures  how often it has lost its replica
    anew      position of the first stay since it began anew: tokens of those before are thrown away
    discarded_tokens  output tokens that were
    """

    id: str
    output_tokens: int
    arrival_s: float
    values: Mapping[str, Any] = field(default_factory=dict)
    contents: Callable[[int], np.ndarray | None] = _none
    group: int = -1
    affinity: int = -1
    order: float = math.nan
    number: int = -1
    placements: list[Placement] = field(default_factory=list)
    end: End = End.NONE
    ended_s: float = math.nan
    sent_s: float = math.nan
    failures: int = 0
    anew: int = 0
    discarded_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return int(self.values["prompt_tokens"])

    @property
    def leaving(self) -> bool:
        """Return whether the request has ended, or ends at its replica's next boundary."""
        if self.end is not End.NONE or not self.placements:
            return self.end is not End.NONE
        replica, row, _ = self.placements[-1]
        end = int(replica.engine.core.requests.end[row])
        return end not in (End.NONE, End.MOVED, End.HANDED_OVER)

    @property
    def served(self) -> Placement | None:
        """Return the last stay whose tokens reached the client, or None."""
        stays = reversed(self.placements[self.anew :] if self.anew else self.placements)
        return next((stay for stay in stays if not stay.replica.prefills), None)

    @property
    def emitted_tokens(self) -> int:
        """Return the tokens that the client has."""
        if (stay := self.served) is None:
            return 0
        replica, row, _ = stay
        return int(replica.engine.core.requests.output_tokens[row])

    def begin_anew(self) -> int:
        """Discard the tokens so far. Returns their number."""
        tokens = self.emitted_tokens
        self.discarded_tokens += tokens
        self.anew = len(self.placements)
        return tokens

    def columns(self, now: float) -> dict[str, Any]:
        """Return the columns of a row for the request on another replica, from `now` on. The
        client's tokens move with it, its KV does not."""
        columns = {**self.values, "group": self.group, "arrival_s": self.arrival_s, "placed_s": now}
        if not math.isnan(self.order):
            columns["order"] = self.order
        if (stay := self.served) is not None:
            replica, row, _ = stay
            table = replica.engine.core.requests
            columns |= {name: getattr(table, name)[row] for name in _CARRIED}
        return columns


class Requests(Sequence[Request]):
    """The requests of a fleet by number. Of a settled one only the place is kept. Its object is
    made again from its row on demand, without contents and affinity."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._open: list[Request | None] = []
        self._places = array("i")  # replica and row of each; -1: not settled
        self._settled = 0

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, number):
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        return self._open[number] or self._made_again(range(len(self))[number])

    def _made_again(self, number: int) -> Request:
        index, row = self._places[2 * number : 2 * number + 2]
        replica = self._replicas[index]
        table = replica.engine.core.requests
        arrival_s = float(table.arrival_s[row])
        return Request(
            table.ids[row],
            int(table.output_tokens[row]),
            arrival_s,
            {name: int(getattr(table, name)[row]) for name in _KEPT},
            group=int(table.group[row]),
            order=float(table.order[row]),
            number=number,
            placements=[Placement(replica, row, 0)],
            end=End.COMPLETED,
            ended_s=float(table.ended_s[row]),
            sent_s=arrival_s,
        )

    @property
    def all_settled(self) -> bool:
        return self._settled == len(self._open)

    def unsettled(self) -> list[Request]:
        return [request for request in self._open if request is not None]

    def append(self, request: Request) -> None:
        request.number = len(self._open)
        self._open.append(request)
        self._places.extend(_NOWHERE)

    def settle(self, request: Request) -> None:
        """Forget a request that completed, unless it had more than one place."""
        if len(request.placements) != 1 or request.failures:
            return
        (replica, row, _), number = request.placements[0], request.number
        self._open[number] = None
        self._places[2 * number], self._places[2 * number + 1] = replica.index, row
        del replica.requests[row]
        self._settled += 1

    def places(self) -> np.ndarray:
        """Return int32[n, 2]: replica and row of each request; -1: not settled."""
        return np.array(self._places, np.int32).reshape(-1, 2)


_NOWHERE = (-1, -1)
_KEPT = ("prompt_tokens", "service_class", "stage")
_CARRIED = ("output_tokens", "first_token_s", "last_token_s", "late_tokens")
