"""Ports: the parts of a transfer's path, each with a rate and a queue. One direction of PCIe is a
port, a network card has two, the device of a tier is another. Bytes, seconds.

A transfer takes a path of ports.

- It begins when all of them are free, and goes at the rate of the slowest.
- Each port serves its transfers in the order in which they were queued. A port that is free before
  the others of a path waits with them, and what is queued behind it waits, too.
- Each port is busy for the bytes over its own rate, not for the slowest one's time. A disk
  that is read over PCIe leaves PCIe to others meanwhile. So a port gets no more bytes than its rate
  allows, however many send to it: eight senders to one receiving port share that port's rate.
- Latency keeps no port busy: the next transfer begins when the bytes of the one before have passed.
- What was queued stays charged. If the bytes are no longer wanted, since their request was
  withdrawn or their target failed, the ports carry them all the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True, eq=False)
class Transfer:
    """`size` bytes on their way.

    begin_s, lands_s  when the path was free for it, and when all of it has arrived
    lost              set before it lands: its target has failed
    """

    size: int
    begin_s: float
    lands_s: float
    lost: bool = False


class Port:
    """bytes_per_s: sustained. latency_s: of each transfer, on top of its bytes.

    free_at                   when it has let through all that is queued
    queued_bytes              charged so far: landed, lost, and those under way
    landed_bytes, lost_bytes  of these, as of the last `settle`
    """

    def __init__(self, name: str, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0 or latency_s < 0:
            raise ValueError(f"port {name} of {bytes_per_s} bytes/s with {latency_s} s latency")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at = 0.0
        self.queued_bytes = self.landed_bytes = self.lost_bytes = 0
        self._queued = 0  # transfers
        # (lands_s, place in the queue, transfer): those that land first in front
        self._under_way: list[tuple[float, int, Transfer]] = []

    def passed(self, begin: float, size: int) -> float:
        """Return the end of `size` bytes that begin at `begin`, alone."""
        return begin + size / self.bytes_per_s

    def carry(self, transfer: Transfer, now: float, until: float) -> None:
        """Charge a transfer that was queued at `now` and keeps the port busy `until` then."""
        self.settle(now)
        self.free_at = until
        self.queued_bytes += transfer.size
        self._queued += 1
        heappush(self._under_way, (transfer.lands_s, self._queued, transfer))

    def lose(self, now: float) -> None:
        """The device at its end has failed: what has not landed by `now` is lost. The port carries
        it all the same."""
        self.settle(now)
        for _, _, transfer in self._under_way:
            transfer.lost = True

    def settle(self, now: float) -> None:
        """Count what has landed, or was lost, by `now`. Time does not go back."""
        while self._under_way and self._under_way[0][0] <= now:
            transfer = heappop(self._under_way)[2]
            if transfer.lost:
                self.lost_bytes += transfer.size
            else:
                self.landed_bytes += transfer.size


def send(
    path: Sequence[Port],
    now: float,
    size: int,
    passed: Callable[[Port, float, int], float] = Port.passed,
) -> Transfer:
    """Queue `size` bytes at `now` on every port of `path` (at least one, none twice). Latencies add
    up. passed: as `Port.passed`, if something slows a port down."""
    begin, latency = now, 0.0
    for port in path:
        latency += port.latency_s
        if port.free_at > begin:
            begin = port.free_at
    transfer = Transfer(size, begin, begin)
    ends = []
    for port in path:
        end = passed(port, begin, size)
        ends.append(end)
        transfer.lands_s = max(transfer.lands_s, end + latency)
    for port, end in zip(path, ends, strict=True):
        port.carry(transfer, now, end)
    return transfer
