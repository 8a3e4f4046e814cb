"""`--cold-start`: the first step of each engine takes longer, and no other one."""

from __future__ import annotations

import numpy as np
import pytest
from pandas.testing import assert_frame_equal

from tests.parameters import SOME_POLICIES, mostly_nightly
from twinserve.policies.registry import policy_names
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate

# far apart: nobody waits for anybody, so nothing else changes
APART = {"trace": "fixed:400,30", "rate": 0.01, "requests": 6, "seed": 3}


def steps_and_requests(**settings):
    (result,) = simulate(SimulationConfig(**{**APART, **settings})).values()
    return result.rows.steps, result.rows.requests


@pytest.mark.parametrize("policy", mostly_nightly(policy_names(), *SOME_POLICIES))
def test_the_first_step_takes_that_much_longer(policy):
    warm, _ = steps_and_requests(policy=(policy,))
    cold, requests = steps_and_requests(policy=(policy,), cold_start=0.4)
    longer = (cold.end_s - cold.start_s) - (warm.end_s - warm.start_s)
    assert longer[0] == pytest.approx(0.4) and np.allclose(longer[1:], 0, atol=1e-9)
    ttft = requests.first_token_s - requests.arrival_s
    assert ttft[0] == pytest.approx(ttft[1] + 0.4)


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_engine_has_its_own(replicas):
    _, requests = steps_and_requests(cold_start=2.0, replicas=replicas, rate=1e6)
    ttft = requests.first_token_s - requests.arrival_s
    assert (ttft > 2.0).all() and requests.replica.nunique() == replicas


def test_steps_at_once_are_those_of_single_steps():
    same = {"cold_start": 0.7, "rate": 20.0, "requests": 60}
    for table, exact in zip(
        steps_and_requests(**same), steps_and_requests(exact=True, **same), strict=True
    ):
        assert_frame_equal(table, exact, check_exact=True)
