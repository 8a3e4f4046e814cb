"""LayerKV's decisions: worked examples, each part switched off, and the paper's direction."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.policies.layerkv_runs import MODEL, LayerDesk, simulate
from tests.policies.test_fast_path import LONGEST, workloads
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.layerkv.cost import layerkv_estimator
from twinserve.policies.plan import HOST, Hold
from twinserve.profiles.profile import load_profile
from twinserve.sim.results.recorder import request_columns
from twinserve.traces.workload import Workload

LIMITS = EngineLimits(
    max_num_seqs=4, max_num_batched_tokens=48, max_model_len=48, kv_bytes_per_token=100_000
)


# -- Algorithm 1 -----------------------------------------------------------------------------------
# Steps take 1 s, the SLO is 2 s a token, outputs are predicted to have 10 tokens at least; prompts
# of b and c are expected to take 15 s and 19 s. T_allow = 2 (N_past + N_future) - (T_past + TPOT
# N_future); the current TPOT is 0 before the first decode and 1 s after it.
#   at   a: N_past N_future T_past   allows    b: N_past N_future T_past  allows   begins
#    0                                                                             a: nobody decodes
#    1          1        9      0   20 - 0                                         b: 15 < 20,
#                                                                                  c: 15 + 19 > 20
#    2          1        9      1   20 - 1            1        9      0   20 - 0   19 < 19 is false
#    3          2        8      2   20 - 10           2        8      1   20 - 9   19 > 10
#  4-10                             20 - 10      ends in step 5
#   11         10        1     10   22 - 11                                        19 > 11
#   14         13        1     13   28 - 14      a ends in this step
#   15                                                                             c: nobody decodes
def example(policy: str) -> LayerDesk:
    desk = LayerDesk(policy, 100)
    desk.submit("a", 4, 14, slo_tpot_s=2.0)
    assert desk.step().scheduled == {"a": 4}
    desk.submit("b", 15, 5, slo_tpot_s=2.0)
    desk.submit("c", 19, 1, slo_tpot_s=2.0)
    return desk


def test_prompts_begin_while_those_that_decode_can_spare_the_time():
    desk = example("layerkv")
    allowed, scheduled = [], []
    for now in range(1, 16):
        allowed.append(desk.policy.allowed_seconds(float(now), desk.table))
        scheduled.append(desk.step().scheduled)
    assert allowed == [20, 19, 10, 10, 10, 10, 10, 10, 10, 10, 11, 12, 13, 14, np.inf]
    assert scheduled == [{"b": 15}, *[{"a": 1, "b": 1}] * 4, *[{"a": 1}] * 9, {"c": 19}]


def test_without_the_slo_aware_scheduler_memory_alone_decides():
    desk = example("layerkv:slo_aware=false")
    assert desk.step().scheduled == {"b": 15, "c": 19}


def test_a_request_without_objective_allows_everything():
    desk = LayerDesk("layerkv", 100)
    desk.submit("a", 4, 14)
    desk.step()
    desk.submit("c", 40, 1)
    assert desk.step().scheduled == {"c": 40}


def test_a_negative_allowance_admits_nothing_and_starves_nobody():
    """An objective that nobody can meet: prompts wait for the end of those that decode, and for no
    longer."""
    desk = LayerDesk("layerkv", 100)
    desk.submit("a", 4, 4, slo_tpot_s=1e-3)
    assert desk.step().scheduled == {"a": 4}
    assert desk.step().scheduled == {"a": 1}
    for name, output in (("b", 2), ("c", 1)):
        desk.submit(name, 4, output, slo_tpot_s=1e-3)
    assert desk.policy.allowed_seconds(2.0, desk.table) < 0
    assert desk.scheduled(2) == [{"a": 1}] * 2  # a ends
    assert desk.policy.allowed_seconds(4.0, desk.table) == np.inf
    assert desk.step().scheduled == {"b": 4, "c": 4}
    desk.submit("d", 4, 1, slo_tpot_s=1e-3)
    assert desk.scheduled(2) == [{"b": 1}, {"d": 4}]


# -- layers ----------------------------------------------------------------------------------------
# 10 blocks of four layers: 40 cells. A layer of b's 16 tokens takes 16 s on the link, far more than
# a step: one at a time.
def test_who_keeps_which_layers():
    desk = LayerDesk("layerkv:x=1,threshold=0,horizon=0,watermark=0", 10)
    desk.submit("a", 24, 6)
    assert desk.step().scheduled == {"a": 24} and desk.ledger.free_cells == 40 - 6 * 4
    desk.submit("b", 16, 6)
    assert desk.step().scheduled == {"b": 16} and desk.ledger.free_cells == 0
    assert desk.resident("a", "b") == [4, 4]
    desk.submit("c", 12, 6)
    # c needs a layer: 3 cells. The newest begins to leave: b, a layer, beside the step. And a needs
    # a block now: half of what b has left goes at once.
    assert desk.step().scheduled == {"a": 1}
    assert desk.moves() == [("b", "d2h", 16, (0,), "step"), ("b", "d2h", 16, (1, 2), "before")]
    assert desk.resident("a", "b") == [4, 1]
    assert (desk.ledger.free_cells, desk.ledger.leaving_cells) == (8 - 4, 4)
    # c begins with x: b's layers wait on the host, and come first.
    assert desk.step().scheduled == {"c": 12}
    assert desk.moves() == [("c", "d2h", 12, (0, 1, 2), "step")]
    assert desk.resident("a", "b", "c") == [4, 1, 1] and desk.ledger.free_cells == 8 - 3
    assert desk.scheduled(4) == [{"a": 1}] * 4  # a ends
    # Nobody else has all layers: b's are fetched and stay, though it takes long; then c's, one a
    # step.
    assert desk.step().scheduled == {"b": 1}
    assert desk.moves() == [("b", "h2d", 16, (0, 1, 2), "step")] and desk.resident("b", "c") == [
        4,
        1,
    ]
    assert desk.scheduled(3) == [{"b": 1}] * 3
    assert desk.moves() == [("c", "h2d", 12, (0,), "step")] and desk.resident("c") == [4]
    assert desk.step().scheduled == {"b": 1, "c": 1} and desk.moves() == []


def test_layers_without_room_are_fetched_for_each_step():
    """The same without promotion: all of b's layers on the host come over for every token of it."""
    desk = LayerDesk("layerkv:x=1,retain=min,promote=false,threshold=0", 10)
    desk.submit("a", 8, 3)
    assert desk.step().scheduled == {"a": 8}
    for tokens in (8, 9):
        assert desk.step().scheduled == {"a": 1}
        assert desk.moves() == [
            ("a", "h2d", tokens, (0, 1, 2), "step"),
            ("a", "d2h", 1, (0, 1, 2), "step"),
        ]


