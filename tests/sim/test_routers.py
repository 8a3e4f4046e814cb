"""Routers by name, those of other packages too, and the Python of the page on fleets. What
a router hears comes late, at intervals, and not always."""

import inspect
import re
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tests.examples import examples
from tests.sim.harness import build, hybrid, simulate
from tests.sim.routing import Scene, prompt
from twinserve import own_code
from twinserve.policies.base import Options
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy
from twinserve.sim.fleet.prefix_index import PrefixIndex
from twinserve.sim.fleet.routers.base import Measured, Router, Verdict
from twinserve.sim.fleet.routers.plain import LeastRequests, weight
from twinserve.sim.fleet.routers.registry import parse_router, router_names
from twinserve.sim.fleet.view import Signals
from twinserve.sim.results.metrics import summarise
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


# None is lost; each step's evictions are an event of their own, as where some are lost or late.
STEP_BY_STEP = {"events_lost": 1e-12}


def test_events_come_late_and_in_order():
    at_once, late = heard(**STEP_BY_STEP), heard(events_age_s=0.2)
    assert 0 < len(late) < len(at_once) and at_once[: len(late)] == late
    assert sorted(at_once) == sorted(heard())


@pytest.mark.slow
def test_some_events_never_come():
    every, some = heard(**STEP_BY_STEP), heard(events_lost=0.3)
    assert 0.4 * len(every) < len(some) < 0.9 * len(every)
    left = iter(every)
    assert all(event in left for event in some)  # in the order in which they were sent
    assert some == heard(events_lost=0.3) != heard(events_lost=0.3, seed=1)


def test_losses_need_an_interval():
    with pytest.raises(ValueError, match="lost=0.1: replicas are not measured"):
        Measured(lost=0.1)


# -- what the simple routers choose, request by request --------------------------------------------
REAL_TIME, BEST_EFFORT = 0, 1


def test_round_robin_takes_turns_and_passes_over_the_dead():
    scene = Scene("round-robin", replicas=4)
    assert [scene.send() for _ in range(5)] == [0, 1, 2, 3, 0]
    scene.down(1)
    assert [scene.send() for _ in range(4)] == [2, 3, 0, 2]


def test_random_draws_each_replica_as_often_and_again_the_same():
    scenes = [Scene("random:seed=3", replicas=4) for _ in range(2)]
    picks, again = ([scene.send() for _ in range(4000)] for scene in scenes)
    other = Scene("random:seed=4", replicas=4)
    same = picks == again
    assert same and any(other.send() != pick for pick in picks)
    assert all(abs(count - 1000) < 120 for count in Counter(picks).values())


def test_least_tokens_counts_prompts_and_not_requests():
    scene = Scene("least-tokens", replicas=2)
    long = prompt(tokens=1000)
    assert scene.send(long) == 0
    assert [scene.send(prompt(tokens=300)) for _ in range(4)] == [1, 1, 1, 1]
    assert scene.send(prompt(tokens=1)) == 0  # 1,000 beside 1,200
    scene.end(long, 0)
    assert [scene.send(prompt(tokens=500)) for _ in range(2)] == [0, 0]


def test_a_session_stays_and_moves_only_if_it_must():
    scene = Scene("session", replicas=5)
    talk = {s: scene.send(prompt(affinity=s)) for s in range(200)}
    assert len(set(talk.values())) == 5
    assert {s: scene.send(prompt(affinity=s)) for s in talk} == talk
    scene.down(2)
    after = {s: scene.send(prompt(affinity=s)) for s in talk}
    assert all(after[s] == home for s, home in talk.items() if home != 2)
    assert 2 not in after.values()
    scene.view.up.append(5)
    for column, value in ((scene.view.takes, True), (scene.view.in_flight, 0)):
        column.append(value)
    assert {s: scene.send(prompt(affinity=s)) for s in talk} == after  # one that began stays


def test_sessions_that_begin_go_where_they_would_have_without_others():
    """Which of them came before makes no difference."""
    first, second = Scene("session", replicas=4), Scene("session", replicas=4)
    forward = {s: first.send(prompt(affinity=s)) for s in range(50)}
    assert {s: second.send(prompt(affinity=s)) for s in reversed(range(50))} == forward
    assert forward == {s: max(range(4), key=lambda i: weight(s, i)) for s in range(50)}


@pytest.mark.parametrize("router", ["least-requests", "session"])
def test_requests_without_a_session_go_to_the_fewest(router):
    scene = Scene(router, replicas=2)
    scene.view.in_flight[:] = [3, 1]
    assert scene.send() == 1
    scene.view.in_flight[:] = [1, 3]
    assert scene.send() == 0


def test_an_application_stays_where_its_first_request_went():
    scene = Scene("least-requests", replicas=2)
    assert [scene.send(prompt(affinity=4)) for _ in range(3)] == [0, 0, 0]


def test_classes_are_apart():
    scene = Scene("class-aware:best_effort=0.25", replicas=4)
    assert [scene.send(prompt(service_class=BEST_EFFORT)) for _ in range(3)] == [3, 3, 3]
    assert [scene.send(prompt(service_class=REAL_TIME)) for _ in range(4)] == [0, 1, 2, 0]


