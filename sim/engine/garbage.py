"""Python's cyclic garbage collector, kept out of the way of a run.

A run makes no garbage in cycles worth looking for, but millions of objects that live until its end.
The collector walks them again and again: 5 % of a simulation, and pauses of a tenth of a second in
the steps of a live engine, whose process holds vLLM.

Nothing is frozen (`gc.freeze`): what is thawed does not count as new to the collector, so the
garbage of many runs would stay.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_THRESHOLDS = (50_000, 20, 1_000)


def collect_seldom() -> None:
    """Apply `collected_seldom` until the process ends. Thresholds stay, because restoring them
    makes the collector walk all objects."""
    gc.set_threshold(*_THRESHOLDS)


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Make the collector look seldom at new objects, and never at those that exist already. Can be
    nested."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
