"""Runs of identical decode steps, asynchronously: byte for byte what single steps give, for every
policy, while arrivals, ends, preemptions and transfers fall between plans that were made ahead."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.policies.policy_runs import crowds
from tests.sim.harness import POLICIES, Affine, build, same_rows
from tests.sim.test_async import asynchronous
from twinserve.policies.base import EngineLimits
from twinserve.traces.workload import BestEffortPool, Workload

LONGEST = 48  # tokens of a request: 12 blocks of four
LIMITS = EngineLimits(
    max_num_seqs=4, max_num_batched_tokens=48, max_model_len=LONGEST, kv_bytes_per_token=50_000_000
)
OTHERS = (
    "bros:swap=false", "bros:group_size=3", "bros:chunk=5,replacement=false",
    "bros:chunk=fit,fit_least=4,fit_age_s=0.05", "preemptive-wait:preemption_mode=swap",
    "preemptive-wait:newcomers_preempt=false", "round-robin:chunk=3",
    "vllm:long_prefill_token_threshold=7", "vllm:enable_chunked_prefill=false",
    "vllm:kv=bidirectional", "vllm-v0:preemption_mode=swap",
)  # fmt: skip
# Steps of hundredths of a second, so that arrivals on a grid of them fall onto ends of steps too.
MODEL = Affine(base=0.01, prefill=0.0, decode=0.0, context=0.0)
UNEVEN = Affine(base=0.006, prefill=2e-4, decode=5e-4, context=1e-5)


@st.composite
def cases(draw):
    """A few requests, perhaps a pool; a memory that holds between one and five of them; step times;
    overhead."""
    workload = draw(crowds(ttft_s=[0.02, 0.1, 0.4], tpot_s=[0.011, 0.03, 0.2]))
    return (
        workload,
        draw(st.integers(LONGEST // 4 + 1, 40)),
        draw(st.sampled_from([0, 6, 40])),
        draw(st.sampled_from([MODEL, UNEVEN])),
        draw(st.sampled_from([0.0, 0.0, 0.004, 0.02])),
    )


def both(policy: str, case):
    """The same run, in runs of steps and step by step, that one audited."""
    workload, blocks, host, model, overhead = case
    with asynchronous():
        return [
            build(
                workload,
                policy,
                model=model,
                limits=LIMITS,
                blocks=blocks,
                block_tokens=4,
                host_blocks=host,
                fast=fast,
                overhead=overhead,
                caching=policy.startswith(("vllm", "round")) or None,
                audit=not fast,
            ).run()
            for fast in (True, False)
        ]


# A run of steps whose plan moves KV, which is moved once.
MOVES = Workload.build(
    [0.0] * 6, [1] * 6, [1, 1, 1, 1, 16, 19], pool=BestEffortPool(1, (4, 16), (2, 12), until_s=0.2)
)
BUSY = Workload.build([0.0, 0.0, 0.05, 0.1, 0.13], [20, 18, 20, 9, 1], [28, 28, 20, 28, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    mostly_nightly([*POLICIES, *OTHERS], "bros", *SOME_POLICIES, "vllm-v0:preemption_mode=swap"),
)
@examples(10, suppress_health_check=list(HealthCheck))
@example(case=(BUSY, 13, 6, MODEL, 0.0))
@example(case=(MOVES, 13, 6, UNEVEN, 0.0))
@given(case=cases())
def test_one_step_at_a_time_gives_the_same_rows(policy, case):
    fast, exact = both(policy, case)
    same_rows(fast.rows, exact.rows)
    assert exact.requests.finished.all()
    emitted = dict(zip(exact.requests.request_id, exact.requests.output_tokens, strict=True))
    workload = case[0]
    assert [emitted[name] for name in workload.ids] == workload.output_tokens.tolist()


@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, "bros", *SOME_POLICIES))
def test_the_fast_path_is_taken(policy):
    """A lone request that decodes is planned a few times, not once a token."""
    case = (Workload.build([0.0], [5], [40]), 20, 0, MODEL, 0.0)
    fast, exact = both(policy, case)
    assert len(exact.engines[0].decision_seconds) >= 40
    assert len(fast.engines[0].decision_seconds) <= 6
