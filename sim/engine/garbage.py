"""Keep Python's cyclic garbage collector out of the way of a run.

A run makes little cyclic garbage, but millions of objects that live until its end. Walking these
again and again takes 5 % of a simulation. In a live engine, whose process holds vLLM, it pauses
steps by a tenth of a second.

Nothing is frozen (`gc.freeze`): objects that are thawed do not count as new to the collector, so
the garbage of many runs would stay.
"""

import contextlib
import gc
from collections.abc import Iterator

_OBJECTS, _ONE_RUN = 50_000, 1_000_000  # new ones before the collector looks
_OLDER = (20, 1_000)


def collect_seldom(one_run: bool = False) -> None:
    """Apply `collected_seldom` until the process ends. Thresholds stay, because restoring them
    makes the collector walk all objects.

    one_run: the process ends after it, so that most runs are never looked at."""
    gc.set_threshold(_ONE_RUN if one_run else _OBJECTS, *_OLDER)


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Make the collector look seldom at new objects, and never at those that exist already. Can be
    nested."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _OBJECTS), *_OLDER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
