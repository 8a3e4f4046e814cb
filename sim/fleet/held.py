"""Requests that wait in the fleet: for a replica, or as the router has it."""

from __future__ import annotations

from collections import OrderedDict

from twinserve.sim.fleet.pool import offline
from twinserve.sim.fleet.request import Request


class Held:
    """queues  of real-time requests, and of best-effort ones, by number in order of coming"""

    def __init__(self) -> None:
        self.queues: tuple[OrderedDict[int, Request], ...] = (OrderedDict(), OrderedDict())
        self._since_s: dict[int, float] = {}  # of one that is being placed again, too

    def __bool__(self) -> bool:
        return any(self.queues)

    def hold(self, request: Request, now: float) -> None:
        self.queues[offline(request)][request.number] = request
        self._since_s.setdefault(request.number, now)

    def take(self, request: Request) -> bool:
        """To place it again. False where it does not wait."""
        return self.queues[offline(request)].pop(request.number, None) is not None

    def placed(self, request: Request) -> None:
        """It waits no more, if it did."""
        self._since_s.pop(request.number, None)

    def clear(self) -> list[tuple[Request, float]]:
        """All that waited, by number, and since when (seconds)."""
        waited = [request for queue in self.queues for request in queue.values()]
        waited.sort(key=lambda request: request.number)
        since = [(request, self._since_s[request.number]) for request in waited]
        for queue in self.queues:
            queue.clear()
        self._since_s = {}
        return since
