"""The paged ledger in lockstep with a reference of plain lists, and tries that leave no trace."""

import copy
import gc
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.examples import examples
from tests.moves import way
from tests.policies.paged_reference import PagedReference
from twinserve.policies.kv.free import FreeStack, zeros_by_page
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.registry import ledger_class, ledger_names
from twinserve.policies.requests import RequestTable

SIZE, TEXTS = 4, 3


def snapshot(ledger: PagedLedger) -> dict:
    """Every bit of the state that means something, block numbers included."""
    pool, held = ledger.pool, ledger._held
    order = [chunk[pool._stamp[chunk] == number] for number, chunk in pool._order]
    tables = {}
    for row, entry in ledger._tables.items():
        names = entry.contents[: ledger._published[row]]
        tables[row] = (entry.blocks[: held[row]].tolist(), names.tolist())
    return {
        "tables": tables,
        "contents": {row: names.tolist() for row, names in sorted(ledger._contents.items())},
        "refs": [(b, int(pool.refs[b])) for b in np.flatnonzero(pool.refs)],
        "content": [(b, int(pool.content[b])) for b in np.flatnonzero(pool.content >= 0)],
        "blank": pool._blank.units().tolist(),
        "order": np.concatenate([*order, np.zeros(0, np.int64)]).tolist(),
        "cached": pool.cached,
        "evicted": pool.evicted,
        "found": [(int(c), int(pool._found_at[c])) for c in np.flatnonzero(pool._found_at)],
        "copies": {content: list(blocks) for content, blocks in sorted(pool._copies.items())},
        "swapped": dict(sorted(ledger._swapped.items())),
        "host": (ledger.host.by_row(), ledger.host.free),
        "usage": ledger.usage(),
        "moves": [(m.row, way(m), m.tokens, m.blocks.tolist()) for m in ledger._moves],
    }


