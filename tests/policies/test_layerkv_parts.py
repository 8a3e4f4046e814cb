"""LayerKV's formulas, added up by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.policies.layerkv_runs import Truth
from twinserve.native.plain_batch import allowed_prefill_seconds, available_cells
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.layerwise.ledger import offload_order
from twinserve.policies.layerkv.cost import (
    LayerCost,
    LayerKvEstimator,
    RecentSteps,
    layerkv_estimator,
)
from twinserve.policies.layerkv.lengths import (
    HistoryPredictor,
    LengthRange,
    TrainedPredictor,
    TrueClass,
)
from twinserve.policies.layerkv.policy import beside_allreduce
from twinserve.policies.parts.estimators import LinearEstimator
from twinserve.policies.requests import RequestTable
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.profiles.forms.layerkv import LayerKvModel
from twinserve.profiles.profile import load_profile


# -- which layers (Sec. 3.1.2) ---------------------------------------------------------------------
def test_the_papers_example_of_eight_layers():
    """Four layers on the GPU: 1, 3, 5 and 7; the 0th, 2nd, 4th and 6th on the CPU."""
    assert sorted(offload_order(8)[:4]) == [0, 2, 4, 6]
    assert sorted(offload_order(8)[4:]) == [1, 3, 5, 7]
    assert offload_order(8, interleaved=False) == tuple(range(8))


@pytest.mark.parametrize("layers", [1, 2, 5, 12, 32, 60, 80])
def test_every_other_layer_leaves_before_any_two_neighbours(layers):
    order = offload_order(layers)
    assert sorted(order) == list(range(layers))
    assert set(order[: (layers + 1) // 2]) == set(range(0, layers, 2))


# -- x (eqs. 3-4) ----------------------------------------------------------------------------------
# alpha = beta = 1, 8 layers, 2 x 1,000 parameters and a hidden size of 1 at 1,000 FLOP/s, 2 bytes a
# layer and token at 8 bytes/s: T_prefill = n (2,000 + 2 n 8) / 1,000 = 2 n + 0.016 n^2, T_offload =
# n (8 - x) 2 / 8 = n (8 - x) / 4.
MODEL = LayerKvModel(
    alpha=1.0, beta=1.0, parameters=1000, hidden=1, layers=8, flops=1000.0, layer_kv_bytes=2.0,
    pcie_bytes_per_s=8.0,
)  # fmt: skip
SLOW = replace(MODEL, pcie_bytes_per_s=4.0)
BY_PHASE = LinearEstimator(
    BrosLinearModel(PhaseCost(2.0, 0.016, 0.0), PhaseCost(1.0, 0.0, 0.0)), SwapTimeModel(1 / 4)
)
#   n   T_prefill   a layer (8 bytes/s, 4 bytes/s)   layers hidden (of 8)       x
#  10     21.6          2.5    5                        8.64    4.32           0   4
#  25     60.0          6.25  12.5                      9.6     4.8            0   4
# 125    500.0         31.25  62.5                     16       8              0   0
# 124    494.016       31     62                       15.9     7.968          0   1
X = [(10, 0, 4), (25, 0, 4), (124, 0, 1), (125, 0, 0)]


@pytest.mark.parametrize("tokens, fast, slow", X)
def test_the_fewest_layers_whose_transfer_hides_behind_the_prompt(tokens, fast, slow):
    limits = EngineLimits(kv_bytes_per_token=16)
    for model, expected in ((MODEL, fast), (SLOW, slow)):
        cost = LayerCost(LayerKvEstimator(BY_PHASE.model, BY_PHASE.swap, model), 8, limits)
        assert cost.min_resident_layers(tokens) == model.min_resident_layers(tokens) == expected
        assert cost.layer_seconds(tokens, 8 - expected) <= cost.prefill_seconds(tokens)
        if expected:
            assert cost.layer_seconds(tokens, 8 - expected + 1) > cost.prefill_seconds(tokens)
    # any other estimator of batches and transfers will do
    assert LayerCost(BY_PHASE, 8, limits).min_resident_layers(tokens) == slow


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_layers_of_many_requests_take_what_each_by_itself_takes(share):
    limits, tokens = EngineLimits(kv_bytes_per_token=17), np.arange(1, 400, 7)
    swap = SwapTimeModel(seconds_per_byte=1e-3, base_s=0.1)
    for estimator in (
        LayerKvEstimator(BY_PHASE.model, swap, MODEL),
        LinearEstimator(BY_PHASE.model, swap),
    ):
        cost = LayerCost(estimator, 8, limits, share)
        for layers in (1, 3):
            alone = [cost.layer_seconds(n, layers) for n in tokens.tolist()]
            assert cost.layer_seconds(tokens, layers).tolist() == alone


def test_a_link_that_allreduce_uses_too_hides_fewer_layers():
    limits = EngineLimits(kv_bytes_per_token=16)
    estimator = LayerKvEstimator(BY_PHASE.model, BY_PHASE.swap, MODEL)
    assert [
        LayerCost(estimator, 8, limits, share).min_resident_layers(10)
        for share in (1.0, 0.75, 0.5, 0.1)
    ] == [
        0,
        2,  # 2.5 / 0.75 = 3.33 s a layer: six of them
        4,
        8,
    ]


def test_long_prompts_need_no_layer_and_short_ones_on_a_fast_gpu_do():
    """Sec. 3.1.1: x falls with the prompt's length."""
    profile = load_profile("llama-3.1-70b@h100:tp4")
    prompts = layerkv_estimator(profile, profile.model()).prompts
    x = [prompts.min_resident_layers(n) for n in (16, 1024, 16384)]
    assert x == sorted(x, reverse=True) and x[-1] == 0


