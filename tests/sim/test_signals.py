"""What a router hears comes late, at intervals, and not always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.sim.harness import build, hybrid
from twinserve.sim.fleet.prefix_index import PrefixIndex
from twinserve.sim.fleet.routers.base import Measured, Router
from twinserve.sim.fleet.view import Signals

TIMES = st.floats(0, 1000)
SIGNALS = st.builds(
    Signals, st.floats(0, 5), st.sampled_from([0.0, 0.1, 1.0]), st.just(0.5), seed=st.integers(0, 9)
)


def test_a_poll_is_of_the_last_tick_and_takes_its_time():
    signals = Signals(age_s=0.25, interval_s=1.0)
    assert [signals.measured_s(0, now) for now in (3.2, 3.25, 3.9, 4.3)] == [2.0, 3.0, 3.0, 4.0]
    assert Signals(age_s=0.5).measured_s(0, 3.2) == 2.7
    assert Signals().measured_s(0, 3.2) == 3.2


def test_lost_polls_leave_the_one_before():
    signals = Signals(interval_s=1.0, lost=0.25)
    ages = np.array([now - signals.measured_s(0, now + 0.5) for now in range(1, 4001)])
    share = (ages > 0).mean()
    assert abs(share - 0.25) < 0.03
    other = [now - signals.measured_s(1, now + 0.5) for now in range(1, 4001)]
    assert (ages != other).any()  # each replica loses polls of its own


@examples(100)
@given(SIGNALS, TIMES, TIMES)
def test_what_is_known_is_not_of_the_future_and_never_goes_back(signals, a, b):
    early, late = sorted((a, b))
    known = [signals.measured_s(2, now) for now in (early, late)]
    assert known[0] <= known[1] and known[0] <= early - signals.age_s


class Listening(Router):
    """Keeps what it hears, and when it decides."""

    name = "listening"

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.heard: list[tuple[str, int]] = []
        self.index = PrefixIndex()
        super().__init__()

    def on_came(self, replica):
        self.cache = self.index.add(replica)

    def on_stored(self, replica, contents):
        self.heard += [("stored", c) for c in contents.tolist()]
        self.cache.stored(contents)

    def on_removed(self, replica, contents):
        self.heard += [("removed", c) for c in contents.tolist()]
        self.cache.removed(contents)

    def place(self, request, stage, view):
        return 0


def heard(**signals) -> list[tuple[str, int]]:
    router = Listening(Signals(**signals))
    load = hybrid(4, 40, rate=60.0, prefix_block=16)
    build(load, caching=True, blocks=120, router=router).run()
    return router.heard


def test_events_come_late_and_in_order():
    at_once, late = heard(), heard(events_age_s=0.2)
    assert 0 < len(late) < len(at_once) and at_once[: len(late)] == late


@pytest.mark.slow
def test_some_events_never_come():
    every, some = heard(), heard(events_lost=0.3)
    assert 0.4 * len(every) < len(some) < 0.9 * len(every)
    left = iter(every)
    assert all(event in left for event in some)  # in the order in which they were sent
    assert some == heard(events_lost=0.3) != heard(events_lost=0.3, seed=1)


def test_losses_need_an_interval():
    with pytest.raises(ValueError, match="lost=0.1: replicas are not measured"):
        Measured(lost=0.1)