class World:
    """Ledger and reference side by side. `pick(options)` chooses one of a sequence."""

    def __init__(self, pick, blocks: int, host: int, caching: bool, in_order: bool = False) -> None:
        self.pick = pick
        self.table = RequestTable()
        self.ledger = PagedLedger(
            self.table, blocks, SIZE, host, caching, shared_contents=8 * TEXTS
        )
        if in_order:
            self.ledger.reuse_in_order()
        self.reference = PagedReference(blocks, SIZE, host, caching, in_order)
        self.live: list[int] = []
        self.granted: dict[int, int] = {}
        self.moved: list[tuple[int, str, int]] = []

    # -- who is where ----------------------------------------------------------------------------
    def holding(self) -> list[int]:
        return [row for row in self.live if row in self.reference.rows]

    def waiting(self) -> list[int]:
        away = (*self.reference.rows, *self.reference.swapped)
        return [row for row in self.live if row not in away]

    def known(self, row: int) -> int:
        return int(self.table.known_tokens(row))

    # -- operations ------------------------------------------------------------------------------
    def submit(self) -> None:
        prompt, text = self.pick(range(1, 30)), self.pick(range(TEXTS))
        prefix = 8 * text + np.arange(prompt // SIZE)
        service_class = self.pick((0, 0, 1))
        row = self.table.submit("", prefix, prompt_tokens=prompt, service_class=service_class)
        self.reference.names[row] = prefix.tolist()
        self.live.append(row)

    def admit(self) -> None:
        row = self.pick(self.waiting())
        known = self.known(row)
        hit = self.ledger.hit_tokens(row)
        assert hit == self.reference.hit_tokens(row, known)
        hit = self.pick((hit, hit, 0))
        tokens = self.pick((known, self.pick(range(hit + 1, known + 1))))
        keep, reserve = self.pick((0, 0, 2)), self.pick((0, known))
        fits = self.reference.admit(row, tokens, hit, known, keep, reserve)
        assert self.ledger.admit(row, tokens, hit, keep, reserve) == fits
        if fits:
            self.table.computed_tokens[row] = hit
            self.granted[row] = tokens

    def grow(self) -> None:
        row = self.pick(self.holding())
        tokens = self.pick(range(self.granted[row], self.known(row) + 1))
        fits = self.reference.grow(row, tokens)
        assert self.ledger.grow(row, tokens) == fits
        if fits:
            self.granted[row] = tokens

    def grow_all(self) -> None:
        rows = [row for row in self.holding() if self.pick((True, True, False))]
        wanted = {r: self.pick(range(self.granted[r], self.known(r) + 1)) for r in rows}
        fits = self.reference.grow_all(wanted)
        values = np.array(list(wanted.values()), np.int64)
        assert self.ledger.grow_all(np.array(rows, np.int64), values) == fits
        if fits:
            self.granted.update(wanted)

    def grow_each(self) -> None:
        """One after another, up to the first one that finds no room."""
        rows = [row for row in self.holding() if self.pick((True, True, False))]
        wanted = {r: self.pick(range(self.granted[r], self.known(r) + 1)) for r in rows}
        refused = (i for i, pair in enumerate(wanted.items()) if not self.reference.grow(*pair))
        done = next(refused, len(rows))
        values = np.array(list(wanted.values()), np.int64)
        assert self.ledger.grow_each(np.array(rows, np.int64), values) == done
        self.granted.update(list(wanted.items())[:done])

    def step(self) -> None:
        """What was granted is computed; who caught up gets a token."""
        for row in self.holding():
            self.table.computed_tokens[row] = self.granted[row]
            if self.granted[row] == self.known(row):
                self.table.output_tokens[row] += 1
        self.ledger.begin_step()
        self.moved = []

    def decode_run(self) -> None:
        """Rows that decode do so for as many steps as the ledger promises, and no further."""
        computed = self.table.computed_tokens
        rows = [r for r in self.holding() if computed[r] == self.granted[r] == self.known(r) - 1]
        limit = self.pick((3, 40))
        steps = self.ledger.decode_steps(np.array(rows, np.int64), limit)
        trial = copy.deepcopy(self.reference)
        possible = 0
        while possible < limit:
            if not trial.grow_all({r: int(computed[r]) + possible + 1 for r in rows}):
                break
            possible += 1
        assert steps == possible
        if rows and 0 < steps:
            self.ledger.extend(np.array(rows, np.int64), steps)
            for row in rows:
                assert self.reference.grow(row, int(computed[row]) + steps)
                self.granted[row] = int(computed[row]) + steps
                self.table.output_tokens[row] += steps - 1

    def drop(self) -> None:
        row = self.pick(self.holding() or self.live)
        self.reference.free(row)
        self.ledger.drop(row)
        self._lost(row)

    def free(self) -> None:
        row = self.pick(self.live)
        self.reference.free(row)
        self.ledger.free(row)
        self._lost(row)
        self.live.remove(row)

    def _lost(self, row: int) -> None:
        self.table.computed_tokens[row] = 0
        self.granted.pop(row, None)

    def swap_out(self) -> None:
        computed = self.table.computed_tokens
        row = self.pick([r for r in self.holding() if computed[r]])
        fits = self.reference.swap_out(row, int(computed[row]))
        assert self.ledger.swap_out(row) == fits
        if fits:
            self.moved.append((row, "d2h", int(computed[row])))
            self.granted[row] = int(computed[row])

    def swap_in(self) -> None:
        row = self.pick(sorted(self.reference.swapped))
        tokens, keep = self.reference.swapped[row], self.pick((0, 1))
        fits = self.reference.swap_in(row, keep)
        assert self.ledger.swap_in(row, keep) == fits
        if fits:
            self.moved.append((row, "h2d", tokens))

    def change(self) -> None:
        """One change of memory that is possible now."""
        possible = [self.grow_all, self.grow_each]
        possible += [self.admit] * 2 if self.waiting() else []
        possible += [self.grow, self.drop] if self.holding() else []
        possible += [self.swap_in] * 2 if self.reference.swapped else []
        possible += [self.free] if self.live else []
        if any(self.table.computed_tokens[row] for row in self.holding()):
            possible.append(self.swap_out)
        self.pick(possible)()

    # -- tries -----------------------------------------------------------------------------------
    def attempt(self, depth: int = 1) -> None:
        """Changes inside a try, with another one inside it perhaps; kept or taken back."""
        keep = self.pick((True, False))
        before = snapshot(self.ledger)
        columns = {n: getattr(self.table, n).copy() for n in ("computed_tokens", "output_tokens")}
        # `pick` and the table are no part of what is copied
        own = (self.reference, self.live, self.granted, self.moved)
        saved = copy.deepcopy(own)
        mark = self.ledger.mark()
        for _ in range(self.pick(range(5))):
            if depth and self.pick((True, False, False)):
                self.attempt(depth - 1)
            else:
                self.change()
        if keep:
            self.ledger.commit(mark)
            return
        self.ledger.rollback(mark)
        after = snapshot(self.ledger)
        assert {k: (before[k], after[k]) for k in before if before[k] != after[k]} == {}
        self.reference, self.live, self.granted, self.moved = saved
        for name, column in columns.items():
            getattr(self.table, name)[:] = column

    # -- comparison ------------------------------------------------------------------------------
    def compare(self) -> None:
        ledger, reference = self.ledger, self.reference
        ledger.check()
        assert ledger.free_blocks == len(reference.queue)
        pairs = {}  # the reference's block -> the ledger's
        for row, blocks in reference.rows.items():
            ours = ledger.blocks_of(row).tolist()
            assert ledger.held_blocks(row) == len(ours) == len(blocks)
            for block, number in zip(blocks, ours, strict=True):
                assert pairs.setdefault(id(block), number) == number
        assert len(set(pairs.values())) == len(pairs)
        users = [self.users(block) for block in self.distinct()]
        usage = ledger.usage()
        assert usage.real_time == sum(0 in classes for classes in users)
        assert usage.best_effort == sum(0 not in classes for classes in users)
        assert usage.cached == sum(block.content is not None for block in reference.queue)
        assert usage.host_tokens == sum(reference.swapped.values())
        for row in self.waiting():
            assert ledger.hit_tokens(row) == reference.hit_tokens(row, self.known(row))
            assert ledger.held_blocks(row) == ledger.missing_tokens(row) == 0
        for row, tokens in reference.swapped.items():
            assert ledger.missing_tokens(row) == tokens and not ledger.held_blocks(row)
        moves = [(m.row, way(m), m.tokens) for m in ledger._moves]
        assert moves == self.moved

    def distinct(self):
        return {id(b): b for blocks in self.reference.rows.values() for b in blocks}.values()

    def users(self, block) -> list[int]:
        return [int(self.table.service_class[row]) for row in block.users]


class Lockstep(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        blocks=st.integers(3, 24),
        host=st.sampled_from([0, 5, 20]),
        cached=st.booleans(),
        in_order=st.booleans(),
    )
    def start(self, seed, blocks, host, cached, in_order):
        # Arguments come from one seeded source: drawn one by one they would be mostly zeros.
        self.world = World(random.Random(seed).choice, blocks, host, cached, in_order)
        self.world.submit()

    @rule()
    def submit(self):
        if len(self.world.live) < 8:
            self.world.submit()

    @rule(times=st.integers(1, 3))
    def change(self, times):
        for _ in range(times):
            self.world.change()
            self.world.compare()

    @rule()
    def attempt(self):
        self.world.attempt()
        self.world.compare()

    @rule()
    def step(self):
        self.world.step()
        self.world.compare()

    @rule()
    def decode_run(self):
        self.world.step()
        self.world.decode_run()
        self.world.compare()


TestLockstep = Lockstep.TestCase
TestLockstep.settings = examples(
    60, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)


def walk(world: World, rng: random.Random) -> None:
    """Sixty changes, tries and steps, each compared with the reference."""
    world.submit()
    for _ in range(60):
        turn = rng.choice(("change", "change", "change", "attempt", "step", "decode", "submit"))
        if turn == "submit" and len(world.live) < 8:
            world.submit()
        elif turn in ("change", "attempt"):
            getattr(world, turn)()
        elif turn in ("step", "decode"):
            world.step()
            if turn == "decode":
                world.decode_run()
        world.compare()


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_long_walks_agree_with_the_reference(seed, in_order):
    """Deeper into a full memory than short sequences of rules come."""
    rng = random.Random(seed)
    host, cached = rng.choice((0, 5, 20)), rng.random() < 0.7 or in_order
    world = World(rng.choice, rng.randint(3, 24), host, cached, in_order)
    walk(world, rng)


# -- what a replica keeps is in proportion to what it holds, not to what it could hold -------------
BLOCKS, HELD = 400_000, 40


@given(capacity=st.integers(1, 40), data=st.data())
def test_units_come_back_in_the_order_of_a_plain_stack(capacity, data):
    """Beside a list that has had all units from the beginning."""
    stack, plain, taken = FreeStack(capacity), list(range(capacity))[::-1], []
    for _ in range(data.draw(st.integers(0, 12))):
        before = list(plain)
        if data.draw(st.booleans()):
            n = data.draw(st.integers(0, len(plain)))
            units = stack.take(n)
            assert units.tolist() == plain[len(plain) - n :]
            del plain[len(plain) - n :]
            if data.draw(st.booleans()):  # taken back
                stack.put(units)
                plain = before
            else:
                taken += units.tolist()
        else:
            n = data.draw(st.integers(0, len(taken)))
            back = data.draw(st.permutations(taken))[:n]
            stack.put(np.array(back, np.int64))
            if data.draw(st.booleans()):  # taken back
                stack.lift(n)
            else:
                plain += back
                taken = [unit for unit in taken if unit not in back]
        assert stack.units().tolist() == plain and stack.free == len(plain)


def test_zeros_by_page_are_arrays_of_their_own():
    for length in (3, 30_000):  # too little to be mapped, and mapped
        whole, flags = zeros_by_page((length, np.int64), (length, np.bool_))
        assert (whole.dtype, flags.dtype) == (np.int64, np.bool_)
        assert len(whole) == len(flags) == length and not whole.any() and not flags.any()
        whole[:] = -1
        assert not flags.any()
        flags[-1] = True
        assert (whole == -1).all() and flags.sum() == 1


def ledger_with_a_request(name: str):
    kind = ledger_class(name)
    options = {"shared_contents": BLOCKS} if kind.caches_prefixes else {}
    table = RequestTable()
    ledger = kind(table, BLOCKS, 16, 0, **options)
    row = table.submit("one", prompt_tokens=HELD * 16)
    ledger.begin_step()
    assert ledger.admit(row, HELD * 16) and ledger.held_blocks(row) == HELD
    return ledger


@pytest.mark.parametrize("name", ledger_names())
def test_blocks_that_were_never_used_take_no_memory(name):
    first = ledger_with_a_request(name)  # keeps what all ledgers of so many blocks share
    gc.collect()
    tracemalloc.start()
    try:
        second = ledger_with_a_request(name)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 40_000 < BLOCKS  # bytes
    assert first.free_blocks == second.free_blocks == BLOCKS - HELD


def test_a_table_grows_with_its_requests():
    def bytes_of(requests: int) -> int:
        tracemalloc.start()
        try:
            table = RequestTable()
            for i in range(requests):
                table.submit("r", prompt_tokens=i)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert table.prompt_tokens.tolist() == list(range(requests))
        return taken

    few, many = bytes_of(2), bytes_of(2000)
    assert few < 20_000 < many < 1_000_000
