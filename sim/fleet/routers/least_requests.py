"""The replica with the fewest unfinished requests, the first of them on a tie; requests that share
a prefix stay where the first of them went."""

from __future__ import annotations

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Shedding, fewest
from twinserve.sim.fleet.view import FleetView


class LeastRequests(Router[Shedding]):
    name = "least-requests"
    Options = Shedding

    def setup(self) -> None:
        self._home: dict[int, int] = {}  # affinity -> replica

    def on_forgotten(self, affinity: int) -> None:
        self._home.pop(affinity, None)

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        home = self._home.get(request.affinity)
        if home is not None and view.takes[home]:
            return home
        replica = fewest(view)
        if request.affinity >= 0:
            self._home[request.affinity] = replica
        return replica
