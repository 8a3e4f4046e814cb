"""Searches run together find what each finds alone, in whatever order their trials end."""

from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor

import pytest

from twinserve.sim.plan import waves
from twinserve.sim.plan.waves import WAVE, Task, drive_all
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.executors import InThisProcess


def counting(start: int, steps: int):
    """Sends each number, and adds up what comes back."""
    total = 0
    for number in range(start, start + steps):
        total += yield number
    return total


LENGTHS = [3, 0, 1, 7, 2, 4, 0, 5]
WANTED = [sum(2 * (10 * i + k) for k in range(n)) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_searches_find_what_each_finds_alone(monkeypatch, threads):
    told = []
    monkeypatch.setattr(waves, "run_trial", lambda number: 2 * number)
    workers = ThreadPoolExecutor(threads) if threads else InThisProcess()
    with workers:
        searches = [counting(10 * i, n) for i, n in enumerate(LENGTHS)]
        found, trials = drive_all(searches, workers, lambda *so_far: told.append(so_far))
    assert found == WANTED and trials == sum(LENGTHS)
    assert told[-1] == (trials, 0) and [done for done, _ in told] == sorted(d for d, _ in told)


def in_pairs(start: int, steps: int):
    """Waits for two trials at a time."""
    total = 0
    for number in range(start, start + steps):
        first, second = yield [number, number + 100]
        total += second - first
    return total


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_search_that_waits_for_several_gets_them_in_their_order(monkeypatch, threads):
    monkeypatch.setattr(waves, "run_trial", lambda number: 2 * number)
    workers = ThreadPoolExecutor(threads) if threads else InThisProcess()
    with workers:
        searches = [counting(0, 3), in_pairs(10, 4), counting(30, 2), in_pairs(50, 0)]
        found, trials = drive_all(searches, workers, lambda *_: None)
    assert found == [6, 4 * 200, 122, 0] and trials == 3 + 8 + 2


def test_a_whole_wave_is_handed_in_before_any_trial_has_ended(monkeypatch):
    class Holds(InThisProcess):
        """Ends no call before a wave of them has come, and then all of them, the last first."""

        def __init__(self):
            self.open = []

        def submit(self, fn, /, *args, **kwargs):
            future: Future = Future()
            self.open.append((future, fn(*args)))
            if len(self.open) == WAVE:
                while self.open:
                    ended, result = self.open.pop()
                    ended.set_result(result)
            return future

    monkeypatch.setattr(waves, "run_trial", lambda number: 2 * number)
    searches = [counting(10 * i, 4) for i in range(WAVE * 2)]
    found, trials = drive_all(searches, Holds(), lambda *_: None)
    assert trials == 8 * WAVE
    assert found == [2 * sum(range(10 * i, 10 * i + 4)) for i in range(WAVE * 2)]


def test_a_lost_worker_is_one_line(monkeypatch):
    def lost(number):
        raise BrokenExecutor("gone")

    monkeypatch.setattr(waves, "run_trial", lost)
    with pytest.raises(SettingsError, match="give --workers 1"):
        drive_all([counting(0, 1)], InThisProcess(), lambda *_: None)


def test_only_a_search_that_is_under_way_waits_for_a_trial():
    task = Task(counting(5, 2), lambda: 0)
    with pytest.raises(ValueError, match="not under way"):
        _ = task.next_trial
    task.start()
    assert task.next_trial == 5
    task.give_up()
    with pytest.raises(ValueError, match="not under way"):
        _ = task.next_trial