def test_real_time_requests_overflow_and_best_effort_ones_do_not():
    scene = Scene("class-aware:best_effort=0.5,overflow=2", replicas=2)
    assert [scene.send() for _ in range(4)] == [0, 0, 1, 1]
    assert scene.send() == 0  # the other one has no fewer
    assert [scene.send(prompt(service_class=BEST_EFFORT)) for _ in range(9)] == [1] * 9


def test_the_only_replica_serves_both_classes():
    scene = Scene("class-aware", replicas=1)
    assert [scene.send(prompt(service_class=c)) for c in (REAL_TIME, BEST_EFFORT)] == [0, 0]


# -- load shedding ---------------------------------------------------------------------------------
def test_a_class_is_shed_while_every_replica_is_full():
    scene = Scene("round-robin:shed_be=1,shed_rt=3", replicas=2)
    offline = prompt(service_class=BEST_EFFORT)
    assert [scene.send(offline) for _ in range(3)] == [0, 1, Verdict.REJECT]
    assert [scene.send() for _ in range(5)] == [0, 1, 0, 1, Verdict.REJECT]
    scene.end(prompt(), 0)
    assert scene.send(offline) is Verdict.REJECT and scene.send() == 0


def test_what_is_shed_costs_its_class_and_helps_the_other():
    """Best-effort requests are rejected under load: all ends are told by class."""
    load = hybrid(3, 60, rate=300.0, sessions=0, applications=0, be_share=0.5)
    plain = simulate(load, replicas=2, router=parse_router("spread").build())
    shed = simulate(load, replicas=2, router=parse_router("spread:shed_be=8").build())
    before, after = (summarise(run.rows)["classes"] for run in (plain, shed))
    assert before["be"]["rejected"] == 0 < after["be"]["rejected"]
    assert after["rt"]["rejected"] == 0
    assert after["be"]["rejected"] + after["be"]["completed"] == before["be"]["submitted"]
    assert after["rt"]["mean_ttft_ms"] < before["rt"]["mean_ttft_ms"]


# -- every router ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", router_names())
@examples(40)
@given(data=st.data())
def test_it_sends_to_a_replica_that_is_up_and_the_same_again(name, data):
    """Whatever comes, ends and fails; a second router of the kind decides alike."""
    one, other = Scene(name, 4), Scene(name, 4)
    here: list = []
    for number in range(data.draw(st.integers(5, 30))):
        what = data.draw(st.sampled_from(["send", "send", "send", "end", "first", "fail"]))
        if what == "fail" and len(one.view.up) > 1 and not number % 5:
            gone = data.draw(st.sampled_from(one.view.up))
            for scene in (one, other):
                scene.down(gone)
                for request, replica in here:
                    if replica == gone:
                        scene.end(request, gone)
            here = [entry for entry in here if entry[1] != gone]
        elif what in ("end", "first") and here:
            request, replica = data.draw(st.sampled_from(here))
            for scene in (one, other):
                if what == "end":
                    scene.end(request, replica)
                else:
                    scene.first_token(request, replica)
            if what == "end":
                here.remove((request, replica))
        else:
            first = data.draw(st.integers(0, 5)) * 10
            request = prompt(
                *range(first, first + data.draw(st.integers(0, 4))),
                tokens=data.draw(st.integers(64, 200)),
                affinity=data.draw(st.integers(-1, 2)),
                service_class=data.draw(st.integers(0, 1)),
            )
            choices = [scene.send(request) for scene in (one, other)]
            assert choices[0] == choices[1] and choices[0] in one.view.up
            here.append((request, choices[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", router_names())
def test_it_serves_a_workload_step_by_step_as_in_runs(name):
    """On whatever replicas: nothing is lost, and steps taken at once give the same rows."""
    load = hybrid(5, 40, prefix_block=32)
    runs = [
        simulate(
            load, replicas=3, router=parse_router(name).build(), fast=fast, caching=True,
            block_tokens=16, audit=False,
        )
        for fast in (True, False)
    ]  # fmt: skip
    rows, exact = (run.rows for run in runs)
    left = rows.requests.outcome != "rejected"
    assert rows.requests.finished[left].all() and rows.requests.equals(exact.requests)
    assert set(rows.requests.replica) >= {0, 1, 2}


# -- files -----------------------------------------------------------------------------------------
MINE = """
from twinserve.sim.fleet.routers.base import Router, Shedding

class Last(Router[Shedding]):
    name = "last"
    Options = Shedding

    def place(self, request, stage, view):
        return view.up[-1]
"""


def test_a_router_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    scene = Scene("mine.py:Last:shed_be=4", replicas=3)
    assert [scene.send() for _ in range(3)] == [2, 2, 2] and scene.router.options.shed_be == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine.py:Lst", r"router file mine.py has no 'Lst' \(did you mean 'Last'\?\); write"),
        ("nowhere.py:Last", "router file nowhere.py: there is no such file; check the path"),
        ("mine.py:Last:off=1", "router 'mine.py:Last' has no option 'off'"),
    ],
)
def test_a_wrong_file_is_one_line(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(RegistryError, match=said):
        parse_router(text)
