"""One order of applications for all replicas of a fleet: who is refused without, and what
Justitia's is worth (docs/fleet.md)."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.policies.justitia_reference import app
from tests.sim.harness import Affine, same_rows
from tests.sim.test_fleet_policies import at, made
from tests.sim.troubled import troubled
from twinserve.policies.errors import PolicyError
from twinserve.policies.justitia.clock import VirtualClock, fluid_finish_times
from twinserve.policies.justitia.policy import JustitiaOrder
from twinserve.policies.parts.predictors import DemandOptions, Predictor, kv_token_time
from twinserve.policies.registry import parse_policy, policy_class, policy_names
from twinserve.policies.requests import End
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.plain import LeastRequests, Spread
from twinserve.sim.setup.audit import CROWDED
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation
from twinserve.traces.apps.generate import from_samples
from twinserve.traces.transform import merge
from twinserve.traces.workload import Workload

TRUE = "justitia:predictor=perfect"
# scikit-learn, which `mlp` needs, takes half a second to import
TOLD = {"justitia": TRUE, "srjf": "srjf:predictor=perfect"}
ORDERING = ("justitia", "kv-share", "parrot", "srjf", "vtc")


class Scattered(Router):
    """Spreads, and stamps nothing."""

    name = "scattered"
    spreads_applications = True

    def place(self, request, stage, view):
        return view.up[request.number % len(view.up)]


def graphs(seed: int, count: int = 14) -> Workload:
    """Applications of one to three stages, up to three requests a stage, as many as keep two small
    replicas from idling; and requests by themselves."""
    rng = np.random.default_rng(seed)
    samples = [
        app(
            [
                [(int(p), int(d)) for p, d in rng.integers([20, 10], [140, 60], (width, 2))]
                for width in rng.integers(1, 4, rng.integers(1, 4))
            ],
            "CC",
        )
        for _ in range(count)
    ]
    workload = from_samples(np.sort(rng.random(count) * 0.3).tolist(), samples)
    alone = Workload.build(
        np.sort(rng.random(6) * 0.3), rng.integers(20, 140, 6), rng.integers(10, 60, 6),
        ids=[f"alone-{i}" for i in range(6)],
    )  # fmt: skip
    return merge(workload, alone)


def test_policies_that_account_for_applications_say_so():
    traits = {name: policy_class(name).traits for name in policy_names()}
    assert {n for n, own in traits.items() if own.orders_applications} == set(ORDERING)


@pytest.mark.parametrize("policy", ORDERING)
def test_a_router_that_spreads_without_an_order_is_refused(policy):
    with pytest.raises(PolicyError) as refused:
        made(TOLD.get(policy, policy), graphs(0), router=Scattered())
    said = str(refused.value)
    assert "'scattered'" in said and repr(policy) in said and "least-requests" in said
    assert ("spread)" in said) == (policy == "justitia") and "\n" not in said


@pytest.mark.parametrize("policy", sorted(set(ORDERING) - {"justitia"}))
def test_policies_without_an_order_of_the_fleet_are_refused_by_one_that_stamps(policy):
    with pytest.raises(PolicyError, match=f"'spread' spreads .* policy '{policy}' .*least-req"):
        made(TOLD.get(policy, policy), graphs(0), router=Spread())


def test_an_order_that_cannot_be_known_before_is_refused():
    with pytest.raises(PolicyError, match="cost=compute needs M to order .* set M"):
        made(f"{TRUE},cost=compute", graphs(0), router=Spread())
    made("justitia:cost=compute,M=500,predictor=perfect", graphs(0), router=Spread()).run()


def test_replicas_that_order_in_different_ways_are_refused():
    run = made(TRUE, graphs(0), 1, router=Spread())
    other = parse_policy("justitia:predictor=perfect,error=0.5")
    with pytest.raises(PolicyError, match="replica 1 orders applications .* same options"):
        run.add(Description(run.inputs.hardware, other))
    run.add(Description(run.inputs.hardware, parse_policy("vllm")))  # it does not order them
    run.run()
    assert len(run.rows().requests) == len(run.inputs.workload)


def test_other_policies_may_be_spread():
    run = made("vllm", graphs(0), router=Scattered())
    run.run()
    assert np.isnan(run.engines[0].core.requests.order).all()


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_on_one_replica_stamps_change_nothing(seed, exact):
    """The fleet's fluid system is that of the replica, where there is one."""
    results = []
    for router in (LeastRequests(), Spread()):
        run = made(TRUE, graphs(seed), 1, router=router, settings={"exact": exact})
        run.run()
        results.append((run.rows(), run.engines[0].core.requests.order))
    same_rows(results[0][0], results[1][0])
    assert np.isnan(results[0][1]).all() and not np.isnan(results[1][1]).any()


