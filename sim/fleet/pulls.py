"""When replicas pull offline requests out of the fleet's pool, and what returns to it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twinserve.policies.requests import End, State
from twinserve.sim.engine.clock import PLANS, Clock
from twinserve.sim.fleet.pool import FamilyPool, offline
from twinserve.sim.fleet.replica import Replica
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.view import FleetView


class PulledPool(FamilyPool):
    """dispatch  sends a request to a replica, by index"""

    def __init__(
        self, window: int, clock: Clock, view: FleetView, dispatch: Callable[[Request, int], None]
    ) -> None:
        super().__init__(window)
        self._clock, self._view, self._dispatch = clock, view, dispatch
        self._pulls = False  # at the end of this instant

    def place(self, request: Request) -> bool:
        """To its family, or into the pool. False where it is to wait."""
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
    """Of a replica that drains: offline requests that it has not begun go back to the pool, at the
    next step boundary."""
    table = replica.engine.core.requests
    idle = (table.state == State.WAITING) & (table.end == End.NONE) & (table.output_tokens == 0)
    for row in np.flatnonzero(idle).tolist():
        if offline(replica.requests[row]):
            replica.engine.withdraw(row, End.MOVED)
