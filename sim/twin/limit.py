"""A time limit on many runs: each part gets an even share of the time left. Work in progress at the
limit is given up. Preparation of runs does not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twinserve.sim.setup.config import SettingsError


class TimeUp(Exception):
    """The run under way was given up, since the time was up."""


def check_limit(seconds: float | None) -> None:
    """Raises SettingsError for a `--limit` that is no number of seconds above 0."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise SettingsError(f"--limit {seconds:g}: give seconds above 0")


class TimeLimit:
    """seconds: of wall time from now on; None: no limit."""

    def __init__(
        self, seconds: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._end = float("inf") if seconds is None else now() + seconds

    def share(self, parts: int) -> TimeLimit:
        """The limit of the next one of `parts` equal parts that are left."""
        now = self._now()
        found = TimeLimit(now=self._now)
        found._end = now + max(self._end - now, 0.0) / parts
        return found

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time does not count inside."""
        begun = self._now()
        try:
            yield
        finally:
            self._end += self._now() - begun

    def up(self) -> bool:
        return self._now() >= self._end

    def check(self) -> None:
        """Raises TimeUp when the time is up."""
        if self.up():
            raise TimeUp

    def around(self, report: Callable[..., None] | None) -> Callable[..., None]:
        """`report`, of a run's progress, which ends the run when the time is up."""

        def reported(*state) -> None:
            self.check()
            if report is not None:
                report(*state)

        return reported
