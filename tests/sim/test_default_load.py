"""The default run: its online load alone is 60 to 70 % of what the hardware can do."""

from __future__ import annotations

import pytest

from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate


@pytest.mark.slow
def test_the_default_online_load_is_two_thirds_of_capacity():
    """Capacity by its own definition: how long the same requests take when they all come at
    once."""
    as_is = simulate(SimulationConfig(offline=True))["vllm"].rows.requests
    at_once = simulate(SimulationConfig(offline=True, rate_scale=1e4))["vllm"].rows.requests
    busy = at_once.last_token_s.max() - at_once.arrival_s.min()
    span = as_is.arrival_s.max() - as_is.arrival_s.min()
    assert 0.6 <= busy / span <= 0.7
