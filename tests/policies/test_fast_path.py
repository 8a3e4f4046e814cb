"""Runs of identical decode steps taken at once give byte for byte what single steps give, for every
policy with its options, on ledgers paged and bidirectional; and on the way nothing runs without
memory and every request ends. All ledgers: test_policies_on_ledgers.py."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.policies.policy_runs import crowds, simulate
from tests.sim.harness import Affine, build, same_rows
from twinserve.policies.base import EngineLimits
from twinserve.policies.registry import parse_policy, policy_names
from twinserve.traces.workload import BestEffortPool, Workload

KINDS = ("paged", "cached", "bidirectional")
# Every policy there is, as it comes and with its options that change who gives way, and how.
VARIANTS = {
    "bros": (
        "bros", "bros:swap=false", "bros:chunk=5,replacement=false", "bros:group_size=3",
        "bros:order=savable", "bros:chunk=fit", "bros:chunk=fit,group_size=2",
        "bros:chunk=fit,fit_least=4,fit_age_s=0.02,fit_feedback=0.5", "bros:base_batch=1",
        "bros:base_batch=2,chunk=5",
    ),
    "conserve": ("conserve", "conserve:preemption_mode=recompute"),
    "mlfq": (
        "mlfq", "mlfq:quantum=0.004,starve_limit=0.05,min_free_blocks=2",
        "mlfq:preemption_mode=recompute", "mlfq:quantum=0.004,skip_join=false,starve_limit=0.05",
    ),
    "preemptive-wait": (
        "preemptive-wait", "preemptive-wait:preemption_mode=swap",
        "preemptive-wait:newcomers_preempt=false",
    ),
    "round-robin": ("round-robin", "round-robin:chunk=3", "round-robin:batch_size=2"),
    "sarathi": ("sarathi", "sarathi:chunk_size=5"),
    "tgi": (
        "tgi", "tgi:max_new_tokens=20", "tgi:max_batch_size=2",
        "tgi:max_new_tokens=20,waiting_served_ratio=1.5,max_waiting_tokens=3",
    ),
    "vllm": (
        "vllm", "vllm:enable_chunked_prefill=false", "vllm:long_prefill_token_threshold=7",
        "vllm:scheduling=priority",
    ),
    "vllm-v0": ("vllm-v0", "vllm-v0:preemption_mode=swap", "vllm-v0:watermark=0.2"),
}  # fmt: skip
POLICIES = [text for name in policy_names() for text in VARIANTS.get(name, (name,))]


LONGEST = 48  # tokens of a request: 12 blocks of four
LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=LONGEST)


@st.composite
def workloads(draw):
    """A few requests, perhaps a pool, and a memory that holds between one and five of them."""
    workload = draw(crowds(ttft_s=[0.004, 0.03, 0.4], tpot_s=[0.0025, 0.01, 0.2]))
    return workload, draw(st.integers(LONGEST // 4 + 1, 40)), draw(st.sampled_from([0, 6, 40]))


def compare(policy: str, kind: str, case) -> None:
    workload, blocks, host = case
    steps, gaps, ended, _ = simulate(workload, policy, kind, blocks, host=host, limits=LIMITS)
    exact = simulate(
        workload, policy, kind, blocks, host=host, limits=LIMITS, fast=False, check=True
    )
    for ours, theirs in zip((steps, gaps, ended), exact, strict=False):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    assert ended.finished.all()
    emitted = dict(zip(ended.request_id, ended.output_tokens, strict=True))
    assert [emitted[name] for name in workload.ids] == workload.output_tokens.tolist()


PAIRS = [(policy, kind) for policy in POLICIES for kind in KINDS]
# Eight whose arrivals and ends fall into each other's runs of steps.
EIGHT = Workload.build(
    [0.0, 0.0, 0.01, 0.02, 0.05, 0.051, 0.09, 0.3],
    [9, 17, 5, 20, 1, 12, 8, 3],
    [25, 12, 28, 3, 20, 9, 1, 15],
    slo_ttft_s=np.full(8, 0.4),
    slo_tpot_s=np.full(8, 0.2),
)
# each policy on some ledger: the first on the first, the second on the second ...
TURNS = [(policy, KINDS[i % len(KINDS)]) for i, policy in enumerate(POLICIES)]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kind"), mostly_nightly(PAIRS, *TURNS))
@examples(6, suppress_health_check=list(HealthCheck))
@example(case=(EIGHT, 16, 30))
@given(case=workloads())
def test_one_step_at_a_time_gives_the_same_rows(policy, kind, case):
    compare(policy, kind, case)


# Found by the test above. A request that was replaced, and then placed all the same because a more
# urgent one found no memory, came twice into the batch.
TWICE = Workload.build(
    [0.16, 0.22],
    [14, 17],
    [22, 1],
    slo_ttft_s=np.full(2, 0.004),
    slo_tpot_s=np.full(2, 0.01),
    pool=BestEffortPool(3, (4, 16), (2, 12), until_s=0.2),
)
# One that had just been dropped was asked to grow.
DROPPED = Workload.build(
    [0.0, 0.0, 0.0, 0.09, 0.09, 0.11, 0.12],
    [1, 1, 1, 1, 11, 1, 1],
    [1, 1, 1, 15, 15, 7, 3],
    service_class=np.array([0, 0, 0, 1, 1, 1, 1], np.int8),
    slo_ttft_s=np.repeat([0.004, np.nan], [3, 4]),
    slo_tpot_s=np.repeat([0.0025, np.nan], [3, 4]),
    pool=BestEffortPool(1, (4, 16), (2, 12), until_s=0.2),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", mostly_nightly(VARIANTS["bros"], "bros"))
@pytest.mark.parametrize("workload, host", [(TWICE, 6), (DROPPED, 0)], ids=["twice", "dropped"])
def test_workloads_that_once_failed(workload, host, policy, kind):
    compare(policy, kind, (workload, LONGEST // 4 + 1, host))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_fast_path_is_taken(policy):
    """A lone request that decodes is planned a few times, not once a token."""
    workload = Workload.build([0.0], [5], [40])
    steps, _, _, engine = simulate(workload, policy, parse_policy(policy).kv_name, 20)
    assert len(steps) >= 40
    if "group_size" in policy:  # its deadlines move within a group, so it decides at every step
        assert len(engine.decision_seconds) == len(steps)
    else:
        assert len(engine.decision_seconds) <= 4


@pytest.mark.parametrize(
    "policy, kind, decisions",
    [("mlfq:quantum=0.05,starve_limit=none", "paged", 12), ("bros-exact", "bidirectional", 12)],
)
def test_a_prompt_too_long_to_join_does_not_break_runs(policy, kind, decisions):
    """It waits until those that run have ended, some of them behind it in the order, and is not
    asked for at every step."""
    workload = Workload.build(
        [0.0, 0.0, 0.01, 0.05], [5, 5, 60, 600], [60, 80, 100, 5], slo_ttft_s=np.full(4, 1.0),
        slo_tpot_s=np.full(4, 0.02),
    )  # fmt: skip
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=1024)
    steps, gaps, ended, engine = simulate(workload, policy, kind, 1200, limits=limits)
    exact = simulate(workload, policy, kind, 1200, limits=limits, fast=False)
    for ours, theirs in zip((steps, gaps, ended), exact, strict=False):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    assert len(steps) > 100 and len(engine.decision_seconds) <= decisions


# -- asynchronously --------------------------------------------------------------------------------
# Steps of hundredths of a second, so that arrivals on a grid of them fall onto ends of steps too.
EVEN = Affine(base=0.01, prefill=0.0, decode=0.0, context=0.0)
UNEVEN = Affine(base=0.006, prefill=2e-4, decode=5e-4, context=1e-5)


@st.composite
def cases(draw):
    """A few requests, perhaps a pool; a memory that holds between one and five of them; step times;
    overhead."""
    return (
        draw(crowds(ttft_s=[0.02, 0.1, 0.4], tpot_s=[0.011, 0.03, 0.2])),
        draw(st.integers(LONGEST // 4 + 1, 40)),
        draw(st.sampled_from([0, 6, 40])),
        draw(st.sampled_from([EVEN, UNEVEN])),
        draw(st.sampled_from([0.0, 0.0, 0.004, 0.02])),
    )


def both_ahead(policy: str, case):
    """The same run, in runs of steps and step by step, that one audited."""
    workload, blocks, host, model, overhead = case
    settings = {
        "model": model,
        "limits": replace(LIMITS, kv_bytes_per_token=50_000_000),
        "blocks": blocks,
        "block_tokens": 4,
        "host_blocks": host,
        "overhead": overhead,
        "caching": policy.startswith(("vllm", "round")) or None,
        "asynchronous": True,
    }
    return [build(workload, policy, fast=f, audit=not f, **settings).run() for f in (True, False)]


# A run of steps whose plan moves KV, which is moved once.
MOVES = Workload.build(
    [0.0] * 6, [1] * 6, [1, 1, 1, 1, 16, 19], pool=BestEffortPool(1, (4, 16), (2, 12), until_s=0.2)
)
BUSY = Workload.build([0.0, 0.0, 0.05, 0.1, 0.13], [20, 18, 20, 9, 1], [28, 28, 20, 28, 1])
AHEAD = [*POLICIES, "vllm:kv=bidirectional", "bros:kv=paged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", mostly_nightly(AHEAD, "bros", *SOME_POLICIES, "vllm-v0:preemption_mode=swap")
)
@examples(10, suppress_health_check=list(HealthCheck))
@example(case=(BUSY, 13, 6, EVEN, 0.0))
@example(case=(MOVES, 13, 6, UNEVEN, 0.0))
@given(case=cases())
def test_one_step_at_a_time_gives_the_same_rows_ahead(policy, case):
    fast, exact = both_ahead(policy, case)
    same_rows(fast.rows, exact.rows)
    assert exact.requests.finished.all()
    emitted = dict(zip(exact.requests.request_id, exact.requests.output_tokens, strict=True))
    assert [emitted[name] for name in case[0].ids] == case[0].output_tokens.tolist()


def test_a_prompt_left_alone_loses_its_cap():
    workload = Workload.build([0.0, 0.02], [5, 36], [6, 5])
    case = (workload, 40, 0, UNEVEN, 0.0)
    fast, exact = both_ahead("vllm:long_prefill_token_threshold=3", case)
    same_rows(fast.rows, exact.rows)


@pytest.mark.parametrize("policy", mostly_nightly(AHEAD, "bros", *SOME_POLICIES))
def test_the_fast_path_is_taken_ahead(policy):
    """A lone request that decodes is planned a few times, not once a token."""
    fast, exact = both_ahead(policy, (Workload.build([0.0], [5], [40]), 20, 0, EVEN, 0.0))
    assert len(exact.engines[0].decision_seconds) >= 40
    if "group_size" not in policy:
        assert len(fast.engines[0].decision_seconds) <= 6
