"""Which slots a step reads and writes when the bidirectional ledger's layout is carried out, on a
memory of labels: no engine needed."""

import numpy as np
import pytest

from tests.live.followed import follow
from tests.live.twin_workloads import in_turn_inputs
from tests.parameters import mostly_nightly
from twinserve.backends.live.attention import slots
from twinserve.backends.live.physical.host import SlotHost
from twinserve.backends.live.physical.layout import PhysicalMemory, SlotStage
from twinserve.backends.live.transfer.host import HostFull
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.plan import StepPlan
from twinserve.policies.registry import policy_names
from twinserve.policies.requests import RequestClass, RequestTable
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.sim.twin.live import blank_settings, live_settings

# The requests would take six times the pool together; the host is too small to keep all that is
# swapped out.
SETTINGS = {"num_blocks": 14, "host_blocks": 20, "slo": "ttft=0.04,tpot=0.03", "exact": True}


def inputs_for(policy: str = "bros", **changes) -> Inputs:
    """Every second request is best-effort."""
    return in_turn_inputs(policy, 2, **{**SETTINGS, **changes})


def expand(runs: list[tuple[int, int]]) -> list[int]:
    return [first + i for first, count in runs for i in range(count)]


class Labels:
    """An engine's memory in which a slot holds the name and the position of a token; carries out
    what a scheduler would send, with the slots that the attention kernels would work out from
    entries and counts."""

    def __init__(self, ledger: BidirectionalLedger) -> None:
        self.ledger, self.size = ledger, ledger.block_tokens
        self.memory = PhysicalMemory(ledger)
        self.host = SlotHost(max(ledger.host_blocks, 1) * self.size, self.size)
        self.blocks = ledger.num_blocks + 1
        self.device = np.full(self.blocks * self.size, None, object)
        self.copies = np.full(max(ledger.host_blocks, 1) * self.size, None, object)
        self.counts = np.full(2 * self.blocks, self.size)

    def step(self, plan: StepPlan) -> None:
        computed = self.ledger.table.computed_tokens
        layout = self.memory.step(plan)
        for stage in layout.stages:
            self.host.carry(stage)
        for stage in self.host.take_stages():
            self.copies[expand(stage.orders.out.rows)] = self.device[expand(stage.orders.out.slots)]
            for sources, targets in stage.relocations:
                self.device[expand(targets)] = self.device[expand(sources)]
            self.device[expand(stage.orders.back.slots)] = self.copies[
                expand(stage.orders.back.rows)
            ]
        reads = {}
        for row, granted in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True):
            name, first = self.ledger.table.ids[row], int(computed[row])
            places = self.places(layout.tables[name], first + granted)
            reads[name] = places
            assert self.device[places[:first]].tolist() == [(name, token) for token in range(first)]
            self.device[places[first:]] = [(name, token) for token in range(first, first + granted)]
        taken = np.concatenate([*reads.values(), np.zeros(0, np.int64)])
        assert len(np.unique(taken)) == len(taken), "two requests of one step in one slot"
        assert not len(taken) or taken.min() >= self.size, "vLLM's null block is written to"
        self.host.check()

    def places(self, table, tokens: int) -> np.ndarray:
        self.counts[slots.cell_of(table.entries, self.blocks)] = [*table.counts[:-1], self.size]
        first = np.zeros((1, len(table.entries) + 1), np.int32)
        slots.first_positions(table.entries[None], self.counts, first)
        rows, positions = np.zeros(tokens, np.int64), np.arange(tokens)
        return slots.slot_mapping(table.entries[None], rows, positions, self.size, first)


# with more, memory is set aside for so much text that nothing is ever moved
CROWDED = {"tgi": "max_new_tokens=12,"}
RUNS = [(f"{name}:{CROWDED.get(name, '')}kv=bidirectional", 8) for name in policy_names()]
RUNS += [("bros", 40), ("bros:chunk=48", 20)]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "host_blocks"), mostly_nightly(RUNS, RUNS[0], RUNS[-1]))
def test_every_step_finds_its_own_tokens(policy, host_blocks):
    inputs = inputs_for(policy, host_blocks=host_blocks, requests=12, num_blocks=10)
    simulation = Simulation(inputs, inputs.policies[0])
    (engine,) = simulation.engines
    labels = Labels(engine.core.ledger)
    moves = follow(engine.backend, labels)
    simulation.run()
    assert simulation.rows().requests["finished"].all() and moves
    labels.step(StepPlan())
    assert labels.host.free_tokens == host_blocks * 32  # nobody's copies are left


def table_of(*classes: int) -> RequestTable:
    table = RequestTable()
    for number, service_class in enumerate(classes):
        table.submit("AaBC"[number], service_class=service_class, prompt_tokens=100)
    return table


class World:
    """A ledger of a few blocks of four slots, a memory, and the plans made by hand."""

    def __init__(self, blocks: int, *classes: int, host_blocks: int = 10) -> None:
        self.table = table_of(*classes)
        self.ledger = BidirectionalLedger(self.table, blocks, 4, host_blocks)
        self.labels = Labels(self.ledger)

    def run(self, **grants: int) -> None:
        """One step in which the named requests compute so many tokens."""
        ids = self.table.ids
        rows = np.array([ids.index(name) for name in grants], np.int64)
        self.ledger.begin_step()
        for row, tokens in zip(rows.tolist(), grants.values(), strict=True):
            goal = int(self.table.computed_tokens[row]) + tokens
            if not self.table.computed_tokens[row]:
                assert self.ledger.admit(row, goal)
                continue
            assert self.ledger.held_blocks(row) or self.ledger.swap_in(row)
            assert self.ledger.grow(row, goal)
        self.step(rows, np.array([*grants.values()], np.int64))

    def step(self, rows, tokens) -> None:
        self.labels.step(StepPlan(rows, tokens, moves=self.ledger.take_moves()))
        self.table.computed_tokens[rows] += tokens


