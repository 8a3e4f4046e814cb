"""In a crowd a policy looks at those who can gain or lose memory, and decides as if it had looked
at everybody, one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.sim.harness import hybrid, same_rows, simulate
from twinserve.policies.baselines.vllm import VllmPolicy
from twinserve.policies.kv.bidirectional.state import SlotState
from twinserve.policies.layerkv.lengths import LengthRange, LengthRanges
from twinserve.policies.parts.fill import _Filling

FILLING = ["conserve", "mlfq", "round-robin"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", FILLING)
@pytest.mark.parametrize("seed", mostly_nightly([3, 4], 3))
def test_rows_that_go_on_together_go_on_as_one_by_one(policy, seed, monkeypatch):
    crowd = hybrid(seed, n=40, sessions=2, applications=1, pool=3)
    asked = []
    usual = _Filling._affordable
    monkeypatch.setattr(_Filling, "_affordable", lambda *a: asked.append(usual(*a)) or asked[-1])
    together = simulate(crowd, policy, blocks=96, host_blocks=64)
    assert max(asked) > 1  # memory was short, and some did go together
    monkeypatch.setattr(_Filling, "_affordable", lambda *a: 0)
    same_rows(together.rows, simulate(crowd, policy, blocks=96, host_blocks=64).rows)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "vllm:scheduling=priority"])
@pytest.mark.parametrize("planned_ahead", [False, True])
def test_running_rows_are_granted_together_as_one_by_one(policy, planned_ahead, monkeypatch):
    def run():
        crowd = hybrid(3, n=40, sessions=2, applications=1, pool=3)
        return simulate(crowd, policy, blocks=96, host_blocks=64, asynchronous=planned_ahead)

    ahead = []
    usual = VllmPolicy._grant_ahead

    def counted(self, index, *rest):
        found = usual(self, index, *rest)
        ahead.append(found[0] - index)
        return found

    monkeypatch.setattr(VllmPolicy, "_grant_ahead", counted)
    together = run()
    assert max(ahead) > 1  # memory was short, and some were granted together
    monkeypatch.setattr(VllmPolicy, "_grant_ahead", lambda self, index, left, *a: (index, left))
    same_rows(together.rows, run().rows)


@pytest.mark.slow
def test_room_on_the_host_is_asked_of_those_that_can_give_some(monkeypatch):
    """Requests without a block on the device, thousands in a crowd, need all their copies."""
    found = []
    usual = SlotState.drop_copies

    def counted(state, row, keep_missing):
        freed = usual(state, row, keep_missing)
        found.extend([(int(state.held[row]), freed)] if keep_missing else [])
        return freed

    monkeypatch.setattr(SlotState, "drop_copies", counted)
    simulate(hybrid(5, n=24, pool=6), "bros", blocks=48, host_blocks=40)
    assert found and all(held and freed for held, freed in found)


tokens = st.integers(1, 500)


@given(st.lists(st.tuples(tokens, tokens, tokens, st.integers(0, 600)), min_size=1, max_size=9))
@examples(50)
def test_ranges_in_columns_say_what_each_range_says(drawn):
    expected = [LengthRange(*sorted(three)) for *three, _ in drawn]
    expected.append(LengthRange())
    past = np.array([*(n for *_, n in drawn), 7])
    rows = np.arange(len(expected))[::-1] * 3 + 1
    ranges = LengthRanges()
    for row, one in zip(rows.tolist(), expected, strict=True):
        ranges.put(row, one)
    told = [one.left(int(n)) for one, n in zip(expected, past, strict=True)]
    assert ranges.left(rows, past).tolist() == told and told[-1] == math.inf
