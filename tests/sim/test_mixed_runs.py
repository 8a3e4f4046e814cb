"""Runs of mixed steps, prompts in chunks beside decodes: byte for byte what single steps give, for
the policies that hand them out, on every memory that allows them, synchronously or not."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.sim.harness import Affine, build, same_rows
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
from twinserve.traces.workload import PrefixBlocks, Workload

LONGEST = 240  # tokens of a request: 60 blocks of four
POLICIES = (
    "vllm", "vllm:scheduling=priority", "vllm:long_prefill_token_threshold=3", "vllm:kv=task-aware",
    "vllm:kv=bidirectional", "sarathi", "sarathi:chunk_size=9", "justitia", "vtc", "parrot", "srjf",
    "round-robin:chunk=5", "round-robin:chunk=5,batch_size=2", "echo-bs",
    "echo-bs:threshold=true,sample_s=0.05,history_s=0.5", "conserve",
    "conserve:checkpoint_blocks=2,preemption_mode=recompute", "conserve:kv=paged", "bros:chunk=5",
    "bros:chunk=3,kv=paged", "bros:chunk=4,adaptive_batch=false", "vllm:release=0.19",
)  # fmt: skip


@dataclass(frozen=True)
class Restless(Affine):
    """A step that is not the one before repeated takes longer, and by how many tokens attend."""

    watches_churn = True

    def step_seconds(self, work) -> float:
        attended = int((work.prefill_new * work.prefill_resident).sum())
        churn = 2e-3 * work.churn.changed + 1e-3 * work.churn.joined
        return super().step_seconds(work) + 1e-6 * attended + churn


# Steps of a hundredth of a second, so that arrivals fall onto ends of steps, too.
EVEN = Affine(base=0.01, prefill=0.0, decode=0.0, context=0.0)
MODELS = (EVEN, Affine(base=0.006, prefill=2e-4, decode=5e-4, context=1e-5), Restless())
_REQUESTS = st.tuples(
    st.integers(0, 60),  # arrival, hundredths of a second
    st.integers(1, 180),  # prompt
    st.integers(1, 60),  # output
    st.integers(0, 1),  # class
    st.integers(0, 2),  # text
)


def workload_of(rows) -> Workload:
    """Rows as in `_REQUESTS`; prompts of one text begin alike."""
    arrival, prompt, output, effort, text = (np.array(c) for c in zip(*sorted(rows), strict=True))
    blocks = -(-prompt // 4)
    ids = np.concatenate([60 * t + np.arange(n) for t, n in zip(text, blocks, strict=True)])
    return Workload.build(
        arrival / 100,
        prompt,
        output,
        service_class=effort.astype(np.int8),
        slo_ttft_s=np.where(effort == 0, 0.5, np.nan),
        slo_tpot_s=np.where(effort == 0, 0.03, np.nan),
        prefix=PrefixBlocks(ids.astype(np.int64), np.cumsum([0, *blocks]), 4),
    )


@st.composite
def cases(draw):
    """A workload, what `build` is to be told, and whether plans are made ahead."""
    limits = EngineLimits(
        max_num_seqs=draw(st.integers(2, 5)),
        max_num_batched_tokens=draw(st.integers(6, 30)),
        max_model_len=LONGEST,
    )
    settings = {
        "limits": limits,
        "model": draw(st.sampled_from(MODELS)),
        "blocks": draw(st.sampled_from([61, 90, 400])),
        "overhead": draw(st.sampled_from([0.0, 0.0, 0.004])),
        "client_timeout": draw(st.sampled_from([None, None, 0.31])),
        "caching": draw(st.booleans()),
    }
    rows = draw(st.lists(_REQUESTS, min_size=1, max_size=6))
    return workload_of(rows), settings, draw(st.booleans())


def both(policy: str, workload: Workload, settings: dict, ahead: bool = False):
    """The same run, in runs of steps and step by step, that one audited."""
    if policy.startswith("bros") and settings.get("client_timeout"):
        settings = settings | {"client_timeout": None}
    settings = {"block_tokens": 4, "host_blocks": 20, "asynchronous": ahead, **settings}
    return [
        build(workload, policy, fast=fast, audit=not fast, **settings).run()
        for fast in (True, False)
    ]


LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=LONGEST)
PLAIN = {"limits": LIMITS, "model": EVEN, "blocks": 400, "caching": True}
# a decode beside a long prompt, cut by an arrival; two prompts with the same text side by side
LONG = workload_of([(0, 4, 60, 0, 0), (2, 150, 5, 0, 1), (11, 160, 5, 1, 1), (12, 9, 9, 0, 2)])


@pytest.mark.nightly
@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, *POLICIES[:3], "sarathi", POLICIES[11]))
@examples(40, suppress_health_check=list(HealthCheck))
@example(case=(LONG, PLAIN, False))
@example(case=(LONG, PLAIN, True))
@example(case=(LONG, PLAIN | {"blocks": 61}, True))
@given(case=cases())
def test_one_step_at_a_time_gives_the_same_rows(policy, case):
    fast, exact = both(policy, *case)
    same_rows(fast.rows, exact.rows)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "policy",
    ["vllm", "sarathi:chunk_size=8", "round-robin:chunk=7", "echo-bs", "conserve", "bros:chunk=7"],
)
def test_a_long_prompt_is_planned_a_few_times(policy, ahead):
    """Not once a chunk, whether or not another request decodes beside it. Steps take longer as that
    one's context grows."""
    workload = workload_of([(0, 4, 60, 0, 0), (2, 150, 2, 0, 1)])
    fast, exact = both(policy, workload, PLAIN | {"model": replace(EVEN, context=1e-6)}, ahead)
    same_rows(fast.rows, exact.rows)
    plans = [len(run.engines[0].decision_seconds) for run in (fast, exact)]
    assert (exact.rows.steps.prefill_requests > 0).sum() > 20
    assert plans[0] < plans[1] / 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_evicts_what_is_next_in_one_queue_of_blank_and_cached_blocks(ahead):
    workload = workload_of([(i * 25, 50 + 9 * i, 50 - 5 * i, 0, i % 3) for i in range(8)])
    fast, exact = both("vllm:release=0.19", workload, PLAIN | {"blocks": 61}, ahead)
    same_rows(fast.rows, exact.rows)
    assert exact.engines[0].core.ledger.pool.evicted > 20


def test_a_prompt_that_becomes_cached_lets_the_next_one_in():
    """Memory is too small for both prompts, until enough of their common text is computed."""
    workload = workload_of([(0, 160, 20, 0, 1), (1, 164, 5, 0, 1)])
    small = PLAIN | {"limits": replace(LIMITS, max_num_batched_tokens=40), "blocks": 61}
    fast, exact = both("vllm:long_prefill_token_threshold=8", workload, small)
    same_rows(fast.rows, exact.rows)
    first, second = fast.rows.requests.itertuples()
    assert second.first_scheduled_s < first.last_token_s
    assert second.hit_tokens > 0


# Steps that differ from the one before: what the backend says of them, and that runs taken at
# once stay exact.
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
