"""Replicas of a fleet share what cannot change, and nothing else; what a fleet takes of memory."""

import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType

import numpy as np
import pytest

from tests.golden.golden_runs import crowded
from tests.parameters import mostly_nightly
from twinserve.policies.base import Options
from twinserve.policies.registry import policy_names
from twinserve.profiles.profile import Profile
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.loop import Engine
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import Workload

# What all replicas of a fleet have in common: the clock, and what a run only reads.
COMMON = (Clock, Workload, Profile, Options)
OPAQUE = (type, ModuleType, FunctionType, str, bytes, int, float, Enum, type(None), np.generic)


def parts_of(thing: object) -> Iterator[tuple[str, object]]:
    """What an object refers to, each with its name in it."""
    if isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", part) for i, part in enumerate(thing))
    elif isinstance(thing, MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, partial):
        yield from (("()", part) for part in (thing.func, *thing.args))
    elif not isinstance(thing, np.ndarray):
        names = [n for c in type(thing).__mro__ for n in getattr(c, "__slots__", ())]
        for name in (*vars(thing), *names) if hasattr(thing, "__dict__") else names:
            if hasattr(thing, name):
                yield f".{name}", getattr(thing, name)


def changeable(thing: object) -> bool:
    if isinstance(thing, np.ndarray):
        return thing.flags.writeable and thing.size > 0
    return isinstance(thing, (dict, list, set, deque))


def reachable(engine: Engine) -> dict[int, tuple[str, object]]:
    """Every array and collection that can change: id -> where it is, and itself."""
    found: dict[int, tuple[str, object]] = {}
    seen = {id(engine.backend.model)}  # of step times: a function of the batch
    todo: list[tuple[str, object]] = [
        (name, getattr(engine, name)) for name in ("core", "backend", "recorder")
    ]
    while todo:
        where, thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (*COMMON, *OPAQUE)):
            continue
        seen.add(id(thing))
        if changeable(thing):
            found[id(thing)] = where, thing
        todo += [(where + name, part) for name, part in parts_of(thing)]
    return found


def two_engines(policy: str) -> Simulation:
    inputs = crowded(policy, 5, replicas=2)
    return Simulation(inputs, inputs.policies[0])


def shared(one: Engine, other: Engine) -> list[str]:
    """Where `one` has what `other` has too."""
    mine, theirs = reachable(one), reachable(other)
    return sorted(mine[key][0] for key in mine.keys() & theirs.keys())


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
def test_two_engines_share_nothing_that_can_change(policy):
    simulation = two_engines(policy)
    for _ in range(2):  # as composed, and when they have served requests
        assert shared(*simulation.engines) == []
        simulation.clock.run(until=simulation.clock.now + 0.5)


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