def test_some_layers_of_a_token_count_as_that_share_of_it():
    """As above: three of four layers of 8 tokens leave with the prompt; then of 8 and of 9 come
    over, and of one return."""
    desk = LayerDesk("layerkv:x=1,retain=min,promote=false,threshold=0", 10)
    row = desk.submit("a", 8, 3)
    moved = []
    for _ in range(3):
        desk.step()
        moved.append(desk.table.swapped_tokens[row])
    assert moved == [8 * 0.75, (8 + 8 + 1) * 0.75, (8 + 8 + 1 + 9 + 1) * 0.75]
    assert request_columns(desk.table, 0, [])["swapped_tokens"].tolist() == [20]  # of 20.25


def test_moved_bytes_are_those_of_the_requests_tokens():
    """Bytes of a token that four layers share evenly, so that only the rounding of a request's own
    sum is left."""
    limits = EngineLimits(max_num_seqs=12, max_model_len=64, kv_bytes_per_token=100_000)
    steps, _, requests, engine = simulate(SPREAD, "layerkv", 25, host=200, limits=limits)
    moved = int((steps.to_host_bytes + steps.to_device_bytes).sum())
    assert moved == engine.core.requests.swapped_tokens.sum() * 100_000 > 0
    assert abs(int(requests.swapped_tokens.sum()) * 100_000 - moved) <= len(SPREAD) * 50_000


