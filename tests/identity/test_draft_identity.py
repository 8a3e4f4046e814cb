"""Speculative decoding: policy `vllm` with drafts takes the decisions of vLLM's schedulers that are
fed as many drafts, of which as many are right."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.identity.compare import Report
from tests.identity.draft_scenarios import drafted
from tests.identity.drafts import DraftedScheduler, compare_drafts
from tests.identity.regimes import DRAFTS

KEPT = Path(__file__).resolve().parents[2] / "docs" / "results" / "identity_drafts.json"
# What each regime of the long run must have seen.
SEEN = {
    "preemption": ("preemptions", "rejected_in_preemption", "at_longest"),
    "chunks": ("partial_chunks", "cut_drafts", "rejected"),
    "prefix cache": ("hit_tokens", "resumed_hit_tokens", "evictions", "padded"),
    "priority": ("priority_preemptions", "granted_victims", "rejected_in_preemption"),
    "asynchronous": ("in_flight_preemptions", "rejected_of_victims", "wasted", "held_back"),
}


def test_the_long_run_held_in_each_regime_and_saw_what_it_is_for():
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert {one["regime"] for one in kept["regimes"]} == set(DRAFTS) == set(SEEN)
    for one in kept["regimes"]:
        assert one["steps"] >= 100_000 and one["mismatches"] == 0, one["regime"]
        for name in (*SEEN[one["regime"]], "accepted", "trimmed", "withdrawn_running"):
            assert one["counters"][name] > 0, (one["regime"], name)


def compare(kinds, asynchronous: bool, steps: int) -> tuple[Report, Counter]:
    total, drafts = Report(), Counter()
    for name, seed in kinds:
        scenario = drafted(name, seed, asynchronous)
        report, found = compare_drafts(scenario, leaving=0.03, max_steps=steps)
        assert report.mismatches == 0, f"{name} {seed}: {report.first_mismatch}"
        total, drafts = total + report, drafts + found
    return total, drafts


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decisions_with_drafts_are_those_of_vllm(asynchronous):
    kinds = [("preemption", 1), ("partial_chunks", 4), ("priority", 5), ("mixed", 6), ("mixed", 3)]
    total, drafts = compare(kinds, asynchronous, 700)
    assert total.preemptions > 50 and total.partial_chunks > 500 and total.hit_tokens > 0
    least = {"rejected": 10_001, "accepted": 10_001, "rejected_in_preemption": 101}
    least |= {"trimmed": 1, "cut_drafts": 1, "padded": 1}
    assert all(drafts[name] >= few for name, few in least.items()), drafts
    assert (drafts["rejected_of_victims"] > 0) == (drafts["wasted"] > 0) == asynchronous


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
def test_both_sides_agree_with_themselves():
    report, _ = compare_drafts(drafted("preemption", 1, True), DraftedScheduler, max_steps=300)
    assert report.mismatches == 0 and report.steps == 300
