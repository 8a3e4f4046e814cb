"""How old, and how complete, what a router hears of replicas is.

Production routers poll `/metrics` and receive KV events over a socket: what they decide by was
measured a while ago, and some of it never comes. Losses are drawn by number, not by order, so that
they are the same in every run with one seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Signals:
    """Seconds, and shares of 0 to 1. All zero: what is true now.

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
        """When what the router knows of a replica at `now` was measured; not after now."""
        at_s = now - self.age_s
        if not self.interval_s:
            return at_s
        tick = math.floor(at_s / self.interval_s)
        while tick > 0 and self.lost and _share(self.seed, replica, tick) < self.lost:
            tick -= 1
        return min(tick * self.interval_s, at_s)

    def event_is_lost(self, replica: int, number: int) -> bool:
        """Of the events of a replica, counted from 0."""
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