RT, BE = int(RequestClass.REAL_TIME), int(RequestClass.BEST_EFFORT)


def test_moves_of_plans_without_a_step_come_with_the_next_one():
    """A is swapped out, then a: two plans that compute nothing. Then both requests' data is needed
    again."""
    world = World(2, RT, BE)
    world.run(A=3, a=3)
    for row in (0, 1):
        world.ledger.begin_step()
        assert world.ledger.swap_out(row)
        world.labels.memory.follow(world.ledger.take_moves())
    world.run(a=1)
    world.run(A=1)
    assert len(world.ledger.blocks_of(0)) == len(world.ledger.blocks_of(1)) == 1


def test_a_copy_that_comes_back_is_kept():
    """One block: A and a take turns, and from the second turn on nothing goes to the host."""
    world = World(1, RT, BE)
    world.run(A=3)
    out = []
    for name in "aAaAa":
        begun = world.labels.host._number
        world.run(**{name: 3 if name == "a" and not world.table.computed_tokens[1] else 0})
        held = {n: world.labels.host.tokens_of(n) for n in "Aa"}
        out.append((world.labels.host._number > begun, held))
    assert [held for _, held in out[1:]] == [{"A": [1, 2], "a": [1, 2]}] * 4
    assert all(moved for moved, _ in out)


def test_relocations_go_between_the_copies(monkeypatch):
    """The last drawing of docs/live_memory.md: a5 comes back, a4 is copied within the device."""
    world = World(3, RT, BE, RT, RT)
    world.run(A=2, B=4, C=1)
    world.run(a=5)
    world.run(A=1)
    world.ledger.free(2)
    stages = []
    carry = SlotHost.carry
    monkeypatch.setattr(
        SlotHost, "carry", lambda self, stage: (stages.append(stage), carry(self, stage))
    )
    world.run(A=0, a=0)
    (stage,) = stages
    assert [len(slots) for slots, _ in stage.relocations] == [1]
    assert [(name, tokens.tolist()) for name, tokens, _ in stage.back] == [
        ("a", [4])
    ] and not stage.out


def test_a_lost_move_is_refused_before_anybody_reads():
    world = World(1, RT, BE)
    world.run(A=3)
    world.run(a=3)
    world.ledger.begin_step()
    assert world.ledger.grow(0, 3)
    moves = world.ledger.take_moves()
    kept = [move for move in moves if move.row != 0]
    with pytest.raises(LiveEngineError, match="A reads slot 1 of block 0, where token 2 of a lies"):
        world.labels.memory.step(StepPlan(np.array([0]), np.array([0]), moves=kept))


def test_a_lost_checkpoint_is_refused():
    world = World(1, RT, BE)
    world.run(A=3)
    world.ledger.begin_step()
    assert world.ledger.admit(1, 3)
    with pytest.raises(
        LiveEngineError, match="counts on a host copy of token 1 of A, which was never made"
    ):
        world.labels.memory.step(StepPlan(np.array([1]), np.array([3])))


def test_grants_beyond_memory_are_refused():
    world = World(1, RT)
    world.ledger.begin_step()
    assert world.ledger.admit(0, 3)
    with pytest.raises(
        LiveEngineError, match="A computes token 3, for which the ledger has no slot"
    ):
        world.labels.memory.step(StepPlan(np.array([0]), np.array([4])))


def test_host_room_is_exact():
    host = SlotHost(4, 4)
    tokens = np.arange(4)
    host.carry(SlotStage(out=[("A", tokens, tokens + 8)]))
    with pytest.raises(HostFull):
        host.carry(SlotStage(out=[("a", tokens[:1], tokens[:1])]))
    host.carry(SlotStage(forgotten=[("A", tokens[2:])], out=[("a", tokens[:2], tokens[:2])]))
    assert (host.tokens_of("A"), host.tokens_of("a"), host.free_tokens) == ([0, 1], [0, 1], 0)
    host.drop("A")
    host.forget("a", [0, 7])
    assert (host.tokens_of("A"), host.tokens_of("a"), host.free_tokens) == ([], [1], 3)
    host.check()


def test_other_ledgers_have_no_layout():
    with pytest.raises(LiveEngineError, match="ledger paged cannot be made physical"):
        PhysicalMemory(PagedLedger(RequestTable(), 4, 4))
    inputs = inputs_for("vllm")
    with pytest.raises(SettingsError, match="policy vllm runs on paged"):
        live_settings(inputs, inputs.policies[0], blank_settings(physical=True))


def test_a_physical_engine_has_what_the_ledger_has():
    inputs = inputs_for()
    settings = live_settings(inputs, inputs.policies[0], blank_settings(physical=True))
    assert (settings.num_blocks, settings.swap_blocks, settings.prefix_caching) == (14, 20, False)
    assert settings.max_model_len == 14 * 32  # a table as wide as the pool