def test_half_of_the_kept_layers_leave_before_the_rest():
    """Room for a forecast that is short by everything: of b and c, first two layers each, the
    newest first."""
    desk = LayerDesk("layerkv:x=4,threshold=0.9,horizon=0,watermark=0", 12, estimator=slow_steps())
    for name in "abc":
        desk.submit(name, 8, 9)
    assert desk.step().scheduled == {"a": 8, "b": 8, "c": 8}
    assert desk.resident("a", "b", "c") == [4, 4, 4]
    desk.step()
    assert desk.moves()[:4] == [
        ("c", "d2h", 8, (0, 2), "step"),
        ("b", "d2h", 8, (0, 2), "step"),
        ("c", "d2h", 8, (1, 3), "step"),
        ("b", "d2h", 8, (1, 3), "step"),
    ]
    assert desk.resident("a", "b", "c") == [4, 0, 0]  # the oldest keeps its own


def slow_steps():
    """Decode steps are expected to take long, so that any transfer hides behind one."""
    from twinserve.policies.parts.estimators import LinearEstimator
    from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel

    return LinearEstimator(
        BrosLinearModel(PhaseCost(1.0, 0.0, 0.0), PhaseCost(0.0, 0.0, 1000.0)),
        SwapTimeModel(seconds_per_byte=1.0),
    )


# -- every part can be switched off ----------------------------------------------------------------
SPREAD = Workload.build(
    np.arange(12) / 100, np.arange(20, 32), np.arange(10, 34, 2), slo_tpot_s=np.full(12, 0.2)
)


def seen(policy: str, blocks: int = 25, host: int = 200, workload=SPREAD, **settings):
    """Moves and plans of a run in which memory is short."""
    moves, admitted = [], set()

    def watch(plan, core):
        admitted.update(row for row, _ in plan.admitted)
        new = {row for row, _ in plan.admitted}
        moves.extend((m, m.row in new, m.row in plan.rows.tolist()) for m in plan.moves)

    limits = EngineLimits(max_num_seqs=12, max_model_len=64, kv_bytes_per_token=100_000)
    _, _, requests, engine = simulate(
        workload,
        policy,
        blocks,
        host=host,
        limits=limits,
        fast=False,
        check=True,
        seen=watch,
        **settings,
    )
    assert requests.finished.all()
    return requests, moves


def ttft(requests: pd.DataFrame) -> float:
    return float((requests.first_token_s - requests.arrival_s).mean())


def test_layer_wise_prompts_do_not_wait_for_memory():
    ours, moves = seen("layerkv")
    off, none = seen("layerkv:layer_wise=false")
    assert ttft(ours) < ttft(off) / 2
    assert moves and not none and ours.recomputes.sum() == 0 < off.recomputes.sum()


def test_proactive_offload_can_be_off():
    """Then layers leave only where a step finds no memory, and it waits for them."""
    for option, proactive in (("true", True), ("false", False)):
        _, moves = seen(f"layerkv:x=2,proactive={option}", blocks=30)
        ahead = [
            m
            for m, new, runs in moves
            if m.target == HOST and m.hold is Hold.STEP and not new and m.tokens > 1
        ]
        assert bool(ahead) == proactive


def test_interleaving_can_be_off():
    for option, two in (("true", (0, 2)), ("false", (0, 1))):
        _, moves = seen(f"layerkv:x=2,retain=min,interleaved={option}")
        assert {m.layers for m, new, _ in moves if new} == {two}


def test_the_threshold_keeps_blocks_free():
    low = {}
    for threshold in (0.0, 0.5):
        free = []
        limits = EngineLimits(max_num_seqs=12, max_model_len=64, kv_bytes_per_token=1000)
        simulate(
            SPREAD,
            f"layerkv:x=0,horizon=0,threshold={threshold}",
            40,
            host=200,
            limits=limits,
            fast=False,
            seen=lambda plan, core, free=free: free.append(
                core.ledger.free_cells + core.ledger.leaving_cells
            ),
        )
        low[threshold] = np.median(free[10:-10])
    assert low[0.5] > low[0.0]


