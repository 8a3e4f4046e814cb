"""A run that lasts as long as its online requests."""

import pytest

from twinserve.experiments.study.runs import WhileOnline
from twinserve.policies.registry import parse_policy
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.transform import merge
from twinserve.traces.workload import Workload


@pytest.mark.parametrize("first_s", [None, 5.1])
def test_a_run_while_online_requests_last_is_watched_slice_by_slice(first_s):
    """Two of them, the later at 5 s, when the first has long ended; and offline requests that take
    far longer."""
    load = merge(
        Workload.build([0.0, 5.0], [16, 16], [5, 50]), longdoc("toolbench", requests=400, seed=2)
    )
    config = SimulationConfig(profile="llama-3.1-8b@a100-40g", policy=("echo",))
    inputs = Inputs(config, load, resolve_hardware(config), (parse_policy("echo"),), ())
    looks = []
    run = WhileOnline(
        inputs,
        inputs.policies[0],
        slice_s=0.25,
        first_s=first_s,
        watch=lambda of: looks.append(of.clock.now),
    )
    run.run()
    assert looks == pytest.approx([(first_s or 0.25) + 0.25 * i for i in range(len(looks))])
    requests = run.rows().requests
    online = requests[requests.service_class == "rt"]
    assert online.finished.all() and not requests.finished.all()
    assert 5 < looks[-2] < online.last_token_s.max() <= looks[-1] == run.clock.now
