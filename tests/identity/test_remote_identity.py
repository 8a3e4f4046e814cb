"""Prefill apart from decode, with synchronous and asynchronous scheduling: policy `vllm` decides on
both sides what vLLM's scheduler does behind its NIXL connector. Decode side: loads pending,
arrived, failed, aborted, preempted afterwards, short of blocks. Prefill side: memory that is given
back when it has been fetched, or a lease has run out.

`tests/identity/regimes.py` runs more of it (docs/results/remote-identity.json)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.identity.leases import LeasingReal, let_go
from tests.identity.mutations import Mutation
from tests.identity.protocol import EngineSettings
from tests.identity.regimes import REGIMES, Regime, compare, wrong
from tests.parameters import mostly_nightly
from twinserve.sim.fleet.connector import FREED, Stage

KEPT = Path(__file__).resolve().parents[2] / "docs" / "results" / "remote-identity.json"

# prefill and decode; loads that fail are recomputed in one, end their request in the other
IN_CI = REGIMES[1], REGIMES[2], REGIMES[3]
# by class of scenarios, seeds that show the most in few steps
DECODE = {"preemption": (0, 1), "priority": (1,), "mixed": (1, 2), "partial_chunks": (1,)}
PREFILL = {"preemption": (0, 1), "priority": (0, 1, 2), "mixed": (0,), "partial_chunks": (1,)}


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("regime", mostly_nightly(REGIMES, *IN_CI), ids=lambda regime: regime.name)
def test_both_sides_decide_as_vllm_does(regime):
    steps, total = 0, Counter()
    for generate, seeds in (DECODE if regime.side == "decode" else PREFILL).items():
        for seed in seeds:
            report, seen = compare(regime, generate, seed)
            assert report.mismatches == 0, f"{generate} {seed}: {report.first_mismatch}"
            steps += report.steps
            total += seen
    assert steps > (10_000 if regime.side == "decode" else 3_000)
    assert all(total[name] for name in regime.phenomena), total


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_who_frees_what_is_as_vllms_connectors_have_it(push):
    nixl = LeasingReal(EngineSettings(64, 4, 512, 1024)).scheduler.connector.nixl
    for (gone, stage), freed in FREED.items():
        if push or stage is not Stage.ANNOUNCED:  # a pull announces nothing
            assert let_go(nixl, gone, stage, push) is freed[push], (gone, stage)


def test_what_is_kept_of_many_seeds_held_and_the_docs_say_so():
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert wrong(kept) == []
    page = (KEPT.parents[1] / "fleet.md").read_text(encoding="utf-8")
    for regime, part in zip(REGIMES, kept["regimes"], strict=True):
        assert part["regime"] == regime.name and part["seen"].keys() == set(regime.phenomena)
        assert part["steps"] >= 100_000
        rarest, times = min(part["seen"].items(), key=lambda found: found[1])
        row = (regime.name, f"{part['requests']:,}", f"{part['steps']:,}", "0", part["seeds"])
        assert f"| {' | '.join(map(str, row))} | {rarest}: {times:,} |\n" in page


POLICY, CORE = "policy", "stepper.core"
SYNCHRONOUS, AHEAD = Regime("decode", False), Regime("decode", True)
FAILING, PREFILL_SIDE = Regime("decode", True, recompute=False), Regime("prefill", True)
BROKEN = (
    (
        SYNCHRONOUS,
        Mutation(
            "loads take what prompts under way still need",
            "admission check",
            ("mixed", 1),
            ((POLICY, "_fetch", " + self._still_needed(requests, ledger)", ""),),
        ),
    ),
    (
        SYNCHRONOUS,
        Mutation(
            "whoever loads takes a seat",
            "waiting order",
            ("mixed", 2),
            (
                (
                    POLICY,
                    "_has_seat",
                    "len(self.running) <",
                    "len(self.running) + len(self.fetching) <",
                ),
            ),
        ),
    ),
    (
        SYNCHRONOUS,
        Mutation(
            "others go before those whose KV has come",
            "waiting order",
            ("preemption", 1),
            (
                (
                    POLICY,
                    "_admit_waiting",
                    "for row in self.fetching if row not in self._away",
                    "for row in self.fetching if row not in self._away and not self.waiting",
                ),
            ),
        ),
    ),
    (
        SYNCHRONOUS,
        Mutation(
            "computes nothing after a load",
            "last-token rule",
            ("mixed", 1),
            (
                (
                    CORE,
                    "fetched",
                    "requests.known_tokens(row) - 1",
                    "requests.known_tokens(row) - 2",
                ),
            ),
        ),
    ),
    (
        SYNCHRONOUS,
        Mutation(
            "caches a prompt before it has come",
            "hit rule",
            ("mixed", 1),
            (
                (
                    "ledger",
                    "admit_remote",
                    "return self._admit(row, tokens, hit_tokens, keep_free, 0)",
                    "return self.admit(row, tokens, hit_tokens, keep_free, 0)",
                ),
            ),
        ),
    ),
    (
        SYNCHRONOUS,
        Mutation(
            "frees the blocks of who left before the load has landed",
            "memory accounting",
            ("mixed", 1),
            ((CORE, "settle", "max(self._lands_s.get(row, now), now)", "now"),),
        ),
    ),
    (
        PREFILL_SIDE,
        Mutation(
            "gives nothing back",
            "memory accounting",
            ("preemption", 1),
            ((CORE, "release", "self._released.append(row)", "pass"),),
        ),
    ),
    (
        PREFILL_SIDE,
        Mutation(
            "gives memory back at once",
            "memory accounting",
            ("preemption", 1),
            (
                (
                    CORE,
                    "complete",
                    "self.kept.add(row)",
                    "self.kept.add(row), self.ledger.free(row)",
                ),
            ),
        ),
    ),
    (
        AHEAD,
        Mutation(
            "preempts who is computed in the step under way",
            "victim",
            ("preemption", 1),
            ((POLICY, "_grant_one_by_one", "in self._computing", "in ()"),),
        ),
    ),
    (
        AHEAD,
        Mutation(
            "gives back at once what the step under way still writes",
            "memory accounting",
            ("partial_chunks", 1),
            ((CORE, "settle", "self.policy.traits.loads_kv and", "False and"),),
        ),
    ),
    (
        FAILING,
        Mutation(
            "keeps the memory of a request whose load has failed",
            "memory accounting",
            ("preemption", 1),
            ((CORE, "fetched", "self._lands_s.pop(row, None)", "pass"),),
        ),
    ),
    (
        PREFILL_SIDE,
        Mutation(
            "hands over a prompt that was preempted as it ended",
            "memory accounting",
            ("priority", 2),
            ((CORE, "plan", "if self.hands_over and self.under_way", "if False"),),
        ),
    ),
    (
        PREFILL_SIDE,
        Mutation(
            "renews a lease for longer",
            "memory accounting",
            ("preemption", 1),
            (("due", "begin", "LEASE_S * 2 / 3", "LEASE_S * 3 / 4"),),
        ),
    ),
)


@pytest.mark.nightly
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(("regime", "mutation"), BROKEN, ids=lambda v: getattr(v, "name", ""))
def test_a_broken_hand_over_is_caught(regime, mutation):
    report, _ = compare(regime, *mutation.witness, mutation)
    assert report.mismatches == 1
