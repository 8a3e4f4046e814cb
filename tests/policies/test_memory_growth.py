"""What a replica keeps is in proportion to what it holds, not to what it could hold."""

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinserve.policies.kv.free import FreeStack, zeros_by_page
from twinserve.policies.registry import ledger_class, ledger_names
from twinserve.policies.requests import RequestTable

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
