"""Steps that differ from the one before: what the backend says of them, and that runs taken at once
stay exact."""

import numpy as np
import pandas as pd
import pytest

from tests.parameters import mostly_nightly
from twinserve.backends.links import PcieLink
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import EngineLimits
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable
from twinserve.profiles.composition import STEADY, Churn
from twinserve.profiles.measured.model import HiddenTimes, MeasuredModel, TrafficTimes
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_policy

# Powers of two: sums of these are exact, and every part can be told from a total.
TRAFFIC = TrafficTimes(
    step_s=2**-14, request_s=2**-17, join_s=2**-9, change_s=2**-11, swap_out_s=2**-8,
    swap_in_s=2**-7,
)  # fmt: skip
MODEL = MeasuredModel(
    batches=(1, 16),
    contexts=(16, 4096),
    decode_s=((2**-8, 2**-8), (2**-7, 2**-6)),
    tokens=(16, 512),
    token_s=(2**-8, 2**-5),
    prefill_request_s=0.0,
    decode_request_s=0.0,
    pair_s=0.0,
    attended_s=0.0,
    decode_share=0.0,
    traffic=TRAFFIC,
    hidden=HiddenTimes((1, 16), (2**-12, 2**-10)),
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "churn.json"
    save_profile(
        load_profile("llama-3.1-8b@h100:tp4").model_copy(update={"step_model": MODEL}), path
    )
    assert load_profile(path).model() == MODEL
    return str(path)


def settings(profile: str, policy: str, **more) -> SimulationConfig:
    tight = {"num_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 300, "cap_length": 500}
    common = {
        "trace": "poisson", "requests": 40, "rate": 20.0, "profile": profile,
        "slo": "ttft=0.3,tpot=0.02",
    }  # fmt: skip
    return SimulationConfig(policy=(policy,), **common | tight | more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "vllm",
        *mostly_nightly(["bros", "bros:kv=paged", "round-robin"]),
        "vllm-v0:preemption_mode=swap",
        *mostly_nightly(["layerkv", "justitia", "echo-bs"]),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_runs_taken_at_once_are_the_single_steps(profile, policy, asynchronous):
    found = []
    for exact in (False, True):
        inputs = resolve(
            settings(
                profile, policy, exact=exact, async_scheduling=asynchronous, pool=3, num_blocks=80
            )
        )
        rows = run_policy(inputs, inputs.policies[0]).rows
        found.append(rows)
    fast, exact = found
    pd.testing.assert_frame_equal(fast.requests, exact.requests, check_exact=True)
    pd.testing.assert_frame_equal(fast.steps, exact.steps, check_exact=True)


def watched(config: SimulationConfig) -> list:
    inputs = resolve(config)
    simulation = Simulation(inputs, inputs.policies[0])
    backend, works = simulation.engines[0].backend, []
    execute = backend.execute

    def kept(plan, emitting, now, overhead_s=0.0):
        executed = execute(plan, emitting, now, overhead_s)
        works.append((executed.work, plan, np.diff([now, *executed.outcome.ends_s])))
        return executed

    backend.execute = kept
    simulation.run()
    return works


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_alone_by_hand(profile, tmp_path, asynchronous):
    """Joins with its prompt; the first decode differs from that; the others repeat each other.
    Asynchronous scheduling hides host time in all steps but that of an idle engine."""
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 16, "output_length": 5}\n')
    config = settings(
        profile,
        "vllm",
        trace=str(trace),
        rate=None,
        rate_scale=1.0,
        requests=None,
        exact=True,
        async_scheduling=asynchronous,
    )
    works = watched(config)
    assert [work.churn for work, _, _ in works] == [
        Churn(joined=1, changed=True), Churn(changed=True), STEADY, STEADY, STEADY,
    ]  # fmt: skip
    every = TRAFFIC.step_s + TRAFFIC.request_s - asynchronous * 2**-12
    prompt = 2**-8 + TRAFFIC.step_s + TRAFFIC.join_s + TRAFFIC.change_s
    expected = [prompt, 2**-8 + every + TRAFFIC.change_s, *[2**-8 + every] * 3]
    assert [float(seconds[0]) for _, _, seconds in works] == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_what_changes_is_what_the_plans_say(profile):
    """Whoever joins or is swapped is counted once, and a batch is the same only if nobody came,
    went, or had a prompt."""
    works = watched(settings(profile, "vllm-v0:preemption_mode=swap", exact=True))
    before, swapped = None, 0
    for work, plan, _ in works:
        batch = set(plan.rows.tolist()), len(work.prefill_new) == 0
        assert work.churn.joined == len(plan.admitted) + len(plan.swapped_in)
        assert work.churn.swapped_in == len(plan.swapped_in) <= max(work.churn.swapped_in_tokens, 0)
        assert (work.churn.swapped_out > 0) == (work.churn.swapped_out_tokens > 0)
        moved = work.churn.swapped_out > 0
        assert work.churn.changed == (batch != before or not batch[1] or moved)
        before, swapped = batch, swapped + work.churn.swapped_out
    assert swapped > 5
    assert sum(work.churn.joined for work, _, _ in works) >= 40 + swapped


def test_a_request_that_comes_back_beside_an_unchanged_batch():
    """The batch decodes as before while another's KV returns: a run's first step pays for that, as
    a single one does."""
    requests = RequestTable()
    for name in ("stays", "returns"):
        row = requests.submit(name, arrival_s=0.0, prompt_tokens=16)
        requests.computed_tokens[row], requests.output_tokens[row] = 16, 1
    ends = []
    for fast in (True, False):
        backend = SimulatedBackend(requests, MODEL, PcieLink(1e9), EngineLimits(), fast=fast)
        backend.expect(0, 100)
        alone = StepPlan(np.array([0]), np.array([1]))
        backend.execute(alone, np.array([True]), 0.0)
        back = StepPlan(np.array([0]), np.array([1]), swapped_in=[1], valid_for=3)
        executed = backend.execute(back, np.array([True]), 0.0)
        assert executed.work.churn == Churn(joined=1, swapped_in=1, swapped_in_tokens=16)
        assert len(executed.outcome.ends_s) == (4 if fast else 1)
        ends.append(executed.outcome.ends_s[0])
    assert (
        ends[0]
        == ends[1]
        == 2**-8 + TRAFFIC.step_s + TRAFFIC.request_s + TRAFFIC.join_s + TRAFFIC.swap_in_s
    )
