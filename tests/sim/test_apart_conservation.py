"""Prefill apart from decode, in any trouble: every request ends exactly once, memory is given back
exactly once on both sides, and the parts of a TTFT add up (docs/fleet.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parameters import SOME_POLICIES, mostly_nightly_pairs
from tests.sim.apart import hand_over, troubled
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import ledger_class, ledger_names, parse_policy, policy_names
from twinserve.sim.fleet.connector import Push

RULES = ("none", "llm-d:threshold=60", "dynamo:tokens=90,share=1", "dynamo:busy=2")

LEDGERS = [name for name in ledger_names() if ledger_class(name).hands_over and name != "paged"]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_troubled_fleet_of_mooncakes_conductor(asynchronous):
    connector = hand_over(lease_s=0.2, recompute=True, router="conductor")
    run, rows = troubled(3, 10, connector, asynchronous=asynchronous, prefill=2, decode=2)
    assert run.happened.keys() >= {"leave", "fail"}
    assert (rows.placements["role"] == "decode").any()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_troubled_fleet(asynchronous, recompute):
    connector = hand_over(lease_s=0.2, recompute=recompute)
    run, _ = troubled(3, 10, connector, asynchronous=asynchronous, prefill=2, decode=2)
    assert run.happened.keys() >= {"leave", "fail"}


@pytest.mark.nightly
@given(
    seed=st.integers(0, 10**6),
    troubles=st.integers(0, 40),
    rule=st.sampled_from(RULES),
    lease_s=st.sampled_from([0.02, 0.2, 30.0]),
    recompute=st.booleans(),
    push=st.sampled_from([None, Push(timeout_s=0.1), Push(0.0, 5.0)]),
    asynchronous=st.booleans(),
    migrates=st.booleans(),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
)
def test_random_troubles(
    seed, troubles, rule, lease_s, recompute, push, asynchronous, migrates, prefill, decode
):
    troubled(
        seed,
        troubles,
        hand_over(rule, lease_s, recompute, push=push),
        asynchronous=asynchronous,
        migrates=migrates,
        prefill=prefill,
        decode=decode,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("push", [None, Push(timeout_s=0.1)], ids=["pull", "push"])
def test_everything_that_can_happen_does(push):
    happened, seen = Counter(), Counter()
    for seed in range(24):
        connector = hand_over(RULES[seed % 4], 0.05, recompute=seed % 3 == 0, push=push)
        more = {"asynchronous": seed % 2 == 1, "migrates": seed % 5 == 0}
        run, rows = troubled(seed, 20, connector, prefill=2, decode=2, **more)
        happened.update(run.happened)
        stays = rows.placements
        load = stays["load_begin_s"].notna()
        seen["loads"] += int(load.sum())
        seen["failed loads"] += int(stays["load_failed"].sum())
        seen["expired leases"] += int(stays["lease_expired"].sum())
        left = stays["outcome"] == "disconnected"
        coming = load & (stays["ended_s"] < stays["load_end_s"])
        seen["left while the KV came"] += int((left & coming).sum())
        seen["left before"] += int((left & (stays["role"] == "decode") & ~load).sum())
        seen["preempted"] += int(stays.loc[load, "recomputes"].sum())
        decodes = stays["role"] == "decode"
        seen["local"] += int((decodes & (stays["placement"] == 0)).sum())
    assert min(happened[what] for what in ("leave", "add", "drain", "grace", "fail")) > 0
    assert len(seen) == 7 and min(seen.values()) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "ledger"),
    mostly_nightly_pairs(product(policy_names(), ["paged", *LEDGERS]), "bros", *SOME_POLICIES),
)
def test_prompts_computed_by_any_policy_on_any_ledger_that_hands_over(policy, ledger):
    spec = replace(parse_policy(policy), kv=ledger)
    connector = hand_over(recompute=True)
    if spec.policy.traits.orders_applications:
        with pytest.raises(PolicyError, match="as a whole"):
            troubled(5, 6, connector, prefill_policy=spec)
        return
    troubled(5, 6, connector, prefill=2, prefill_policy=spec)
    if spec.policy.asynchronous:
        troubled(6, 6, connector, prefill=2, prefill_policy=spec, asynchronous=True)
