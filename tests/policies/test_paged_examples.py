"""Worked examples of what a block of the paged ledger goes through."""

import numpy as np
import pytest

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.requests import RequestTable

SIZE = 4


class Shelf:
    """Rows by name; a text is a letter, so that "aab" shares its first two blocks with "aac"."""

    def __init__(self, blocks: int, host: int = 0, caching: bool = True) -> None:
        self.table = RequestTable()
        self.ledger = PagedLedger(self.table, blocks, SIZE, host, caching, shared_contents=32)
        self.named: dict[str, int] = {}
        self.rows: dict[str, int] = {}

    def submit(self, name: str, text: str, extra: int = 0, service_class: int = 0) -> int:
        """One block a letter, and `extra` tokens behind them."""
        starts = [text[: i + 1] for i in range(len(text))]
        for start in starts:
            if start not in self.named:
                self.named[start] = len(self.named)
        prefix = np.array([self.named[start] for start in starts], np.int64)
        tokens = SIZE * len(text) + extra
        self.rows[name] = self.table.submit(
            name, prefix, prompt_tokens=tokens, service_class=service_class
        )
        return self.rows[name]

    def admit(self, name: str, **values) -> bool:
        row = self.rows[name]
        hit = self.ledger.hit_tokens(row)
        done = self.ledger.admit(row, int(self.table.known_tokens(row)), hit, **values)
        self.table.computed_tokens[row] = self.table.known_tokens(row) if done else 0
        self.ledger.check()
        return done

    def hit(self, name: str) -> int:
        return self.ledger.hit_tokens(self.rows[name])

    def free(self, name: str) -> None:
        self.ledger.free(self.rows[name])
        self.ledger.check()


def test_the_last_token_is_always_computed():
    shelf = Shelf(8)
    shelf.submit("first", "ab")
    shelf.admit("first")
    shelf.submit("same", "ab")
    shelf.submit("longer", "ab", extra=1)
    shelf.submit("other", "ba")
    assert (shelf.hit("same"), shelf.hit("longer"), shelf.hit("other")) == (4, 8, 0)


def test_cached_blocks_are_evicted_least_recently_freed_and_tail_first():
    shelf = Shelf(4)
    shelf.submit("one", "ab")
    shelf.submit("two", "cd")
    shelf.admit("one")
    shelf.admit("two")
    shelf.free("two")
    shelf.free("one")
    assert shelf.ledger.free_blocks == shelf.ledger.usage().cached == 4
    shelf.submit("three", "e")
    assert shelf.admit("three")  # takes d, the tail of who was freed first
    shelf.submit("cd again", "cd", extra=1)
    shelf.submit("ab again", "ab", extra=1)
    assert (shelf.hit("cd again"), shelf.hit("ab again")) == (4, 8)


def test_hits_that_nobody_uses_are_no_free_memory_any_more():
    shelf = Shelf(4)
    shelf.submit("one", "abc")
    shelf.admit("one")
    shelf.free("one")
    shelf.submit("two", "abc", extra=8)  # three hits and two more: five of four
    assert shelf.hit("two") == 12 and not shelf.admit("two")
    assert shelf.ledger.free_blocks == 4


def test_a_dropped_row_finds_what_it_had_generated():
    shelf = Shelf(6)
    row = shelf.submit("one", "a")
    shelf.admit("one")
    shelf.table.output_tokens[row] = 5
    assert shelf.ledger.grow(row, 9)
    shelf.ledger.drop(row)
    assert shelf.hit("one") == 8  # a prompt block and a generated one of its nine tokens
    shelf.free("one")


def test_misuse_is_told():
    shelf = Shelf(4)
    row = shelf.submit("one", "ab", extra=1)
    with pytest.raises(LedgerError, match="1 cached blocks, 0 are there"):
        shelf.ledger.admit(row, 9, 4)
    shelf.admit("one")
    with pytest.raises(LedgerError, match="though it holds 3 blocks"):
        shelf.ledger.admit(row, 9)
    with pytest.raises(LedgerError, match="do not fit"):
        shelf.ledger.extend(np.array([row]), 50)
    mark = shelf.ledger.mark()
    shelf.ledger.commit(mark)
    with pytest.raises(LedgerError, match="ended already"):
        shelf.ledger.rollback(mark)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda pool: pool.refs.__setitem__(0, 2), "users do not match"),
        (lambda pool: pool._blank.take(1), "not a partition"),
        (lambda pool: setattr(pool, "cached", 1), "in eviction order, 1 counted"),
        (lambda pool: pool.content.__setitem__(5, 3), "a blank block is findable"),
    ],
)
def test_the_auditor_sees_what_is_wrong(spoil, message):
    shelf = Shelf(6)
    shelf.submit("one", "ab", extra=1)
    shelf.admit("one")
    spoil(shelf.ledger.pool)
    with pytest.raises(LedgerError, match=message):
        shelf.ledger.check()


def test_what_a_row_lacks_is_what_is_not_cached():
    """Room in `full` is what `b` needs beyond the blocks that it finds."""
    shelf = Shelf(6)
    shelf.submit("a", "xy")
    shelf.submit("full", "mnop")
    for name in ("a", "full"):
        shelf.admit(name)
    row, victims = shelf.submit("b", "xyz", extra=1), np.array([shelf.rows["full"]])
    lack, gains = shelf.ledger.relief(row, 13, victims)
    assert (shelf.hit("b"), lack, gains.tolist()) == (8, 2, [4])


def test_of_two_prompts_alike_the_blocks_found_are_those_computed_first():
    """`ahead` is a block ahead of `behind`, in a run of three steps of a block each."""
    shelf = Shelf(10)
    rows = np.array([shelf.submit(name, "abcd") for name in ("behind", "ahead")])
    for row, tokens in zip(rows.tolist(), (4, 8), strict=True):
        assert shelf.ledger.admit(row, tokens)
        shelf.table.computed_tokens[row] = tokens
    shelf.ledger.extend_chunks(rows, np.array([4, 4]), 2)
    shelf.table.computed_tokens[rows] += 8
    shelf.submit("third", "abcd", extra=1)
    assert shelf.admit("third")
    behind, ahead, third = (
        shelf.ledger.blocks_of(shelf.rows[n]) for n in ("behind", "ahead", "third")
    )
    assert third[:4].tolist() == [behind[0], *ahead[1:4]]
