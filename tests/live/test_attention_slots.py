"""Slots of tokens in blocks filled from either end: by hand, by their properties, and against what
the bidirectional ledger draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.bidi_views import held_tokens
from twinserve.backends.live.attention import slots
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.requests import RequestClass, RequestTable


def places(table, row, length, block_tokens, first=None) -> np.ndarray:
    return slots.slot_mapping(table, np.full(length, row), np.arange(length), block_tokens, first)


def test_by_hand():
    table = slots.entries_of([[5, 2, 9]], [[False, True, True]])
    assert table.dtype == np.int32
    assert list(slots.block_of(table)[0]) == [5, 2, 9]
    assert list(slots.is_backward(table)[0]) == [0, 1, 1]
    assert list(places(table, 0, 10, 4)) == [20, 21, 22, 23, 11, 10, 9, 8, 39, 38]


def test_a_block_left_early_by_hand():
    table = slots.entries_of([[5, 2, 9]], True)
    counts = np.full(2 * 10, 4, np.int32)
    counts[10 + 5], counts[10 + 2] = 2, 1
    first = slots.first_positions(table, counts, np.empty((1, 4), np.int32))
    assert list(first[0]) == [0, 2, 3, 7]
    assert list(places(table, 0, 6, 4, first)) == [23, 22, 11, 39, 38, 37]


@given(
    st.sampled_from([1, 2, 16, 32, 128, 256]), st.lists(st.booleans(), min_size=1, max_size=6),
    st.data(),
)  # fmt: skip
def test_a_text_has_slots_of_its_own_in_its_own_blocks(block_tokens, backward, data):
    blocks = data.draw(st.permutations(range(len(backward))))
    if data.draw(st.booleans()):  # the highest block whose slots fit
        blocks = [slots.BACKWARD - 1 - b for b in blocks]
    table = slots.entries_of([blocks], [backward])
    length = data.draw(st.integers(1, len(backward) * block_tokens))
    found = places(table, 0, length, block_tokens)
    assert found.min() >= 0 and found.max() <= np.iinfo(np.int32).max
    assert len(set(found)) == length
    assert list(found // block_tokens) == [blocks[p // block_tokens] for p in range(length)]
    offset = np.arange(length) % block_tokens
    mirrored = np.repeat(backward, block_tokens)[:length]
    assert list(found % block_tokens) == list(np.where(mirrored, block_tokens - 1 - offset, offset))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=6))
def test_tokens_of_a_batch(rows):
    new = [n for n, _ in rows]
    start = np.concatenate([[3], 3 + np.cumsum(new)])
    lengths = [n + before for n, before in rows]
    row, position = slots.tokens_of_batch(start, lengths)
    expected = [(i, b + k) for i, (n, b) in enumerate(rows) for k in range(n)]
    assert list(zip(row.tolist(), position.tolist(), strict=True)) == expected


@pytest.mark.parametrize("block", [-1, slots.BACKWARD])
def test_a_block_that_cannot_be_encoded_is_refused(block):
    with pytest.raises(ValueError, match=f"block {block} cannot be put in a block table"):
        slots.entries_of([0, block], True)


@examples(150)
@given(
    st.integers(3, 12),
    st.lists(
        st.tuples(st.sampled_from(["rt", "be", "grow", "free"]), st.integers(1, 11)), max_size=12
    ),
)
def test_the_ledgers_tokens_lie_where_it_draws_them(num_blocks, changes):
    """Entries and counts are all that an engine is told; they must give back the ledger's
    picture."""
    table = RequestTable()
    ledger = BidirectionalLedger(table, num_blocks, 4, host_blocks=8)
    live: list[int] = []
    for number, (kind, amount) in enumerate(changes):
        ledger.begin_step()
        if kind in ("rt", "be"):
            service_class = RequestClass.REAL_TIME if kind == "rt" else RequestClass.BEST_EFFORT
            row = table.submit(f"{'Ab'[kind == 'be']}{number}.", service_class=service_class)
            live += [row] if ledger.admit(row, amount) else []
        elif live and kind == "grow":
            row = live[amount % len(live)]
            ledger.grow(row, held_tokens(ledger, row) + amount)
        elif live:
            ledger.free(live.pop(amount % len(live)))
        for row in live:
            table.computed_tokens[row] = held_tokens(ledger, row)
    whole = [row for row in live if not ledger.missing_tokens(row)]
    drawn = [line.split("|")[1].split() for line in ledger.render().splitlines()]
    assert sum(len(places_of(ledger, table, row)) for row in whole) == sum(
        token != "." for line in drawn for token in line if owner(token) in names(table, whole)
    )
    for row in whole:
        for number, place in enumerate(places_of(ledger, table, row), 1):
            shown = drawn[place // 4][place % 4]
            assert shown.lower() == f"{table.ids[row]}{number}".lower()


def places_of(ledger, table, row) -> np.ndarray:
    """Slots of the row's text, from what an engine would be told; behind its row, leftovers."""
    backward = table.service_class[row] != RequestClass.REAL_TIME
    entries = slots.entries_of(ledger.blocks_of(row), backward)
    counts = np.full(2 * ledger.num_blocks, 4, np.int32)
    cells = slots.cell_of(entries, ledger.num_blocks)
    counts[cells[:-1]] = ledger.counts_of(row)[:-1]
    others = np.setdiff1d(np.arange(2 * ledger.num_blocks), cells)
    counts[others] = 1  # blocks of others, left after one token
    leftover = slots.entries_of(others[:2] % ledger.num_blocks, others[:2] >= ledger.num_blocks)
    block_table = np.concatenate([entries, leftover])[None]
    width = block_table.shape[1]
    first = slots.first_positions(block_table, counts, np.empty((1, width + 1), np.int32))
    return places(block_table, 0, held_tokens(ledger, row), 4, first)


def owner(token: str) -> str:
    return token.lower().partition(".")[0] + "."


def names(table, rows) -> set[str]:
    return {table.ids[row].lower() for row in rows}
