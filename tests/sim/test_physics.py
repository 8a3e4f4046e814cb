"""What must hold of any queue, whatever serves it: Little's law, and that more of a resource does
not hurt on average. Every policy of the registry is under these tests."""

from dataclasses import astuple

import numpy as np
import pytest

from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.sim.harness import Affine, hybrid, simulate
from twinserve.policies.registry import policy_names

SEEDS = range(20)
T_QUANTILE = 2.093  # 97.5 % of Student's t with 19 degrees of freedom
SMALL, LARGE = 96, 192  # blocks: requests are preempted, and hardly one is
FASTER = 0.95


def littles_law(policy: str, seed: int, **settings) -> None:
    """Requests in the system, summed over the time of the steps, are the times that requests spend
    in it from the step after their arrival: the two tables are recorded by different code."""
    workload = hybrid(seed, n=24, sessions=2, applications=1, pool=3)
    run = simulate(workload, policy, host_blocks=64, **settings)
    steps, requests = run.steps, run.requests
    assert requests.finished.all()
    start, end = steps.start_s.to_numpy(), steps.end_s.to_numpy()
    there = (steps.running + steps.waiting).to_numpy()
    arrived, left = requests.arrival_s.to_numpy(), requests.ended_s.to_numpy()
    begun = start[np.searchsorted(start, arrived)]
    idle = np.maximum(start[1:] - end[:-1], 0.0)  # between two steps: whoever is there waits
    between = [
        gap * ((begun <= e) & (left > e)).sum() for gap, e in zip(idle, end[:-1], strict=True)
    ]
    assert there @ (end - start) + sum(between) == pytest.approx((left - begun).sum(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(policy_names(), "bros", *SOME_POLICIES))
@pytest.mark.parametrize("seed", [1, pytest.param(12, marks=pytest.mark.nightly)])
def test_littles_law_between_step_rows_and_request_rows(policy, seed):
    littles_law(policy, seed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(policy_names(), "bros", *SOME_POLICIES))
def test_littles_law_where_steps_are_planned_ahead(policy):
    littles_law(policy, 1, asynchronous=True)


def sojourn_s(policy: str, seed: int, blocks: int = SMALL, factor: float = 1.0) -> float:
    """Mean time from arrival to last token."""
    usual = Affine()
    model = Affine(*(factor * cost for cost in astuple(usual)))
    workload = hybrid(seed, n=40, sessions=2, applications=1)
    run = simulate(workload, policy, blocks=blocks, host_blocks=64, model=model, audit=False)
    return float((run.requests.ended_s - run.requests.arrival_s).mean())


def hurts(before: list[float], after: list[float]) -> bool:
    """Whether the mean of the paired differences is surely above 0 (95 %)."""
    change = np.subtract(after, before)
    half = T_QUANTILE * change.std(ddof=1) / len(change) ** 0.5
    return change.mean() > half


def test_a_cost_on_average_is_told_from_chance():
    luck = np.random.default_rng(0).normal(size=20)
    assert hurts([0.0] * 20, luck + 1) and not hurts([0.0] * 20, luck - luck.mean())
    assert not hurts([0.0] * 20, [0.0] * 20)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", policy_names())
def test_more_memory_and_faster_steps_do_not_hurt_on_average(policy):
    """Over 20 seeds, where memory is short. Single seeds do get slower: another order of the same
    requests may be a worse one. No policy is an exception on average."""
    before = [sojourn_s(policy, seed) for seed in SEEDS]
    assert not hurts(before, [sojourn_s(policy, seed, LARGE) for seed in SEEDS])
    assert not hurts(before, [sojourn_s(policy, seed, factor=FASTER) for seed in SEEDS])
