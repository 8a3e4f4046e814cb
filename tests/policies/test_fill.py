"""The shared `fill`: seats, tokens and memory in a given order. Blocks of four tokens."""

from types import GenericAlias
from typing import Annotated, Any

import numpy as np
import pytest

from tests.policies.policy_runs import ledger_of
from twinserve.policies.base import SystemView
from twinserve.policies.parts.fill import blocking, fill
from twinserve.policies.parts.runs import decodes_only, further_decodes
from twinserve.policies.plan import DEVICE, HOST, Hold, KvMove, StepPlan
from twinserve.policies.requests import RequestTable, State, _declared


class Bench:
    """Rows that hold `computed` tokens of a longer text, or none."""

    def __init__(self, blocks: int, kind: str = "paged", host: int = 0) -> None:
        self.table = RequestTable()
        self.ledger = ledger_of(kind, self.table, blocks, 4, host, shared=8)

    def add(self, prompt: int, computed: int = 0, output: int = 0) -> int:
        row = self.table.submit(f"r{len(self.table)}", prompt_tokens=prompt, output_tokens=output)
        if computed:
            assert self.ledger.admit(row, computed)
            self.table.computed_tokens[row] = computed
            self.table.state[row] = State.RUNNING
        return row

    def fill(self, order: list[int], ready=(), **values) -> StepPlan:
        self.ledger.begin_step()
        view = SystemView(0.0, self.table, dict.fromkeys(ready, 1.0))
        plan = fill(view, self.ledger, np.array(order, np.int64), **{"seats": 9, **values})
        self.ledger.check()
        return plan


def granted(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True))


def test_the_first_row_may_exceed_the_token_budget():
    for computed in (0, 2):
        bench = Bench(10)
        rows = [bench.add(9, computed), bench.add(1)]
        assert granted(bench.fill(rows, token_budget=4)) == {0: 9 - computed}


def test_nobody_loses_memory_for_nothing():
    bench = Bench(6)
    rows = [bench.add(30), bench.add(8, 8, 1), bench.add(8, 8, 1)]
    plan = bench.fill(rows)
    assert granted(plan) == {1: 1, 2: 1} and not plan.preempted and not plan.admitted


def test_nobody_overtakes_who_waits_for_memory_but_those_who_hold_theirs_go_on():
    bench = Bench(4)
    rows = [bench.add(12), bench.add(8, 8, 1), bench.add(1)]
    assert granted(bench.fill(rows, newcomers_evict=False)) == {1: 1}


def test_a_prefix_that_is_cached_need_not_be_computed():
    bench = Bench(6, "cached")
    text = np.arange(2)
    first = bench.table.submit("first", text, prompt_tokens=8)
    assert bench.ledger.admit(first, 8)
    bench.ledger.free(first)
    row = bench.table.submit("second", text, prompt_tokens=9)
    plan = bench.fill([row])
    assert plan.admitted == [(row, 8)] and granted(plan) == {row: 1}


def test_rows_in_flight_are_left_out():
    bench = Bench(10)
    rows = [bench.add(4, 4, 1), bench.add(4, 4, 1)]
    assert granted(bench.fill(rows, ready=[0])) == {1: 1}


def test_a_swapped_row_comes_back_if_its_next_token_fits_too():
    for blocks, back in ((5, False), (6, True)):
        bench = Bench(blocks, host=4)
        row, other = bench.add(12, 12, 1), bench.add(7, 7)
        assert bench.ledger.swap_out(row)
        bench.table.state[row] = State.SWAPPED
        plan = bench.fill([row, other], newcomers_evict=False, swap=True)
        assert (plan.swapped_in == [row]) == back == (row in granted(plan))
        assert bench.ledger.missing_tokens(row) == (0 if back else 12)


def test_what_stands():
    bench = Bench(10)
    rows = [bench.add(4, 4, 1), bench.add(4, 4, 1)]
    plan = bench.fill(rows)
    assert decodes_only(plan, bench.table)
    # Two blocks each now, six left: three further ones each, for tokens 5 to 20.
    assert further_decodes(plan, bench.table, bench.ledger) == 15
    assert not decodes_only(bench.fill([bench.add(1)]), bench.table)
    assert further_decodes(StepPlan(), bench.table, bench.ledger) == 0


def test_blocking_moves_keep_all_else():
    move = KvMove(3, DEVICE, HOST, 7, Hold.STEP)
    assert blocking([move]) == [KvMove(3, DEVICE, HOST, 7, Hold.BEFORE_STEP)]


# -- the request table's declaration of its columns ------------------------------------------------
@pytest.mark.parametrize(
    "array",
    [
        GenericAlias(np.ndarray, (tuple[Any, ...], np.dtype[np.int64])),  # NDArray up to NumPy 2.4
        GenericAlias(np.ndarray, (np.int64,)),  # from 2.5 on: an alias with a parameter of its own
    ],
)
def test_a_column_has_its_type_however_numpy_spells_arrays(array):
    assert _declared(Annotated[array, -1]) == (np.int64, -1)
