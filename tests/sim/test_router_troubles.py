"""Every router in fleets where clients leave and replicas come, drain and fail at random: nothing
is lost, and steps taken at once give the rows of single ones."""

from __future__ import annotations

import pytest

from tests.parameters import mostly_nightly
from tests.sim.troubled import troubled
from twinserve.policies.registry import parse_policy
from twinserve.sim.fleet.routers.registry import parse_router, router_names

OF_PREFIXES = ("conductor", "dynamo-kv", "llm-d", "sglang")
CASES = [(name, seed) for name in router_names() for seed in (1, 6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"), mostly_nightly(CASES, *((name, 1) for name in OF_PREFIXES), ("vllm-dp", 6))
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
