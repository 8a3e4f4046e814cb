"""The bidirectional ledger at its limits: a full host, grants taken back, wrong use, damage found
by the auditor.
"""

import numpy as np
import pytest

from tests.policies.test_bidirectional import Board, fig8, overwritten
from twinserve.policies.kv.base import LedgerError


def test_the_lowest_row_gives_up_its_spare_copies_first():
    board = Board(blocks=3, host_blocks=2, size=2)
    assert board.admit("a", 2) and board.admit("b", 2) and board.admit("c", 2)
    board.step()
    assert board.admit("A", 4)
    assert board.moves() == ["a to host 2: 0[0:2]", "b to host 2: 1[0:2]"]
    board.step()
    board.free("A")
    assert board.grow("a", 2) and board.grow("b", 2)
    board.step()
    assert board.swap_out("c")  # takes the room of a's copies
    board.step()
    assert board.swap_out("b")
    assert board.moves() == []
    board.step()
    assert not board.swap_out("a")


def test_copies_of_what_the_device_has_lost_make_no_room():
    board = Board(blocks=3, host_blocks=2, size=2)
    assert board.admit("a", 4) and board.admit("b", 2)
    board.step()
    assert board.admit("A", 4)
    board.step()
    board.free("A")
    assert board.grow("a", 4)  # on both sides; the host is full
    board.step()
    assert board.admit("B", 2)
    assert board.missing_tokens("a") == 2
    board.step()
    assert board.swap_out("b")  # takes the room of the other two
    board.free("B")
    board.step()
    assert board.grow("a", 4)
    assert board.moves() == ["a to device 2: 0[0:2]"]


def test_a_part_moves_beside_a_running_real_time_row_if_it_just_fits():
    board = Board(blocks=2)
    assert board.admit("A", 3) and board.admit("B", 3)
    board.step()
    assert board.admit("a", 1)
    board.step()
    assert board.grow("B", 3) and board.grow("a", 1) and board.grow("A", 4)
    board.shows(
        """
        0 | A1 A2 A3 A4 |
        1 | B1 B2 B3 a1 |
        """
    )
    assert board.moves() == []
    board.withdraw("a")  # copied within the device in this step: it stays protected
    assert not board.grow("B", 4)
    board.step()
    assert board.grow("B", 4)
    assert board.moves() == ["a to host 1: 1[3:4]"]


def test_a_block_beside_a_row_that_runs_is_no_relief():
    """Dropping A would leave its block to a, and B no room as long as a runs."""
    board = Board(blocks=1)
    assert board.admit("A", 2)
    board.step()
    assert board.admit("a", 2)
    row, victims = board.row("B"), np.array([board.row("A")])
    assert board.ledger.relief(row, 4, victims) == (1, [0])
    board.step()
    assert board.ledger.relief(row, 4, victims) == (1, [1])


def test_a_withdrawn_grant_gives_back_its_slots_and_stays_until_its_data_has_landed():
    board = overwritten()
    board.step()
    board.free("A")
    assert board.grow("a", 4)
    board.shows(
        """
        0 | . . a2 a1 |
        1 | B1 B2 B3 B4 |
        2 | B5 B6 a4 a3 | (B7 B8)
        """
    )
    board.withdraw("a")
    board.shows(
        """
        0 | . . a2 a1 |
        1 | B1 B2 B3 B4 |
        2 | B5 B6 . a3 | (B7 B8)
        """
    )
    assert not board.grow("B", 8)  # a3 is on its way to the device
    board.step()
    assert board.grow("B", 8)


def test_long_moves_are_one_per_row_and_direction():
    board = Board(blocks=20, host_blocks=40)
    assert board.admit("a", 77)
    board.step()
    assert board.admit("A", 78)
    (move,) = board.ledger.take_moves()
    assert move.tokens == 75 and len(move.blocks) == 20
    assert (move.slots[:, 1] - move.slots[:, 0]).sum() == 75
    assert board.missing_tokens("a") == 75


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("admit", ("A", 3)),
        ("admit", ("Z", 0)),
        ("admit", ("Z", 4, 4)),
        ("grow", ("Z", 4)),
        ("swap_out", ("Z",)),
        ("swap_in", ("A",)),
    ],
)
def test_wrong_use_is_an_error(operation, args):
    board = fig8()
    with pytest.raises(LedgerError):
        getattr(board, operation)(*args)


def test_a_step_cannot_begin_inside_a_try():
    board = fig8()
    mark = board.ledger.mark()
    with pytest.raises(LedgerError):
        board.ledger.begin_step()
    board.ledger.commit(mark)
    board.ledger.begin_step()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda s: s.lack.__setitem__(2 + 3, 0),  # a3 and B8 in one slot
        lambda s: s.lack.__setitem__(0, 1),  # A2 nowhere
        lambda s: s.host.clear(),
        lambda s: s.on_host.reserve(1, 1),
        lambda s: s.owner.__setitem__(1, 0),
        lambda s: s.count.__setitem__(1, 3),
        lambda s: s.start.__setitem__(2, 3),
        lambda s: s.index.__setitem__(2, 0),
        lambda s: s.kind.__setitem__(2, 1),
        lambda s: s.missing_tokens.__setitem__(2, 0),
        lambda s: s.missing_blocks.__setitem__(2, 2),
        lambda s: s.pinned.__setitem__(2, s.step),
        lambda s: s.tables[1].__setitem__(1, 0),
        lambda s: setattr(s.empty, "free", 1),
        lambda s: setattr(s, "rt_blocks", 2),
        lambda s: s.last.__setitem__(1, 1),
        lambda s: s.tokens.__setitem__(0, 3),
    ],
)
def test_the_auditor_sees_every_kind_of_damage(corrupt):
    board = overwritten()
    corrupt(board.ledger._state)
    with pytest.raises(LedgerError):
        board.ledger.check()


def test_rows_beyond_the_first_thousand():
    board = Board(blocks=4)
    for i in range(1500):
        board.table.submit(f"r{i}", service_class=i % 2)
    rows = np.array([3, 1400])
    assert board.ledger.missing_tokens(rows).tolist() == [0, 0]
    assert board.ledger.admit(1400, 5) and board.ledger.held_blocks(1400) == 2
    board.ledger.check()
