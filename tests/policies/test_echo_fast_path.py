"""Echo's runs of decode steps taken at once give byte for byte what single steps give, on every
ledger."""

from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.policies import policy_runs
from tests.policies.echo_runs import LADDER, echo_ledgers, estimator_of
from tests.policies.policy_runs import simulate
from tests.policies.test_fast_path import KINDS, compare, workloads
from twinserve.policies.base import EngineLimits
from twinserve.profiles.forms.echo import EchoModel
from twinserve.traces.workload import Workload

OPTIONS = (
    "echo:slo=gap,sample_s=0.01,history_s=0.1", "echo:length_buckets=false,b_decode=0.3",
    "echo-bs:threshold=true", "echo:feedback=0.3", "echo:benefit=offline", "echo:offline=climb",
    "echo:offline=climb,benefit=offline",
)  # fmt: skip
VARIANTS = (*LADDER, *OPTIONS)
CASES = [
    *((policy, kind) for policy in LADDER for kind in (*KINDS, "paged-rc", "task-aware")),
    *((policy, "task-aware") for policy in OPTIONS),
]
# Wrong by up to a factor of two, either way.
MISPREDICTED = estimator_of(
    EchoModel(alpha=0.0, beta=1e-4, c=5e-4, gamma=1e-5, delta=2e-6, lambda_=1.1, decode_base_s=1e-3)
)


@pytest.fixture(autouse=True)
def ledgers():
    with echo_ledgers():
        yield


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "kind"), mostly_nightly(CASES, *CASES[::4]))
@examples(6, suppress_health_check=list(HealthCheck))
@given(case=workloads())
def test_one_step_at_a_time_gives_the_same_rows(policy, kind, case):
    with echo_ledgers():
        compare(policy, kind, case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", VARIANTS)
@examples(6, suppress_health_check=list(HealthCheck))
@given(case=workloads())
def test_also_where_the_estimate_is_wrong(policy, case):
    with echo_ledgers(), mock.patch.object(policy_runs, "LinearEstimator", lambda *_: MISPREDICTED):
        compare(policy, "task-aware", case)


@pytest.mark.parametrize("policy", VARIANTS)
@pytest.mark.parametrize("service_class", [0, 1])
def test_the_fast_path_is_taken(policy, service_class):
    """A lone request that decodes is planned a few times, not once a token."""
    workload = Workload.build([0.0], [5], [40], service_class=np.array([service_class], np.int8))
    steps, _, _, engine = simulate(workload, policy, "task-aware", 20)
    assert len(steps) >= 40
    if "feedback" in policy:  # the estimate may change after every step
        assert len(engine.decision_seconds) == len(steps)
    else:
        samples = steps.end_s.max() / 0.01 if "sample_s" in policy else 1
        assert len(engine.decision_seconds) <= 4 + samples


LONG = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=400)


def both(workload, policy: str, blocks: int):
    """The rows of a run with and without runs of steps; equal."""
    rows = []
    for fast in (True, False):
        with mock.patch.object(policy_runs, "LinearEstimator", lambda *_: MISPREDICTED):
            *frames, engine = simulate(
                workload, policy, "task-aware", blocks, limits=LONG, fast=fast
            )
        rows.append((frames, len(engine.decision_seconds)))
    for ours, theirs in zip(rows[0][0], rows[1][0], strict=True):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    return rows[0][0], rows[0][1], rows[1][1]


def test_a_run_ends_before_a_deadline_binds():
    """Steps take longer than TPOT, so slack melts until the offline decodes must be left out."""
    workload = Workload.build(
        [0.0, 0.0, 0.0],
        [10, 40, 40],
        [200, 150, 150],
        service_class=np.array([0, 1, 1], np.int8),
        slo_ttft_s=np.array([0.04, np.nan, np.nan]),
        slo_tpot_s=np.array([0.0021, np.nan, np.nan]),
    )
    (steps, _, ended), plans, single = both(workload, "echo", 200)
    assert plans < single / 1.5  # runs there were
    assert ended.last_token_s[1:].min() > 1.2 * 150 * 0.0021  # and pauses of the offline ones


def test_a_run_ends_when_the_threshold_may_change():
    """An online request has just held half of the memory. An offline prompt waits for that to be
    forgotten, 0.1 s, while another one decodes."""
    workload = Workload.build(
        [0.0, 0.0, 0.05],
        [8, 200, 200],
        [200, 2, 2],
        service_class=np.array([1, 0, 1], np.int8),
        slo_ttft_s=np.array([np.nan, 9.0, np.nan]),
        slo_tpot_s=np.array([np.nan, 9.0, np.nan]),
    )
    policy = "echo-bs:threshold=true,history_s=0.1,sample_s=0.01"
    (_, _, ended), plans, single = both(workload, policy, 110)
    by_id = ended.set_index("request_id")
    assert plans < single / 1.5
    assert by_id.first_scheduled_s["r1"] < 0.01
    assert 0.1 < by_id.first_scheduled_s["r2"] < by_id.last_token_s["r0"] - 0.05
