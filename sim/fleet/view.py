"""What a router sees of its replicas, and how old and complete that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.results.recorder import Load


@dataclass(slots=True)
class FleetView:
    """What a router sees of a fleet.

    now        seconds
    up         indices of the replicas that take requests, ascending
    takes      by index: whether the replica takes requests
    in_flight  by index: requests dispatched there that have not ended; always exact
    signals    how old snapshots are, and which were lost (`Router.signals`)
    num_blocks, block_tokens  by index: KV blocks, and tokens in one
    models     by index: a model of its step times, measured beforehand; None: unknown
    silent_s   replicas from which nothing arrives -> since when (seconds)
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
        """Return the view of a fleet without replicas."""
        return cls(now, [], [], [], signals, snapshot)

    def add(self, num_blocks: int, block_tokens: int, model: StepTimeModel | None) -> None:
        """Add the next replica, which takes no requests yet."""
        self.takes.append(False)
        self.in_flight.append(0)
        self.num_blocks.append(num_blocks)
        self.block_tokens.append(block_tokens)
        self.models.append(model)

    def measured_s(self, replica: int) -> float:
        """Return when the latest snapshot of a replica that has arrived was taken."""
        at_s = self.signals.measured_s(replica, self.now)
        return min(at_s, self.silent_s.get(replica, at_s)) if self.silent_s else at_s

    def load(self, replica: int) -> Load:
        """Return the latest snapshot of a replica. Inside a run of steps it shows what single steps
        would, and does not cut the run."""
        return self.snapshot(replica, self.measured_s(replica))


_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Signals:
    """Age and loss of what a router hears of replicas. Production routers poll `/metrics` and
    receive KV events over a socket, so measurements are old and some never arrive. Losses are drawn
    by number, so that runs with one seed lose the same ones. Times are seconds, shares 0 to 1. All
    zero: the router sees the present.

    age_s         from a measurement of a replica to its arrival at the router
    interval_s    replicas are measured at multiples of this; 0: always
    lost          share of measurements that never arrive; needs an interval
    events_age_s  from a change of a prefix cache to the arrival of its event
    events_lost   share of these events that never arrive
    """

    age_s: float = 0.0
    interval_s: float = 0.0
    lost: float = 0.0
    events_age_s: float = 0.0
    events_lost: float = 0.0
    seed: int = 0

    def measured_s(self, replica: int, now: float) -> float:
        """Return when the router's present knowledge of a replica was measured; not after now."""
        at_s = now - self.age_s
        if not self.interval_s:
            return at_s
        tick = math.floor(at_s / self.interval_s)
        while tick > 0 and self.lost and _share(self.seed, replica, tick) < self.lost:
            tick -= 1
        return min(tick * self.interval_s, at_s)

    def event_is_lost(self, replica: int, number: int) -> bool:
        """Return whether an event of the replica, counted from 0, is lost."""
        return self.events_lost > 0 and _share(~self.seed, replica, number) < self.events_lost


def _share(*numbers: int) -> float:
    """A number of [0, 1) that is drawn by these (SplitMix64; Steele, Lea, Flood, OOPSLA 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state / (1 << 64)
