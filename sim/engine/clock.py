"""The simulated clock: SimPy's environment, with events at absolute times.

SimPy schedules by delay, and now + (t - now) is not always t in floating point. The fast path jumps
over many steps, and must reach exactly the one-step path's time. So events are put at the time
itself.
"""

from collections.abc import Callable
from heapq import heapify, heappush

import simpy
from simpy.core import NORMAL, URGENT
from simpy.events import Event

# At equal times arrivals and landed transfers come first, then the ends of steps, replica by
# replica (STEPS + its index), then decisions, replica by replica (PLANS + its index): a decision at
# time t sees all that happened up to and including t, whichever event was scheduled first. Only the
# news that a request has left a replica, told right before its decision, come after those of
# replicas before it.
BEFORE_STEPS, STEPS, PLANS = URGENT, NORMAL, 1 << 20

_new_event = Event.__new__


class Clock(simpy.Environment):
    def __init__(self) -> None:
        super().__init__()
        self.at_end: list[Callable[[], None]] = []  # called when nothing is left to happen
        self.idle_events = 0  # of those that are put here: nothing rests on them
        self.planning = -1  # replica whose news, from before its decision, are being told

    def run(self, until=None):
        """Run like simpy.Environment.run. Without `until` the run ends when nothing is left to
        happen."""
        value = super().run(until)
        if until is None:
            for check in self.at_end:
                check()
        return value

    @property
    def empty(self) -> bool:
        """Return whether nothing is left to happen, except now and except `idle_events`."""
        return len(self._queue) <= self.idle_events

    def cancel(self, event: Event) -> None:
        """Cancel an event that was put at a time. It does not keep the clock going."""
        self._queue = [entry for entry in self._queue if entry[-1] is not event]
        heapify(self._queue)

    def reach(self, time_s: float, priority: int) -> bool:
        """Move to `time_s` (seconds) if nothing else happens before an event of `priority` there,
        so that a process needs no event of its own. Returns False if the event is needed, or if the
        time lies in the past, which `at` refuses. Only the process that waited for the present
        event may call this.

        The process is the only one that waited for the event which it handles.
        """
        if time_s < self._now:
            return False
        if self._queue:
            next_s, next_priority = self._queue[0][:2]
            if next_s < time_s or (next_s == time_s and next_priority <= priority):
                return False
        self._now = time_s
        return True

    def at(self, time_s: float, priority: int = STEPS) -> Event:
        """Return an event that happens at `time_s` (seconds, not before now)."""
        if time_s < self._now:
            raise ValueError(f"an event at {time_s} s, when it is {self._now} s already")
        event = _new_event(Event)  # with all that `Event` itself would set
        event.env, event.callbacks, event._ok, event._value = self, [], True, None
        # EventPriority is a name for type checkers, and to call it would cost as much as the rest
        heappush(self._queue, (time_s, priority, next(self._eid), event))  # type: ignore[misc]
        return event