def spread(seed: int, replicas: int = 2, **more) -> Simulation:
    return made(TRUE, graphs(seed), replicas, router=Spread(), **more)


def stamps(run: Simulation) -> dict[int, float]:
    """Of the applications."""
    sent = [r for r in run.fleet.requests if r.group >= 0 and r.end is not End.NEVER_SENT]
    found = {r.group: r.order for r in sent}
    assert all(r.order == found[r.group] for r in sent)
    return found


def test_requests_of_an_application_have_one_stamp_wherever_they_are():
    run = spread(1, 3)
    run.run()
    found = stamps(run)
    alone = [r.order for r in run.fleet.requests if r.group < 0]
    assert len({*found.values(), *alone}) == len(found) + len(alone)
    for engine in run.engines:
        table = engine.core.requests
        assert len(table) and not np.isnan(table.order).any()
        assert {found[g] for g in table.group.tolist() if g >= 0} <= set(table.order.tolist())
    several = {g: set() for g in found}
    for index, engine in enumerate(run.engines):
        for group in engine.core.requests.group.tolist():
            several.get(group, set()).add(index)
    assert max(map(len, several.values())) == 3


def test_each_replica_admits_by_the_order_of_the_fleet():
    """Nobody begins while somebody with a smaller stamp has waited there since before."""
    run = spread(2)
    run.run()
    waited = 0
    for engine in run.engines:
        table = engine.core.requests
        for a, b in itertools.permutations(range(len(table)), 2):
            if table.order[a] < table.order[b]:
                began, came = table.first_scheduled_s[b], table.placed_s[a]
                later = table.first_scheduled_s[a] > began
                assert not (later and came <= began), (a, b)
                waited += b < a
    assert waited > 20


@pytest.mark.parametrize("migrates", [False, True])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stamps_are_the_same_however_many_steps_are_taken_at_once(seed, migrates):
    """In a fleet whose clients leave and whose replicas come, drain and fail."""
    spec = parse_policy("justitia:predictor=perfect")
    run, _ = troubled(spec, seed, 20, migrates, router=Spread)
    assert len({request.order for request in run.fleet.requests}) > 20


STEP_S = 1 / 128  # so that times of steps are exact


PACED = Affine(base=STEP_S, prefill=0.0, decode=0.0, context=0.0)


