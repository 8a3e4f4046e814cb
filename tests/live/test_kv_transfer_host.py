"""What the host holds, and which copies a step is ordered to do: without an engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.backends.live.transfer.host import HostFull, HostKv, HostRows


def indices(runs) -> list[int]:
    return [index for first, count in runs for index in range(first, first + count)]


def pairs(copies) -> list[tuple[int, int]]:
    return list(zip(indices(copies.slots), indices(copies.rows), strict=True))


def test_rows_are_taken_lowest_first_and_joined_again():
    rows = HostRows(10)
    first, second, third = rows.take(3), rows.take(4), rows.take(3)
    assert (first, second, third, rows.free) == ([(0, 3)], [(3, 4)], [(7, 3)], 0)
    with pytest.raises(HostFull, match="room for 0 of 10 tokens, 1 shall be copied out"):
        rows.take(1)
    rows.give(third)
    rows.give(first)
    assert rows.take(5) == [(0, 3), (7, 2)]
    with pytest.raises(ValueError, match="free already"):
        rows.give([(8, 2)])


def test_a_swap_out_and_back():
    host = HostKv(host_tokens=16, block_tokens=4)
    host.swap_out("a", [5, 2], 7)
    orders = host.take_orders()
    assert orders.number == 1
    assert pairs(orders.out) == list(zip([20, 21, 22, 23, 8, 9, 10], range(7), strict=True))
    assert not orders.back.rows
    assert (host.held("a"), host.free_tokens) == (7, 9)

    assert host.missing("a", 0, 8) == 0  # no order: the engine would recompute it
    assert host.swap_in("a") == 7
    assert host.missing("a", 4, 8) == 3  # the prefix cache has the first block
    host.resumed("a", [2, 6], 3)
    assert host.held("a") == 0
    orders = host.take_orders()
    assert (orders.number, orders.back.after) == (2, 1)
    assert pairs(orders.back) == [(24, 4), (25, 5), (26, 6)]
    assert (host.unfilled, host.free_tokens) == ((), 16)


def test_the_step_computes_at_least_the_last_known_token():
    host = HostKv(16, 4)
    host.swap_out("a", [0, 1], 8)
    host.swap_in("a")
    assert host.missing("a", 0, 8) == 7
    assert host.missing("a", 8, 8) == 0


def test_an_order_back_that_is_not_taken_up_lapses():
    host = HostKv(16, 4)
    host.swap_out("a", [0], 4)
    host.take_orders()
    host.swap_in("a")
    assert host.take_orders().number == 0
    assert (host.unfilled, host.held("a")) == (("a",), 4)
    assert host.missing("a", 0, 5) == 0
    host.take_orders()
    assert host.unfilled == ()


def test_a_recomputed_or_finished_request_gives_its_rows_up_with_the_next_step():
    host = HostKv(16, 4)
    host.swap_out("a", [0], 4)
    host.swap_out("b", [1], 4)
    host.take_orders()
    host.resumed("a", [7], 0)  # resumed without an order
    host.drop("b")
    host.drop("nobody")
    assert (host.held("a"), host.held("b"), host.free_tokens) == (0, 0, 8)
    host.check()
    assert host.take_orders().number == 0
    assert host.free_tokens == 16


def test_what_is_refused():
    host = HostKv(8, 4)
    with pytest.raises(HostFull, match="room for 8 of 8 tokens, 9"):
        host.swap_out("a", [0, 1, 2], 9)
    assert (host.free_tokens, host.take_orders().number) == (8, 0)  # nothing happened
    host.swap_out("a", [0], 4)
    with pytest.raises(ValueError, match="swapped out already"):
        host.swap_out("a", [0], 4)
    with pytest.raises(ValueError, match="5 tokens to swap out of 1 blocks of 4"):
        host.swap_out("b", [1], 5)
    with pytest.raises(ValueError, match="no copy on the host"):
        host.swap_in("b")
    with pytest.raises(ValueError, match="host_tokens is 0"):
        HostKv(0, 4)
    host.check()


@examples(60)
@given(st.data())
def test_rows_are_conserved_and_every_token_comes_back_from_its_own_row(data):
    """Any order of swaps, drops and steps against a plain picture of device and host
    contents."""
    block_tokens = 4
    host = HostKv(data.draw(st.integers(8, 40)), block_tokens)
    memory: dict[int, tuple] = {}  # host row -> content
    names = ["a", "b", "c"]
    swapped: dict[str, int] = {}
    device: dict[int, tuple] = {}
    block = 0
    for step in range(data.draw(st.integers(1, 12))):
        for name in names:
            do = data.draw(st.sampled_from(["out", "in", "drop", "nothing"]))
            tokens = data.draw(st.integers(1, 9))
            if do == "out" and name not in swapped:
                blocks = list(range(block, block + -(-tokens // block_tokens)))
                block += len(blocks)
                for position in range(tokens):
                    device[blocks[0] * block_tokens + position] = (name, step, position)
                try:
                    host.swap_out(name, blocks, tokens)
                    swapped[name] = step, tokens
                except HostFull:
                    assert tokens > host.free_tokens
            elif do == "in" and name in swapped and swapped[name][0] < step:
                host.swap_in(name)
                cached = data.draw(st.integers(0, 2)) * block_tokens
                found = host.missing(name, cached, swapped[name][1] + 1)
                assert found == max(0, swapped[name][1] - cached)
                blocks = list(range(block, block + 3))
                block += 3
                host.resumed(name, blocks, found)
                for position in range(cached, cached + found):
                    expected = (name, swapped[name][0], position)
                    device[blocks[0] * block_tokens + position] = ("wait", expected)
                del swapped[name]
            elif do == "drop":
                host.drop(name)
                swapped.pop(name, None)
            host.check()
        orders = host.take_orders()
        for slot, row in pairs(orders.out):
            memory[row] = device[slot]
        for slot, row in pairs(orders.back):
            assert device[slot] == ("wait", memory[row])
            device[slot] = memory[row]
        host.check()
    host.drop_all()
    host.take_orders()
    assert host.free_tokens == host.host_rows.rows
    assert not [content for content in device.values() if content[0] == "wait"]
