"""BROS's problem solved exactly: by hand, by enumeration and by integer programming; and the policy
made of it."""

from dataclasses import replace

import hypothesis
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.matrices import inputs_for
from tests.parameters import mostly_nightly
from tests.policies.policy_runs import BY_HAND, MODEL, Desk, simulate
from tests.policies.test_bros import Counter
from tests.policies.test_fast_path import workloads
from twinserve.policies.base import EngineLimits
from twinserve.policies.bros.exact import BrosExactOptions, BrosExactPolicy
from twinserve.policies.bros.milp import solve_milp
from twinserve.policies.bros.problem import Instance, batch_seconds, enumerate_batches, solution
from twinserve.policies.errors import PolicyError
from twinserve.policies.names import RegistryError
from twinserve.policies.parts.estimators import Batch, LinearEstimator, ModelEstimator
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.sim.setup.audit import Auditor
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import Simulation
from twinserve.sim.setup.run import simulate as run

# -- by hand ---------------------------------------------------------------------------------------
# A prompt token takes 1 ms; decodes take 30 ms together and 10 ms each.
TIMES = LinearEstimator(
    BrosLinearModel(PhaseCost(0.001, 0.0, 0.0), PhaseCost(0.010, 0.0, 0.030)),
    SwapTimeModel(seconds_per_byte=1e-3),
)


def example(residual: float, **changes) -> Instance:
    """Real-time prompt a of 100 ms; best-effort prompt x of 20 ms; best-effort decodes y and z.
    Without a the best rate is that of x alone: 1 / 0.02 = 50 a second, against 2 / 0.05 = 40 of y
    and z and 3 / 0.07 = 43 of all three."""
    prefill = np.array([True, True, False, False])
    new, context = np.array([100, 20, 1, 1]), np.array([100, 20, 50, 60])
    batch = Batch(np.arange(4), prefill, new, context, np.zeros(4, np.int64))
    instance = Instance(
        batch, np.array([residual]), np.array([0.1]), pace=0.2, size=4, tokens=1000,
        new_blocks=np.zeros(4, np.int64), empty_blocks=0,
    )  # fmt: skip
    return replace(instance, **changes)


BLOCKS = np.array([5, 3, 0, 0])
EXAMPLES = {
    "a has time: left out, T + 0.1 <= 0.5": (example(0.5), "x", 0),
    "left out until the last moment, 0.02 + 0.1 <= 0.125": (example(0.125), "x", 0),
    "it must run, and nothing fits beside it": (example(0.115), "a", 0),
    "it is lost, and served: all fit into the pace": (example(0.05), "axyz", 1),
    "a shorter pace": (example(0.05, pace=0.13), "ax", 1),
    "as printed it is not lost: 0.02 + 0.02 <= 0.05": (
        example(0.05, following=np.array([0.02])),
        "x",
        0,
    ),
    "no objective: served, or it would wait for ever": (example(np.inf), "axyz", 0),
    "real-time first": (example(0.5, rt_first=True), "axyz", 0),
    "most requests, of those that leave a time": (example(0.175, most_requests=True), "xyz", 0),
    "batch size": (example(0.05, size=2), "ax", 1),
    "x finds no block": (example(0.5, new_blocks=BLOCKS, empty_blocks=2), "yz", 0),
    "a may drop others": (example(0.115, new_blocks=BLOCKS, empty_blocks=2), "a", 0),
    "x may not, beside a": (example(0.05, new_blocks=BLOCKS, empty_blocks=2), "ayz", 1),
    "all tokens but the longest request's": (example(0.05, tokens=1), "ay", 1),
    "x would be twenty more": (example(0.05, tokens=21), "ayz", 1),
}


@pytest.mark.parametrize("solve", [enumerate_batches, solve_milp])
@pytest.mark.parametrize("name", EXAMPLES)
def test_by_hand(name, solve):
    instance, chosen, lost = EXAMPLES[name]
    found = solve(instance, TIMES)
    assert "".join(np.array(list("axyz"))[found.chosen]) == chosen
    assert found.lost == lost and found.feasible
    best_effort = len(chosen.replace("a", ""))
    assert found.rate == pytest.approx(best_effort / found.seconds)


@pytest.mark.parametrize("solve", [enumerate_batches, solve_milp])
def test_nobody_with_memory_is_no_solution(solve):
    batch = Batch(
        np.arange(2), np.zeros(2, bool), np.ones(2, np.int64), np.array([4, 8]),
        np.zeros(2, np.int64),
    )  # fmt: skip
    nobody = np.zeros(0)
    stuck = Instance(batch, nobody, nobody, np.inf, 2, 100, np.ones(2, np.int64), 0)
    assert solve(stuck, TIMES) is None
    # a tie: the first one
    assert solve(replace(stuck, empty_blocks=1), TIMES).chosen.tolist() == [True, False]


