"""Tiers: the host's room, as ledgers hold it."""

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
from twinserve.policies.kv.tiers import Tier
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


def test_what_is_undone_is_as_it_was():
    undo = []
    held = Tier(10, "blocks", undo.append)
    held.reserve(3, 4)
    held.release(3, 1)
    assert (held.free, held.by_row()) == (7, {3: 3})
    while undo:
        undo.pop()()
    assert (held.free, held.used, held.by_row()) == (10, 0, {})


def hold(ledger: KvLedger, row: int, tokens: int) -> None:
    """The row has computed so many tokens on the device."""
    assert ledger.admit(row, tokens)
    ledger.table.computed_tokens[row] = tokens
    ledger.begin_step()


# -- a plain model ---------------------------------------------------------------------------------
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "release", "try", "keep", "take back"]),
        st.integers(0, ROWS - 1),
        st.integers(0, 9),
    ),
    max_size=40,
)


@examples(60)
@given(st.sampled_from(KINDS), OPERATIONS)
def test_a_tier_agrees_with_a_plain_model(kind, operations):
    """Reservations in tries within tries: rows hold what a dict says, and get only what is free."""
    ledger = ledger_of(kind)
    tier, held = ledger.host, {}
    tries: list[tuple[int, dict]] = []  # mark, what was held before
    for name, row, units in operations:
        if name == "try":
            tries.append((ledger.mark(), dict(held)))
        elif name in ("keep", "take back") and tries:
            mark, before = tries.pop()
            (ledger.commit if name == "keep" else ledger.rollback)(mark)
            held = held if name == "keep" else before
        elif name in ("reserve", "release"):
            more = units if name == "reserve" else -units
            fits = sum(held.values()) + more <= tier.capacity and held.get(row, 0) + more >= 0
            if fits:
                getattr(tier, name)(row, units)
                held[row] = held.get(row, 0) + more
            else:
                with pytest.raises(LedgerError, match=f"row {row} (takes|gives back) {units} "):
                    getattr(tier, name)(row, units)
        assert [tier.held_by(row) for row in range(ROWS)] == [held.get(r, 0) for r in range(ROWS)]
        assert tier.used == sum(held.values())
        assert not tier.problems(held)


# -- ledgers ---------------------------------------------------------------------------------------
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "out", "out", "back", "free", "tried out", "copy"]),
        st.integers(0, ROWS - 1),
        st.integers(1, 5 * SIZE),
    ),
    max_size=30,
)


@examples(60)
@given(st.sampled_from(KINDS), STEPS)
def test_a_ledger_conserves_its_tier(kind, steps):
    ledger = ledger_of(kind, host=6)
    tier, there = ledger.host, ["nowhere"] * ROWS
    for name, row, tokens in steps:
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
            before, mark = tier.by_row(), ledger.mark()
            ledger.swap_out(row)
            ledger.rollback(mark)
            assert tier.by_row() == before
        elif name == "copy" and there[row] == "device" and isinstance(ledger, CheckpointedLedger):
            ledger.checkpoint(row, tokens)
        ledger.begin_step()
        ledger.check()
        assert sum(tier.by_row().values()) + tier.free == tier.capacity
    for row in range(ROWS):
        ledger.free(row)
    assert tier.free == tier.capacity


@every_kind
def test_the_auditor_sees_room_that_is_lost(kind):
    ledger = ledger_of(kind)
    hold(ledger, 0, SIZE)
    assert ledger.swap_out(0)
    ledger.check()
    tier, held = ledger.host, ledger.host.used
    tier.free -= 1
    expected = f"{held} held and {tier.free} free are not the tier's {tier.capacity} "
    with pytest.raises(LedgerError, match=expected):
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
