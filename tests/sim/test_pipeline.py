"""Pipeline stages: several batches of an engine are under way, each on another stage."""

import numpy as np
import pytest

from tests.identity.ours import vllm_stepper
from tests.parameters import mostly_nightly
from tests.sim.stepper import Stepper
from tests.sim.troubled import troubled
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import parse_policy
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.profile import load_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.results.metrics import summarise
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.offered_load import service_seconds
from twinserve.sim.setup.run import Simulation

NAME = "llama-3.1-8b@h100"
PROMPTS = "closed:concurrency=40,requests=40,input=2048,output=1"
CHATS = "closed:concurrency=24,requests=72,input=300,output=20"


def _rows(trace: str, profile: str, **settings):
    return _run(trace, profile, **settings)[0]


def _run(trace: str, profile: str, **settings):
    given = {
        "async_scheduling": False,
        "host_time": "none",
        "slo": "none",
        "prefix_caching": False,
        **settings,
    }
    inputs = resolve(SimulationConfig(trace=trace, profile=profile, **given))
    simulation = Simulation(inputs, inputs.policies[0])
    simulation.run()
    return simulation.rows(), inputs


def _under_way(steps) -> int:
    """Most batches at one time; one that begins when another ends is after it."""
    changes = [(t, 1) for t in steps.start_s] + [(t, -1) for t in steps.end_s]
    return int(np.cumsum([change for _, change in sorted(changes)]).max())


@pytest.mark.parametrize("pp", [2, 4])
def test_a_request_alone_waits_for_all_stages_and_the_transfers(pp):
    alone = "closed:concurrency=1,requests=1,input=500,output=40"
    one, more = (_rows(alone, name).requests.iloc[0] for name in (NAME, f"{NAME}:pp{pp}"))
    model = load_profile(f"{NAME}:pp{pp}").model()
    sent = (pp - 1) * (model.transfer_seconds(500) + 39 * model.transfer_seconds(1))
    assert more.last_token_s > one.last_token_s
    assert more.last_token_s == pytest.approx(one.last_token_s + sent, rel=1e-9)


@pytest.mark.parametrize("pp", [2, 4])
def test_full_stages_do_nearly_as_many_times_as_much_and_never_more(pp):
    budget = {"max_num_batched_tokens": 2048}
    one, more = (_rows(PROMPTS, name, **budget) for name in (NAME, f"{NAME}:pp{pp}"))
    ratio = more.requests.last_token_s.max() / one.requests.last_token_s.max()
    assert 1 / pp <= ratio < 1.15 / pp
    # and no faster than the slowest stage takes for each of them
    work = StepComposition(prefill_new=np.array([2048]), prefill_resident=np.array([0]))
    slowest = max(load_profile(f"{NAME}:pp{pp}").model().stage_seconds(work))
    assert more.requests.last_token_s.max() >= len(more.steps) * slowest
    assert _under_way(more.steps) == pp


@pytest.mark.parametrize(("prompt", "output"), [(2048, 2), (1000, 100), (100, 200)])
def test_the_estimated_capacity_is_that_of_full_stages(prompt, output):
    """What `--load` is a share of; alone on the engine a batch has one stage of four."""
    trace = f"closed:concurrency=150,requests=300,input={prompt},output={output}"
    rows, inputs = _run(trace, f"{NAME}:pp4", max_num_seqs=150)
    took = rows.requests.last_token_s.max()
    assert service_seconds(inputs.workload, inputs.hardware) == pytest.approx(took, rel=0.15)


@pytest.mark.parametrize("pp", [2, 3])
def test_planned_ahead_there_is_one_batch_more_and_only_vllms_host_time_is_gone(pp):
    alone = "closed:concurrency=1,requests=1,input=500,output=40"
    name = f"{NAME}:pp{pp}"

    def last_token_s(ahead, host_time):
        rows = _rows(alone, name, async_scheduling=ahead, host_time=host_time)
        return rows.requests.last_token_s[0]

    for same in ("none", "2ms+0us"):
        assert last_token_s(True, same) == pytest.approx(last_token_s(False, same), rel=1e-9)
    assert last_token_s(True, "auto") == last_token_s(True, "none")
    assert last_token_s(False, "auto") > last_token_s(True, "auto") + 40 * 0.9e-3
    chats = _rows(CHATS, name, async_scheduling=True, max_num_batched_tokens=1024)
    assert (chats.requests.output_tokens == 20).all()
    assert _under_way(chats.steps) == pp + 1
    computed = chats.steps.prefill_tokens.sum() + chats.steps.decode_requests.sum()
    assert computed == (chats.requests.prompt_tokens + chats.requests.output_tokens - 1).sum()