# -- enumeration and integer programming -----------------------------------------------------------
COSTS = LinearEstimator(
    BrosLinearModel(PhaseCost(6e-5, 8e-10, 0.012), PhaseCost(7e-5, 8e-9, 0.017)),
    SwapTimeModel(seconds_per_byte=2e-11, base_s=1e-3),
)


def drawn(seed: int) -> Instance:
    """Every part of the problem binds now and then."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 10))
    r = int(rng.integers(0, n + 1))
    prefill = rng.random(n) < 0.4
    new = np.where(prefill, rng.integers(10, 1000, n), 1)
    context = new + np.where(prefill, 0, rng.integers(10, 2000, n))
    swapped = np.where(~prefill & (rng.random(n) < 0.3), rng.integers(1, 500, n) * 200_000, 0)
    batch = Batch(np.arange(n), prefill, new, context, swapped)
    residual = np.where(rng.random(r) < 0.1, np.inf, rng.uniform(-0.1, 0.4, r))
    residual.sort()
    alone = batch_seconds(COSTS, batch, np.eye(n, dtype=bool))
    pace = max(0.1, alone[0]) if r else np.inf
    blocks = np.where(rng.random(n) < 0.5, rng.integers(0, 5, n), 0)
    size, tokens, empty = (
        int(rng.integers(1, n + 1)),
        int(rng.integers(100, 3000)),
        int(rng.integers(0, 8)),
    )
    flags = bool(rng.random() < 0.3), bool(rng.random() < 0.3)
    return Instance(
        batch, residual, np.maximum(0.03, alone[:r]), pace, size, tokens, blocks, empty, *flags
    )


@examples(40)
@given(seed=st.integers(0, 2**32))
@hypothesis.example(seed=337)  # two batches whose rates are 3e-6 apart
def test_both_find_the_same(seed):
    """To within the solver's tolerances, about 1e-6 of times."""
    instance = drawn(seed)
    ours, theirs = enumerate_batches(instance, COSTS), solve_milp(instance, COSTS)
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.goals == theirs.goals and ours.rate * (1 - 1e-5) <= theirs.rate <= ours.rate * (
            1 + 1e-9
        )
        assert ours.feasible and theirs.feasible


@examples(60)
@given(seed=st.integers(0, 2**32), bits=st.integers(1, 2**9))
def test_no_feasible_batch_is_better(seed, bits):
    instance = drawn(seed)
    other = solution(instance, COSTS, (bits >> np.arange(len(instance)) & 1).astype(bool))
    if other.feasible:
        best = enumerate_batches(instance, COSTS)
        assert (best.goals, -best.rate * (1 + 1e-9)) <= (other.goals, -other.rate)


@examples(30)
@given(seed=st.integers(0, 2**32))
def test_seconds_are_the_estimators_to_the_bit(seed):
    batch = drawn(seed).batch
    for estimator in (COSTS, ModelEstimator(MODEL, COSTS.swap)):
        batches = np.random.default_rng(seed).random((5, len(batch))) < 0.5
        batches[0] = True
        expected = [estimator.seconds(batch[chosen]) if chosen.any() else 0.0 for chosen in batches]
        assert batch_seconds(estimator, batch, batches).tolist() == expected


def test_algorithm_1_loses_no_fewer_deadlines_than_the_best_batch():
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=8192)
    policy = BrosExactPolicy(limits, BrosExactOptions(), COSTS)
    policy.take_average(0.03)
    rng, worse = np.random.default_rng(3), 0
    for seed in range(150):
        batch = drawn(seed).batch
        r = len(batch) // 2
        table = RequestTable()
        for row in range(len(batch)):
            table.submit(
                f"r{row}", service_class=int(row >= r), slo_tpot_s=0.2 if row < r else np.nan
            )
        urgent = policy.packer.by_urgency(
            batch[:r], rng.uniform(-0.05, 0.3, r), table, policy.batch_size
        )
        candidates = policy.packer.by_swap(batch[r:])
        instance = policy.instance(urgent, candidates, 64, table)
        greedy = solution(instance, COSTS, policy.greedy_batch(urgent, candidates, 64))
        best = policy.solve(instance)
        if greedy.feasible:
            assert (best.goals, -best.rate * (1 + 1e-9)) <= (greedy.goals, -greedy.rate)
            worse += greedy.lost > best.lost
    assert worse > 0


