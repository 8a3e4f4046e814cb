"""Clients that leave: policy `vllm` forgets a request where vLLM's scheduler does
(`finish_requests`), and all decisions after it are the same: waiting, running, in the middle of a
prompt, preempted, and, with asynchronous scheduling, with a token on its way."""

from __future__ import annotations

import dataclasses

import pytest

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.mutations import mutations
from tests.identity.ours import OurScheduler
from tests.parameters import mostly_nightly

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]

LEAVING = 0.05  # of the steps
# regime -> (generator of scenarios, asynchronous scheduling, seeds)
REGIMES = {
    "preemption": ("preemption", False, (1,)),
    "partial chunks": ("partial_chunks", False, (5,)),
    "priority": ("priority", False, (3,)),
    "mixed": ("mixed", False, (3,)),
    "preemption, asynchronous": ("preemption", True, (3,)),
    "partial chunks, asynchronous": ("partial_chunks", True, (5,)),
    "priority, asynchronous": ("priority", True, (3,)),
    "mixed, asynchronous": ("mixed", True, (3,)),
}


def compare(generate: str, seed: int, asynchronous: bool, make=OurScheduler) -> Report:
    scenario = getattr(scenarios, generate)(seed)
    settings = dataclasses.replace(scenario.settings, async_scheduling=asynchronous)
    return run_identity(settings, scenario.requests, make, leaving=LEAVING)


def checked(regime: str) -> Report:
    generate, asynchronous, seeds = REGIMES[regime]
    total = Report()
    for seed in seeds:
        report = compare(generate, seed, asynchronous)
        assert report.mismatches == 0, f"{regime} {seed}: {report.first_mismatch}"
        total += report
    return total


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {regime: checked(regime) for regime in REGIMES}


@pytest.mark.parametrize("regime", REGIMES)
def test_decisions_are_the_same_when_clients_leave(reports, regime):
    total = reports[regime]
    assert total.withdrawn_running > 20 and total.withdrawn_new > 5
    assert (total.withdrawn_in_flight > 5) == ("asynchronous" in regime)


def test_clients_left_wherever_a_request_can_be(reports):
    total = sum(reports.values(), Report())
    assert total.steps > 15_000
    for name in (
        "withdrawn_new", "withdrawn_returning", "withdrawn_running", "withdrawn_in_chunk",
        "withdrawn_in_flight", "withdrawn_at_end",
    ):  # fmt: skip
        assert getattr(total, name) > 0, name


@pytest.mark.usefixtures("mooncake")
@pytest.mark.traces
@pytest.mark.parametrize("asynchronous", mostly_nightly([False, True], False))
def test_prefixes_of_those_who_left_are_found(asynchronous):
    report = compare("prefix_eviction", 1, asynchronous)
    assert report.mismatches == 0, report.first_mismatch
    assert report.withdrawn_running > 20 and report.evictions > 10_000 and report.hit_tokens > 0


@pytest.mark.nightly
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mutation", mutations("withdrawals"), ids=lambda m: m.name)
def test_a_broken_withdrawal_is_caught(mutation, asynchronous):
    report = compare(
        *mutation.witness, asynchronous, lambda settings: OurScheduler(settings, mutation)
    )
    assert report.mismatches == 1