def test_allreduce_on_the_link_keeps_more_layers():
    """A prompt of 4 tokens is expected to take 4 s, and hides all four layers of 1 s; with half of
    the link it hides two."""
    for share, kept in ((0.0, 0), (0.5, 2)):
        desk = LayerDesk(f"layerkv:retain=min,allreduce_share={share}", 100)
        desk.submit("a", 4, 2)
        desk.step()
        assert desk.resident("a") == [kept]


@examples(25, suppress_health_check=list(HealthCheck))
@given(case=workloads(), kind=st.sampled_from(["paged", "layerwise"]))
def test_without_its_parts_it_is_vllm_v0(case, kind):
    workload, blocks, host = case
    for mode in ("recompute", "swap"):
        ours, theirs = (
            simulate(workload, policy, blocks, kind=kind, host=host, limits=LIMITS)[:3]
            for policy in (
                f"layerkv:slo_aware=false,layer_wise=false,preemption_mode={mode}",
                f"vllm-v0:preemption_mode={mode}",
            )
        )
        for one, other in zip(ours, theirs, strict=True):
            pd.testing.assert_frame_equal(one, other, check_exact=True)


@examples(25, suppress_health_check=list(HealthCheck))
@given(case=workloads())
def test_with_memory_and_time_enough_it_is_vllm_v0(case):
    workload, _, host = case
    ours, theirs = (
        simulate(workload, policy, 2000, host=host, limits=LIMITS)[:3]
        for policy in ("layerkv:slo_aware=false", "vllm-v0")
    )
    for one, other in zip(ours, theirs, strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_a_link_that_is_never_found_free_is_refused():
    """All-reduce and computing take turns of one length each, and whoever waits two lengths always
    meets all-reduce."""
    with pytest.raises(
        PolicyError,
        match="allreduce_share=0.5 and allreduce_wait=2 no KV transfer ever finds the link free",
    ):
        LayerDesk("layerkv:allreduce_share=0.5,allreduce_wait=2", 10)


def test_an_estimator_is_needed():
    with pytest.raises(
        PolicyError, match="has no estimator; set slo_aware=false and layer_wise=false"
    ):
        desk = LayerDesk("layerkv", 10, estimator=None)
        desk.submit("a", 4, 1)
        desk.step()
    desk = LayerDesk("layerkv:slo_aware=false,layer_wise=false", 10, estimator=None)
    desk.submit("a", 4, 1)
    assert desk.step().scheduled == {"a": 4}


# -- the paper's direction (Fig. 4) ----------------------------------------------------------------
def llama_on_l20(policy: str, context: int, seed: int, n: int = 100) -> tuple[float, float]:
    """Llama-2-7B on one L20, prompts of `context` tokens, 512 out, 1 request/s: mean TTFT (s),
    output tokens/s."""
    profile = load_profile("llama-2-7b@l20")
    model = profile.model()
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1.0, n))
    workload = Workload.build(
        arrival, np.full(n, context), np.full(n, 512), slo_tpot_s=np.full(n, 0.2)
    )
    limits = EngineLimits(256, 2048, 17408, int(profile.kv_bytes_per_token))
    blocks = profile.num_gpu_blocks
    _, _, requests, _ = simulate(
        workload,
        policy,
        blocks,
        kind="paged" if policy == "vllm-v0" else "layerwise",
        size=16,
        host=40 * blocks,
        layers=profile.llm.layers,
        limits=limits,
        bytes_per_s=profile.pcie_bytes_per_s,
        model=model,
        estimator=layerkv_estimator(profile, model),
    )
    assert requests.finished.all()
    return ttft(requests), requests.output_tokens.sum() / requests.last_token_s.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "context, seed, factor",
    mostly_nightly([(2048, 0, 5.0), (2048, 1, 5.0), (4096, 0, 3.0)], (2048, 0, 5.0)),
)
def test_ttft_of_long_prompts_falls_by_a_clear_factor_at_nearly_the_same_throughput(
    context, seed, factor
):
    theirs, ours = llama_on_l20("vllm-v0", context, seed), llama_on_l20("layerkv", context, seed)
    assert ours[0] < theirs[0] / factor
    assert ours[1] > 0.95 * theirs[1]


