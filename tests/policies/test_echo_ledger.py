"""Echo's KV memory: the eviction order by hand, in lockstep with a reference of plain lists, and
what tries leave."""

import random

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from tests.policies import test_paged_ledger
from tests.policies.paged_reference import PagedReference
from tests.policies.test_paged_ledger import SIZE, TEXTS, World
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.task_aware.eviction import CountedPool
from twinserve.policies.kv.task_aware.ledger import CountedLedger, TaskAwareLedger
from twinserve.policies.requests import RequestTable

ON, OFF = 0, 1


class Desk:
    """A ledger of blocks of four tokens; a text is a letter, `A3` its first three blocks."""

    def __init__(self, ledger=TaskAwareLedger, blocks: int = 12) -> None:
        self.table = RequestTable()
        self.ledger = ledger(self.table, blocks, 4, shared_contents=26 * 10)

    def submit(self, text: str, service_class: int) -> int:
        n = int(text[1:])
        prefix = 10 * (ord(text[0]) - ord("A")) + np.arange(n)
        # one token more: all blocks can hit
        row = self.table.submit(text, prefix, prompt_tokens=4 * n + 1, service_class=service_class)
        self.ledger.begin_step()
        return row

    def run(self, row: int) -> None:
        """Compute its prompt's full blocks."""
        hit = self.ledger.hit_tokens(row)
        assert self.ledger.admit(row, int(self.table.prompt_tokens[row]) - 1, hit)
        self.ledger.check()

    def end(self, row: int) -> None:
        self.ledger.free(row)
        self.ledger.check()

    def cached(self) -> set[str]:
        """Blocks that can be found, by name: `A0` is the first block of text A."""
        content = self.ledger.pool.content
        return {f"{chr(65 + c // 10)}{c % 10}" for c in content[content >= 0].tolist()}

    def order(self) -> list[tuple[str, float]]:
        """(block, priority of the paper), the first to be evicted first."""
        pool = self.ledger.pool
        order = pool.eviction_order()
        names = [f"{chr(65 + c // 10)}{c % 10}" for c in pool.content[order].tolist()]
        return list(zip(names, (pool._rank_of(order) / 2).tolist(), strict=True))


def filled(ledger=TaskAwareLedger) -> Desk:
    """Five texts of two blocks have been computed, one after another, and two are still to come or
    running:

    | text | computed by            | still wanted by             | priority |
    |------|------------------------|-----------------------------|----------|
    | A    | offline, has ended     | two queued offline requests | 2        |
    | B    | offline, has ended     | nobody                      | 0        |
    | C    | online, has ended      | nobody                      | 0.5      |
    | D    | online, has ended      | one queued offline request  | 1        |
    | E    | offline, has ended     | nobody                      | 0        |
    | F    | online, runs           |                             | infinity |
    """
    desk = Desk(ledger)
    for text, service_class in (("A2", OFF), ("B2", OFF), ("C2", ON), ("D2", ON), ("E2", OFF)):
        row = desk.submit(text, service_class)
        desk.run(row)
        desk.end(row)
    for text in ("A2", "A2", "D2"):
        desk.submit(text, OFF)
    desk.run(desk.submit("F2", ON))
    return desk


def test_the_lowest_priority_goes_first_then_the_least_recently_used():
    desk = filled()
    # within a text the tail was released before the head
    assert desk.order() == [
        ("B1", 0.0), ("B0", 0.0), ("E1", 0.0), ("E0", 0.0), ("C1", 0.5), ("C0", 0.5), ("D1", 1.0),
        ("D0", 1.0), ("A1", 2.0), ("A0", 2.0),
    ]  # fmt: skip
    assert desk.ledger.pool.blank == 0 and desk.ledger.free_blocks == 10


@pytest.mark.parametrize(
    ("blocks", "gone", "lost"),
    [
        (1, {"B1"}, 0),
        (3, {"B0", "B1", "E1"}, 0),
        (5, {"B0", "B1", "E0", "E1", "C1"}, 0),
        (7, {"B0", "B1", "E0", "E1", "C0", "C1", "D1"}, 1),
        (10, {f"{text}{i}" for text in "ABCDE" for i in (0, 1)}, 4),
    ],
)
def test_memory_for_a_new_request_takes_them_in_that_order(blocks, gone, lost):
    """lost: evicted blocks that somebody still wants (eq. 2), known before."""
    desk = filled()
    before = desk.cached()
    assert desk.ledger.lost_tokens(4 * blocks) == 4 * lost
    desk.run(desk.submit(f"Z{blocks}", ON))
    assert before - desk.cached() == gone


