"""KV events on their way from a replica's prefix cache to the router."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from twinserve.sim.engine.clock import Clock
from twinserve.sim.fleet.replica import Life, Replica
from twinserve.sim.fleet.routers.base import Router


class News(NamedTuple):
    """due_s  when the router hears it (seconds)"""

    due_s: float
    source: KvNews
    stored: bool
    contents: np.ndarray


class KvNews:
    """A KvListener: what a replica's prefix cache tells its router, until the replica is down.

    on_the_way  where news wait that take their time (`Signals.events_age_s`), in order; the fleet
                delivers what is due before the router decides
    """

    def __init__(
        self, replica: Replica, router: Router, clock: Clock, on_the_way: deque[News]
    ) -> None:
        self._replica = replica
        self._router = router
        self._clock = clock
        self._on_the_way = on_the_way
        self._count = 0

    def stored(self, contents: np.ndarray) -> None:
        self._tell(True, contents)

    def removed(self, contents: np.ndarray) -> None:
        self._tell(False, contents)

    def _tell(self, stored: bool, contents: np.ndarray) -> None:
        signals = self._router.signals
        self._count += 1
        index = self._replica.index
        if signals.event_is_lost(index, self._count - 1) or index in self._router.view.silent_s:
            return
        if signals.events_age_s:
            due_s = self._clock.now + signals.events_age_s
            self._on_the_way.append(News(due_s, self, stored, contents.copy()))
        else:
            self.arrive(stored, contents)

    def arrive(self, stored: bool, contents: np.ndarray) -> None:
        """The router hears it now."""
        if self._replica.life is not Life.DOWN:
            self._router.view.now = self._clock.now
            hear = self._router.on_stored if stored else self._router.on_removed
            hear(self._replica.index, contents)


def deliver(news: deque[News], now: float) -> None:
    """All that is due."""
    while news and news[0].due_s <= now:
        _, source, stored, contents = news.popleft()
        source.arrive(stored, contents)
