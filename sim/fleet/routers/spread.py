"""The replica with the fewest unfinished requests for each request by itself, the first of them on
a tie: applications are spread over replicas, in one order of the whole fleet.

The requests of an application run side by side on all replicas, where `least-requests` keeps them
on one for the sake of shared prefixes. A policy that accounts for applications as a whole needs
the order of the fleet for that: `justitia` has one (its virtual finish times), others are refused.
"""

from __future__ import annotations

from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import PerRequest, Shedding, fewest
from twinserve.sim.fleet.view import FleetView


class Spread(PerRequest[Shedding]):
    name = "spread"
    Options = Shedding

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        return fewest(view)
