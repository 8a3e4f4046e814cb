"""Real-time and best-effort requests apart, on replicas of their own."""

from __future__ import annotations

from pydantic import Field

from twinserve.policies.requests import RequestClass
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import PerRequest, Shedding, fewest
from twinserve.sim.fleet.view import FleetView


class ClassAwareOptions(Shedding):
    """best_effort  share of the replicas that are up which best-effort requests have, the last ones
                 by index: rounded, but at least one for each class
    overflow     a real-time request goes to one of these too, where every replica of its own has so
                 many requests in flight and that one has fewer; None: never
    """

    best_effort: float = Field(0.5, gt=0, lt=1)
    overflow: int | None = Field(None, ge=1)


class ClassAware(PerRequest[ClassAwareOptions]):
    """To the replica with the fewest requests among those of its class; a replica that is up alone
    serves both classes."""

    name = "class-aware"
    Options = ClassAwareOptions

    def place(self, request: Request, stage: Role, view: FleetView) -> int:
        up = view.up
        count = min(max(round(self.options.best_effort * len(up)), 1), len(up) - 1)
        real_time, best_effort = up[: len(up) - count], up[len(up) - count :]
        if len(up) == 1:
            return up[0]
        if request.values.get("service_class", 0) == RequestClass.BEST_EFFORT:
            return fewest(view, best_effort)
        own = fewest(view, real_time)
        most = self.options.overflow
        if most is not None and view.in_flight[own] >= most:
            return fewest(view, [own, *best_effort])
        return own
