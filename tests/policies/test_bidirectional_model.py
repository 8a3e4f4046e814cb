"""The bidirectional ledger in lockstep with a slot-by-slot model, and its moves applied to a memory
of labelled slots.
"""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.examples import examples
from tests.moves import way
from tests.parameters import mostly_nightly
from tests.policies.bidi_reference import Reference
from tests.policies.bidi_views import held_tokens, preemption_table
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.plan import DEVICE, HOST
from twinserve.policies.requests import RequestTable


def summary(ledger: BidirectionalLedger) -> dict:
    """As Reference.summary, from the ledger's arrays. Taking the moves is undone."""
    state = ledger._state
    rows = {}
    for row in sorted(state.tables):
        cells = state.cells_of(row)
        peers = (cells + state.num_blocks) % (2 * state.num_blocks)
        rows[row] = [
            (
                int(state.count[c]),
                int(state.lack[c]),
                (int(state.owner[p]), int(state.index[p])) if state.count[p] else None,
            )
            for c, p in zip(cells, peers, strict=True)
        ]
    held = np.flatnonzero(state.held).tolist()
    step = ledger._moves_of_step
    return {
        "rows": rows,
        "swapped": {
            int(r): int(state.tokens[r]) for r in np.flatnonzero(state.tokens) if r not in held
        },
        "host": sorted((r, int(t)) for r, mask in state.host.items() for t in np.flatnonzero(mask)),
        "pinned": np.flatnonzero(state.pinned == state.step).tolist(),
        "empty": ledger.free_blocks,
        "moves": sorted(
            (r, way, int(t))
            for way, moving in (("d2h", step.leaving), ("h2d", step.arriving))
            for r, pieces in moving.items()
            for piece in pieces
            for t in piece[0]
        ),
        "relocated": sorted(r.row for r in ledger.relocations()),
    }


def snapshot(ledger: BidirectionalLedger) -> dict:
    """Every bit of the state that is valid, block numbers included."""
    state, step = ledger._state, ledger._moves_of_step
    arrays = {k: v.tobytes() for k, v in vars(state).items() if isinstance(v, np.ndarray)}
    return {
        **arrays,
        "empty": state.empty.units().tobytes(),
        "tables": {row: state.cells_of(row).tobytes() for row in state.tables},
        "host": {row: mask.tobytes() for row, mask in state.host.items()},
        "on_host": (state.on_host.by_row(), state.on_host.free),
        "numbers": (state.num_empty, state.rt_blocks, state.step),
        "pieces": [
            {row: [tuple(a.tobytes() for a in piece) for piece in pieces] for row, pieces in moving}
            for moving in (step.leaving.items(), step.arriving.items())
        ],
        "relocations": ledger.relocations(),
    }


class Memory:
    """Device slots and host copies, each labelled with the (row, token) whose KV it is."""

    def __init__(self, blocks: int, size: int) -> None:
        self.device = {(b, s): None for b in range(blocks) for s in range(size)}
        self.host = {}

    def places(self, ledger, row):
        """(block, slot) of each token of the row."""
        size, real_time = ledger.block_tokens, ledger.table.service_class[row] == 0
        found = []
        for block, count in zip(
            ledger.blocks_of(row).tolist(), ledger.counts_of(row).tolist(), strict=True
        ):
            found += [(block, i if real_time else size - 1 - i) for i in range(count)]
        return found

    def execute(self, ledger) -> None:
        moves = ledger.take_moves()
        assert [way(m) for m in moves] == sorted(way(m) for m in moves)
        assert len({(m.row, m.target) for m in moves}) == len(moves)
        for move in moves:
            slots = [
                (b, s)
                for b, (lo, hi) in zip(move.blocks, move.slots, strict=True)
                for s in range(lo, hi)
            ]
            assert len(slots) == move.tokens == len(set(slots))
            if move.target == HOST:
                for place in slots:
                    label = self.device[place]
                    assert label is not None and label[0] == move.row
                    self.host[label] = label
        for r in ledger.relocations():
            old = [(r.source, s) for s in range(*r.source_slots)]
            new = [(r.target, s) for s in range(*r.target_slots)]
            for place, label in zip(new, [self.device[p] for p in old], strict=True):
                self.device[place] = label
        for move in moves:
            if move.target == DEVICE:
                token_at = {place: t for t, place in enumerate(self.places(ledger, move.row))}
                for b, (lo, hi) in zip(move.blocks, move.slots, strict=True):
                    for s in range(lo, hi):
                        self.device[b, s] = self.host[move.row, token_at[b, s]]
        table, state = ledger.table, ledger._state
        running = [r for r in state.tables if state.is_pinned(r)]
        for row in running:
            places = self.places(ledger, row)
            for token in range(int(table.computed_tokens[row]), len(places)):
                self.device[places[token]] = (row, token)
        for row in running:
            places = self.places(ledger, row)
            assert [self.device[p] for p in places] == [(row, t) for t in range(len(places))]
            table.computed_tokens[row] = len(places)


