"""Policy `vllm` takes the decisions of the real vLLM scheduler, step for step, in every corner we
could think of.

Each class of scenarios runs at least 5,000 steps, and must show that what it is for happened. The
nightly part `identity` runs a million of each.
"""

from __future__ import annotations

import pytest

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.mutations import RULES, mutations
from tests.identity.ours import OurScheduler
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]

STEPS_A_CLASS = 5_000


def run_class(generate, seeds) -> Report:
    """All seeds of a class added up; fails at the first step that differs, saying where."""
    total = Report()
    for seed in seeds:
        scenario = generate(seed)
        report = run_identity(scenario.settings, scenario.requests, OurScheduler)
        assert report.mismatches == 0, (
            f"{scenario.name}, {scenario.settings}: {report.first_mismatch}"
        )
        total += report
    assert total.steps >= STEPS_A_CLASS
    return total


def test_an_override_leaves_as_many_blocks_as_in_vllms_pool():
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(100, enable_caching=False, hash_block_size=16)
    config = SimulationConfig(num_gpu_blocks_override=pool.num_gpu_blocks)
    assert resolve_hardware(config).num_blocks == pool.get_num_free_blocks() == 99


def test_preemption():
    total = run_class(scenarios.preemption, seeds=range(2))
    assert total.preemptions > 500
    assert total.priority_preemptions == 0  # fcfs: the victim is always the last of the batch
    assert total.resumed_hit_tokens > 0  # victims that came back found blocks of their own


@pytest.mark.nightly
@pytest.mark.usefixtures("mooncake")
@pytest.mark.traces
def test_prefix_eviction_on_a_real_trace():
    total = run_class(scenarios.prefix_eviction, seeds=range(1))
    assert total.evictions > 25_000
    assert total.hit_tokens > 250_000
    assert total.resumed_hit_tokens > 0 and total.duplicates > 0


def test_partial_chunks():
    total = run_class(scenarios.partial_chunks, seeds=(1, 2))
    assert total.partial_chunks > 5_000
    assert total.duplicates > 0  # requests that compute the same text side by side


def test_priority_inversion():
    total = run_class(scenarios.priority, seeds=range(2))
    assert total.priority_preemptions > 100  # victims from the middle of the batch
    assert total.granted_victims > 25  # served earlier in the same step: their tokens go back


def test_everything_at_once():
    total = run_class(scenarios.mixed, seeds=range(3))
    for name in (
        "preemptions",
        "priority_preemptions",
        "evictions",
        "partial_chunks",
        "resumed_hit_tokens",
    ):
        assert getattr(total, name) > 0, name


@pytest.mark.nightly
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("mutation", mutations("ours"), ids=lambda m: m.name)
def test_a_broken_rule_of_ours_is_caught(mutation):
    generate, seed = mutation.witness
    scenario = getattr(scenarios, generate)(seed)
    report = run_identity(
        scenario.settings, scenario.requests, lambda settings: OurScheduler(settings, mutation)
    )
    assert report.mismatches == 1


def test_every_rule_of_ours_is_broken_once():
    assert {mutation.rule for mutation in mutations("ours")} == set(RULES)