# -- how long prompts may take (eqs. 1-2) ----------------------------------------------------------
# T_slo is for past + future tokens; a future token takes 0.03 s
#  SLO    past   T_past   lower   future   T_slo   T_past + T_future   allowed
#  0.2     10     1.0       50      40      10.0       1.0 + 1.2         7.8
#  0.2     49     9.0       50       1      10.0       9.0 + 0.03        0.97
#  0.2     80    16.0       50       1      16.2      16.0 + 0.03        0.17
#  0.2      5     3.0        1       1       1.2       3.0 + 0.03       -1.83
#  none    10   100.0       50      40                                    inf
SLO = np.array([0.2, 0.2, 0.2, 0.2, np.nan])
PAST, PAST_S = np.array([10, 49, 80, 5, 10]), np.array([1.0, 9.0, 16.0, 3.0, 100.0])
LOWER = np.array([50.0, 50.0, 50.0, 1.0, 50.0])


def test_what_each_request_allows():
    allowed = allowed_prefill_seconds(SLO, PAST_S, PAST, LOWER, 0.03)
    assert allowed.tolist() == pytest.approx([7.8, 0.97, 0.17, -1.83, np.inf])


def test_the_current_tpot_is_the_mean_of_the_last_steps():
    recent = RecentSteps(3)
    assert recent.tpot == 0.0
    recent.add(np.array([9.0, 1.0, 2.0]))
    recent.add(np.array([3.0]))
    assert recent.tpot == 2.0


# -- free blocks ahead (eq. 5) ---------------------------------------------------------------------
def test_free_cells_of_the_next_stages():
    """Four layers, blocks of 16 tokens. a: 5 blocks in 4 layers, 20 tokens to go: ends in stage 2.
    b: 3 blocks, 1 of its layers on the device, 16 tokens: stage 1. c: 2 blocks in 2 layers, nobody
    knows.

    stage   free before   allocated a b c      released              free after
      1         10            4  1  2        b: (3 + 1) x 1 =  4          7
      2          7            4  -  2        a: (5 + 2) x 4 = 28         29
      3         29            -  -  2                                    27
    """
    available = available_cells(
        10, np.array([5, 3, 2]), np.array([4, 1, 2]), np.array([20.0, 16.0, np.inf]),
        block_tokens=16, horizon=3,
    )  # fmt: skip
    assert available.tolist() == [10, 7, 29, 27]
    assert available_cells(10, np.array([5]), np.array([4]), np.array([1.0]), 16, 0).tolist() == [
        10
    ]


# -- lengths ---------------------------------------------------------------------------------------
def table_of(*prompts: int) -> RequestTable:
    table = RequestTable()
    for i, prompt in enumerate(prompts):
        table.submit(f"r{i}", prompt_tokens=prompt)
    return table


def test_what_is_left_of_a_range():
    expected = LengthRange(10, 15, 20)
    assert [expected.left(n) for n in (0, 14, 15, 19)] == [15, 1, 5, 1]
    assert expected.left(20) == np.inf and LengthRange().left(3) == np.inf


