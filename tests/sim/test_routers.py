"""Routers by name, those of other packages too, and the Python of the page on fleets. What
a router hears comes late, at intervals, and not always."""

import inspect
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tests.examples import examples
from tests.sim.harness import build, hybrid
from twinserve import own_code
from twinserve.policies.base import Options
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy
from twinserve.sim.fleet.prefix_index import PrefixIndex
from twinserve.sim.fleet.routers.base import Measured, Router
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.fleet.routers.registry import parse_router, router_names
from twinserve.sim.fleet.view import Signals
from twinserve.sim.setup.config import SimulationConfig

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


class LastOptions(Options):
    of: int = Field(2, ge=1)


class Last(Router[LastOptions]):
    """The last of the first few."""

    name = "last"
    Options = LastOptions

    def place(self, request, stage, view):
        return view.up[: self.options.of][-1]


@pytest.fixture
def other_packages(monkeypatch):
    """An entry point as if another package had been installed."""
    point = EntryPoint("last", f"{__name__}:Last", "twinserve.routers")
    monkeypatch.setattr(
        own_code, "entry_points", lambda group: [point] if group == point.group else []
    )


def test_every_router_is_found_by_its_name():
    assert "least-requests" in router_names()
    for name in router_names():
        assert parse_router(name).build().name == name
    assert isinstance(parse_router("least-requests").build(), LeastRequests)


def test_routers_of_other_packages_have_options(other_packages):
    assert "last" in router_names()
    assert parse_router("last").build().options.of == 2
    assert parse_router("last:of=3").build().options.of == 3


@pytest.mark.parametrize(
    "text, said",
    [
        ("lest-requests", r"no router 'lest-requests' \(did you mean 'least-requests'\?\)"),
        ("least-requests:of=1",
         "router 'least-requests' has no option 'of'; it has shed_rt, shed_be"),
        ("last:off=1", r"router 'last' has no option 'off' \(did you mean 'of'\?\); it has of"),
        ("last:of=0", "router 'last', option of=0: should be greater than or equal to 1"),
        ("llm-d:events_lost=0.1",
         "router 'llm-d', option events_lost=0.1: index=approximate uses no KV events"),
        ("dynamo-kv:index=approximate,events_age=1", "option events_age=1: index=approximate"),
        ("dynamo-kv:ttl=60", "option ttl=60: index=exact removes blocks by KV events"),
        ("last:of", r"router 'last': expected option=value, not 'of' \(in 'last:of'\)"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_option_is_one_line(text, said, other_packages):
    with pytest.raises(RegistryError, match=said):
        parse_router(text)


@pytest.mark.parametrize(
    "text", ["dynamo-kv:ttl=60,index=approximate", "llm-d:events_age=0,events_lost=0.1,index=exact"]
)
def test_options_of_the_index_go_with_it_in_any_order(text):
    assert parse_router(text).build()


def test_the_examples_of_the_help_exist():
    examples = re.findall(r"options after a colon: (\S+);", inspect.getsource(SimulationConfig))
    policy, router = examples
    assert parse_policy(policy).given and parse_router(router).build()


def test_the_python_of_the_page_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert "sarathi" in capsys.readouterr().out


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
