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
    """

    now: float
    up: list[int]
    takes: list[bool]
    in_flight: list[int]
    snapshot: Callable[[int, float], Load]

    def load(self, replica: int, age_s: float = 0.0) -> Load:
        """Of a replica, as it was `age_s` seconds ago. Inside a run of steps too it is what single
        steps would show, and it cuts no run."""
        return self.snapshot(replica, self.now - age_s)
