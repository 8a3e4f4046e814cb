"""The layer-wise ledger: cells are conserved whatever is done to it, tries leave no trace, and for
a policy that knows nothing of layers it is a paged memory."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.layerkv_runs import simulate
from tests.policies.test_fast_path import workloads
from twinserve.policies.base import EngineLimits
from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.plan import DEVICE, HOST, Hold
from twinserve.policies.requests import RequestTable

ROWS, LAYERS, BLOCKS, ROOM = 6, 4, 12, 10


def ledger_of(layers=LAYERS, blocks=BLOCKS, host=ROOM) -> LayerwiseLedger:
    table = RequestTable()
    for i in range(ROWS):
        table.submit(f"r{i}", prompt_tokens=9, service_class=i % 2)
    return LayerwiseLedger(table, blocks, 4, host, layers)


def block_table(ledger: LayerwiseLedger, row: int) -> dict[int, np.ndarray | None]:
    """Layer -> int64[blocks], the cell of each block, or None for a layer on the host."""
    host, held, cells = int(ledger._host[row]), int(ledger._held[row]), ledger._tables[row]
    places = {
        layer: None if p < host else cells[p, :held].copy() for p, layer in enumerate(ledger.order)
    }
    return dict(sorted(places.items()))


def state(ledger: LayerwiseLedger):
    """All that can be asked."""
    rows = sorted(ledger._tables)
    return (
        ledger.free_cells,
        ledger.free_host_cells,
        ledger.leaving_cells,
        ledger.usage(),
        [
            (r, ledger.held_blocks(r), int(ledger.host_layers(r)), r in ledger._swapped)
            for r in rows
        ],
        [
            {k: None if v is None else v.tolist() for k, v in block_table(ledger, r).items()}
            for r in rows
        ],
        ledger.missing_tokens(np.array(rows, np.int64)).tolist(),
        [(m.row, m.source, m.target, m.tokens, m.layers, m.hold) for m in ledger._moves],
    )


operations = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "admit", "admit_layers", "grow", "free", "offload", "offload_now", "onload",
                "stream", "swap", "step", "compute",
            ]
        ),
        st.integers(0, ROWS - 1),
        st.integers(0, 30),
    ),
    max_size=40,
)  # fmt: skip


def apply(ledger: LayerwiseLedger, name: str, row: int, n: int) -> None:
    """The operation, if the row is in a state for it."""
    held = row in ledger._tables
    swapped = row in ledger._swapped
    if name == "step":
        ledger.begin_step()
    elif not held:
        ledger.table.computed_tokens[row] = 0
        if name == "admit":
            ledger.admit(row, n + 1, keep_free=n % 3, reserve_tokens=2 * n)
        elif name == "admit_layers":
            ledger.admit_layers(row, n + 1, n % (LAYERS + 1), keep_free=n % 2)
    elif name == "free":
        ledger.free(row)
    elif name == "swap":
        ledger.swap_in(row, n % 2) if swapped else ledger.swap_out(row)
    elif swapped:
        return
    elif name == "grow":
        ledger.grow(row, n)
    elif name in ("offload", "offload_now"):
        ledger.offload(
            row, min(n % LAYERS + 1, ledger.resident_layers(row)), at_once=name == "offload_now"
        )
    elif name == "onload" and ledger.host_layers(row):
        ledger.onload(row, min(n % LAYERS + 1, int(ledger.host_layers(row))))
    elif name == "stream":
        ledger.stream(row)
    elif name == "compute":  # the engine's part
        ledger.table.computed_tokens[row] = (
            int(ledger.table_blocks(row)) * ledger.block_tokens - n % 4
        )


@examples(100)
@given(operations)
def test_cells_are_conserved(ops):
    ledger = ledger_of()
    for name, row, n in ops:
        apply(ledger, name, row, n)
        ledger.check()
        device = sum(
            int(ledger.table_blocks(r)) * ledger.resident_layers(r)
            for r in range(ROWS)
            if r in ledger._tables
        )
        host = sum(
            int(ledger.table_blocks(r)) * int(ledger.host_layers(r))
            for r in range(ROWS)
            if r in ledger._tables
        )
        assert device + ledger.free_cells + ledger.leaving_cells == BLOCKS * LAYERS
        assert host + ledger.free_host_cells == ROOM * LAYERS
    for row in range(ROWS):
        ledger.free(row)
    ledger.begin_step()
    ledger.check()
    assert ledger.free_blocks == BLOCKS and ledger.free_host_cells == ROOM * LAYERS
    assert ledger.usage().host_tokens == 0 and ledger.usage().real_time == 0


# A row that is swapped out in a try, and one that comes back in it, from before it or from within.
SWAPPED = [("admit", 0, 7), ("compute", 0, 0), ("swap", 0, 0)]


@examples(100)
@example(SWAPPED[:2], SWAPPED[2:], 0)
@example(SWAPPED, SWAPPED[2:] * 2, 1)
@given(operations, operations, st.integers(0, 40))
def test_a_try_that_is_rolled_back_leaves_no_trace(before, tried, inner):
    ledger = ledger_of()
    for op in before:
        apply(ledger, *op)
    seen, computed = state(ledger), ledger.table.computed_tokens.copy()
    mark = ledger.mark()
    tried = [op for op in tried if op[0] not in ("step", "compute")]
    nested = None
    for i, op in enumerate(tried):
        if i == inner:
            nested, middle = ledger.mark(), state(ledger)
        apply(ledger, *op)
    if nested is not None:
        ledger.table.computed_tokens[:] = computed
        ledger.rollback(nested)
        assert state(ledger)[:5] == middle[:5]
    ledger.rollback(mark)
    ledger.table.computed_tokens[:] = computed
    ledger.check()
    assert state(ledger) == seen


@examples(50)
@given(operations, operations)
def test_a_try_that_is_kept_is_as_if_done_at_once(before, tried):
    one, two = ledger_of(), ledger_of()
    for op in before:
        apply(one, *op), apply(two, *op)
    tried = [op for op in tried if op[0] not in ("step", "compute")]
    mark = one.mark()
    for op in tried:
        apply(one, *op), apply(two, *op)
    one.commit(mark)
    one.check()
    assert state(one) == state(two)
    with pytest.raises(LedgerError, match="this try has ended"):
        one.rollback(mark)


def test_the_auditor_sees_a_lost_cell():
    ledger = ledger_of()
    assert ledger.admit_layers(0, 9, 2)
    ledger.check()
    ledger.pool.take(1)
    with pytest.raises(LedgerError, match="not a partition"):
        ledger.check()
    ledger = ledger_of()
    assert ledger.admit_layers(0, 9, 2)
    ledger.host.reserve(0, 1)
    with pytest.raises(LedgerError, match="row 0 holds 7 cells of 4 tokens in one layer, not 6"):
        ledger.check()
    ledger = ledger_of()
    assert ledger.admit_layers(0, 9, 2)
    ledger._rt_cells += 1
    with pytest.raises(LedgerError, match="the count of real-time cells is off"):
        ledger.check()


# -- by hand ---------------------------------------------------------------------------------------
def test_a_prompt_with_two_of_four_layers_on_the_device():
    """Nine tokens, three blocks: six cells here and six there; the copies leave beside the step."""
    ledger = ledger_of()
    ledger.begin_step()
    assert ledger.admit_layers(0, 9, resident=2)
    (move,) = ledger.take_moves()
    assert (move.source, move.target, move.tokens, move.layers, move.hold) == (
        DEVICE, HOST, 9, (0, 2), Hold.STEP,
    )  # fmt: skip
    assert ledger.free_cells == 48 - 6 and ledger.free_host_cells == 40 - 6
    table = block_table(ledger, 0)
    assert table[0] is None and table[2] is None and len(table[1]) == len(table[3]) == 3
    assert ledger.usage().host_tokens == 6  # three blocks of four in half of the layers
    assert ledger.held_blocks(0) == 2  # 1.5, rounded up


def test_layers_leave_beside_one_step_and_are_free_in_the_next():
    ledger = ledger_of()
    assert ledger.admit(0, 8)
    ledger.table.computed_tokens[0] = 8
    ledger.begin_step()
    assert ledger.offload(0, 3)
    assert ledger.free_cells == 48 - 8 and ledger.leaving_cells == 6
    assert [m.layers for m in ledger.take_moves()] == [(0, 1, 2)]
    ledger.begin_step()
    assert ledger.free_cells == 48 - 2 and ledger.leaving_cells == 0
    assert ledger.offload(0, 1, at_once=True)
    assert ledger.free_cells == 48
    (move,) = ledger.take_moves()
    assert move.hold is Hold.BEFORE_STEP and move.layers == (3,)


def test_a_row_runs_only_when_its_layers_are_brought():
    ledger = ledger_of()
    assert ledger.admit(0, 8)
    ledger.table.computed_tokens[0] = 8
    assert ledger.missing_tokens(0) == 0
    ledger.begin_step()
    ledger.offload(0, 2, at_once=True)
    ledger.begin_step()
    assert ledger.missing_tokens(0) == 8
    assert ledger.missing_tokens(np.array([0])).tolist() == [8]
    ledger.stream(0)
    assert ledger.missing_tokens(0) == 0
    there, back = ledger.take_moves()
    assert (there.target, there.tokens, there.layers) == (DEVICE, 8, (0, 2))
    assert (back.target, back.tokens, back.layers) == (HOST, 1, (0, 2))
    ledger.begin_step()
    assert ledger.missing_tokens(0) == 8
    assert ledger.onload(0, 2) and ledger.missing_tokens(0) == 0
    assert [m.layers for m in ledger.take_moves()] == [(0, 2)]


def test_layers_leave_and_come_back_in_one_order():
    ledger = ledger_of(layers=8, host=30)
    assert ledger.admit(0, 4)
    ledger.table.computed_tokens[0] = 4
    gone = []
    for n in (2, 3, 1):
        ledger.begin_step()
        ledger.offload(0, n)
        gone += ledger.take_moves()[0].layers
    assert sorted(gone) == sorted(
        layer for layer, cells in block_table(ledger, 0).items() if cells is None
    )
    assert sorted(gone) == [0, 1, 2, 4, 5, 6]
    ledger.begin_step()
    ledger.onload(0, 2)
    assert [layer for layer, cells in block_table(ledger, 0).items() if cells is None] == [
        0, 2, 4, 6,
    ]  # fmt: skip


def test_without_room_on_the_host_nothing_leaves():
    ledger = ledger_of(host=1)  # four cells
    assert not ledger.admit_layers(0, 8, 0) and ledger.admit_layers(0, 8, 2)
    assert not ledger.offload(0, 1) and not ledger.swap_out(0)
    assert not ledger.grow(0, 9)
    ledger.check()


def test_rows_grow_together_into_the_last_cells():
    """A block of both takes four cells and two here, and two on the host: all that there is."""
    ledger = ledger_of(blocks=6, host=2)  # 24 and 8 cells
    assert ledger.admit(0, 12) and ledger.admit_layers(1, 12, 2)
    assert (ledger.free_cells, ledger.free_host_cells) == (6, 2)
    assert ledger.grow_all(np.array([0, 1]), np.array([16, 16]))
    assert (ledger.free_cells, ledger.free_host_cells) == (0, 0)
    assert not ledger.grow_all(np.array([1]), np.array([17]))


def test_misuse_is_named():
    ledger = ledger_of()
    assert ledger.admit_layers(0, 8, 2)
    with pytest.raises(LedgerError, match="row 0 is admitted though it holds 2 blocks"):
        ledger.admit(0, 4)
    with pytest.raises(LedgerError, match="row 0: 3 layers are to leave, 2 are on the device"):
        ledger.offload(0, 3)
    with pytest.raises(LedgerError, match="row 0: 3 layers are to come back, 2 are on the host"):
        ledger.onload(0, 3)
    with pytest.raises(LedgerError, match="row 0: 0 layers are to come back"):
        ledger.onload(0, 0)
    with pytest.raises(LedgerError, match="5 of 4 layers on the device"):
        ledger.admit_layers(1, 4, 5)
    with pytest.raises(LedgerError, match="the order of layers changes"):
        ledger.interleave(False)
    with pytest.raises(ValueError, match="a model of 0 layers"):
        LayerwiseLedger(ledger.table, 4, 4, layers=0)


def test_how_long_partly_resident_rows_can_decode():
    """Blocks of four, two rows of eight tokens; one has a layer of four on the device, the other
    all. 14 free cells, 26 on the host: a block of both takes 5 and 3. So two blocks each, and there
    is no third."""
    ledger = ledger_of(blocks=6, host=8)
    assert ledger.admit_layers(0, 8, 1) and ledger.admit(1, 8)
    ledger.table.computed_tokens[:2] = 8
    assert (ledger.free_cells, ledger.free_host_cells) == (14, 26)
    assert ledger.decode_steps(np.array([0, 1]), 100) == 8
    assert ledger.decode_steps(np.array([0]), 1) == 1
    assert ledger.decode_steps(np.array([0]), 100) == 32  # the host: 26 // 3 blocks


# -- any policy ------------------------------------------------------------------------------------
LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=48)
WITHOUT_LAYERS = (
    "vllm-v0",
    "vllm-v0:preemption_mode=swap",
    "vllm",
    "round-robin",
    "preemptive-wait:preemption_mode=swap",
)


@pytest.mark.parametrize("policy", WITHOUT_LAYERS)
@examples(15, suppress_health_check=list(HealthCheck))
@given(case=workloads())
def test_for_others_it_is_a_paged_memory(policy, case):
    """Byte for byte the rows of the paged ledger without prefix cache."""
    workload, blocks, host = case
    rows = [
        simulate(
            workload, policy, blocks, kind=kind, host=host, limits=LIMITS, check=kind == "layerwise"
        )[:3]
        for kind in ("paged", "layerwise")
    ]
    for one, other in zip(*rows, strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