def test_a_count_falls_as_requests_end_and_moves_the_block():
    desk = Desk()
    rows = [desk.submit("A2", OFF) for _ in range(3)]
    desk.run(rows[0])
    assert desk.order() == []  # in use: never evicted
    desk.end(rows[0])
    assert desk.order() == [("A1", 2.0), ("A0", 2.0)]
    desk.run(rows[1])
    desk.end(rows[1])
    assert desk.order() == [("A1", 1.0), ("A0", 1.0)]
    desk.end(rows[2])  # withdrawn without having run
    assert desk.order() == [("A1", 0.0), ("A0", 0.0)]


def test_a_preempted_request_still_wants_its_own_text():
    """Its generated text too: nobody else shares it, and it will be computed again."""
    desk = Desk()
    row = desk.submit("A1", OFF)
    desk.run(row)
    assert desk.ledger.grow(row, 12)
    desk.table.computed_tokens[row], desk.table.output_tokens[row] = 12, 8
    desk.ledger.drop(row)
    desk.table.computed_tokens[row] = 0
    desk.ledger.check()
    assert [priority for _, priority in desk.order()] == [1.0, 1.0, 1.0]
    desk.end(row)
    assert [priority for _, priority in desk.order()] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "prefix", [None, np.arange(0), np.arange(30, 32)], ids=["unnamed", "no whole block", "its own"]
)
def test_a_preempted_request_wants_its_text_whether_or_not_it_had_a_name(prefix):
    """A best-effort pool's prompts have no names in the run, and names that nobody shares in its
    replay."""
    desk = Desk()
    row = desk.table.submit("own", prefix, prompt_tokens=9, service_class=OFF)
    desk.ledger.begin_step()
    assert desk.ledger.admit(row, 9)
    desk.ledger.drop(row)
    desk.ledger.check()
    assert [priority for _, priority in desk.order()] == [1.0, 1.0]
    # ten of twelve blocks hold nothing; its text would go for the next
    assert [desk.ledger.lost_tokens(4 * n) for n in (10, 11, 12)] == [0, 4, 8]
    desk.ledger.free(row)
    assert [priority for _, priority in desk.order()] == [0.0, 0.0] and not desk.ledger.lost_tokens(
        48
    )


def test_the_auditor_sees_a_wrong_count():
    desk = filled()
    desk.ledger.pool.rc[250] += 1  # of a text that is not here
    with pytest.raises(LedgerError, match="reference counts"):
        desk.ledger.check()


def test_the_auditor_sees_a_wrong_order():
    desk = filled()
    desk.ledger.pool._rank[desk.ledger.pool.eviction_order()[0]] = 8
    with pytest.raises(LedgerError, match="priority is out of date"):
        desk.ledger.check()


# -- against a reference ---------------------------------------------------------------------------
class TaskAwareReference(PagedReference):
    """Evicts by (priority, last use), looked up anew for each block."""

    def __init__(self, blocks: int, size: int, host: int, caching: bool, by_priority: bool) -> None:
        super().__init__(blocks, size, host, caching)
        self.by_priority = by_priority
        self.service_class: dict[int, int] = {}
        self.alive: list[int] = []

    def rc(self, content) -> int:
        if content[0] == "own" if isinstance(content, tuple) else False:
            return int(content[1] in self.alive and self.service_class[content[1]] == OFF)
        return sum(content in self.names[r] for r in self.alive if self.service_class[r] == OFF)

    def priority(self, block) -> float:
        if block.content is None:
            return -1
        if not self.by_priority:
            return 0
        return self.rc(block.content) or (0.5 if getattr(block, "online", False) else 0)

    def take(self, row: int, n: int):
        order = sorted(self.queue, key=self.priority)  # stable: the queue is in order of release
        for block in order[:n]:
            block.online = False
        self.queue = order[:n] + [block for block in self.queue if block not in order[:n]]
        return super().take(row, n)

    def give_back(self, row: int) -> None:
        for block in self.rows[row]:
            block.online = getattr(block, "online", False) or self.service_class[row] == ON
        super().give_back(row)

    def free(self, row: int, ends: bool = False) -> None:
        super().free(row)
        if ends:
            self.alive.remove(row)


