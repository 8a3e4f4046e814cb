"""Requests that wait in the fleet: held for a replica, or in the pool of offline (best-effort) work
from which replicas pull.

Offline requests wait as families, whose prompts begin with the same block of text (as documents in
Echo's own pool, policies/echo/pool.py). Without text, requests with one `affinity` are a family. A
replica with fewer offline requests than its window pulls whole families until the window is full.
The replica is then the home of these families: while it is up, their later requests go there at
once. So each text is computed on one replica, and any replica may take the families in the pool.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from twinserve.policies.requests import End, RequestClass, State
from twinserve.sim.engine.clock import PLANS, Clock
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.view import FleetView

Family = tuple[str, int]  # what its requests share, and which

_OFFLINE = int(RequestClass.BEST_EFFORT)


def offline(request: Request) -> bool:
    """Return whether the request waits in the pool, if the fleet has one."""
    return request.values.get("service_class") == _OFFLINE


class FamilyPool:
    """Families of offline requests that wait to be pulled."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"an offline window of {window} requests; give one at least")
        self.window = window
        self._block_tokens = 0  # whose contents tell texts apart; 0: not known yet
        self._families: dict[Family, dict[int, Request]] = {}  # that wait, members by number
        self._waits: dict[int, tuple[Family, float]] = {}  # number -> family, since when
        self._first: dict[Family, int] = {}  # family that waits -> its first number
        self._order: list[tuple[int, int, Family]] = []  # heap of first number, entry, family
        self._entries = 0
        self._homes: dict[Family, int] = {}  # family -> replica that pulled it last
        self._here: dict[int, int] = {}  # replica -> its offline requests

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waits)

    def __contains__(self, number: int) -> bool:
        return number in self._waits

    def read_texts(self, block_tokens: int) -> None:
        """The fleet has its first replica, which gives the size of KV blocks."""
        if not self._block_tokens:
            self._block_tokens = block_tokens
            for request, since_s in self.clear():
                self.add(request, since_s)

    def family(self, request: Request) -> Family:
        """Return the family of a request: equal for requests that share a text."""
        contents = request.contents(self._block_tokens) if self._block_tokens else None
        if contents is not None and len(contents):
            return "text", int(contents[0])
        if request.affinity >= 0:
            return "affinity", request.affinity
        return "alone", request.number

    # -- waiting -----------------------------------------------------------------------------------
    def add(self, request: Request, now: float) -> None:
        number, family = request.number, self.family(request)
        self._families.setdefault(family, {})[number] = request
        self._waits[number] = family, now
        if number < self._first.get(family, math.inf):
            self._first[family] = number
            self._entries += 1
            heappush(self._order, (number, self._entries, family))

    def remove(self, request: Request) -> bool:
        """The request's client left. Returns False if the request does not wait here."""
        if request.number not in self._waits:
            return False
        family, _ = self._waits.pop(request.number)
        members = self._families[family]
        del members[request.number]
        if not members:
            del self._families[family], self._first[family]
        return True

    def clear(self) -> list[tuple[Request, float]]:
        """End all waits. Return the requests that waited, in order of coming, each with since when
        (seconds)."""
        members = {n: r for family in self._families.values() for n, r in family.items()}
        waited = [(members[number], self._waits[number][1]) for number in sorted(members)]
        self._families, self._waits, self._first, self._order = {}, {}, {}, []
        return waited

    # -- replicas ----------------------------------------------------------------------------------
    def came(self, replica: int) -> None:
        """An offline request was sent to a replica."""
        self._here[replica] = self._here.get(replica, 0) + 1

    def left(self, replica: int) -> None:
        """An offline request has left a replica."""
        self._here[replica] -= 1

    def home(self, request: Request, view: FleetView) -> int | None:
        """Return the replica that has the request's family, if it still takes requests."""
        home = self._homes.get(self.family(request))
        return home if home is not None and view.takes[home] else None

    def puller(self, view: FleetView) -> int | None:
        """Return the replica that pulls next: the one with the fewest offline requests, if fewer
        than its window. None if no request waits or all replicas have enough."""
        if not self._waits or not view.up:
            return None
        replica = min(view.up, key=lambda index: self._here.get(index, 0))
        return replica if self._here.get(replica, 0) < self.window else None

    def pull(self, view: FleetView) -> tuple[int, list[Request]] | None:
        """Return the puller and the family that came first, its requests in order of coming. None
        if nothing moves."""
        replica = self.puller(view)
        if replica is None:
            return None
        number, _, family = heappop(self._order)
        while self._first.get(family) != number:  # it has gone, or has an earlier request now
            number, _, family = heappop(self._order)
        del self._first[family]
        members = self._families.pop(family)
        for number in members:
            del self._waits[number]
        if family[0] != "alone":
            self._homes[family] = replica
        return replica, [members[number] for number in sorted(members)]


