"""Echo's predictors of online load: KV memory for the threshold (Sec. 5.3), arrival rate for Fig.
11 (Sec. 7.4)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable


class Window:
    """Mean and standard deviation of the last `size` whole numbers. Sums are whole numbers too, so
    nothing drifts."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self.values: deque[int] = deque(maxlen=self.size)
        self._sum = 0
        self._squares = 0

    def add(self, value: int, times: int = 1) -> None:
        for _ in range(min(times, self.size)):
            if len(self.values) == self.size:
                oldest = self.values[0]
                self._sum -= oldest
                self._squares -= oldest * oldest
            self.values.append(value)
            self._sum += value
            self._squares += value * value

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return self._sum / len(self.values) if self.values else 0.0

    @property
    def deviation(self) -> float:
        n = len(self.values)
        return math.sqrt(n * self._squares - self._sum * self._sum) / n if n else 0.0

    def high(self, sigmas: float) -> float:
        """mu + sigmas * sigma."""
        return self.mean + sigmas * self.deviation


class MemoryForecast:
    """What online requests may need of KV memory soon: mu + sigmas * sigma of what they held over
    the last `window_s` seconds.

    Sampled every `every_s` seconds of the engine's clock, whatever steps and plans do in between,
    so that the forecast does not depend on how often it is asked for.
    """

    def __init__(self, sigmas: float = 2.0, window_s: float = 3600.0, every_s: float = 1.0) -> None:
        self.sigmas = sigmas
        self.every_s = every_s
        self.window = Window(round(window_s / every_s))
        self._taken = 0  # samples so far; the next one is due at _taken * every_s
        self.blocks = 0

    @property
    def next_s(self) -> float:
        """When the next sample is due, seconds."""
        return self._taken * self.every_s

    def remember(self, held: Iterable[int]) -> None:
        """Samples from before the clock began, blocks, the oldest first; before the first
        `observe`."""
        for blocks in held:
            self.window.add(blocks)
        self.blocks = math.ceil(self.window.high(self.sigmas))

    def observe(self, now: float, held: int) -> None:
        """Online requests hold `held` blocks, and have since the last plan: samples that came due
        take that value."""
        due = 0
        while (self._taken + due) * self.every_s <= now:
            due += 1
            if due > self.window.size:  # long idle: the whole window has one value
                due = max(due, int(now / self.every_s) - self._taken)
        if due:
            self._taken += due
            self.window.add(held, due)
            self.blocks = math.ceil(self.window.high(self.sigmas))

    def reserve(self, held: int) -> int:
        """Blocks to leave free for online requests that hold `held` now."""
        return max(0, self.blocks - held)


class ArrivalForecast:
    """The arrival rate to expect: mu + sigmas * sigma of the arrivals per bin over the last
    `window_s` seconds (Fig. 11)."""

    def __init__(self, window_s: float = 900.0, bin_s: float = 60.0, sigmas: float = 0.0) -> None:
        self.bin_s = bin_s
        self.sigmas = sigmas
        self.window = Window(round(window_s / bin_s))
        self._bin = 0
        self._count = 0

    def arrive(self, now: float) -> None:
        """A request arrives at `now` (seconds, not decreasing)."""
        self._close(now)
        self._count += 1

    def _close(self, now: float) -> None:
        """Bins that ended before `now` enter the window."""
        current = int(now // self.bin_s)
        if current > self._bin:
            self.window.add(self._count)
            self.window.add(0, current - self._bin - 1)
            self._bin, self._count = current, 0

    def rate(self, now: float) -> float:
        """Requests a second expected at `now`, from bins that ended; 0 before the first one
        ends."""
        self._close(now)
        return self.window.high(self.sigmas) / self.bin_s
