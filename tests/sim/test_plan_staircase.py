"""The walk along the staircase beside all splits, for any staircase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinserve.sim.plan.apart import Answer, Split, staircase


def walked(first: Split, most: int, answer) -> tuple[Split | None, list[Split]]:
    tried, walk = [], staircase(first, most)
    try:
        split = next(walk)
        while True:
            tried.append(split)
            split = walk.send(answer(split))
    except StopIteration as end:
        return end.value, tried


def cheapest(enough, most: int) -> int | None:
    totals = [p + d for p in range(1, most) for d in range(1, most - p + 1) if enough(p, d)]
    return min(totals, default=None)


@st.composite
def staircases(draw):
    """What `p` prefill replicas need of decode ones, never more for more; None: no number helps."""
    steps = draw(st.lists(st.none() | st.integers(1, 14), min_size=14, max_size=14))
    known = sorted((s for s in steps if s is not None), reverse=True)
    needs = [None] * (14 - len(known)) + known
    return lambda p, d: needs[p - 1] is not None and d >= needs[p - 1]


@given(
    enough=staircases(),
    most=st.integers(2, 14),
    first=st.builds(Split, st.integers(0, 20), st.integers(0, 20)),
    of_decode=st.booleans(),
)
def test_the_walk_finds_what_brute_force_finds(enough, most, first, of_decode):
    def answer(split):
        assert split.prefill >= 1 and split.decode >= 1 and split.total <= most
        return Answer(True) if enough(*split) else Answer(False, of_decode)

    found, tried = walked(first, most, answer)
    best = cheapest(enough, most)
    assert (None if found is None else found.total) == best
    assert found is None or (enough(*found) and found in tried)
    assert len(set(tried)) == len(tried)


@given(p=st.integers(1, 12), d=st.integers(1, 12))
def test_a_corner_takes_no_more_trials_than_two_diagonals_and_the_climb(p, d):
    """Prompts need `p` replicas and decodes `d`, each by themselves."""

    def answer(split):
        return Answer(split.prefill >= p and split.decode >= d, split.prefill >= p)

    found, tried = walked(Split(1, 1), 64, answer)
    assert found == (p, d)
    climb = next(i for i, split in enumerate(tried) if split.prefill >= p and split.decode >= d)
    assert len(tried) <= 2 * tried[climb].total + climb + 1


def test_late_later_tokens_add_no_prefill_replica():
    found, tried = walked(Split(3, 1), 40, lambda s: Answer(s.decode >= 5 and s.prefill >= 3, True))
    assert found == (3, 5)
    climb = next(i for i, split in enumerate(tried) if split.decode >= 5) + 1
    assert {split.prefill for split in tried[:climb]} == {3}


@pytest.mark.parametrize("most", [2, 3, 9])
def test_where_none_is_enough_no_split_of_the_most_is_left_out(most):
    found, tried = walked(Split(1, 1), most, lambda split: Answer(False))
    assert found is None
    assert {split for split in tried if split.total == most} == {
        Split(p, most - p) for p in range(1, most)
    }
