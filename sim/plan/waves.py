"""Runs the trials of many searches, a few at once, the cheapest search first.

Trials of searches that may be given up go in waves of a fixed size. So the trials do not depend on
the number of processes. Searches that all run to their end need no waves.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from twinserve.errors import TwinserveError
from twinserve.own_code import fault
from twinserve.sim.plan.trial import run_trial
from twinserve.sim.setup.config import SettingsError

WAVE = 4

Search = Generator[Any, Any, Any]  # yields what a trial is made of, and is sent what it found
Waves = Generator[list[Any], list[Any], Any]  # a search that waits for several at once


@dataclass
class Task:
    """A search. rank: its least possible cost, updated before each wave, None if it is to be given
    up; found: what it returned."""

    search: Search | Waves
    rank: Callable[[], Any | None]
    found: Any = None
    over: bool = False
    _next: Any = field(default=None, repr=False)

    @property
    def next_trial(self) -> Any:
        """Return the trial that the search waits for; for `Waves` a list. Raises ValueError before
        it is started and after it is over."""
        if self.over or self._next is None:
            raise ValueError("a search that is not under way waits for no trial")
        return self._next

    def start(self) -> None:
        self._advance(None)

    def give_up(self) -> None:
        self.search.close()
        self.over = True

    def _advance(self, found: Any) -> None:
        try:
            self._next = next(self.search) if found is None else self.search.send(found)
        except StopIteration as end:
            self.found, self.over = end.value, True


def drive(
    tasks: Sequence[Task], workers: Executor, report: Callable[[int, int], None], most: int = WAVE
) -> int:
    """Run all searches to their end, and return the number of trials. report(trials so far,
    searches that are under way); most: trials in a wave. Raises what a trial raises."""

    def told(done: int, _: int) -> None:
        report(done, sum(not task.over for task in tasks))

    return drive_all([in_waves(tasks, most)], workers, told)[1]


def in_waves(tasks: Sequence[Task], most: int = WAVE) -> Waves:
    """Run the trials of all tasks, `most` at once by rank, until all are over."""
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
            return
        wave = [tasks[number] for _, number in sorted(live)[:most]]
        trials = yield [task.next_trial for task in wave]
        for task, trial in zip(wave, trials, strict=True):
            task._advance(trial)


def drive_all(
    searches: Sequence[Search | Waves],
    workers: Executor,
    report: Callable[[int, int], None],
    work: Callable[[Any], Any] | None = None,
) -> tuple[list[Any], int]:
    """Return what each search returns, and the number of trials. No search is given up or waits for
    another. work: makes a trial, called in a worker; by default `run_trial`. report, errors: as of
    `drive`."""
    tasks = [Task(search, lambda: 0) for search in searches]
    waiting = deque(tasks)
    running: dict[Future, tuple[Task, list[Future]]] = {}
    done = 0
    for task in tasks:
        task.start()
    with _told_of_lost_workers():
        while True:
            while waiting and len(running) < WAVE:
                task = waiting.popleft()
                if task.over:
                    continue
                asked = task.next_trial if isinstance(task.next_trial, list) else [task.next_trial]
                wave = [workers.submit(_tried, work or run_trial, spec) for spec in asked]
                running |= dict.fromkeys(wave, (task, wave))
            if not running:
                return [task.found for task in tasks], done
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, wave = running.pop(future)
                trial = future.result()
                done += 1
                if any(other in running for other in wave):
                    continue
                several = isinstance(task.next_trial, list)
                task._advance([one.result() for one in wave] if several else trial)
                waiting.appendleft(task)  # what is under way first: searches are long chains
            report(done, sum(not task.over for task in tasks))


def _tried(work: Callable[[Any], Any], spec: Any) -> Any:
    """In a worker, whose frames do not come back: an error in a user's own code as its line."""
    try:
        return work(spec)
    except Exception as error:
        if isinstance(error, TwinserveError) or (line := fault(error)) is None:
            raise
        raise SettingsError(line) from error


@contextmanager
def _told_of_lost_workers() -> Iterator[None]:
    try:
        yield
    except BrokenExecutor:
        raise SettingsError(
            "a worker process died during a trial, perhaps for lack of memory; give --workers 1"
        ) from None
