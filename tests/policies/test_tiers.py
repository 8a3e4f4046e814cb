"""Tiers: room that ledgers borrow, alone or several of them from one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.policies.kv.base import KvLedger, LedgerError
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.kv.paged.checkpointed import CheckpointedLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.kv.task_aware.ledger import TaskAwareLedger
from twinserve.policies.kv.tiers import Holdings, Tier
from twinserve.policies.requests import RequestTable

ROWS, SIZE, LAYERS = 5, 4, 3
KINDS = (PagedLedger, CheckpointedLedger, TaskAwareLedger, BidirectionalLedger, LayerwiseLedger)
every_kind = pytest.mark.parametrize("kind", KINDS)


def ledger_of(kind: type[KvLedger], blocks: int = 30, host: int = 4) -> KvLedger:
    table = RequestTable()
    for i in range(ROWS):
        table.submit(f"r{i}", prompt_tokens=9, service_class=i % 2)
    options = {"layers": LAYERS} if kind.knows_layers else {}
    ledger = kind(table, blocks, SIZE, host, **options)
    ledger.begin_step()
    return ledger


def sharing(kinds, room: int = 4, blocks: int = 30) -> tuple[Tier, list[KvLedger]]:
    """Ledgers of these kinds on one tier with room for `room` blocks."""
    ledgers = [ledger_of(kind, blocks, host=0) for kind in kinds]
    tier = Tier(room * ledgers[0].host_units, ledgers[0].host.tier.unit)
    for ledger in ledgers:
        ledger.borrow(tier)
    return tier, ledgers


def test_what_is_undone_is_as_it_was():
    undo = []
    tier = Tier(10, "blocks")
    held = Holdings(tier, undo.append)
    held.reserve(3, 4)
    held.release(3, 1)
    assert (tier.free, held.by_row()) == (7, {3: 3})
    while undo:
        undo.pop()()
    assert (tier.free, held.used, held.by_row()) == (10, 0, {})


def hold(ledger: KvLedger, row: int, tokens: int) -> None:
    """The row has computed so many tokens on the device."""
    assert ledger.admit(row, tokens)
    ledger.table.computed_tokens[row] = tokens
    ledger.begin_step()


# -- a plain model ---------------------------------------------------------------------------------
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "release", "try", "keep", "take back"]),
        st.integers(0, 1),  # ledger
        st.integers(0, ROWS - 1),
        st.integers(0, 9),
    ),
    max_size=40,
)


@examples(60)
@given(st.sampled_from(KINDS), OPERATIONS)
def test_a_tier_agrees_with_a_plain_model(kind, operations):
    """Reservations of two ledgers, in tries within tries of one of them at a time: each holds what
    a dict says, and nobody gets what is not free."""
    tier, ledgers = sharing([kind, kind])
    held: dict[tuple[int, int], int] = {}
    tries: list[tuple[int, int, dict]] = []  # ledger, mark, what was held before
    for name, which, row, units in operations:
        if tries:
            which = tries[0][0]
        ledger, key = ledgers[which], (which, row)
        if name == "try":
            tries.append((which, ledger.mark(), dict(held)))
        elif name in ("keep", "take back") and tries:
            _, mark, before = tries.pop()
            (ledger.commit if name == "keep" else ledger.rollback)(mark)
            held = held if name == "keep" else before
        elif name in ("reserve", "release"):
            more = units if name == "reserve" else -units
            fits = sum(held.values()) + more <= tier.capacity and held.get(key, 0) + more >= 0
            if fits:
                getattr(ledger.host, name)(row, units)
                held[key] = held.get(key, 0) + more
            else:
                with pytest.raises(LedgerError, match=f"row {row} (takes|gives back) {units} "):
                    getattr(ledger.host, name)(row, units)
        for i, owner in enumerate(ledgers):
            expected = [held.get((i, row), 0) for row in range(ROWS)]
            assert [owner.host.held_by(row) for row in range(ROWS)] == expected
            assert owner.host.used == sum(expected)
            assert owner.host.free == tier.capacity - sum(held.values())
        tier.check()


# -- ledgers that share ----------------------------------------------------------------------------
@every_kind
def test_neither_can_take_what_the_other_holds(kind):
    """Room for four blocks: three go to one, so that of the other one's rows only that of a block
    fits; what the first gives back the second can have."""
    tier, (one, other) = sharing([kind, kind])
    hold(one, 0, 3 * SIZE)
    hold(other, 0, 2 * SIZE)
    hold(other, 1, SIZE)
    assert one.swap_out(0)
    assert not other.swap_out(0)
    assert other.host.used == 0 and other.held_blocks(0) == 2
    assert other.swap_out(1) and tier.free == 0
    other.begin_step()
    one.begin_step()
    assert one.swap_in(0)
    one.free(0)
    assert other.swap_out(0) and tier.free == other.host_units
    for ledger in (one, other):
        ledger.check()


def test_copies_of_another_ledger_do_not_give_way():
    """A checkpointed row's copies make room for rows of its own ledger only."""
    tier, (one, other) = sharing([CheckpointedLedger, PagedLedger])
    hold(one, 0, 3 * SIZE)
    hold(one, 1, 4 * SIZE)
    hold(other, 0, 2 * SIZE)
    assert one.checkpoint(0, 9) == 3
    assert not other.swap_out(0) and one.host.held_by(0) == 3
    assert one.swap_out(1) and one.host.by_row() == {1: 4}
    tier.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "out", "out", "back", "free", "tried out", "copy"]),
        st.integers(0, 1),
        st.integers(0, ROWS - 1),
        st.integers(1, 5 * SIZE),
    ),
    max_size=30,
)


