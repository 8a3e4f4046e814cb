"""Echo's prediction of online memory, against what was held."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.policies.echo.offline import MemoryForecast
from twinserve.sim.plan.trial import predicted_memory


def steps_of(held, seconds: float = 1.0) -> pd.DataFrame:
    """A step of `seconds` for each number of blocks that online requests hold."""
    start = np.arange(len(held)) * seconds
    return pd.DataFrame(
        {
            "replica": 0,
            "start_s": start,
            "end_s": start + seconds,
            "kv_rt_blocks": np.array(held, np.int64),
        }
    )


def test_a_prediction_by_hand():
    """History of four: 2, 4, 4, 6 have mu 4 and sigma sqrt(2), so mu + 2 sigma is 6.83 and 7 blocks
    are kept."""
    predicted, held = predicted_memory(steps_of([2, 4, 4, 6, 9, 5]), 2.0, 4.0, 1.0, 1.0)
    assert predicted.tolist() == [7, 10] and held.tolist() == [9, 5]  # 4, 4, 6, 9: 5.75 + 2 * 2.05
    steady, held = predicted_memory(steps_of([70] * 50), 2.0, 10.0, 1.0, 5.0)
    assert set(steady.tolist()) == set(held.tolist()) == {70} and len(held) == 36
    assert not len(predicted_memory(steps_of([70] * 14), 2.0, 10.0, 1.0, 5.0)[0])


@examples(40)
@given(
    held=st.lists(st.integers(0, 500_000), min_size=3, max_size=60),
    history=st.integers(1, 10),
    ahead=st.integers(1, 3),
    sigmas=st.sampled_from([0.0, 1.0, 2.0, 3.5]),
)
def test_it_is_the_prediction_of_the_policy(held, history, ahead, sigmas):
    forecast = MemoryForecast(sigmas, float(history), 1.0)
    blocks = []
    for now, value in enumerate(held):
        forecast.observe(float(now), value)
        blocks.append(forecast.blocks)
    predicted, later = predicted_memory(steps_of(held), sigmas, history, 1.0, ahead)
    # the last bit before rounding up
    assert np.abs(predicted - blocks[history - 1 : len(held) - ahead]).max(initial=0) <= 1
    assert later.tolist() == held[history - 1 + ahead :]


def test_more_sigmas_are_exceeded_less():
    steps = steps_of(np.random.default_rng(0).normal(1000, 100, 4000).astype(int))
    exceeded = []
    for sigmas in (0.0, 1.0, 2.0, 3.0):
        predicted, held = predicted_memory(steps, sigmas, 600.0, 1.0, 60.0)
        exceeded.append(float((held > predicted).mean()))
    assert exceeded == sorted(exceeded, reverse=True)
    # of a normal distribution 2.3 % lie above mu + 2 sigma
    assert exceeded[2] == pytest.approx(0.023, abs=0.01)


def test_nothing_is_held_while_nothing_runs():
    steps = steps_of([5, 5])
    steps.loc[1, ["start_s", "end_s"]] = [3.0, 4.5]  # idle from 1 to 3 s
    predicted, held = predicted_memory(steps, 0.0, 1.0, 1.0, 1.0)
    assert predicted.tolist() == [5, 0, 0, 5] and held.tolist() == [0, 0, 5, 5]
