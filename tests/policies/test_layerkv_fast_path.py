"""LayerKV's runs of decode steps taken at once give byte for byte what single steps give, with
several layers, short and long transfers, and asynchronously too; on the way nothing runs without
its layers, and every request ends."""

import pandas as pd
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.layerkv_runs import MODEL, simulate
from tests.policies.test_fast_path import LONGEST, workloads
from twinserve.policies.base import EngineLimits
from twinserve.traces.workload import Workload

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
