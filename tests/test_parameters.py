"""What a part of many pairs keeps: `.ci/run` has each policy and each ledger that it is said to."""

import pytest

from tests.conftest import LONGEST, TESTS
from tests.parameters import each, in_turn, mostly_nightly, mostly_nightly_pairs

PAIRS = [(a, b) for a in "abcde" for b in "xyz"]


@pytest.mark.parametrize(
    "pairs",
    [
        PAIRS,
        [(b, a) for a, b in PAIRS],
        [pair for pair in PAIRS if pair[1] != "z" or pair[0] == "a"],
        [("a", b) for b in "xyz"],
    ],
)
def test_each_value_on_either_side_is_in_a_pair(pairs):
    kept = in_turn(pairs)
    assert set(kept) <= set(pairs) and len(kept) == len(set(kept))
    for side in (0, 1):
        assert {pair[side] for pair in kept} == {pair[side] for pair in pairs}


def test_no_pair_is_lost_and_those_left_out_are_marked():
    every = mostly_nightly_pairs(PAIRS)
    assert [getattr(one, "values", one) for one in every] == PAIRS
    marked = [one for one in every if not isinstance(one, tuple) or hasattr(one, "marks")]
    assert len(marked) == len(PAIRS) - 5
    assert all({mark.name for mark in one.marks} == {"nightly"} for one in marked)


def test_a_value_that_is_not_there_cannot_be_kept():
    with pytest.raises(AssertionError, match="none of the values"):
        mostly_nightly(["a"], "b")


def test_each_value_is_asked_and_the_one_that_fails_is_named():
    seen = []

    def ask(letter):
        seen.append(letter)
        assert letter != "b"

    with pytest.raises(AssertionError) as error:
        each("letter", "abc")(ask)()
    assert seen == ["a", "b"] and error.value.__notes__ == ["letter: 'b'"]
    with pytest.raises(AssertionError):
        each("letter", "")(ask)()


def test_files_that_begin_are_there():
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
