"""Asynchronous scheduling: policy `vllm` behind an engine that plans one step ahead takes the
decisions of vLLM's `AsyncScheduler` behind a batch queue of two.

Beside tests/identity/test_identity.py this needs few steps of each kind: what is new is what is in
flight when a plan is made.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.mutations import mutations
from tests.identity.ours import OurScheduler
from tests.identity.protocol import EngineSettings
from tests.identity.real_scheduler import RealScheduler

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]

# By class: seeds whose scenarios show the most of what matters here, in few steps.
SEEDS = {
    "preemption": (1, 3),
    "partial_chunks": (5,),
    "priority": (3,),
    "mixed": (3,),
    "prefix_eviction": (1,),
}
STEPS = 20_000


def ahead(settings: EngineSettings) -> EngineSettings:
    return dataclasses.replace(settings, async_scheduling=True)


def compare(generate: str, seed: int, make=OurScheduler, **options) -> Report:
    scenario = getattr(scenarios, generate)(seed)
    return run_identity(ahead(scenario.settings), scenario.requests, make, **options)


def run_class(name: str) -> Report:
    total = Report()
    for seed in SEEDS[name]:
        report = compare(name, seed)
        assert report.mismatches == 0, f"{name} {seed}: {report.first_mismatch}"
        total += report
    return total


@pytest.fixture(scope="module")
def synthetic() -> dict[str, Report]:
    return {name: run_class(name) for name in SEEDS if name != "prefix_eviction"}


def test_every_class_is_identical_for_20_000_steps(synthetic):
    total = sum(synthetic.values(), Report())
    assert total.steps >= STEPS
    # And what differs from the synchronous scheduler has happened.
    assert total.in_flight_preemptions > 500
    assert total.ended_victims > 5  # their last token came while they waited
    assert total.held_back > 1_000  # left out while it was computed
    assert total.resumed_hit_tokens > 0 and total.partial_chunks > 1_000
    assert synthetic["preemption"].priority_preemptions == 0
    assert synthetic["priority"].granted_victims > 0


@pytest.mark.usefixtures("mooncake")
@pytest.mark.traces
def test_prefix_eviction_on_a_real_trace():
    total = run_class("prefix_eviction")
    assert total.evictions > 100_000 and total.resumed_hit_tokens > 0
    assert total.in_flight_preemptions > 100 and total.ended_victims > 0


def test_vllms_own_block_hashes_lead_to_the_same_decisions():
    report = compare("mixed", 3, hashing="vllm", max_steps=1200)
    assert report.mismatches == 0, report.first_mismatch
    assert report.hit_tokens > 0


def test_a_synchronous_engine_decides_otherwise():
    """The comparison sees the pipeline at all."""

    def synchronous(settings):
        return OurScheduler(dataclasses.replace(settings, async_scheduling=False))

    assert compare("preemption", 3, synchronous).mismatches == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("mutation", mutations("ours_ahead"), ids=lambda m: m.name)
def test_a_broken_rule_of_ours_is_caught(mutation):
    report = compare(*mutation.witness, lambda settings: OurScheduler(settings, mutation))
    assert report.mismatches == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("mutation", mutations("vllm_ahead"), ids=lambda m: m.name)
def test_a_broken_rule_of_vllms_is_seen_in_the_decisions(mutation):
    report = compare(*mutation.witness, lambda settings: RealScheduler(settings, mutation=mutation))
    assert report.mismatches == 1
    assert "raised" not in report.first_mismatch


def test_both_sides_agree_with_themselves():
    report = compare("preemption", 3, RealScheduler, max_steps=1000)
    assert report.mismatches == 0 and report.steps == 1000
