"""What a client needs that runs on the server's own machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ahead_of_others() -> Iterator[bool]:
    """This thread goes before the ordinary programs of its host, as if it had a machine of its own.
    True where the host allows that (Linux, root or CAP_SYS_NICE), else nothing changes.

    Without it a client is woken late by a server that keeps its processors busy, and reads tokens
    in one piece that the server sent one by one (docs/calibrate.md, "Answers in one piece").
    Processes that are started meanwhile are ordinary ones. A client that computes all the time
    would hold up everything else.
    """
    if not hasattr(os, "sched_getscheduler"):  # not Linux
        yield False
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    if not keep_ahead():
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)


def keep_ahead() -> bool:
    """The same for good, as for a thread of a pool; False where the host does not allow it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):  # not Linux; not allowed
        return False
    return True
