"""Asks an autoscaler at its times, and starts and drains replicas as it wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinserve.policies.names import built
from twinserve.sim.engine.clock import PLANS, Clock
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.replica import Life, Replica
from twinserve.sim.fleet.scaling.base import Demand, Scaler, Seen
from twinserve.sim.fleet.scaling.scalers import SCALERS

_STUCK = 1000  # decisions in a row while nothing happens and requests wait


@dataclass(frozen=True)
class Bounds:
    """least, most  replicas
    start_up_s   from a start to taking requests
    grace_s      after which a drained replica's requests are taken from it; None: never
    """

    least: int
    most: int
    start_up_s: float
    grace_s: float | None = None


class Autoscaler:
    """start  called with seconds: a further replica starts up, and takes requests then
    over   whether all requests have been sent

    Of several replicas the latest goes first: one that starts up before one that serves.
    """

    def __init__(
        self,
        clock: Clock,
        fleet: Fleet,
        scaler: Scaler,
        bounds: Bounds,
        demand: Demand,
        start: Callable[[float], Replica],
        over: Callable[[], bool],
    ) -> None:
        self.clock, self.fleet, self.scaler, self.bounds = clock, fleet, scaler, bounds
        self.demand = demand
        self._start, self._over = start, over
        clock.process(self._life())

    def _life(self):
        idle, tick = 0, 0
        while True:
            tick += 1
            self.clock.idle_events += 1
            # after what arrives and ends at this instant, before any replica plans
            yield self.clock.at(tick * self.scaler.options.every, PLANS - 2)
            self.clock.idle_events -= 1
            idle = idle + 1 if self.clock.empty else 0
            if idle > _STUCK or not self.fleet.active and self._over():
                return
            self._decide()

    def _of(self, *lives: Life) -> list[Replica]:
        return [replica for replica in self.fleet.replicas if replica.life in lives]

    def _decide(self) -> None:
        up, starting = self._of(Life.UP), self._of(Life.WARMING)
        now = self.clock.now
        seen = Seen(
            now,
            [replica.engine.load(now) for replica in up],
            len(starting),
            [replica.model for replica in up if replica.model is not None],
            up[0].engine.core.ledger.block_tokens if up else 1,
            self.bounds.start_up_s,
            self.demand,
        )
        wanted = min(max(self.scaler.wants(seen), self.bounds.least), self.bounds.most)
        change = wanted - seen.replicas
        if not change:
            return
        for _ in range(change):
            self._start(self.bounds.start_up_s)
        for replica in [*reversed(starting), *reversed(up)][: max(-change, 0)]:
            self.fleet.drain(replica.index, self.bounds.grace_s)


def parse_scaler(text: str) -> Scaler:
    """Read `wva`, or `dynamo:ttft=0.3`. Raises RegistryError."""
    return built("autoscaler {}", "autoscaler", SCALERS, text)
