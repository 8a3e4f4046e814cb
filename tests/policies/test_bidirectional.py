"""Worked examples of the bidirectional ledger, drawn slot by slot: blocks of four slots as in the
paper's Fig. 8.

Real-time rows are capital letters, best-effort rows small ones; in brackets: what only the host
has.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.policies.bidi_views import held_tokens, preemption_table
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.plan import HOST, Hold
from twinserve.policies.requests import RequestTable


class Board:
    """A ledger whose rows go by one-letter names."""

    def __init__(self, blocks: int, host_blocks: int = 8, size: int = 4) -> None:
        self.table = RequestTable()
        self.ledger = BidirectionalLedger(self.table, blocks, size, host_blocks)
        self.ledger.begin_step()
        self.rows: dict[str, int] = {}

    def __getattr__(self, name):
        """Ledger operations take the name of a row."""
        operation = getattr(self.ledger, name)

        def call(row, *args, **kwargs):
            done = operation(self.row(row), *args, **kwargs)
            self.ledger.check()
            return done

        return call

    def row(self, name: str) -> int:
        if name not in self.rows:
            self.rows[name] = self.table.submit(name, service_class=int(name.islower()))
        return self.rows[name]

    def step(self) -> None:
        """What was granted is computed."""
        for row in self.rows.values():
            self.table.computed_tokens[row] = held_tokens(self.ledger, row)
        self.ledger.begin_step()

    def moves(self) -> list[str]:
        found = []
        for m in self.ledger.take_moves():
            assert m.hold is Hold.STEP
            places = [f"{b}[{lo}:{hi}]" for b, (lo, hi) in zip(m.blocks, m.slots, strict=True)]
            arrow = "to host" if m.target == HOST else "to device"
            found.append(f"{self.table.ids[m.row]} {arrow} {m.tokens}: {' '.join(places)}")
        return found

    def __str__(self) -> str:
        return "\n".join("    " + line for line in self.ledger.render().splitlines())

    def shows(self, expected: str) -> None:
        assert self.ledger.render().splitlines() == [
            line.strip() for line in expected.strip().splitlines()
        ]


def fig8() -> Board:
    """The paper's Fig. 8 in small: a3 sits at the end of the block that B is filling."""
    board = Board(blocks=3)
    assert board.admit("A", 2) and board.admit("B", 7)
    board.step()
    assert board.admit("a", 3)
    board.shows(
        """
        0 | A1 A2 a2 a1 |
        1 | B1 B2 B3 B4 |
        2 | B5 B6 B7 a3 |
        """
    )
    assert board.moves() == []
    board.step()
    return board


def overwritten() -> Board:
    board = fig8()
    assert board.grow("B", 8)
    return board


def test_real_time_joins_a_best_effort_block_without_any_transfer():
    board = Board(blocks=2)
    assert board.admit("a", 5)
    board.shows(
        """
        0 | a4 a3 a2 a1 |
        1 | . . . a5 |
        """
    )
    assert not board.admit("A", 3)  # a runs in this step
    board.step()
    assert board.ledger.preemptable_blocks() == 2
    assert board.admit("A", 3)
    board.shows(
        """
        0 | a4 a3 a2 a1 |
        1 | A1 A2 A3 a5 |
        """
    )
    assert board.moves() == []
    assert board.missing_tokens("a") == 0
    assert preemption_table(board.ledger) == []


def test_the_most_empty_best_effort_block_is_preempted_first_whatever_its_number():
    board = Board(blocks=3)
    assert board.admit("a", 4) and board.admit("b", 2) and board.admit("c", 3)
    board.step()
    assert board.admit("A", 9)
    board.shows(
        """
        0 | A9 a3 a2 a1 | (a4)
        1 | A1 A2 A3 A4 | (b1 b2)
        2 | A5 A6 A7 A8 | (c1 c2 c3)
        """
    )
    assert board.moves() == ["a to host 1: 0[0:1]", "b to host 2: 1[2:4]", "c to host 3: 2[1:4]"]


def test_overwriting_checkpoints_exactly_the_one_slot():
    board = overwritten()
    board.shows(
        """
        0 | A1 A2 a2 a1 |
        1 | B1 B2 B3 B4 |
        2 | B5 B6 B7 B8 | (a3)
        """
    )
    assert board.moves() == ["a to host 1: 2[3:4]"]
    assert (board.missing_tokens("a"), board.missing_blocks("a"), board.missing_tokens("B")) == (
        1,
        1,
        0,
    )
    (entry,) = preemption_table(board.ledger)
    assert (entry.block, entry.real_time_row, entry.best_effort_row) == (
        2,
        board.row("B"),
        board.row("a"),
    )
    assert (entry.first, entry.end, entry.missing_row, entry.missing_slots) == (
        3, 4, board.row("a"), (3, 4),
    )  # fmt: skip