def two_stages(ahead: bool) -> Stepper:
    """Two requests on two stages, in blocks of four tokens."""
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=64)
    stepper = vllm_stepper(20, 4, limits, True, ahead, 2)
    stepper.submit("a", 4, 5)
    stepper.submit("b", 6, 12)
    return stepper


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_left_gets_no_token_of_its_batch(ahead):
    stepper = two_stages(ahead)
    stepper.step()
    stepper.withdraw(0)
    for _ in range(2):
        stepper.step()
    assert stepper.requests.output_tokens.tolist() == [0, 1]


def test_a_block_is_found_when_the_batch_that_fills_it_has_ended():
    stepper = two_stages(True)
    core, pool = stepper.core, stepper.core.ledger.pool
    filling = 0
    for _ in range(14):
        stepper.step()
        computed, under_way = core.requests.computed_tokens, core._batches[: len(core.requests)]
        if core.requests.output_tokens.min() > 0:
            assert (pool.content >= 0).sum() == ((computed - under_way) // 4).sum()
            filling += ((computed - under_way) // 4 < computed // 4).sum()
    assert filling > 2


def test_time_in_which_several_batches_ran_counts_once():
    busy = summarise(_rows(PROMPTS, f"{NAME}:pp4", max_num_batched_tokens=2048))["scheduler"][
        "busy"
    ]
    assert busy == pytest.approx(1.0, abs=0.01)


def test_a_slow_replica_with_stages_takes_as_many_times_as_long():
    trace = "closed:concurrency=1,requests=1,input=500,output=40"
    slow = '[{"replica": 0, "kind": "slow", "at_s": 0, "factor": 3}]'
    whole, slowed = (
        _rows(trace, f"{NAME}:pp2", failures=failures).requests.last_token_s[0]
        for failures in (None, slow)
    )
    assert slowed == pytest.approx(3 * whole, rel=1e-9)


STAGES = [("llama-3.1-8b@h100:pp2", 0), ("llama-3.1-8b@h100:pp4", 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "seed"), STAGES)
@pytest.mark.parametrize("migrates", mostly_nightly([False, True], True))
@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_lost_when_clients_leave_and_replicas_fail(profile, seed, migrates, ahead):
    """In little memory, beside replicas without stages."""
    troubled(parse_policy("vllm"), seed, migrates=migrates, profile=profile, async_scheduling=ahead)


@pytest.mark.nightly
@pytest.mark.parametrize("profile", [name for name, _ in STAGES])
@pytest.mark.parametrize("policy", ["vllm", "vllm:scheduling=priority,watermark=0.05"])
def test_nothing_is_lost_in_many_such_fleets(profile, policy):
    preempted = 0
    for seed in range(12):
        _, rows = troubled(parse_policy(policy), seed, migrates=seed % 2 > 0, profile=profile)
        preempted += rows.steps.preempted_recompute.sum()
    assert preempted > 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": ("bros",)}, "choose policy vllm, or a profile without :ppN"),
        ({"shared_prefix": True}, "--shared-prefix"),
        ({"speculate": "k=3,method=ngram,acceptance=0.7"}, "--speculate"),
        ({"step_times": "operators"}, "--step-times roofline"),
    ],
)
def test_what_stages_are_not_simulated_with_is_one_clear_line(settings, words):
    with pytest.raises((ProfileError, SettingsError, PolicyError)) as raised:
        _rows(CHATS, f"{NAME}:pp2", **settings)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_log_of_decisions_with_stages_is_refused():
    given = {"async_scheduling": False, "slo": "none"}
    inputs = resolve(SimulationConfig(trace=CHATS, profile=f"{NAME}:pp2", **given))
    with pytest.raises(SettingsError, match="--decisions: .* drop it, or :ppN"):
        Simulation(inputs, inputs.policies[0], decisions=True)
