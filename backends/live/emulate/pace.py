"""When the steps of an emulated GPU begin and end. Imports no vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Pace(Protocol):
    """launch: a step of so many `seconds` is handed to the GPU; when it will have ended, seconds of
    this pace's own clock. goes_on: the engine had no break since the last step, so that a GPU's
    host would have had none. wait: until then."""

    def launch(self, seconds: float, goes_on: bool) -> float: ...

    def wait(self, end_s: float) -> None: ...


@dataclass
class Lateness:
    """How many steps ended late because of the host, and by how much in all."""

    steps: int = 0
    late: int = 0
    late_s: float = 0.0
    busy_s: float = 0.0

    def line(self) -> str:
        """Return the counts in one line, for a log."""
        share = 100 * self.late / self.steps if self.steps else 0.0
        return (
            f"emulated GPU: {self.steps:,} steps, {self.busy_s:,.1f} s; {share:.1f} % of them "
            f"ended late ({self.late:,}), by {self.late_s:,.2f} s in all, since the host was not "
            "ready"
        )


class WallPace:
    """Wall time. The profile's step includes the host's part. So a step of a busy engine begins
    when the one before it ended, whatever this machine's host took to launch it. If that took
    longer than the whole step, the step ends late, and is counted."""

    TOLERANCE_S = 0.0005  # what a sleep is off by

    def __init__(self) -> None:
        self.lateness = Lateness()
        self._end_s = 0.0

    def launch(self, seconds: float, goes_on: bool) -> float:
        now = time.monotonic()
        start_s = self._end_s if goes_on else max(self._end_s, now)
        counts = self.lateness
        counts.steps += 1
        counts.busy_s += seconds
        behind = now - start_s - seconds
        if behind > self.TOLERANCE_S:
            counts.late += 1
            counts.late_s += behind
            start_s += behind
        self._end_s = start_s + seconds
        return self._end_s

    def wait(self, end_s: float) -> None:
        left = end_s - time.monotonic()
        if left > 0:
            time.sleep(left)