class TaskAwareWorld(World):
    def __init__(self, pick, blocks: int, host: int, caching: bool, kind) -> None:
        super().__init__(pick, blocks, host, caching)
        self.ledger = kind(self.table, blocks, SIZE, host, caching, shared_contents=8 * TEXTS)
        self.reference = TaskAwareReference(blocks, SIZE, host, caching, kind.by_priority)

    def submit(self) -> None:
        super().submit()
        row = self.live[-1]
        self.reference.service_class[row] = int(self.table.service_class[row])
        self.reference.alive.append(row)
        self.ledger.begin_step()
        self.moved = []

    def free(self) -> None:
        before = list(self.live)
        super().free()
        (row,) = set(before) - set(self.live)
        self.reference.alive.remove(row)

    def compare(self) -> None:
        super().compare()
        pool, reference = self.ledger.pool, self.reference
        names = {}  # the ledger's content -> the reference's
        for row, blocks in reference.rows.items():
            for block, number in zip(blocks, self.ledger.blocks_of(row).tolist(), strict=True):
                if block.content is not None:
                    names[int(pool.content[number])] = block.content
        order = sorted(reference.queue, key=reference.priority)
        wanted = [reference.rc(b.content) > 0 if b.content is not None else False for b in order]
        for n in range(len(order) + 1):
            assert self.ledger.lost_tokens(n * SIZE) == SIZE * sum(wanted[:n])
        if reference.by_priority:
            ranks = [reference.priority(b) for b in order if b.content is not None]
            assert (pool._rank_of(pool.eviction_order()) / 2).tolist() == ranks


def _snapshot(ledger, plain=test_paged_ledger.snapshot) -> dict:
    pool = ledger.pool
    order = pool.eviction_order()
    pool.problems()  # puts the order where the plain snapshot looks for it
    extra = {
        "rank": pool._rank[order].tolist(),
        "rc": np.flatnonzero(pool.rc).tolist(),
        "counts": pool.rc[pool.rc > 0].tolist(),
        "needed": pool.needed,
        "online": [bool(pool.online[b]) for b in order],
        "counted": {row: len(names) for row, names in sorted(ledger._counted.items())},
    }
    return {**plain(ledger), **extra}


@pytest.mark.parametrize("kind", [TaskAwareLedger, CountedLedger])
@pytest.mark.parametrize("seed", mostly_nightly(range(25), *range(5)))
def test_long_walks_agree_with_the_reference(monkeypatch, kind, seed):
    monkeypatch.setattr(test_paged_ledger, "snapshot", _snapshot)
    rng = random.Random(seed)
    host, cached = rng.choice((0, 5, 20)), rng.random() < 0.9
    world = TaskAwareWorld(rng.choice, rng.randint(3, 24), host, cached, kind)
    test_paged_ledger.walk(world, rng)


@pytest.mark.slow
def test_stale_entries_do_not_pile_up():
    """A text that is used again and again leaves an entry each time; they are cleared away."""
    desk = Desk(blocks=8)
    for _ in range(400):
        row = desk.submit("A2", OFF)
        desk.run(row)
        desk.end(row)
    assert desk.ledger.pool._listed <= 4 * 8 + 1024 + 8


def test_an_entry_whose_first_block_is_in_use_again_waits_for_older_ones():
    """The first and the last block changed their priority, and back: they are one entry now."""
    pool = CountedPool(7, contents=7)
    blocks = pool.take(7)
    pool.publish(blocks, np.arange(7))
    for part in (blocks[:1], blocks[1:6], blocks[6:]):
        pool.release(part)
    for change in (+1, -1):
        pool.count(np.array([0, 6]), change)
    pool.use(blocks[:1])
    assert pool.take(5).tolist() == blocks[1:6].tolist()
