"""A plan is cut to what an engine can do in a step; whoever has left since it was made is in none
of the parts."""

from __future__ import annotations

import pytest

from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.policies.plan import Preemption


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
