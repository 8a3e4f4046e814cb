"""Which measurements others disturbed: found where steps are slowed at chosen times, and hardly
ever where nobody slows any."""

import numpy as np
import pytest

from twinserve.profiles.measured.disturbed import disturbed, disturbed_beside, slowdown

POINTS, REPEATS = 60, 20
N = POINTS * REPEATS


def measured(seed: int, jitter: float) -> tuple[np.ndarray, np.ndarray]:
    """Works in an order that is shuffled in every round, and seconds; one step in fifty takes three
    times as long for reasons of its own."""
    rng = np.random.default_rng(seed)
    work = np.concatenate([rng.permutation(POINTS) for _ in range(REPEATS)])
    seconds = 1e-3 * (1 + work) * rng.lognormal(0, jitter, N)
    return work, seconds * np.where(rng.random(N) < 0.02, 3.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [0.01, 0.05, 0.1, 0.2, 0.3])
def test_an_engines_own_jitter_is_seldom_taken_for_others(jitter):
    found = sum(disturbed(*measured(seed, jitter), np.zeros(N)).sum() for seed in range(25))
    assert found / (25 * N) < 2e-3


@pytest.mark.parametrize("factor", [1.6, 2.0, 4.0])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.75])
def test_steps_slowed_for_a_while_are_found_and_no_others(factor, share):
    """In one stretch of time, without losing the core."""
    rng = np.random.default_rng(1)
    for seed in range(5):
        work, seconds = measured(seed, 0.07)
        first = int(rng.integers(0, N * (1 - share)))
        slowed = np.zeros(N, bool)
        slowed[first : first + int(share * N)] = True
        found = disturbed(work, np.where(slowed, seconds * factor, seconds), np.zeros(N))
        assert found[slowed].mean() > 0.97
        assert found[~slowed].mean() < 0.03  # a few beside the ends of the stretch


def test_a_step_that_lost_its_core_is_found_whatever_else_is_known():
    seconds, off = np.array([1.0, 1.0, 1.0]), np.array([0.04, 0.06, np.nan])
    assert disturbed(np.arange(3), seconds, off).tolist() == [False, True, False]


def test_slowed_steps_are_found_among_those_that_lost_their_core():
    """What lost its core is no measure of the others, and hides none of them."""
    rng = np.random.default_rng(2)
    work, seconds = measured(0, 0.05)
    slowed = np.arange(N) > N // 2
    away = rng.random(N) < 0.4
    seconds = np.where(slowed, 2 * seconds, seconds)
    off = np.where(away, 5 * seconds, 0.0)
    found = disturbed(work, seconds + off, off)
    assert found[away].all() and found[slowed].mean() > 0.97
    assert found[~slowed & ~away].mean() < 0.02


def test_a_machine_that_is_slow_all_the_time_is_a_slower_machine():
    work, seconds = measured(0, 0.05)
    for factor in (1, 3):
        assert not disturbed(work, seconds * factor, np.zeros(N)).any()


def test_works_measured_once_are_judged_by_nobody():
    seconds = np.random.default_rng(0).lognormal(0, 1, 200)
    assert not disturbed(np.arange(200), seconds, np.zeros(200)).any()


def test_nothing_measured_is_nothing_disturbed():
    none = np.zeros(0)
    assert disturbed(none.astype(np.int64), none, none).tolist() == []
    assert disturbed_beside(none, none.astype(bool)).tolist() == []


def test_the_slowdown_is_the_median_of_what_is_counted_around():
    ratio = np.arange(20.0)
    counted = np.ones(20, bool)
    assert slowdown(ratio, counted)[10] == 10
    assert slowdown(ratio, counted)[0] == 2.5  # of 0 to 5
    counted[8:13] = False
    assert slowdown(ratio, counted)[10] == np.median([5, 6, 7, 13, 14, 15])
    assert np.isnan(slowdown(ratio, np.zeros(20, bool))).all()
