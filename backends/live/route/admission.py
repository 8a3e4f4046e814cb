"""Requests that wait in the front: for room at workers, for any worker, or because the router holds
them. The queue and the waiting time are limited; beyond that the client gets a Retry-After."""

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from twinserve.backends.live.route.fleet import RoutedFleet, Stay
from twinserve.backends.live.route.messages import RefusedError
from twinserve.policies.requests import RequestClass
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Verdict

RETRY_AFTER_S = 1


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    avoid: Collection[int]
    first: bool
    placed: asyncio.Future[Stay]


class Admission:
    """most_in_flight  requests at workers at once. most_waiting, timeout_s: see `RouteSettings`"""

    def __init__(
        self, fleet: RoutedFleet, most_in_flight: int, most_waiting: int, timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._most_in_flight, self._most_waiting = most_in_flight, most_waiting
        self._timeout_s = timeout_s
        self._queues: dict[bool, deque[_Waiting]] = {True: deque(), False: deque()}  # real-time

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    async def place(
        self, request: Request, avoid: Collection[int] = (), first: bool = False
    ) -> Stay:
        """Return a stay at a worker, as soon as one is free. avoid: see `RoutedFleet.choose`.
        first: the request was under way and waits before others. Raises RefusedError."""
        stay = self._try(request, avoid)
        if stay is not None:
            return stay
        real_time = bool(request.values["service_class"] == RequestClass.REAL_TIME)
        if self.waiting >= self._most_waiting and not first and not self._make_room(real_time):
            raise self._full()
        one = _Waiting(request, avoid, first, asyncio.get_running_loop().create_future())
        queue = self._queues[real_time]
        queue.appendleft(one) if first else queue.append(one)
        try:
            async with asyncio.timeout(self._timeout_s):
                stay = await one.placed
        except TimeoutError:
            self._leave(one, queue)
            why = "no worker is up" if not self._fleet.up else "no worker had room"
            raise RefusedError(
                503,
                "queue_timeout",
                f"{why} for {self._timeout_s:g} s; try again later",
                RETRY_AFTER_S,
            ) from None
        except asyncio.CancelledError:
            self._leave(one, queue)
            raise
        return stay

    def _full(self) -> RefusedError:
        said = f"{self.waiting:,} requests wait already; try again later"
        return RefusedError(429, "queue_full", said, RETRY_AFTER_S)

    def _make_room(self, real_time: bool) -> bool:
        """Make room for a real-time request: the last best-effort one without a worker goes."""
        queue = self._queues[False]
        if not real_time or not self._most_waiting:
            return False
        last = next((one for one in reversed(queue) if not (one.first or one.placed.done())), None)
        if last is None:
            return False
        queue.remove(last)
        last.placed.set_exception(self._full())
        return True

    def _leave(self, one: _Waiting, queue: deque[_Waiting]) -> None:
        """It waits no more; it may have got a worker at this very instant."""
        if one in queue:
            queue.remove(one)
        elif one.placed.done() and not one.placed.cancelled() and not one.placed.exception():
            self._fleet.ended(one.placed.result())
            self.ask_again()

    def _try(self, request: Request, avoid: Collection[int]) -> Stay | None:
        """None if it is to wait."""
        if self._fleet.in_flight >= self._most_in_flight:
            return None
        choice = self._fleet.choose(request, avoid)
        if choice is Verdict.HOLD:
            return None
        if choice is Verdict.REJECT:
            raise RefusedError(
                429, "rejected", "the router rejects it under load; try again later", RETRY_AFTER_S
            )
        return self._fleet.sent(request, choice)

    def ask_again(self) -> None:
        """Place waiting requests after a request ended, a worker came up or was measured. Real-time
        requests go first, then best-effort ones, each in order of coming, up to the first that must
        wait on."""
        for real_time in (True, False):
            queue = self._queues[real_time]
            while queue:
                one = queue[0]
                if one.placed.done():  # its client has left, or waited too long
                    queue.popleft()
                    continue
                try:
                    stay = self._try(one.request, one.avoid)
                except Exception as error:  # a router's own, too: it is that request's affair alone
                    queue.popleft()
                    one.placed.set_exception(error)
                    continue
                if stay is None:
                    break
                queue.popleft()
                one.placed.set_result(stay)
