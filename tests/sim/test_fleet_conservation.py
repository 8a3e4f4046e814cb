"""Clients leave, replicas come, drain and fail, at random: every request ends exactly once, and
nothing is lost or kept, under every policy, ledger and router (docs/fleet.md)."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parameters import SOME_POLICIES, mostly_nightly, mostly_nightly_pairs
from tests.sim.troubled import troubled
from twinserve.policies.registry import ledger_names, parse_policy, policy_names
from twinserve.sim.fleet.routers.registry import parse_router, router_names

SPECS = [*policy_names(), "vllm:scheduling=priority", "bros:chunk=64", "echo:benefit=offline"]
SEEDS = (10, 11, 12, 13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "migrates"),
    mostly_nightly_pairs(product(SPECS, [False, True]), "bros", *SOME_POLICIES),
)
def test_a_troubled_fleet_of_any_policy(policy, migrates):
    troubled(parse_policy(policy), 3, migrates=migrates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "migrates"),
    mostly_nightly_pairs(
        product([p for p in SPECS if parse_policy(p).policy.asynchronous], [True, False]),
        *SOME_POLICIES,
    ),
)
def test_a_troubled_fleet_that_plans_ahead(policy, migrates):
    troubled(parse_policy(policy), 6, migrates=migrates, async_scheduling=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "ledger"), mostly_nightly_pairs(product(SPECS, ledger_names()), *SOME_POLICIES)
)
def test_a_troubled_fleet_on_any_ledger(policy, ledger):
    """One of four seeds each, so that neighbours have different troubles."""
    spec = replace(parse_policy(policy), kv=ledger)
    seed = SEEDS[(SPECS.index(policy) + ledger_names().index(ledger)) % len(SEEDS)]
    troubled(spec, seed, migrates=seed % 2 == 0)
    if spec.policy.asynchronous:
        troubled(spec, seed, migrates=seed % 2 == 1, async_scheduling=True)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_kind_of_trouble_happens():
    happened = Counter()
    for seed in SEEDS:
        run, _ = troubled(parse_policy("vllm"), seed, migrates=seed % 2 == 0)
        happened.update(run.happened)
    assert happened.keys() == {"leave", "add", "drain", "grace", "fail"}


@pytest.mark.nightly
@given(seed=st.integers(0, 10**6), troubles=st.integers(0, 40), migrates=st.booleans())
def test_random_troubles_of_a_fleet(seed, troubles, migrates):
    names = [*policy_names()]
    troubled(parse_policy(names[seed % len(names)]), seed, troubles, migrates)


OF_PREFIXES = ("conductor", "dynamo-kv", "llm-d", "sglang")
CASES = [(name, seed) for name in router_names() for seed in (1, 6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    mostly_nightly(CASES, *((name, 1) for name in OF_PREFIXES), ("conductor", 6), ("vllm-dp", 6)),
)
def test_a_troubled_fleet_of_any_router(name, seed):
    router = parse_router(name).router
    run, rows = troubled(
        parse_policy("vllm"), seed, migrates=bool(seed % 2), router=router, prefix_caching=True
    )
    assert run.happened and len(rows.requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_a_troubled_fleet_whose_router_hears_late_and_little(seed):
    """On replicas with blocks of two sizes, planned ahead."""
    text = "llm-d:index=exact,age=0.01,interval=0.02,lost=0.3,events_age=0.03,events_lost=0.2"
    troubled(
        parse_policy("vllm"), seed, migrates=True, router=lambda: parse_router(text).build(),
        prefix_caching=True, async_scheduling=True,
    )  # fmt: skip
