"""What a fleet takes of resident memory, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parameters import mostly_nightly

REPLICAS = 400
# An 8B model on an 80 GB GPU: 27,570 KV blocks. Imports and inputs are there before the fleet is.
SCRIPT = """
import sys
from pathlib import Path
from twinserve.policies.requests import End
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation

def resident_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

policy, replicas = sys.argv[1], int(sys.argv[2])
inputs = resolve(
    SimulationConfig(
        trace="mooncake", offline=True, requests=40, profile="llama-3.1-8b@h100", policy=(policy,)
    )
)
Simulation(inputs, inputs.policies[0]).run()  # what all replicas share is there
before = resident_bytes()
fleet = Simulation(
    inputs,
    inputs.policies[0],
    made_of=[Description(inputs.hardware, inputs.policies[0])] * replicas,
)
fleet.run()
ended = sum(request.end == End.COMPLETED for request in fleet.fleet.requests)
print(ended, resident_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to ask")
@pytest.mark.parametrize("policy", mostly_nightly(["vllm", "bros", "echo", "layerkv"], "bros"))
def test_replicas_that_serve_little_take_little(policy):
    """Each with what its share of 40 requests holds: before, it took 1.2 to 2.4 MB."""
    command = [sys.executable, "-c", SCRIPT, policy, str(REPLICAS)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ended, taken = map(int, said.split())
    assert ended == 40
    assert taken / REPLICAS < 120_000  # bytes
