"""A decision log, translated for an engine and carried out on paper: every step can be done, every
request is told all its tokens, and the engine that would be built has room for it. Real engines are
in tests/live/test_twin_pressure.py."""

from collections.abc import Iterable

import pytest

from tests.live.paper_engine import on_paper
from tests.live.pressure import logged, pressed, settings_of
from tests.parameters import mostly_nightly
from twinserve.backends.live.engine.planned import EngineRequests, PlannedStep
from twinserve.policies.plan import Preemption
from twinserve.policies.registry import ledger_names, policy_names

SWAP, DROP = Preemption.SWAP, Preemption.RECOMPUTE
CASES = [(policy, kv) for policy in policy_names() for kv in ledger_names()]
FAST = [("conserve", "checkpointed"), ("layerkv", "layerwise"), ("vllm-v0", "layerwise")]


@pytest.mark.slow
@pytest.mark.parametrize("policy, kv", mostly_nightly(CASES, *FAST))
def test_every_step_can_be_done_in_the_engine_that_is_built(policy, kv):
    for seed in (0, 2, 3, 4, 7):
        log = logged(pressed(seed, f"{policy}:kv={kv}"))
        asked = settings_of(log)
        found = on_paper(log, asked.swap_blocks or 1)
        assert found.told == log.answers and len(found.told) == len(log.requests)
        assert not found.held
        if not asked.prefix_caching:  # else shared blocks would count for each request
            assert found.fullest <= asked.num_blocks


@pytest.mark.slow
def test_a_layerwise_ledger_holds_more_than_its_device():
    """So the pool must be larger than the ledger's, and no fixed number of times as large."""
    beyond = 0
    for seed in range(0, 12, 2):
        log = logged(pressed(seed, "layerkv:x=0,slo_aware=false"))
        beyond += on_paper(log, settings_of(log).swap_blocks).fullest > log.run["kv"]["num_blocks"]
    assert beyond >= 2


@pytest.mark.slow
def test_logs_have_rows_that_come_back_before_they_are_granted_anything():
    """Or else the tests above would not show that they can be replayed."""
    early = 0
    for seed in range(6):
        for step in logged(pressed(seed, "conserve")).steps:
            early += any(row not in step.grants for row in step.swapped_in)
            early += any(plan.swapped_in for plan in step.before)
    assert early > 3


# -- plans one by one ------------------------------------------------------------------------------
def steps(*plans: dict) -> list[PlannedStep]:
    """Plans about requests a, b and c as an engine's steps; those without grants make none."""
    on_engine, made = EngineRequests("abc"), []
    for plan in plans:
        parts: list[Iterable] = [plan.get(n, ()) for n in ("preempted", "admitted", "swapped_in")]
        if "grants" in plan:
            made.append(on_engine.planned(plan["grants"].items(), *parts))
        else:
            on_engine.follow(*parts)
    return made


ADMIT = {"admitted": [(0, 0)], "grants": {0: 5}}
OUT = {"preempted": [(0, SWAP)], "grants": {1: 1}}
OTHER = {"grants": {1: 1}}
BACK = {"swapped_in": [0]}


def test_a_copy_that_counts_no_more_is_forgotten():
    dropped = steps(ADMIT, OUT, BACK | OTHER, {"preempted": [(0, DROP)]} | OTHER, ADMIT)
    assert [step.forgotten for step in dropped] == [(), (), (), ("a",), ()]
    assert dropped[-1].hits == {"a": 0} and dropped[-1].swapped_in == ()


def test_who_begins_anew_gives_back_what_it_has():
    on_engine = EngineRequests("abc")
    on_engine.planned([(0, 5), (1, 5)], (), [(0, 0), (1, 0)], ())
    on_engine.planned([(0, 1)], [(1, SWAP)], (), ())
    on_engine.begin_anew("a")
    on_engine.begin_anew("b")
    step = on_engine.planned([(2, 1)], (), [(2, 0)], ())
    assert step.preempted == (("a", DROP),) and step.forgotten == ("b",)


def test_who_has_left_is_spoken_of_no_more():
    on_engine = EngineRequests("abc")
    on_engine.planned([(0, 5), (1, 5)], (), [(0, 0), (1, 0)], ())
    on_engine.planned([(0, 1)], [(1, SWAP)], (), ())
    on_engine.follow([(0, SWAP), (1, DROP)], (), ())
    on_engine.forget("a")
    on_engine.forget("b")
    assert on_engine.planned([(2, 1)], (), [(2, 0)], ()) == PlannedStep({"c": 1}, {"c": 0})


def planned() -> PlannedStep:
    victims = (("v", Preemption.SWAP),)
    return PlannedStep({"a": 30, "b": 20, "c": 1}, {"a": 0, "b": 4}, victims, ("c",))


def test_what_fits_is_left_as_it_is():
    now, later = planned().split(51, {"a", "b", "c", "v"})
    assert now == planned() and later == PlannedStep()


def test_the_rest_comes_later_and_what_comes_first_comes_once():
    now, later = planned().split(40, {"a", "b", "c", "v"})
    assert (now.grants, now.hits, now.swapped_in) == ({"a": 30, "b": 10}, {"a": 0, "b": 4}, ())
    assert (later.grants, later.hits, later.swapped_in) == ({"b": 10, "c": 1}, {}, ("c",))
    assert len(now.preempted) == 1 and later.preempted == ()


@pytest.mark.parametrize("gone", ["b", "c"])
def test_who_has_left_is_not_looked_for(gone):
    """Its grant has been taken out of the plan, or it is not in the engine any more."""
    cut, whole = planned(), planned()
    cut.grants.pop(gone)
    for plan in (cut, whole):
        now, _ = plan.split(100, {"a", "b", "c", "v"} - {gone})
        assert gone not in {*now.grants, *now.hits, *now.swapped_in}
        assert set(now.grants) == {"a", "b", "c"} - {gone}
