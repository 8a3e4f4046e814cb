"""Policy vllm with the rules of older releases, each seen in what it decides. tests/identity
compares them with the releases themselves."""

import numpy as np
import pytest

from tests.sim.stepper import Stepper
from twinserve.policies.base import EngineLimits
from twinserve.policies.baselines.vllm import RULES, VllmOptions, VllmPolicy
from twinserve.policies.baselines.vllm_drafts import VllmDrafts
from twinserve.policies.baselines.vllm_offloading import VllmDecode
from twinserve.policies.drafting import Drafting, DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.sim.fleet.prefix_index import PrefixIndex
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.replicas import make_policy
from twinserve.sim.setup.run import run_policy

RELEASES = list(RULES)


def stepper(release: str, blocks: int, caching: bool = False, ahead: bool = False, **options):
    requests = RequestTable()
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    ledger = PagedLedger(requests, blocks, 16, prefix_caching=caching)
    policy = VllmPolicy(limits, VllmOptions(release=release, **options))
    return Stepper(requests, policy, ledger, ahead)


@pytest.mark.parametrize("release", RELEASES)
def test_a_prompt_without_company_is_capped_before_0_32(release):
    one = stepper(release, 16, long_prefill_token_threshold=32)
    one.submit("lone", 60, 1)
    assert one.step().scheduled == {"lone": 60 if release == "0.32" else 32}


@pytest.mark.parametrize("release", RELEASES)
def test_before_0_19_a_prompt_is_admitted_when_its_first_chunk_fits(release):
    one = stepper(release, 8)
    one.submit("first", 60, 9)
    one.submit("second", 100, 9)  # 7 blocks, and 4 are free; 4 tokens are left of the budget
    assert ("second" in one.step().scheduled) == (release == "0.15")


@pytest.mark.parametrize("release", RELEASES)
def test_blank_blocks_are_used_again_before_cached_ones_from_0_25_on(release):
    one = stepper(release, 4, caching=True)
    for name, prompt in (("cached", 32), ("half a block", 20), ("next", 10)):
        one.submit(name, prompt, 1)
        one.step()
    assert (one.core.ledger.pool.evicted == 0) == (release not in ("0.15", "0.19"))
    assert one.core.ledger.pool.problems() == []


@pytest.mark.parametrize("release", RELEASES)
def test_before_0_29_the_one_behind_a_victim_passed_over_misses_a_step(release):
    one = stepper(release, 5, ahead=True, scheduling="priority")
    one.submit("ends", 16, 2, priority=9)
    one.step()
    one.submit("grows", 16, 8, priority=1)
    one.submit("last", 20, 8, priority=2)
    one.step()
    seen = one.step()
    assert seen.preempted == ["ends"] and "grows" in seen.scheduled
    assert ("last" in seen.scheduled) == (release in ("0.29", "0.32"))


def test_what_has_landed_is_found_while_its_row_waits_for_memory():
    """Both of its blocks: the text of the second one ends with the token left to compute."""
    requests, heard = RequestTable(), PrefixIndex()
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    ledger = PagedLedger(requests, 8, 16, shared_contents=2)
    ledger.subscribe(heard.add(0))
    one = Stepper(requests, VllmDecode(limits, VllmOptions(watermark=0.5)), ledger)
    one.submit("grows", 30, 9)
    one.step()
    row = one.submit("lands", 32, 9, remote_tokens=32, prefix=np.array([0, 1]))
    one.step()
    one.core.ready_s[row] = np.inf
    for _ in range(2):  # the other one takes a block more, and three of eight are free
        one.step()
    del one.core.ready_s[row]
    assert one.core.fetched(row, True) and heard.size(0) == 0
    assert "lands" not in one.step().scheduled
    assert heard.size(0) == 2


def test_a_row_that_loads_takes_no_seat():
    requests = RequestTable()
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128)
    one = Stepper(requests, VllmDecode(limits, VllmOptions()), PagedLedger(requests, 8, 16))
    row = one.submit("loads", 32, 9, remote_tokens=32)
    one.submit("runs", 20, 9)
    assert one.step().scheduled == {"runs": 20}
    one.core.ready_s[row] = np.inf
    assert one.step().scheduled == {"runs": 1}


def drafting(longest: int, **drafts) -> Stepper:
    requests = RequestTable()
    limits = DraftingLimits(4, 8, max_model_len=longest, drafting=Drafting(**drafts))
    ledger = PagedLedger(requests, 8, 4, prefix_caching=True, shared_contents=2)
    return Stepper(requests, VllmDrafts(limits, VllmOptions()), ledger)


def test_nobody_is_admitted_into_what_a_draft_model_takes_of_the_budget():
    one = drafting(40, tokens=3, slots=2)
    one.submit("first", 5, 9)
    one.submit("second", 5, 9)
    assert one.step().scheduled == {"first": 5}  # of eight tokens one is left, and two are to be


@pytest.mark.parametrize(("longest", "tokens"), [(12, 1), (13, 4)])
def test_drafts_that_pad_end_one_token_before_the_longest_request(longest, tokens):
    one = drafting(longest, tokens=3)
    one.submit("first", 8, 1, prefix=np.array([0, 1]))
    one.step()
    one.submit("again", 9, 2, prefix=np.array([0, 1]))
    assert one.core.plan(1.0).tokens.tolist() == [tokens]  # behind a hit of eight


@pytest.mark.parametrize("release", ["0.15", "0.19"])
def test_a_watermark_is_refused_for_a_release_without_one(release):
    with pytest.raises(PolicyError, match=rf"vLLM {release} has no watermark; leave it out"):
        stepper(release, 4, watermark=0.1)


def test_the_release_is_an_option_and_an_unknown_one_is_named():
    assert parse_policy("vllm:release=0.19").given.release == "0.19"
    with pytest.raises(ValueError, match="0.18"):
        parse_policy("vllm:release=0.18")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_every_request_ends_with_its_tokens_under_any_rules(release, ahead):
    """In a memory that is too small for the batch, with shared prompts."""
    config = SimulationConfig(
        policy=(f"vllm:release={release}",),
        trace="mooncake",
        rate_scale=30.0,
        requests=40,
        cap_length=300,
        num_blocks=30,
        max_num_seqs=12,
        max_num_batched_tokens=128,
        async_scheduling=ahead,
    )
    inputs = resolve(config)
    result = run_policy(inputs, inputs.policies[0])
    assert len(result.rows.requests) == 40
    assert (result.rows.requests.output_tokens == inputs.workload.output_tokens).all()
    assert result.rows.steps.preempted_recompute.sum() > 0


@pytest.mark.parametrize(
    ("version", "policy", "release"),
    [
        ("0.19", "vllm", "0.19"),
        ("0.22.1", "vllm", "0.19"),
        ("0.9", "vllm", "0.15"),
        ("0.19", "vllm:release=0.25", "0.25"),
        (None, "vllm", "0.32"),
    ],
)
def test_the_version_of_the_engine_says_the_rules(version, policy, release):
    inputs = resolve(
        SimulationConfig(
            policy=(policy,), trace="poisson", requests=1, offline=True, engine_version=version
        )
    )
    assert make_policy(inputs, inputs.policies[0]).options.release == release
