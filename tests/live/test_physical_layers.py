"""Which pages a step reads and writes in each layer when the layer-wise ledger's layout is carried
out, on a memory of labels: no engine needed."""

import numpy as np
import pytest

from tests.live.layer_labels import (
    BLOCK,
    LAYERS,
    Labels,
    carried_out,
    deep_profile,
    inputs_for,
    pressed_layers,
)
from tests.parameters import mostly_nightly
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.plan import DEVICE, HOST, StepPlan
from twinserve.policies.registry import policy_names
from twinserve.policies.requests import RequestTable
from twinserve.sim.twin.live import blank_settings, live_settings


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    return deep_profile(tmp_path_factory.mktemp("deep"))


LAYERKV = [
    "layerkv:x=0",
    "layerkv:x=0,slo_aware=false",
    "layerkv:park=false",
    "layerkv:promote=false",
    "layerkv:proactive=false,interleaved=false",
]
# with more, memory is set aside for so much text that nothing is ever moved
CROWDED = {"tgi": "max_new_tokens=12,"}
OTHERS = [f"{name}:{CROWDED.get(name, '')}kv=layerwise" for name in policy_names()]
OTHERS += ["vllm-v0:preemption_mode=swap,kv=layerwise", "bros:chunk=48,kv=layerwise"]
ALL = [*LAYERKV, *OTHERS]
FEW = {"requests": 8, "num_blocks": 7}


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(ALL, ALL[0], ALL[-1]))
def test_every_layer_of_a_step_finds_its_own_tokens(profile, policy):
    simulation, labels = carried_out(inputs_for(profile, policy, **FEW))
    assert simulation.rows().requests["finished"].all()
    labels.step(StepPlan())
    assert labels.memory.rows() == []
    assert labels.memory.free_host_cells == labels.ledger.host_blocks * LAYERS


WAYS = ("to_host_bytes", "to_device_bytes")


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(LAYERKV, LAYERKV[0]))
def test_what_is_copied_is_what_is_accounted(profile, policy):
    simulation, labels = carried_out(inputs_for(profile, policy, **FEW))
    moved, backend = labels.memory.moved, simulation.engines[0].backend
    each = simulation.inputs.hardware.limits.kv_bytes_per_token / LAYERS
    asked = [sum(c[way] for c in backend.moved.values()) for way in WAYS]
    assert asked == [
        each * (moved.offloaded + moved.streamed_out),
        each * (moved.onloaded + moved.streamed_in),
    ]
    assert min(asked) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("policy", LAYERKV)
def test_under_any_pressure(profile, policy):
    moved = np.zeros(4, np.int64)
    for seed in range(8):
        simulation, labels = carried_out(pressed_layers(profile, seed, policy))
        assert simulation.rows().requests["finished"].all(), seed
        found = labels.memory.moved
        moved += found.offloaded, found.onloaded, found.streamed_in, found.streamed_out
    assert (moved > 0).all() or policy == "layerkv:promote=false"


class World:
    """A ledger of a few blocks, labels, and plans made by hand."""

    def __init__(self, blocks: int, host_blocks: int, requests: int = 2) -> None:
        self.table = RequestTable()
        for number in range(requests):
            self.table.submit("ABC"[number], prompt_tokens=2 * BLOCK)
        self.ledger = LayerwiseLedger(self.table, blocks, BLOCK, host_blocks, LAYERS)
        self.labels = Labels(self.ledger)

    def plan(self, *grants: tuple[int, int]) -> None:
        rows, tokens = np.array(grants, np.int64).reshape(-1, 2).T
        self.labels.step(StepPlan(rows, tokens, moves=self.ledger.take_moves()))
        self.table.computed_tokens[rows] += tokens


def test_room_on_the_host_that_comes_free_is_used_in_the_same_plan():
    """The host has room for one request. A comes back, and B leaves in its place."""
    world = World(blocks=4, host_blocks=2)
    world.ledger.begin_step()
    assert world.ledger.admit(0, 2 * BLOCK) and world.ledger.admit(1, 2 * BLOCK)
    world.plan((0, 2 * BLOCK), (1, 2 * BLOCK))
    world.ledger.begin_step()
    assert world.ledger.swap_out(0)
    world.plan()
    world.ledger.begin_step()
    assert world.ledger.swap_in(0) and world.ledger.swap_out(1)
    world.plan((0, 0))
    world.ledger.begin_step()
    assert world.ledger.swap_in(1) is True
    world.plan((0, 0), (1, 0))
    assert world.labels.memory.free_host_cells == 2 * LAYERS


def test_plans_without_a_step_come_with_the_next_one():
    world = World(blocks=2, host_blocks=2, requests=1)
    world.ledger.begin_step()
    assert world.ledger.admit(0, 2 * BLOCK)
    world.plan((0, BLOCK + 3))
    for way in (HOST, DEVICE, HOST, DEVICE):
        world.ledger.begin_step()
        moved = world.ledger.offload if way == HOST else world.ledger.onload
        assert moved(0, 3)
        world.labels.memory.follow(world.ledger.take_moves())
    world.ledger.begin_step()
    world.plan((0, 1))
    assert world.labels.memory.moved.offloaded == 2 * 3 * (BLOCK + 3)


def test_a_lost_move_is_refused_before_anybody_reads():
    world = World(blocks=2, host_blocks=2, requests=1)
    world.ledger.begin_step()
    assert world.ledger.admit(0, 2 * BLOCK)
    world.plan((0, BLOCK))
    world.ledger.begin_step()
    assert world.ledger.offload(0, 2)
    world.ledger.take_moves()
    with pytest.raises(LiveEngineError, match="32 tokens of A in other pages than the engine"):
        world.plan((0, 1))


def test_a_step_that_streams_more_than_was_set_aside_is_refused():
    world = World(blocks=2, host_blocks=4, requests=1)
    world.labels.memory.staging = 1
    world.ledger.begin_step()
    assert world.ledger.admit_layers(0, 2 * BLOCK, resident=1)
    with pytest.raises(LiveEngineError, match="streams 2 blocks a layer, and 1 pages"):
        world.plan((0, 2 * BLOCK))


def test_an_engine_gets_what_the_ledger_has(profile):
    inputs = inputs_for(profile)
    settings = live_settings(inputs, inputs.policies[0], blank_settings(physical=True))
    assert (settings.num_blocks, settings.swap_blocks, settings.layers) == (12, 60, LAYERS)
    assert settings.staging <= 12 + 60
