"""Prefill apart from decode: with a pull connector, policy `vllm` decides on both sides what vLLM's
scheduler does. Decode side: loads pending, arrived, failed, aborted, preempted afterwards, short of
blocks. Prefill side: memory that is given back when it has been fetched."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.mutations import Mutation
from tests.identity.remote import HandingOver, RemoteOurs, RemoteReal

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("newest")]

LEAVING = 0.08  # of the steps
DECODE = {
    "preemption": (0, 1, 3, 6),
    "priority": (0, 2),
    "mixed": (1, 2, 3),
    "partial_chunks": (0, 1),
}
PREFILL = {"preemption": (0, 1, 3), "priority": (2,), "mixed": (0, 3), "partial_chunks": (1,)}
ON_D = (
    "loads", "pending", "arrived", "failed", "failed with a local hit", "aborted while pending",
    "aborted when it had come", "preempted after a load", "short of blocks",
)  # fmt: skip


def compare(generate: str, seed: int, role: str, mutation=None) -> tuple[Report, Counter]:
    scenario = getattr(scenarios, generate)(seed)
    requests, kind = scenario.requests, RemoteOurs
    if role == "kv_producer":
        requests = [dataclasses.replace(request, output_tokens=1) for request in requests]
        kind = HandingOver
    made: list[RemoteReal] = []

    def real(settings):
        made.append(RemoteReal(settings, role))
        return made[0]

    report = run_identity(
        scenario.settings,
        requests,
        lambda settings: kind(settings, mutation),
        leaving=LEAVING,
        make_real=real,
    )
    return report, made[0].seen


def checked(regimes: dict[str, tuple[int, ...]], role: str) -> tuple[int, Counter]:
    steps, total = 0, Counter()
    for generate, seeds in regimes.items():
        for seed in seeds:
            report, seen = compare(generate, seed, role)
            assert report.mismatches == 0, f"{generate} {seed}: {report.first_mismatch}"
            steps += report.steps
            total += seen
    return steps, total


def test_a_decode_side_decides_as_vllm_does():
    steps, seen = checked(DECODE, "kv_consumer")
    assert steps > 25_000
    assert all(seen[name] > 20 for name in ON_D), seen


def test_a_prefill_side_gives_memory_back_when_vllm_does():
    steps, seen = checked(PREFILL, "kv_producer")
    assert steps > 4_000 and seen["kept"] > 1_000


POLICY, CORE = "policy", "stepper.core"
BROKEN = (
    (
        "kv_consumer",
        Mutation(
            "loads take what prompts under way still need",
            "admission check",
            ("mixed", 1),
            ((POLICY, "_fetch", " + self._still_needed(requests, ledger)", ""),),
        ),
    ),
    (
        "kv_consumer",
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
        "kv_consumer",
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
        "kv_consumer",
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
        "kv_consumer",
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
        "kv_consumer",
        Mutation(
            "frees the blocks of who left before the load has landed",
            "memory accounting",
            ("mixed", 1),
            ((CORE, "settle", "max(self._lands_s.get(row, now), now)", "now"),),
        ),
    ),
    (
        "kv_producer",
        Mutation(
            "gives nothing back",
            "memory accounting",
            ("preemption", 1),
            ((CORE, "release", "self._released.append(row)", "pass"),),
        ),
    ),
    (
        "kv_producer",
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
)


@pytest.mark.parametrize(("role", "mutation"), BROKEN, ids=lambda value: getattr(value, "name", ""))
def test_a_broken_hand_over_is_caught(role, mutation):
    report, _ = compare(*mutation.witness, role, mutation)
    assert report.mismatches == 1
