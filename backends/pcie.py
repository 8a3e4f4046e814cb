"""The link between device and host memory: a resource of its own, with a queue in each direction.

Transfers are served one after another (a copy engine a direction, full duplex), outlive the step that started them, and
are known by when they end. Bytes, seconds.
"""

from __future__ import annotations

from ..policies.plan import Direction


class PcieLink:
    """bytes_per_s: sustained, each direction, over all ranks. latency_s: fixed cost of one transfer."""

    def __init__(self, bytes_per_s: float, latency_s: float = 10e-6) -> None:
        if not bytes_per_s > 0 or latency_s < 0:
            raise ValueError(f"a link of {bytes_per_s} bytes/s with {latency_s} s latency")
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at = {Direction.TO_HOST: 0.0, Direction.TO_DEVICE: 0.0}
        self.moved = {Direction.TO_HOST: 0, Direction.TO_DEVICE: 0}

    def transfer(self, now: float, size: int, direction: Direction) -> float:
        """Queue `size` bytes at `now`; returns when they have arrived."""
        end = max(now, self.free_at[direction]) + self.latency_s + size / self.bytes_per_s
        self.free_at[direction] = end
        self.moved[direction] += size
        return end
