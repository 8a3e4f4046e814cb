"""The smallest number that is enough: what brute force finds, in fewer trials;
searches run together find what each finds alone."""

from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.sim.plan import closer, waves
from twinserve.sim.plan.search import smallest
from twinserve.sim.plan.waves import WAVE, Task, drive_all
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.executors import InThisProcess


def found(enough, guess: int, least: int = 1, most: int = 100, above: bool = True):
    search = smallest(guess, least, most, above)
    asked = []
    try:
        number = next(search)
        while True:
            asked.append(number)
            number = search.send(enough(number))
    except StopIteration as end:
        assert len(asked) == len(set(asked)) and set(asked) == set(end.value.tried)
        return end.value


@examples(200)
@given(
    answer=st.integers(1, 120),
    guess=st.integers(0, 130),
    least=st.integers(1, 130),
    most=st.integers(1, 100),
)
def test_where_more_is_better_it_is_the_smallest(answer, guess, least, most):
    """Also where the lower bound is wrong by any amount."""
    end = found(lambda n: n >= answer, guess, min(least, most), most)
    assert end.number == (answer if answer <= most else None) and end.monotone
    for beside in (answer - 1, answer + 1):
        assert not 1 <= beside <= most or answer > most or beside in end.tried


@pytest.mark.parametrize("guess", [1, 3, 40, 64])
def test_few_trials_find_it_near_and_far(guess):
    assert len(found(lambda n: n >= 40, guess, most=1000).tried) <= 14
    assert len(found(lambda n: n >= guess, guess, most=1000).tried) <= 3


@examples(100)
@given(good=st.sets(st.integers(1, 30)), guess=st.integers(1, 30), least=st.integers(1, 30))
def test_whatever_is_enough_the_answer_is_and_its_neighbour_below_is_not(good, guess, least):
    end = found(good.__contains__, guess, least, 30)
    if end.number is None:
        assert not any(end.tried.values())
    else:
        assert end.number in good and end.number == min(n for n in end.tried if end.tried[n])
        assert end.number == 1 or end.tried[end.number - 1] is False
        assert end.number == 30 or end.number + 1 in end.tried
    short = found(good.__contains__, guess, least, 30, above=False)
    assert short.number == end.number and dict(short.tried).items() <= dict(end.tried).items()
    assert set(end.tried) - set(short.tried) <= {(end.number or 0) + 1}


@examples(100)
@given(n=st.integers(2, 40), limit=st.floats(0.001, 1.6))
def test_the_rate_of_one_replica_is_found_to_a_16th_of_its_share(n, limit):
    """limit: of the rate, in shares of the peak's that each of `n` replicas gets."""
    asked = []

    def on_peaks(candidate, peaks, replicas, *, speed, fails, verdict):
        asked.append(speed)
        yield speed
        return [SimpleNamespace(keeps=speed * n <= limit)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closer, "on_peaks", on_peaks)
        search = closer.rate_of_one(SimpleNamespace(candidate=None, peaks=()), n)
        with pytest.raises(StopIteration) as end:
            while True:
                next(search)
    share = (end.value.value or 0.0) * n
    assert share <= limit and len(set(asked)) == len(asked) <= 6
    if limit < 1:
        assert limit - share < 1 / 16 + 1e-9
        assert len(asked) == 4 if limit > 0.75 + 1e-9 else True


def counting(start: int, steps: int):
    """Sends each number, and adds up what comes back."""
    total = 0
    for number in range(start, start + steps):
        total += yield number
    return total


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
