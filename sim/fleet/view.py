"""What a router may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.fleet.signals import Signals
from twinserve.sim.results.recorder import Load


@dataclass(slots=True)
class FleetView:
    """now        seconds
    up         indices of the replicas that take requests, ascending
    takes      by index: whether the replica takes requests
    in_flight  by index: requests dispatched there that have not ended; the router's own count,
               always exact
    signals    how old snapshots are, and which were lost (`Router.signals`)
    num_blocks, block_tokens  by index: KV blocks, and tokens in one
    models     by index: what has been measured of its step times beforehand; None: nothing
    """

    now: float
    up: list[int]
    takes: list[bool]
    in_flight: list[int]
    signals: Signals
    snapshot: Callable[[int, float], Load]
    num_blocks: list[int] = field(default_factory=list)
    block_tokens: list[int] = field(default_factory=list)
    models: list[StepTimeModel | None] = field(default_factory=list)

    def measured_s(self, replica: int) -> float:
        """When the latest snapshot that has come from a replica was taken."""
        return self.signals.measured_s(replica, self.now)

    def load(self, replica: int) -> Load:
        """That snapshot. Inside a run of steps too it is what single steps would show, and it cuts
        no run."""
        return self.snapshot(replica, self.measured_s(replica))
