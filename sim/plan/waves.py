"""Runs the trials of many searches, a few at once, the cheapest search first.

Trials go in waves of a fixed size, so that what is tried, and what is given up, is the same however
many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass, field
from typing import Any

from twinserve.sim.plan.trial import Trial, TrialSpec, run_trial
from twinserve.sim.setup.config import SettingsError

WAVE = 4

Search = Generator[TrialSpec, Trial, Any]


@dataclass
class Task:
    """A search. rank: what it could cost at the least, told anew before each wave, None where it
    is to be given up; found: what it returned."""

    search: Search
    rank: Callable[[], Any | None]
    found: Any = None
    over: bool = False
    _next: TrialSpec | None = field(default=None, repr=False)

    def start(self) -> None:
        self._advance(None)

    def give_up(self) -> None:
        self.search.close()
        self.over = True

    def _advance(self, trial: Trial | None) -> None:
        try:
            self._next = next(self.search) if trial is None else self.search.send(trial)
        except StopIteration as end:
            self.found, self.over = end.value, True


def drive(tasks: Sequence[Task], workers: Executor, report: Callable[[int, int], None]) -> int:
    """Until all are over; returns how many trials there were. report(trials so far, searches that
    are under way). Raises what a trial raises."""
    done = 0
    for task in tasks:
        task.start()
    while True:
        live = []
        for number, task in enumerate(tasks):
            if not task.over and (rank := task.rank()) is None:
                task.give_up()
            elif not task.over:
                live.append((rank, number))
        if not live:
            return done
        wave = [tasks[number] for _, number in sorted(live)[:WAVE]]
        try:
            futures = [workers.submit(run_trial, task._next) for task in wave]
            trials = [future.result() for future in futures]
        except BrokenExecutor:
            raise SettingsError(
                "a worker process ended in the middle of a trial, as it does where memory is "
                "short; give --workers 1"
            ) from None
        for task, trial in zip(wave, trials, strict=True):
            task._advance(trial)
        done += len(wave)
        report(done, len(live))
