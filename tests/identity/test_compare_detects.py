"""The comparison itself: it sees every broken rule, raises no false alarm, and its shortcuts change
nothing."""

from __future__ import annotations

import dataclasses

import pytest

from tests.identity import scenarios
from tests.identity.compare import COMPARED, difference, run_identity
from tests.identity.mutations import RULES, Mutation, MutationMisses, mutations
from tests.identity.protocol import EngineSettings, Observed
from tests.identity.real_scheduler import RealScheduler

VLLM_MUTATIONS = mutations("vllm")
STEP = Observed(
    scheduled={"a": 1, "b": 7},
    preempted=("d", "e"),
    free_blocks=3,
    hits={"b": 16, "c": 0},
    finished=("a", "b"),
    running=("b", "c"),
    waiting=2,
)
CHANGES = {
    "scheduled": {"b": 7, "a": 1},  # the same grants in another order
    "preempted": ("e", "d"),
    "free_blocks": 4,
    "hits": {"b": 16, "c": 16},
    "finished": ("b", "a"),
    "running": ("c", "b"),
    "waiting": 1,
}


def test_equal_steps_do_not_differ():
    assert difference(STEP, dataclasses.replace(STEP, scheduled=dict(STEP.scheduled))) == ""


@pytest.mark.parametrize("name", COMPARED)
def test_a_change_of_any_field_is_named(name):
    found = difference(STEP, dataclasses.replace(STEP, **{name: CHANGES[name]}))
    assert found.startswith(f"{name}: ") and "\n" not in found


def test_scenarios_are_the_same_for_the_same_seed():
    one, other = scenarios.mixed(3), scenarios.mixed(3)
    assert one.settings == other.settings
    for a, b in zip(one.requests, other.requests, strict=True):
        assert (a.prefix == b.prefix).all()
        assert (
            dataclasses.replace(a, prefix=None).__dict__
            == dataclasses.replace(b, prefix=None).__dict__
        )


def test_settings_under_which_a_request_could_never_end_are_refused():
    with pytest.raises(ValueError, match="could never end"):
        EngineSettings(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=161)


def test_a_mutation_that_misses_its_target_is_an_error():
    class Target:
        def method(self):
            return 1

    with pytest.raises(MutationMisses, match="0 copies of 'return 2'"):
        Mutation("m", "victim", ("preemption", 0), (("", "method", "return 2", "return 3"),)).apply(
            Target()
        )


def test_every_rule_is_broken_at_least_once():
    assert {mutation.rule for mutation in VLLM_MUTATIONS} == set(RULES)


live = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]


class TestAgainstVllm:
    pytestmark = live

    @pytest.mark.nightly
    @pytest.mark.usefixtures("newest")
    @pytest.mark.parametrize("mutation", VLLM_MUTATIONS, ids=lambda m: m.name)
    def test_a_broken_rule_is_seen_in_the_decisions(self, mutation):
        generate, seed = mutation.witness
        scenario = getattr(scenarios, generate)(seed)
        report = run_identity(
            scenario.settings,
            scenario.requests,
            lambda settings: RealScheduler(settings, mutation=mutation),
        )
        assert report.mismatches == 1
        # Seen in what it decided, not because it broke down.
        assert "raised" not in report.first_mismatch

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        "witness", sorted({m.witness for m in VLLM_MUTATIONS}), ids=lambda w: f"{w[0]}-{w[1]}"
    )
    def test_no_false_alarm(self, witness):
        generate, seed = witness
        scenario = getattr(scenarios, generate)(seed)
        report = run_identity(scenario.settings, scenario.requests, RealScheduler, max_steps=1500)
        assert report.mismatches == 0 and report.steps == 1500

    @pytest.mark.parametrize("seed", [0, 1])
    def test_vllms_own_block_hashes_lead_to_the_same_decisions(self, seed):
        scenario = scenarios.mixed(seed)
        report = run_identity(
            scenario.settings, scenario.requests, RealScheduler, hashing="vllm", max_steps=1500
        )
        assert report.mismatches == 0, report.first_mismatch
        assert report.hit_tokens > 0 and report.resumed_hit_tokens > 0 and report.duplicates > 0
