"""What a calibration has measured so far, for its keeper: an interrupted one has it still."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from twinserve.profiles.measured.samples import Measurement

if TYPE_CHECKING:
    from twinserve.backends.live.measure.measure import _Run

_KEEP_EVERY_S = 5.0


class Kept:
    """Gives what is measured so far to its keeper. facts: the provenance, of which the part
    that grows is made anew each time."""

    def __init__(self, run: _Run, facts: dict, keep: Callable[[Measurement], None]) -> None:
        self._run, self._facts, self._keep = run, facts, keep
        self._next = time.monotonic() + _KEEP_EVERY_S

    def so_far(self) -> Measurement:
        run = self._run
        return Measurement([*run.steps, *run.traffic], [*run.swaps], self._facts | _progress(run))

    def now_and_then(self) -> None:
        if time.monotonic() >= self._next:
            self.now()
            self._run.bench.step({})  # the next step shall not find the caches full of this

    def now(self) -> None:
        """Give the keeper what has been measured so far, if anything."""
        if self._run.measuring and self._run.empty_s:
            self._keep(self.so_far())
        self._next = time.monotonic() + _KEEP_EVERY_S


def _progress(run: _Run) -> dict:
    """The part of the provenance that is known when something is measured."""
    return {
        "rounds": run.rounds,
        "rounds_again": run.again,
        "partial": run.partial(),
        "elapsed_s": run.elapsed_s(),
        "load_average_after": os.getloadavg()[0],
        "empty_s": float(np.median(run.empty_s)),
        "submit_s": float(np.median(run.bench.submit_s)),
        "swap": run.swap_note,
        "loop_s": min(run.loop_s, default=0.0),  # others on the machine can only make it longer
    }
