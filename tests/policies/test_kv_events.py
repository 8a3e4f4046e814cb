"""KV events of the ledgers: a listener knows at any time what can be found, and hears of nothing
that is taken back."""

import random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies import test_paged_ledger
from tests.policies.event_checks import Listener
from tests.policies.test_echo_ledger import TaskAwareWorld, _snapshot
from tests.policies.test_paged_ledger import SIZE, TEXTS, World, snapshot, walk
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.events import KvEvents
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.kv.paged.pool import BlockPool
from twinserve.policies.kv.task_aware.ledger import CountedLedger
from twinserve.policies.registry import ledger_class, ledger_names
from twinserve.policies.requests import RequestTable
from twinserve.sim.fleet.prefix_index import PrefixIndex

KINDS = [name for name in ledger_names() if ledger_class(name).publishes_events]


def test_ledgers_have_events_where_others_can_find_something_in_them():
    assert KINDS == ["checkpointed", "paged", "paged-rc", "task-aware"]
    assert KINDS == [name for name in ledger_names() if ledger_class(name).caches_prefixes]


@pytest.mark.parametrize("name", sorted(set(ledger_names()) - set(KINDS)))
def test_a_ledger_without_events_says_so(name):
    with pytest.raises(ValueError, match=f"the {name} ledger publishes no KV events"):
        ledger_class(name)(RequestTable(), 8, 4).subscribe(Notes())