class Held:
    """Requests that wait for a replica, or as the router has it.

    queues  of real-time requests, and of best-effort ones, by number in order of coming
    """

    def __init__(self) -> None:
        self.queues: tuple[OrderedDict[int, Request], ...] = (OrderedDict(), OrderedDict())
        self._since_s: dict[int, float] = {}  # of one that is being placed again, too

    def __bool__(self) -> bool:
        return any(self.queues)

    def hold(self, request: Request, now: float) -> None:
        self.queues[offline(request)][request.number] = request
        self._since_s.setdefault(request.number, now)

    def take(self, request: Request) -> bool:
        """Take a request out to place it again. Returns False if it does not wait."""
        return self.queues[offline(request)].pop(request.number, None) is not None

    def placed(self, request: Request) -> None:
        """The request was placed and waits no longer."""
        self._since_s.pop(request.number, None)

    def clear(self) -> list[tuple[Request, float]]:
        """End all waits. Returns the requests by number, each with the time since which it waited
        (seconds)."""
        waited = [request for queue in self.queues for request in queue.values()]
        waited.sort(key=lambda request: request.number)
        since = [(request, self._since_s[request.number]) for request in waited]
        for queue in self.queues:
            queue.clear()
        self._since_s = {}
        return since


class PulledPool(FamilyPool):
    """Decides when replicas pull offline requests, and takes requests back.

    dispatch  sends a request to a replica, by index
    """

    def __init__(
        self, window: int, clock: Clock, view: FleetView, dispatch: Callable[[Request, int], None]
    ) -> None:
        super().__init__(window)
        self._clock, self._view, self._dispatch = clock, view, dispatch
        self._pulls = False  # at the end of this instant

    def place(self, request: Request) -> bool:
        """Send a request to its family's replica, or keep it in the pool. Returns False if it
        waits."""
        home = self.home(request, self._view)
        if home is not None:
            self._dispatch(request, home)
            return True
        self.add(request, self._clock.now)
        self.pull_soon()
        return request.number not in self

    def pull_soon(self) -> None:
        """Replicas with fewer offline requests than their window get some: when all that arrives at
        this instant has, so that families are whole, and before any replica plans. One replica
        that is up alone gets them at once, since there is nothing to choose."""
        if self._pulls or self.puller(self._view) is None:
            return
        if len(self._view.up) == 1:
            self._pull_all()
        else:
            self._pulls = True
            self._clock.process(self._at_the_end_of_the_instant())

    def _at_the_end_of_the_instant(self):
        yield self._clock.at(self._clock.now, PLANS - 1)
        self._pulls = False
        self._pull_all()

    def _pull_all(self) -> None:
        while (pulled := self.pull(self._view)) is not None:
            for request in pulled[1]:
                self._dispatch(request, pulled[0])


def return_offline(replica: Replica) -> None:
    """Return a draining replica's offline requests that have not begun to the pool, at its next
    step boundary."""
    table = replica.engine.core.requests
    idle = (table.state == State.WAITING) & (table.end == End.NONE) & (table.output_tokens == 0)
    for row in np.flatnonzero(idle).tolist():
        if offline(replica.requests[row]):
            replica.engine.withdraw(row, End.MOVED)
