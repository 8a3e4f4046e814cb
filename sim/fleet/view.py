"""What a router may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinserve.sim.results.recorder import Load


@dataclass(slots=True)
class FleetView:
    """now        seconds
    up         indices of the replicas that take requests, ascending
    takes      by index: whether the replica takes requests
    in_flight  by index: requests dispatched there that have not ended; the router's own count,
               always exact
    age_s      how old snapshots are (`Router.snapshot_age_s`)
    """

    now: float
    up: list[int]
    takes: list[bool]
    in_flight: list[int]
    age_s: float
    snapshot: Callable[[int, float], Load]

    def load(self, replica: int) -> Load:
        """Of a replica, as it was `age_s` seconds ago. Inside a run of steps too it is what single
        steps would show, and it cuts no run."""
        return self.snapshot(replica, self.now - self.age_s)