# -- by hand ---------------------------------------------------------------------------------------
class Notes:
    """What was heard, in order: +3 for content 2 stored, -3 for it removed."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def stored(self, contents):
        self.heard += (contents + 1).tolist()

    def removed(self, contents):
        self.heard += (-contents - 1).tolist()

    def take(self) -> list[int]:
        heard, self.heard = self.heard, []
        return heard


class Desk:
    """Ten contents in memory of blocks of four tokens, and somebody who listens."""

    def __init__(self, blocks: int, host: int = 0) -> None:
        self.table = RequestTable()
        self.ledger = PagedLedger(self.table, blocks, 4, host, shared_contents=10)
        self.notes = Notes()
        self.ledger.subscribe(self.notes)

    def submit(self, *contents: int, more: int = 1) -> int:
        """A prompt of these blocks and `more` tokens."""
        prefix = np.array(contents, np.int64)
        return self.table.submit("", prefix, prompt_tokens=4 * len(contents) + more)

    def admit(self, row: int, hit: int = 0) -> bool:
        """All of its prompt; hit: blocks that it is to find."""
        tokens = int(self.table.prompt_tokens[row])
        done = self.ledger.admit(row, tokens, 4 * hit)
        self.table.computed_tokens[row] = tokens if done else 0
        return done


def test_a_text_is_stored_once_and_removed_with_its_last_copy():
    """Two rows compute the same text side by side. One copy is evicted: the other one is found."""
    desk = Desk(blocks=6)
    first, second = desk.submit(0, 1), desk.submit(0, 1)
    assert desk.admit(first) and desk.notes.take() == [1, 2]
    assert desk.admit(second) and desk.notes.take() == []
    desk.ledger.free(first)
    desk.ledger.free(second)
    assert desk.notes.take() == []  # both are cached
    assert desk.admit(desk.submit(more=16))  # two blank blocks, and the first copy
    assert desk.ledger.pool.evicted == 2 and desk.notes.take() == []
    assert desk.admit(desk.submit(more=4)) and desk.notes.take() == [-2]  # the tail goes first
    assert desk.admit(desk.submit(more=4)) and desk.notes.take() == [-1]


def test_evictions_of_a_run_are_told_when_its_steps_come_to_them():
    """Four tokens a block: the row takes a block at steps 1, 5, 9, 13 and 17, the first a blank
    one. Two copies of a text are cached, so that only the second of each is a loss."""
    desk = Desk(blocks=6)
    first, second = desk.submit(0, 1), desk.submit(0, 1)
    assert desk.admit(first) and desk.admit(second) and desk.notes.take() == [1, 2]
    desk.ledger.free(first)
    desk.ledger.free(second)
    assert desk.admit(row := desk.submit(more=4))
    rows = np.array([row])
    lost = [(k, c.tolist()) for k, c in desk.ledger.lost_in_run(rows, 1, range(2, 18))]
    assert lost == [(5, []), (9, []), (13, [1]), (17, [0])]
    ((step, both),) = desk.ledger.lost_in_run(rows, 1, [17])
    assert step == 17 and both.tolist() == [0, 1]
    assert not list(desk.ledger.lost_in_run(rows, 1, [4]))
    assert not list(desk.ledger.lost_in_run(rows, 13, [14, 16]))
    desk.ledger.foretell(both)
    assert desk.notes.take() == [-1, -2]
    desk.ledger.extend(rows, 17)
    assert desk.notes.take() == []
    desk.ledger.free(row)
    assert desk.admit(desk.submit(0)) and desk.notes.take() == [1]


def test_text_that_only_one_row_knows_is_no_event():
    """Its names are numbers that another engine gives to other texts."""
    desk = Desk(blocks=8)
    row = desk.submit(4, more=12)
    assert desk.admit(row) and desk.notes.take() == [5]
    desk.ledger.drop(row)
    assert desk.ledger.hit_tokens(row) == 12  # of its own
    assert desk.admit(desk.submit(more=32)) and desk.notes.take() == [-5]


def test_a_token_in_flight_names_no_block():
    """Asynchronous scheduling: blocks are stored when their text is known."""
    desk = Desk(blocks=8)
    desk.ledger.known_text_only = True
    row = desk.submit(0, 1, more=0)
    desk.table.prompt_tokens[row] = 7
    desk.table.output_tokens[row] = desk.table.in_flight[row] = 1
    assert desk.ledger.admit(row, 8) and desk.notes.take() == [1]
    desk.table.in_flight[row] = 0
    desk.ledger.grow_all(np.array([row]), np.array([8]))
    assert desk.notes.take() == [2]


def test_what_is_rolled_back_is_never_heard():
    """A try that evicts one text and computes another one."""
    desk = Desk(blocks=3)
    old, new = desk.submit(0, 1), desk.submit(2, 3)
    assert desk.admit(old) and desk.notes.take() == [1, 2]
    mark = desk.ledger.mark()
    desk.ledger.drop(old)
    assert desk.admit(new)
    assert desk.ledger.hit_tokens(new) == 8 and desk.notes.take() == []
    desk.ledger.rollback(mark)
    assert desk.notes.take() == []
    mark = desk.ledger.mark()
    desk.ledger.drop(old)
    assert desk.admit(new) and desk.notes.take() == []
    desk.ledger.commit(mark)
    assert desk.notes.take() == [-1, -2, 3, 4]


def test_who_comes_late_hears_what_is_there():
    desk = Desk(blocks=8)
    assert desk.admit(desk.submit(3, 5)) and desk.notes.take() == [4, 6]
    late = Notes()
    desk.ledger.subscribe(late)
    assert late.take() == [4, 6]
    assert desk.admit(desk.submit(7)) and desk.notes.take() == late.take() == [8]
    mark = desk.ledger.mark()
    with pytest.raises(LedgerError, match="add it between steps"):
        desk.ledger.subscribe(Notes())
    desk.ledger.rollback(mark)


@pytest.mark.parametrize("caching", [False, True])
def test_where_nothing_can_be_found_nothing_is_heard(caching):
    """No prefix caching; or requests whose prompts have no names."""
    table = RequestTable()
    ledger, notes = PagedLedger(table, 8, 4, prefix_caching=caching), Notes()
    ledger.subscribe(notes)
    row = table.submit("", None, prompt_tokens=12)
    assert ledger.admit(row, 12)
    ledger.free(row)
    assert notes.take() == []


# -- against the ledgers ---------------------------------------------------------------------------
class Watched:
    """A world of tests/policies/test_paged_ledger.py or test_echo_ledger.py with a listener."""

    def compare(self) -> None:
        if not hasattr(self, "listener"):
            self.listener = Listener(self.ledger, PrefixIndex())
        self.listener.compare()


class PagedWatched(Watched, World):
    def __init__(self, pick, blocks: int, host: int, kind: type[PagedLedger]) -> None:
        super().__init__(pick, blocks, host, True)
        self.ledger = kind(self.table, blocks, SIZE, host, shared_contents=8 * TEXTS)


class CountedWatched(Watched, TaskAwareWorld):
    def __init__(self, pick, blocks: int, host: int, kind: type[CountedLedger]) -> None:
        super().__init__(pick, blocks, host, True, kind)


def listened(name: str, seed: int) -> Listener:
    """Sixty changes, tries and steps of a ledger in small memory, compared after each."""
    rng, kind = random.Random(seed), ledger_class(name)
    counted = issubclass(kind, CountedLedger)
    world = (CountedWatched if counted else PagedWatched)(
        rng.choice, rng.randint(3, 24), rng.choice((0, 5, 20)), kind
    )
    world.compare()
    with patch.object(test_paged_ledger, "snapshot", _snapshot if counted else snapshot):
        walk(world, rng)
    return world.listener


@pytest.mark.parametrize("name", KINDS)
@examples(40)
@given(seed=st.integers(0, 2**32))
def test_a_listener_knows_what_can_be_found(name, seed):
    listened(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_walks_see_texts_come_and_go_and_tries_that_fail(name):
    heard = [listened(name, seed) for seed in range(30)]
    assert sum(one.stored_blocks for one in heard) > 100
    assert sum(one.removed_blocks for one in heard) > 50
    assert sum(one.unsaid for one in heard) > 10
    assert sum(one.foretold for one in heard) > 5


# -- broken on purpose -----------------------------------------------------------------------------
def tell_what_is_tried(monkeypatch):
    touch = KvEvents.touch

    def at_once(self, contents):
        touch(self, contents)
        self.publish()

    monkeypatch.setattr(KvEvents, "touch", at_once)


def forget_to_tell_on_commit(monkeypatch):
    monkeypatch.setattr(PagedLedger, "_publish_events", lambda self: None)


def tell_at_the_end_of_inner_tries(monkeypatch):
    commit = PagedLedger.commit

    def early(self, mark):
        commit(self, mark)
        if self.pool.events is not None:
            self.pool.events.publish()

    monkeypatch.setattr(PagedLedger, "commit", early)


def tell_private_names(monkeypatch):
    start = KvEvents.__init__
    monkeypatch.setattr(KvEvents, "__init__", lambda self, pool, shared: start(self, pool, 1000))


def remove_with_the_first_copy(monkeypatch):
    forget = BlockPool._forget

    def first(self, blocks):
        contents = self.content[blocks]
        forget(self, blocks)
        if self.events is not None and self.undo is None:
            gone = contents[contents < len(self.events._told)]
            gone = np.unique(gone[self.events._told[gone]])
            self.events._told[gone] = False
            for listener in self.events._listeners if len(gone) else ():
                listener.removed(gone)

    monkeypatch.setattr(BlockPool, "_forget", first)


def forget_evictions(monkeypatch):
    forget = BlockPool._forget

    def silent(self, blocks):
        events, self.events = self.events, None
        forget(self, blocks)
        self.events = events

    monkeypatch.setattr(BlockPool, "_forget", silent)


def foretell_the_loss_of_one_copy(monkeypatch):
    monkeypatch.setattr(
        BlockPool, "lost_with", lambda self, blocks, first=0: self.content[blocks[first:]]
    )


def foretell_too_little(monkeypatch):
    first = BlockPool.evicted_first
    monkeypatch.setattr(BlockPool, "evicted_first", lambda self, n: first(self, n)[: n - 1])


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        (tell_what_is_tried, "an event while a change is tried"),
        (tell_at_the_end_of_inner_tries, "an event while a change is tried"),
        (forget_to_tell_on_commit, "the events are not what the blocks hold"),
        (forget_evictions, "the events are not what the blocks hold"),
        (tell_private_names, "a name that only one row knows"),
        (remove_with_the_first_copy, "the events are not what the blocks hold"),
        (foretell_the_loss_of_one_copy, "a text was told as lost and is found|not ascending"),
        (foretell_too_little, "an eviction that was not foretold"),
    ],
)
def test_a_broken_rule_is_seen(monkeypatch, broken, seen):
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=seen):
        for seed in range(12):
            listened("paged", seed)