# -- the policy ------------------------------------------------------------------------------------
class Exact(Counter):
    def __init__(self, options: str = "", blocks: int = 100, **values) -> None:
        values.setdefault("limits", EngineLimits(max_num_seqs=256, kv_bytes_per_token=1))
        Desk.__init__(self, f"bros-exact:{options}" if options else "bros-exact", blocks, **values)


def arrivals(desk: Counter) -> Counter:
    desk.arrives("a", 30, ttft=0.5, tpot=1.0)
    desk.arrives("x", 10, 99)
    desk.arrives("y", 45, 99)
    return desk


@pytest.mark.parametrize("solver", ["auto", "milp", "enumerate"])
def test_a_real_time_request_waits_as_long_as_it_may(solver):
    assert arrivals(Counter()).order(0.0) == "axy"
    desk = arrivals(Exact(f"solver={solver}"))
    assert desk.order(0.0) == "x"  # 1 / 0.01 a second; with y 2 / 0.055
    assert desk.order(0.1) == "x"
    assert desk.order(0.45) == "x"  # 0.01 + 0.03 <= 0.05
    assert desk.order(0.465) == "a"  # 0.035 s left
    assert desk.policy.counters == {"solved_steps": 4, "fallback_steps": 0, "memory_steps": 0}


def test_as_printed_it_is_left_out_until_it_is_too_late():
    desk = arrivals(Exact("following=average"))
    assert desk.order(0.0) == "x"
    assert desk.order(0.465) == "x"  # T_avg is 1 ms: 0.011 <= 0.035
    # lost, and so served; TPOT's second is the pace, and y's prompt would lower the rate
    assert desk.order(0.495) == "ax"


def test_with_real_time_first_it_packs_as_algorithm_1_does():
    assert arrivals(Exact("rt_first=true")).order(0.0) == "ax"
    assert arrivals(Exact("rt_first=true,objective=requests")).order(0.0) == "axy"


@pytest.mark.parametrize("kind", ["paged", "bidirectional"])
@examples(6, suppress_health_check=list(HealthCheck))
@given(case=workloads())
def test_left_to_algorithm_1_it_is_bros(kind, case):
    """One request alone has only one choice."""
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=48)
    one, other = (
        simulate(case[0], policy, kind, case[1], host=case[2], limits=limits, fast=False)[:3]
        for policy in ("bros", "bros-exact:max_requests=1")
    )
    for ours, theirs in zip(one, other, strict=True):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)


def test_where_nobody_has_memory_algorithm_1_finds_some():
    desk = Exact(blocks=4)
    desk.arrives("x", 7, 9)
    desk.arrives("y", 7, 9)
    orders = [desk.order(0.1 * i) for i in range(40) if set(desk.table.state) != {3}]
    assert desk.policy.counters["memory_steps"] > 0
    assert "".join(orders).count("x") >= 9 and set(desk.table.state) == {3}


def test_run_json_says_how_many_steps_were_solved():
    settings = dict(
        trace="sharegpt",
        rate=3.0,
        requests=6,
        pool=3,
        cap_length=120,
        profile="qwen2.5-14b@a100-40g:tp2",
        async_scheduling=False,
    )
    config = SimulationConfig(policy=("bros-exact:max_requests=4", "bros"), **settings)
    results = run(config)
    found = results["bros-exact:max_requests=4"].config["policy"]
    steps = results["bros-exact:max_requests=4"].rows.steps
    assert sum(found["counters"].values()) == len(steps)
    assert found["counters"]["solved_steps"] > 0 and found["counters"]["fallback_steps"] > 0
    assert "counters" not in results["bros"].config["policy"]


def test_what_it_refuses():
    with pytest.raises(RegistryError, match="max_requests=19: should be at least 1 and at most 18"):
        parse_policy("bros-exact:max_requests=19")
    truth = ModelEstimator(MODEL, SwapTimeModel(seconds_per_byte=1e-9))
    with pytest.raises(
        PolicyError,
        match="solver=milp needs step times of the paper's form; drop --estimator perfect",
    ):
        parse_policy("bros-exact:solver=milp").build(EngineLimits(), truth)
    desk = arrivals(Exact(estimator=ModelEstimator(BY_HAND.model, BY_HAND.swap)))
    assert desk.order(0.0) == "x"  # every batch is tried


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", mostly_nightly([False, True], False))
def test_a_crowd_in_too_little_memory_ends(asynchronous):
    """Here all that is left lacks memory some time, and nobody is real-time."""
    crowded = inputs_for("bros-exact:kv=bidirectional", async_scheduling=asynchronous)
    run_of_it = Simulation(crowded, crowded.policies[0])
    Auditor(run_of_it.engines[0].core, crowded.workload.longest)
    run_of_it.run()
    assert run_of_it.rows().requests["finished"].all()