def test_ttft_of_short_prompts_is_the_same():
    assert llama_on_l20("layerkv", 1024, 0) == llama_on_l20("vllm-v0", 1024, 0)


# Requests that wait on the host after their first token: how many, and what it is to have none.
@examples(40, suppress_health_check=list(HealthCheck))
@given(
    case=workloads(),
    most=st.integers(0, 3),
    host=st.sampled_from([6, 40, 200]),
    other=st.sampled_from(["", ",park=false", ",proactive=false", ",slo_aware=false,x=0"]),
)
def test_no_more_requests_have_layers_on_the_host_than_may(case, most, host, other):
    workload, blocks, _ = case
    seen = []

    def watch(plan, core):
        running = core.policy.queues.rows
        seen.append(int((core.ledger.host_layers(running) > 0).sum()))

    policy = f"layerkv:max_parked={most}{other}"
    requests = simulate(workload, policy, blocks, host=host, seen=watch, check=True)[2]
    assert max(seen) <= most
    assert requests.finished.all()


def three_prompts(policy: str) -> LayerDesk:
    """Three prompts of two blocks, of which memory holds two; a layer of eight tokens is 2 s on the
    link, a step takes 1 s."""
    desk = LayerDesk(policy, 4)
    for name in "abc":
        desk.submit(name, 8, 6)
    return desk


def test_one_begins_without_memory_for_it_unless_none_may_be_parked():
    assert set(three_prompts("layerkv:x=0,threshold=0").step().scheduled) == set("abc")
    assert set(three_prompts("layerkv:threshold=0,max_parked=0").step().scheduled) == set("ab")


# LayerKV's runs of decode steps taken at once give byte for byte what single steps give, with
# several layers, short and long transfers, and asynchronously too; on the way nothing runs
# without its layers, and every request ends.
VARIANTS = (
    "layerkv", "layerkv:slo_aware=false",
    "layerkv:savable_only=true,current_tpot=request,predictor=perfect",
    "layerkv:x=0,proactive=false", "layerkv:x=1,promote=false",
    "layerkv:threshold=0,horizon=0,interleaved=false", "layerkv:retain=min,preemption_mode=swap",
    "layerkv:x=0,park=false", "layerkv:max_parked=1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", VARIANTS)
@examples(8, suppress_health_check=list(HealthCheck))
@given(
    case=workloads(),
    layers=st.sampled_from([1, 2, 5]),
    host=st.sampled_from([0, 6, 40, 200]),
    token_bytes=st.sampled_from([10_000, 400_000]),
    share=st.sampled_from([None, 0.1, 0.6]),
)
def test_one_step_at_a_time_gives_the_same_rows(
    policy, asynchronous, case, layers, host, token_bytes, share
):
    workload, blocks, _ = case
    limits = EngineLimits(4, 48, LONGEST, kv_bytes_per_token=token_bytes)
    settings = {"host": host, "layers": layers, "limits": limits, "asynchronous": asynchronous}
    if share:
        settings["allreduces"] = lambda work: share * MODEL.step_seconds(work)
    fast = simulate(workload, policy, blocks, **settings)
    exact = simulate(workload, policy, blocks, fast=False, check=True, **settings)
    for one, other in zip(fast[:3], exact[:3], strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert fast[2].finished.all()
    ledger = exact[3].core.ledger
    assert ledger.free_blocks == blocks and ledger.free_host_cells == host * layers


@pytest.mark.parametrize("policy", VARIANTS)
def test_the_fast_path_is_taken(policy):
    """A lone request that decodes is planned a few times, not once a token."""
    workload = Workload.build([0.0], [5], [40])
    steps, _, _, engine = simulate(workload, policy, 400, host=400)
    assert len(steps) >= 40
    # those fetch layers for some steps or for all
    if "promote=false" not in policy and "retain=min" not in policy:
        assert len(engine.decision_seconds) <= 6