def test_history_says_what_prompts_of_that_length_got():
    table, predictor = table_of(100, 1000, 5), HistoryPredictor(classes=2)
    assert predictor.predict(0, table) == LengthRange()
    for k in range(10):
        predictor.observe(100 + k, 10 + k)
        predictor.observe(1000 + k % 3, 500 + k)
    assert predictor.predict(0, table) == LengthRange(10, 14.5, 19)
    assert predictor.predict(1, table) == LengthRange(500, 504.5, 509)
    # no such prompt yet: half of all fell into that class
    assert predictor.predict(2, table) == LengthRange(10, 14.5, 19)


def test_history_admits_that_it_cannot_tell():
    predictor = HistoryPredictor(classes=4)
    for n in range(1, 41):
        predictor.observe(100, n)
    assert predictor.predict(0, table_of(100)) == LengthRange(1, 20.5, 40)


def test_what_was_learned_before_the_run_is_not_changed_by_it():
    rng = np.random.default_rng(0)
    prompts, outputs = np.repeat([100, 1000], 20), np.concatenate([np.full(20, 7), np.full(20, 70)])
    table, predictor = table_of(100, 1000), TrainedPredictor(classes=2)
    order = rng.permutation(40)
    predictor.learn(prompts[order], outputs[order])
    for _ in range(600):  # more than any history holds
        assert predictor.predict(0, table) == LengthRange(7, 7, 7)
        assert predictor.predict(1, table) == LengthRange(70, 70, 70)
        predictor.observe(100, 999)


def test_with_nothing_to_learn_from_it_learns_from_what_ends():
    table, trained, history = table_of(100), TrainedPredictor(2), HistoryPredictor(2)
    for n in range(30):
        assert trained.predict(0, table) == history.predict(0, table)
        for predictor in (trained, history):
            predictor.observe(100, 10 + n)


def test_the_true_class_and_its_errors():
    table = table_of(*[10] * 400)
    lengths = {name: 64 + i % 64 for i, name in enumerate(table.ids)}
    for accuracy in (1.0, 0.75, 0.0):
        predictor = TrueClass(accuracy)
        with pytest.raises(PolicyError, match="predictor=perfect: this engine does not know"):
            predictor.predict(0, table)
        predictor.truth = Truth(lengths)
        said = [predictor.predict(row, table) for row in range(400)]
        assert sum(r == LengthRange(64, 96, 128) for r in said) / 400 == pytest.approx(
            accuracy, abs=0.07
        )
        wrong = {r.lower for r in said} - {64}
        assert wrong == (set() if accuracy == 1.0 else {32, 128})


# -- all-reduce on the same link (Sec. 3.1.3) ------------------------------------------------------
def test_kv_between_two_allreduces():
    assert beside_allreduce(0.0, 0.5, 0.25) == (1.0, 0.0)
    # 2 looks of 0.7 leave 0.6 until the next all-reduce: one sub-unit, whatever the last bits of
    # 1.4 and 0.6 are
    assert beside_allreduce(0.5, 0.7, 0.6) == pytest.approx((0.3, 0.0))
    # 1 in 5; four all-reduce lengths between two, filled by 16 sub-units without a rest
    assert beside_allreduce(0.2, 0.5, 0.25) == pytest.approx((0.8, 0.0))
    # sub-units of twice its length into gaps of its length: each all-reduce waits as long as it
    # takes itself
    assert beside_allreduce(0.5, 0.5, 2.0) == pytest.approx((2 / 3, 1.0), rel=0.01)
    # Between two all-reduces, one every 2: whoever looks every 3 finds the link free each second
    # time, half through the gap
    share, delay = beside_allreduce(0.5, 3.0, 0.25)
    assert share < 0.3 and delay == 0.0


def test_a_negligible_share_leaves_the_link_alone():
    for share in (1e-300, 1e-9, 1e-6, 1e-4):
        assert beside_allreduce(share, 0.5, 0.01) == pytest.approx((1.0 - share, 0.0), abs=1e-3)


def test_smaller_units_delay_the_allreduce_less():
    delays = [beside_allreduce(0.3, 0.4, unit)[1] for unit in (2.0, 0.5, 0.1)]
    assert delays == sorted(delays, reverse=True) and delays[-1] < 0.1 < delays[0]
