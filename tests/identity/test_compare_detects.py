"""The comparison itself, without vLLM."""

import dataclasses

import pytest

from tests.identity import scenarios
from tests.identity.compare import COMPARED, difference
from tests.identity.mutations import RULES, Mutation, MutationMisses, mutations
from tests.identity.protocol import EngineSettings, Observed

STEP = Observed(
    scheduled={"a": 1, "b": 7}, preempted=("d", "e"), free_blocks=3, hits={"b": 16, "c": 0},
    finished=("a", "b"), running=("b", "c"), waiting=2,
)  # fmt: skip
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


@pytest.mark.parametrize("side", ["ours", "vllm"])
def test_every_rule_is_broken_at_least_once(side):
    assert {mutation.rule for mutation in mutations(side)} == set(RULES)