@examples(60)
@given(st.sampled_from([*((k, k) for k in KINDS), (PagedLedger, CheckpointedLedger)]), STEPS)
def test_ledgers_on_one_tier_conserve_it_and_leave_each_other_alone(kinds, steps):
    tier, ledgers = sharing(kinds, room=6)
    where = [["nowhere"] * ROWS for _ in kinds]
    for name, which, row, tokens in steps:
        ledger, there = ledgers[which], where[which]
        beside = ledgers[1 - which].host.by_row()
        if name == "hold" and there[row] == "nowhere":
            hold(ledger, row, tokens)
            there[row] = "device"
        elif name == "out" and there[row] == "device":
            there[row] = "host" if ledger.swap_out(row) else "device"
        elif name == "back" and there[row] == "host":
            there[row] = "device" if ledger.swap_in(row) else "host"
        elif name == "free" and there[row] != "nowhere":
            ledger.free(row)
            ledger.table.computed_tokens[row] = 0
            there[row] = "nowhere"
        elif name == "tried out" and there[row] == "device":
            before, mark = ledger.host.by_row(), ledger.mark()
            ledger.swap_out(row)
            ledger.rollback(mark)
            assert ledger.host.by_row() == before
        elif name == "copy" and there[row] == "device" and isinstance(ledger, CheckpointedLedger):
            ledger.checkpoint(row, tokens)
        ledger.begin_step()
        ledger.check()
        assert ledgers[1 - which].host.by_row() == beside
        assert sum(each.host.used for each in ledgers) + tier.free == tier.capacity
    for ledger in ledgers:
        for row in range(ROWS):
            ledger.free(row)
    assert tier.free == tier.capacity


# -- borrowing -------------------------------------------------------------------------------------
@every_kind
def test_a_ledger_alone_has_a_tier_of_its_own(kind):
    one, other = ledger_of(kind, host=3), ledger_of(kind, host=3)
    hold(one, 0, 3 * SIZE)
    assert one.swap_out(0) and one.host.free == 0
    assert other.host.free == other.host.tier.capacity == 3 * other.host_units


@every_kind
def test_a_borrowed_tier_is_the_ledgers_room(kind):
    ledger = ledger_of(kind, host=1)
    hold(ledger, 0, 2 * SIZE)
    assert not ledger.swap_out(0)
    ledger.borrow(Tier(2 * ledger.host_units, ledger.host.tier.unit))
    assert ledger.host_blocks == 2 and ledger.swap_out(0)
    with pytest.raises(LedgerError, match="rows hold .* of the tier to be left"):
        ledger.borrow(Tier(9, ledger.host.tier.unit))
    ledger.check()


def test_a_tier_counts_what_its_ledgers_count():
    ledger = ledger_of(LayerwiseLedger)
    expected = (
        "a tier of blocks of 4 tokens for a ledger that counts cells of 4 tokens in one layer"
    )
    with pytest.raises(LedgerError, match=expected):
        ledger.borrow(ledger_of(PagedLedger).host.tier)
    with pytest.raises(ValueError, match="a tier of -1 tokens"):
        Tier(-1, "tokens")


@every_kind
def test_the_auditor_sees_room_that_is_lost(kind):
    ledger = ledger_of(kind)
    hold(ledger, 0, SIZE)
    assert ledger.swap_out(0)
    ledger.check()
    tier = ledger.host.tier
    held = ledger.host.used
    tier.free -= 1
    with pytest.raises(LedgerError, match=f"{held} held and {tier.free} free are not the tier's "):
        ledger.check()
    tier.free += 1
    ledger.host.release(0, 1)
    with pytest.raises(LedgerError, match=f"row 0 holds {held - 1} .*, not {held}"):
        ledger.check()


@every_kind
def test_a_step_that_moves_nothing_leaves_the_tier_alone(kind):
    """Nothing is reserved, nothing noted for undoing: growing and decoding cost what they did."""
    ledger = ledger_of(kind)
    hold(ledger, 0, SIZE)
    hold(ledger, 1, SIZE)
    noted: list = []
    ledger.host._undo = noted.append
    rows = np.array([0, 1])
    for _ in range(3):
        ledger.begin_step()
        assert ledger.grow_all(rows, ledger.table.computed_tokens[rows] + 1)
        ledger.table.computed_tokens[rows] += 1
    ledger.extend(rows, 2 * SIZE)
    assert noted == [] and ledger.host.used == 0
