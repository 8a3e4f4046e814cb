"""Prefill apart from decode, in any trouble: every request ends exactly once, memory is given back
exactly once on both sides, and the parts of a TTFT add up (docs/fleet.md)."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parameters import SOME_POLICIES, mostly_nightly, mostly_nightly_pairs
from tests.sim.apart import Apart, hand_over, handed_over_once, inputs_of, parts_add_up, troubled
from tests.sim.test_failures import ACTIONS
from tests.sim.troubled import TABLES, conserved, conserving
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import ledger_class, ledger_names, parse_policy, policy_names
from twinserve.sim.fleet.connector import Push
from twinserve.sim.fleet.faults import Fault, Kind, Schedule
from twinserve.sim.setup.audit import crowd
from twinserve.traces.workload import Workload

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


CASES = [(seed, action) for seed in range(8) for action in ACTIONS]


def schedule(seed: int) -> Schedule:
    """Of two prefill and two decode replicas: each crashes once or not at all."""
    rng = np.random.default_rng([seed, 18])
    faults = [
        Fault(Kind.CRASH, i, at_s, at_s + float(rng.exponential(0.1)) + 1e-3)
        for i, at_s in enumerate(rng.exponential(0.15, 4).tolist())
        if rng.random() < 0.8
    ]
    return Schedule(tuple(faults), start_up_s=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "action"), mostly_nightly(CASES, (0, "retry")))
def test_a_failing_fleet_with_prefill_apart(seed, action):
    connector = hand_over("llm-d:threshold=40" if seed % 2 else "none", 0.2, bool(seed % 2))
    settings = {
        "exact": True,
        "async_scheduling": seed % 3 == 0,
        "on_failure": action,
        "detection": 0.03 * (seed % 2),
    }
    inputs = replace(inputs_of(crowd(seed), connector, **settings), failures=schedule(seed))
    two = partial(Apart, prefill=2, decode=2)
    run, rows = conserving(two, inputs, (*TABLES, "failures"))
    handed_over_once(run, rows)
    parts_add_up(rows)
    assert len(rows.failures) == (rows.replicas["failed"]).sum()


@pytest.mark.parametrize("seed", [10, 133])
def test_a_lease_may_run_out_while_its_kv_is_fetched(seed):
    """Those that were sent to dead decode replicas come late to others, whose next heartbeat may
    come later still."""
    rng = np.random.default_rng([seed, 6])
    group, arrival_s = rng.integers(-1, 4, 24), np.sort(rng.exponential(0.3, 24))
    prompts, outputs = rng.integers(5, 80, 24), rng.integers(1, 50, 24)
    columns = {"group": group, "group_names": list("abcd"), "delay_s": np.zeros(24)}
    workload = Workload.build(arrival_s, prompts, outputs, **columns)
    connector = hand_over("llm-d:threshold=40", 0.2, True)
    settings = {"on_failure": "retry", "detection": float(rng.exponential(0.2))}
    settings |= {"async_scheduling": False, "retries": int(rng.integers(0, 3))}
    inputs = inputs_of(workload, connector, **settings)
    run = Apart(replace(inputs, failures=schedule(seed)), prefill=2, decode=2)
    run.run()
    conserved(run, run.rows())
    handed_over_once(run, run.rows())
    assert any(load.whole and load.kept.expired for load in run.fleet.loads.values())