def test_missing_slots_come_back_when_their_owner_runs_and_are_never_copied_twice():
    board = overwritten()
    board.step()
    assert board.grow("a", 3)
    board.shows(
        """
        0 | A1 A2 a2 a1 |
        1 | B1 B2 B3 B4 |
        2 | B5 B6 B7 a3 | (B8)
        """
    )
    assert board.moves() == ["B to host 1: 2[3:4]", "a to device 1: 2[3:4]"]
    assert preemption_table(board.ledger)[0].missing_row == board.row("B")
    board.step()
    assert board.grow("B", 8)
    assert board.moves() == ["B to device 1: 2[3:4]"]  # the host still has a3
    board.step()
    assert board.grow("a", 3)
    assert board.moves() == ["a to device 1: 2[3:4]"]


def test_two_owners_of_a_full_block_cannot_both_run_without_another_block():
    board = overwritten()
    board.step()
    assert board.grow("A", 2) and board.grow("B", 8)
    before = board.ledger.render()
    assert not board.grow("a", 3)
    assert board.ledger.render() == before
    assert board.moves() == []
    assert board.missing_tokens("a") == 1


def test_best_effort_takes_idle_real_time_slots_only_when_no_free_slot_is_left():
    board = Board(blocks=2)
    assert board.admit("A", 3) and board.admit("B", 4)
    board.step()
    assert board.grow("B", 4)
    assert board.admit("a", 2)
    board.shows(
        """
        0 | A1 A2 a2 a1 | (A3)
        1 | B1 B2 B3 B4 |
        """
    )
    assert board.moves() == ["A to host 1: 0[2:3]"]
    assert not board.admit("b", 1)  # B runs, and A's block has its best-effort owner
    board.step()
    assert board.admit("b", 1)
    assert board.moves() == ["B to host 1: 1[3:4]"]


def test_best_effort_prefers_empty_blocks_then_the_emptiest_shared_one():
    board = Board(blocks=4)
    assert board.admit("A", 3) and board.admit("B", 2) and board.admit("C", 4)
    assert board.admit("a", 7)
    board.shows(
        """
        0 | A1 A2 A3 a7 |
        1 | B1 B2 a6 a5 |
        2 | C1 C2 C3 C4 |
        3 | a4 a3 a2 a1 |
        """
    )


def test_a_finished_row_leaves_its_peer_what_it_has():
    board = overwritten()
    board.step()
    board.free("B")
    board.shows(
        """
        0 | A1 A2 a2 a1 |
        1 | . . . . |
        2 | . . . . | (a3)
        """
    )
    assert preemption_table(board.ledger) == []
    assert board.ledger.free_blocks == 1
    assert board.grow("a", 3)
    assert board.moves() == ["a to device 1: 2[3:4]"]
    board.free("a")
    board.free("A")
    usage = board.ledger.usage()
    assert (usage.free, usage.real_time, usage.best_effort, usage.host_tokens) == (3, 0, 0, 0)


def test_the_drawings_of_the_documentation_are_real():
    page = (Path(__file__).parents[2] / "docs" / "live_memory.md").read_text()
    text = page.partition("\n## Attention over")[0]
    drawn = [block.strip() for part in text.split("```")[1::2] for block in part.split("\n\n")]
    board = fig8()
    assert board.ledger.render() == drawn[0]
    board.grow("B", 8)
    assert board.ledger.render() == drawn[1]
    board.step()
    board.grow("a", 3)
    assert board.ledger.render() == drawn[2]

    board = Board(blocks=3)
    assert board.admit("A", 2) and board.admit("B", 4) and board.admit("C", 1)
    board.step()
    assert board.admit("a", 5)
    board.step()
    assert board.grow("A", 3)
    board.free("B")
    assert board.ledger.render() == drawn[3]
    board.step()
    assert board.grow("A", 3) and board.grow("a", 5)
    assert board.ledger.render() == drawn[4]
    assert len(drawn) == 5


# The bidirectional ledger at its limits: a full host, grants taken back, wrong use, damage found
# by the auditor.
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
