"""Virtual time, and the fluid system that it stands for (Yang et al., Justitia, Sec. IV-C, eqs.
2-3).

In generalised processor sharing (GPS) the active applications are served at once, each at the same
rate. With C_j the demand of application j, V(t) grows by what each active one is served, and j ends
when V reaches F_j = V(a_j) + C_j. So F_j is known when j arrives, and a later application changes
when that is, but not in which order.

Demand and V are in token-iterations. Capacity is what all applications together are served: M
tokens of KV an iteration.
"""

import heapq
from collections.abc import Sequence


class VirtualClock:
    """V, and the applications active in GPS. `arrive` costs O(log N) in the number of active
    applications; each leaves once."""

    def __init__(self) -> None:
        self.V = 0.0
        self._active: list[float] = []  # heap of F

    @property
    def N(self) -> int:
        """Applications that are active in GPS."""
        return len(self._active)

    def advance(self, service: float) -> float:
        """GPS serves `service` token-iterations in all (M for an iteration). Returns what it could
        not, all having ended."""
        while self._active:
            N, first = len(self._active), self._active[0]
            needed = (first - self.V) * N
            if needed > service:
                self.V += service / N
                return 0.0
            service -= needed
            self.V = first
            heapq.heappop(self._active)
        return service

    def arrive(self, C: float) -> float:
        """An application of demand C arrives now. Returns its virtual finish time F."""
        F = self.V + C
        heapq.heappush(self._active, F)
        return F

    def move(self, F: float, to: float) -> None:
        """An application's F is another one from now on. GPS may have to serve it again."""
        self.leave(F)
        if to > self.V:
            heapq.heappush(self._active, to)

    def leave(self, F: float) -> None:
        """An application with this F leaves before its end; nothing if GPS has served it already.
        Those that stay share the capacity from now on."""
        if F > self.V and F in self._active:
            self._active.remove(F)
            heapq.heapify(self._active)

    def drain(self) -> None:
        """All end at once: there is nothing left to be served."""
        if self._active:
            self.V = max(self._active)
            self._active.clear()


def fluid_finish_times(
    arrivals: Sequence[float], demands: Sequence[float], M: float
) -> list[float]:
    """When each application ends in GPS: iterations, in the order given. arrivals: iterations,
    ascending; demands: token-iterations, > 0; M: tokens. Exact up to rounding; O(n log n)."""
    clock, now, ends = VirtualClock(), 0.0, [0.0] * len(arrivals)
    by_finish: list[tuple[float, int]] = []

    def until(time: float) -> None:
        nonlocal now
        while by_finish:
            F, i = by_finish[0]
            end = now + max(0.0, F - clock.V) * clock.N / M
            if end > time:
                clock.advance((time - now) * M)
                break
            heapq.heappop(by_finish)
            ends[i] = end
            clock.V = F
            heapq.heappop(clock._active)
            now = end
        now = max(now, time) if time < float("inf") else now

    for i, (arrival, demand) in enumerate(zip(arrivals, demands, strict=True)):
        until(arrival)
        heapq.heappush(by_finish, (clock.arrive(demand), i))
    until(float("inf"))
    return ends
