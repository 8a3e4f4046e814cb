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
    silent_s   replicas from which nothing comes, and since when (seconds)
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
    silent_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def empty(
        cls, now: float, signals: Signals, snapshot: Callable[[int, float], Load]
    ) -> FleetView:
        """Of a fleet without replicas."""
        return cls(now, [], [], [], signals, snapshot)

    def add(self, num_blocks: int, block_tokens: int, model: StepTimeModel | None) -> None:
        """The next replica, which takes no requests yet."""
        self.takes.append(False)
        self.in_flight.append(0)
        self.num_blocks.append(num_blocks)
        self.block_tokens.append(block_tokens)
        self.models.append(model)

    def measured_s(self, replica: int) -> float:
        """When the latest snapshot that has come from a replica was taken."""
        at_s = self.signals.measured_s(replica, self.now)
        return min(at_s, self.silent_s.get(replica, at_s)) if self.silent_s else at_s

    def load(self, replica: int) -> Load:
        """That snapshot. Inside a run of steps too it is what single steps would show, and it cuts
        no run."""
        return self.snapshot(replica, self.measured_s(replica))