class World:
    """Ledger, model and memory; every operation draws its arguments from `pick`, a function of a
    sequence.
    """

    def __init__(self, pick, blocks: int, size: int, host_blocks: int) -> None:
        self.pick = pick
        self.table = RequestTable()
        self.ledger = BidirectionalLedger(self.table, blocks, size, host_blocks)
        self.reference = Reference(self.table, blocks, size, host_blocks)
        self.memory = Memory(blocks, size)
        self.ledger.begin_step()

    def do(self, name: str) -> None:
        getattr(self, name)()
        self.compare()

    def both(self, name, *args, **kwargs):
        expected = getattr(self.reference, name)(*args, **kwargs)
        assert getattr(self.ledger, name)(*args, **kwargs) == expected, name
        return expected

    def held(self):
        return sorted(self.reference.s.parts)

    def shuffled(self, rows):
        rows, order = list(rows), []
        while rows:
            order.append(rows.pop(self.pick(range(len(rows)))))
        return order

    def computed(self, row):
        return int(self.table.computed_tokens[row])

    # -- operations --------------------------------------------------------------------------------
    def admit(self):
        if len(self.held()) < 7:
            row = self.table.submit(f"r{len(self.table)}", service_class=self.pick([0, 1]))
            keep, reserve = self.pick([0, 0, 0, 0, 1]), self.pick([0, 0, 0, 20])
            self.both("admit", row, self.pick(range(1, 13)), keep_free=keep, reserve_tokens=reserve)

    def grow(self):
        if self.held():
            row = self.pick(self.held())
            self.both("grow", row, self.reference.held(row) + self.pick([0, 1, 1, 2, 4]))

    def grow_rows(self):
        for row in self.shuffled(self.held())[: self.pick([2, 4, 9])]:
            self.both("grow", row, self.computed(row) + 1)

    def grow_each(self):
        """Real-time rows first, or in any order; up to the first one that finds no room."""
        rows = self.shuffled(self.held())
        if self.pick([True, False]):
            rows.sort(key=lambda row: int(self.table.service_class[row]))
        rows = rows[: self.pick([2, 4, 9])]
        if rows:
            tokens = [self.computed(row) + self.pick([1, 1, 1, 2]) for row in rows]
            pairs = zip(rows, tokens, strict=True)
            refused = (i for i, pair in enumerate(pairs) if not self.reference.grow(*pair))
            expected = next(refused, len(rows))
            assert self.ledger.grow_each(np.array(rows), np.array(tokens)) == expected

    def room_tokens(self):
        """No newcomer finds room for more."""
        row = self.table.submit(f"r{len(self.table)}", service_class=self.pick([0, 1]))
        most = self.ledger.room_tokens(row)
        assert not copy.deepcopy(self.reference).admit(row, most + 1)

    def grow_all(self):
        rows = np.array(self.shuffled(self.held())[: self.pick([1, 2, 4, 9])], np.int64)
        if len(rows):
            tokens = np.array(
                [self.reference.held(r) + self.pick([0, 1, 1, 3]) for r in rows.tolist()]
            )
            expected = self.reference.grow_all(rows.tolist(), tokens.tolist())
            assert self.ledger.grow_all(rows, tokens) == expected

    def swap_out(self):
        if self.held():
            self.both("swap_out", self.pick(self.held()))

    def swap_in(self):
        if self.reference.s.swapped:
            self.both(
                "swap_in",
                self.pick(sorted(self.reference.s.swapped)),
                keep_free=self.pick([0, 0, 1]),
            )

    def free(self):
        rows = self.held() + sorted(self.reference.s.swapped)
        if rows:
            row = self.pick(rows)
            self.both("free", row)
            self.table.computed_tokens[row] = 0

    def withdraw(self):
        if self.reference.s.pinned:
            self.both("withdraw", self.pick(sorted(self.reference.s.pinned)))

    def step(self):
        self.memory.execute(self.ledger)
        self.ledger.begin_step()
        self.reference.begin_step()

    def tries(self):
        """Nested tries of a few operations; what is rolled back leaves no trace, in the moves
        neither.
        """
        before, model = snapshot(self.ledger), copy.deepcopy(self.reference.s)
        computed = self.table.computed_tokens.copy()
        outer = self.ledger.mark()
        self._some()
        middle, middle_model = snapshot(self.ledger), copy.deepcopy(self.reference.s)
        middle_computed = self.table.computed_tokens.copy()
        inner = self.ledger.mark()
        self._some()
        if self.pick([False, True]):
            self.ledger.commit(inner)
        else:
            self.ledger.rollback(inner)
            self.reference.s = middle_model
            self.table.computed_tokens[:] = middle_computed
            assert snapshot(self.ledger) == middle
        self._some()
        self.ledger.rollback(outer)
        self.reference.s = model
        self.table.computed_tokens[:] = computed
        assert snapshot(self.ledger) == before
        with pytest.raises(LedgerError, match="ended"):
            self.ledger.commit(outer)

    def _some(self):
        for _ in range(self.pick(range(4))):
            names = ["grow", "grow", "grow_all", "swap_out", "swap_in", "withdraw", "free"]
            self.do(self.pick(names))

    def run_of_steps(self):
        """`decode_steps` promises what single steps can do and no more, and `extend` leaves the
        same state.
        """
        rows = [r for r in self.shuffled(self.held()) if self.computed(r)][: self.pick([2, 4, 9])]
        if not rows:
            return
        rows, limit = np.array(rows), self.pick(range(1, 16))
        computed = self.table.computed_tokens[rows]
        steps = self.ledger.decode_steps(rows, limit)
        single, by_row, at_once = (copy.deepcopy(self.ledger) for _ in range(3))
        for i in range(1, steps + 1):
            assert single.grow_all(rows, computed + i)
            assert all(map(by_row.grow, rows.tolist(), (computed + i).tolist()))
        if steps < limit:
            assert not copy.deepcopy(single).grow_all(rows, computed + steps + 1)
            with pytest.raises(LedgerError):
                at_once.extend(rows, steps + 1)
        if steps:
            at_once.extend(rows, steps)
            assert summary(at_once) == summary(single) == summary(by_row)
        expected = self.reference.grow_all(rows.tolist(), (computed + 1).tolist())
        assert self.ledger.grow_all(rows, computed + 1) == expected == (steps > 0)

    # -- after each --------------------------------------------------------------------------------
    def compare(self):
        ledger, model = self.ledger, self.reference
        ledger.check()
        assert summary(ledger) == model.summary()
        for row in range(len(self.table)):
            missing = model.missing(row)
            assert ledger.missing_tokens(row) == len(missing)
            blocks = len({b for b, _ in missing})
            if row in model.s.swapped:
                blocks = -(-len(missing) // model.size)
            assert ledger.missing_blocks(row) == blocks
            assert ledger.held_blocks(row) == len(model.s.parts.get(row, []))
            assert held_tokens(ledger, row) == model.held(row)
        usage = ledger.usage()
        real_time = sum(model.owner(b, 0) is not None for b in range(usage.total))
        assert (usage.real_time, usage.free) == (real_time, len(model.empty()))
        assert usage.best_effort == usage.total - real_time - usage.free
        assert usage.host_tokens == len(model.s.host)
        assert ledger.preemptable_blocks() == len(model.idle(model.only(1), 1))
        both_claim = sorted(model.shared().values())
        assert sorted(e.end - e.first for e in preemption_table(ledger)) == [
            n for n in both_claim if n
        ]


OFTEN = [
    "admit", "grow", "grow", "grow_each", "grow_rows", "grow_all", "step", "step", "run_of_steps",
]  # fmt: skip
SELDOM = ["swap_out", "swap_in", "free", "withdraw", "tries", "room_tokens"]


class Lockstep(RuleBasedStateMachine):
    """Hypothesis looks for a short sequence of operations after which the two differ."""

    @initialize(blocks=st.integers(2, 7), size=st.integers(1, 5), host=st.integers(0, 6))
    def build(self, blocks, size, host):
        self.world = World(None, blocks, size, host)

    @rule(data=st.data(), names=st.lists(st.sampled_from(OFTEN + SELDOM), min_size=1, max_size=6))
    def operate(self, data, names):
        self.world.pick = lambda options: data.draw(st.sampled_from(options))
        for name in names:
            self.world.do(name)


Lockstep.TestCase.settings = examples(
    30, stateful_step_count=15, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLockstep = Lockstep.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_nightly([*range(24), 146], 0, 1, 2, 146))
def test_long_walks_agree_with_the_model(seed):
    """Full memory is the rule after some hundred operations, which short sequences seldom reach."""
    rng = np.random.default_rng(seed)
    world = World(
        lambda options: options[int(rng.integers(len(options)))],
        blocks=int(rng.integers(2, 9)),
        size=int(rng.integers(2, 6)),
        host_blocks=int(rng.choice([0, 2, 4, 30])),
    )
    names = OFTEN * 3 + SELDOM
    for _ in range(250):
        world.do(names[int(rng.integers(len(names)))])


@pytest.mark.parametrize("seed", mostly_nightly(range(60), *range(0, 60, 6)))
def test_runs_of_steps_beside_sharers(seed):
    """Sharers in last blocks while other blocks are empty: where runs of steps end."""
    rng = np.random.default_rng(seed)

    def pick(options):
        return options[int(rng.integers(len(options)))]

    size = pick([4, 6, 8])
    world = World(pick, blocks=12, size=size, host_blocks=20)

    def admit(service_class, tokens):
        row = world.table.submit(f"r{len(world.table)}", service_class=service_class)
        return [row] if world.both("admit", row, tokens) else []

    (filler,) = admit(0, 9 * size)
    rows = [row for _ in range(3) for row in admit(0, pick(range(1, size + 1)))]
    rows += [row for _ in range(pick([1, 2, 3])) for row in admit(1, pick([1, 1, 2]))]
    world.do("step")
    world.both("free", filler)
    for _ in range(4):
        for row in world.shuffled(rows)[: pick([0, 0, 1, 3])]:
            world.both("grow", row, world.reference.held(row) + pick([1, 2, 3]))
        for name in ("run_of_steps", pick(["step", "run_of_steps"])):
            world.do(name)
