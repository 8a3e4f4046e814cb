"""The smallest number that is enough: what brute force finds, in fewer trials."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.sim.plan import closer
from twinserve.sim.plan.search import smallest


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


def test_where_more_is_not_always_better_that_is_said():
    end = found(lambda n: n in (5, 7, 8), 5, least=5)
    assert end.number == 5 and not end.monotone and end.tried[6] is False
    end = found(lambda n: n in (3, 5, 6, 7), 5, least=3)
    assert end.number == 3 or end.number == 5  # what was not tried is not known
    assert end.number == min(n for n, ok in end.tried.items() if ok)


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
        assert len(asked) == 4 if limit >= 0.75 else True
