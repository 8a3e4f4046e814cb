"""Python's cyclic garbage collector, kept out of the way of a run.

A run makes no garbage in cycles worth looking for, but millions of objects that live until its end. The collector walks them
again and again: 5 % of a simulation, and pauses of a tenth of a second in the steps of a live engine, whose process holds vLLM.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_THRESHOLDS = (50_000, 20, 1_000)


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """What is there already is not looked at, and what is made meanwhile seldom. Can be nested."""
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # else somebody further out, or vLLM, keeps them so
            gc.unfreeze()
