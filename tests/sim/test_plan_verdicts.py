"""Whether an objective is met, failed or not decided, from parts of runs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from tests.examples import examples
from twinserve.sim.plan.closer import drawn
from twinserve.sim.plan.sizes import Size
from twinserve.sim.plan.trial import Kept, Trial, needed
from twinserve.sim.plan.verdicts import attained, together
from twinserve.sim.results.options import Objective
from twinserve.sim.results.parts import ratio, student
from twinserve.sim.setup.config import SimulationConfig

TTFT = Objective("rt", "ttft", 1.0, statistic="p90")


def trial(*kept: int, due: int = 100, value_s: float = 0.5) -> Trial:
    windows = tuple((due, k) for k in kept)
    one = Kept(due * len(kept), sum(kept), windows, value_s)
    return Trial(True, False, (), (one,))


@pytest.mark.parametrize("freedom", [1, 2, 9, 11, 19, 29, 99, 500])
def test_student_is_never_too_narrow(freedom):
    exact = float(special.stdtrit(freedom, 0.975))
    assert exact - 0.0005 <= student(freedom) <= 1.02 * exact


def test_an_interval_by_hand():
    """Parts that keep 9, 10, 8 and 9 of 10: 0.9, and residuals 0, 1, -1, 0."""
    share, half = ratio([(10, 9), (10, 10), (10, 8), (10, 9)])
    assert share == 0.9 and half == pytest.approx(3.182 * np.sqrt(4 / 3 * 2) / 40)
    assert ratio([(10, 9)]) == (0.9, np.inf)


def test_the_three_answers():
    sure, lost = [99, 98, 97, 99], [80, 82, 81, 79]
    for kept, answer in ((sure, "meets"), (lost, "fails"), ([80, 100, 95, 88], "undecided")):
        (one,) = attained([TTFT], [trial(*kept)])
        assert one.answer == answer and one.low <= one.share <= one.high
    assert one.slack == pytest.approx(0.5)
    met, failed = (attained([TTFT], [trial(*kept)])[0] for kept in (sure, lost))
    assert together([met, met]) == "meets" and together([met, one]) == "undecided"
    assert together([failed, one]) == "fails"
    for kept, end in (([100, 100, 96, 100], "high"), ([0, 4, 0, 0], "low")):
        assert getattr(attained([TTFT], [trial(*kept)])[0], end) == (end == "high")
    empty = replace(trial(*sure).objectives[0], windows=((0, 0), *((100, k) for k in sure)))
    assert attained([TTFT], [Trial(True, False, (), (empty,))])[0].low == met.low


@examples(50)
@given(st.lists(st.integers(70, 100), min_size=10, max_size=10))
def test_the_same_again_in_more_draws_is_surer_and_says_the_same_share(kept):
    (once,) = attained([TTFT], [trial(*kept)])
    (often,) = attained([TTFT], [trial(*kept)] * 4)
    assert often.share == pytest.approx(once.share)
    assert often.high - often.low <= once.high - once.low + 1e-12


def test_of_a_thousand_requests_a_percentile_needs_whole_ones():
    p = Objective("rt", "ttft", 1.0, statistic="p99.9")
    assert (needed(p, 1000), needed(p, 1001), needed(TTFT, 10), needed(TTFT, 11)) == (
        999, 1000, 9, 10,
    )  # fmt: skip


def test_nothing_due_says_nothing():
    none = Trial(True, False, (), (Kept(0, 0, (), None),))
    assert attained([TTFT], [none]) == () and together(()) == "meets"


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    """Independent parts of 200 requests that keep 90 % on the mean, some parts better than
    others."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        rates = np.clip(rng.normal(0.9, 0.04, 10), 0, 1)
        share, half = ratio([(200, int(rng.binomial(200, p))) for p in rates])
        hits += abs(share - 0.9) <= half
    assert 0.93 <= hits / 2000 <= 0.97


@pytest.mark.parametrize("draws", [1, 2])
def test_a_size_that_failed_at_the_end_of_its_first_peak_is_seen_on_all(draws):
    """Its search did not go on to the second one."""
    candidate = SimpleNamespace(config=SimulationConfig(rate_scale=1.0))
    peaks = [SimpleNamespace(settings=lambda n, speed, fails: {}, since_s=0.0)] * 2
    size = Size(candidate, peaks, 1, 1, 4, None, trials={1: [trial(*[50] * 10)]})
    look, asked = drawn(size, [TTFT], 1, draws), 0
    try:
        next(look)
        while True:
            asked += 1
            look.send(trial(*[50] * 10))
    except StopIteration as end:
        found = end.value
    assert asked == 2 * draws and len(found.attained) == 2 and found.answer == "fails"