@pytest.mark.parametrize("replicas", [2, 4])
def test_halves_have_the_fluid_system_of_the_whole(replicas):
    """Replicas that share out the memory of one, all busy and at one pace: the fleet's F are those
    of the fluid system that the whole memory would have, and so is their order."""
    rng = np.random.default_rng(5)
    count, blocks = 24, 240
    shapes = rng.integers([20, 20], [140, 60], (count, 4, 2))
    samples = [app([[(int(p), int(d)) for p, d in shape]], "CC") for shape in shapes]
    iterations = np.sort(rng.choice(60, count, replace=False))
    iterations[0] = 0
    workload = from_samples((iterations * STEP_S).tolist(), samples)
    run = paced(workload, replicas, blocks // replicas)
    run.run()
    tables = [engine.core.requests for engine in run.engines]
    last = workload.last_arrival_s
    assert all((t.placed_s[: len(t)] <= last).any() for t in tables)
    expected = []
    clock, before = VirtualClock(), 0
    for at_iteration, demand in zip(iterations.tolist(), demands(samples), strict=True):
        clock.advance((at_iteration - before) * blocks * CROWDED.block_tokens)
        before = at_iteration
        expected.append(clock.arrive(demand))
    found = stamps(run)
    ours = [found[group] for group in range(count)]
    assert ours == pytest.approx(expected, rel=1e-12)
    assert np.argsort(ours).tolist() == np.argsort(expected).tolist()
    ends = fluid_finish_times(iterations.tolist(), demands(samples), blocks * CROWDED.block_tokens)
    assert np.argsort(ends).tolist() == np.argsort(ours).tolist()


def test_an_iteration_is_worth_what_all_replicas_that_are_up_are_worth():
    """One of two replicas has nothing to do while the first application runs alone."""
    samples, blocks = [app([[(400, 30)]], "CC"), app([[(30, 20)]], "CC")], 120
    run = paced(from_samples([0.0, 3 * STEP_S], samples), 2, blocks)
    run.run()
    clock, wanted = VirtualClock(), []
    for iterations, demand in zip((0, 3), demands(samples), strict=True):
        clock.advance(iterations * 2 * blocks * CROWDED.block_tokens)
        wanted.append(clock.arrive(demand))
    assert list(stamps(run).values()) == pytest.approx(wanted, rel=1e-12)


def demands(samples) -> list[int]:
    return [sum(kv_token_time(p, d) for p, d in sample.requests) for sample in samples]


def paced(workload: Workload, replicas: int, blocks: int) -> Simulation:
    config = CROWDED.model_copy(
        update={"replicas": replicas, "num_blocks": blocks, "max_num_batched_tokens": 100_000}
    )
    hardware = replace(resolve_hardware(config), model=PACED)
    spec = parse_policy(TRUE)
    inputs = Inputs(config, workload, hardware, (spec,), ())
    return Simulation(inputs, spec, router=Spread())


@pytest.mark.parametrize("migrates", [False, True])
def test_an_application_that_fails_leaves_the_fluid_system_at_once(migrates):
    run = spread(3, migrates=migrates)
    fluid = run.fleet._order.order.clock
    seen = {}

    def fail():
        here = {r.group for r in run.fleet.replicas[0].requests.values() if r.end is End.NONE}
        seen["before"], seen["V"] = list(fluid._active), fluid.V
        run.fleet.fail(0)
        found = stamps(run)
        seen["gone"] = {found[g] for g in here if g >= 0 and found[g] in seen["before"]}
        seen["after"] = list(fluid._active)

    at(run, 0.2, fail)
    run.run()
    assert seen["gone"]
    if migrates:
        assert set(seen["before"]) == set(seen["after"])
        assert all(request.end is End.COMPLETED for request in run.fleet.requests)
    else:
        assert not seen["gone"] & set(seen["after"])
        assert any(request.end is End.NEVER_SENT for request in run.fleet.requests)


def test_an_application_that_a_client_left_leaves_at_once():
    """And those that stay share what it had: later ones get smaller stamps than with it."""
    run, without = spread(4), spread(4)
    fluid = run.fleet._order.order.clock
    left = []

    def leave():
        # the one that GPS would serve longest
        request = max(
            (r for r in run.fleet.requests if not r.leaving and r.group >= 0), key=lambda r: r.order
        )
        count = fluid.N
        assert run.fleet.withdraw(request, End.DISCONNECTED)
        assert fluid.N == count - 1 and request.order not in fluid._active
        assert request.end is End.NONE  # it is there until the end of the step
        assert not run.fleet.withdraw(request, End.DISCONNECTED) or fluid.N == count - 1
        left.append(request)

    at(run, 0.1, leave)
    run.run(), without.run()
    assert left[0].end is End.DISCONNECTED
    ours, theirs = stamps(run), stamps(without)
    assert any(ours[group] > theirs[group] for group in ours)  # V grows faster among fewer


def test_memory_that_comes_and_goes_changes_the_pace_of_the_fleet():
    """The fluid system has the memory of the replicas that are up."""

    class Counted(JustitiaOrder):
        def __init__(self):
            super().__init__(Predictor(DemandOptions(predictor="class-mean")))
            self.total = 0.0

        def serve(self, service):
            self.total += service

    run = spread(6, 2)
    order = run.fleet._order
    order.order = counted = Counted()
    memory = CROWDED.num_blocks * CROWDED.block_tokens
    paces = []

    def pace(index):
        """Service by step of a replica since it was last asked."""
        steps = 0

        def ask():
            nonlocal steps
            order._tell(run.clock.now)
            now = run.engines[index].steps_begun(run.clock.now)
            paces.append(counted.total / (now - steps) / memory if now > steps else None)
            counted.total, steps = 0.0, now

        return ask

    asked = pace(1)
    at(run, 0.05, asked)
    at(run, 0.05, lambda: run.fleet.drain(0))
    at(run, 0.15, asked)
    run.run()
    assert paces[0] > 1.5 and paces[1] == 1.0
