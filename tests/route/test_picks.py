"""The live fleet tells a router what the simulated one does: the same views, the same picks."""

import numpy as np
import pytest

from tests.commands import refused
from tests.route.fronts import prompts_of, scene
from tests.route.test_prompts import told
from tests.sim.routing import Scene
from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.measured import KvMemory
from twinserve.backends.live.route.names import Sessions
from twinserve.backends.live.route.settings import router_of
from twinserve.policies.names import RegistryError
from twinserve.sim.cli.main import main
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Shedding
from twinserve.sim.fleet.routers.registry import router_names
from twinserve.sim.results.recorder import Load
from twinserve.sim.setup.config import SettingsError

REPLICAS, BLOCKS = 4, 500
OPTIONS = {
    "dynamo-kv": ":index=approximate",
    "llm-d": ":interval=0.1",
    "sglang": ":balance_abs=2",
    "class-aware": ":overflow=2",
    "round-robin": ":shed_be=6",
}
EXACT = {"dynamo-kv": "", "llm-d": ":index=exact", "conductor": ":reject=false"}
ROUTERS = [(name, OPTIONS.get(name, "")) for name in router_names() if name != "conductor"]
ROUTERS += list(EXACT.items())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def requests(count: int) -> list[Request]:
    """Conversations that go on, some of them best-effort, some with sessions."""
    rng = np.random.default_rng(3)
    prompts = prompts_of("trusted")
    texts = [f"system {i % 3} " * 40 + f"user {i} " for i in range(12)]
    found = []
    for i in range(count):
        who = int(rng.integers(len(texts)))
        texts[who] += "and then " * int(rng.integers(1, 40))
        body = {"prompt": texts[who], "vllm_xargs": {"class": "be" if who % 4 == 0 else "rt"}}
        session = f"user {who}" if who % 2 else None
        found.append(prompts.request(f"r{i}", body, 0.0, [], session))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), ROUTERS)
def test_a_live_router_picks_what_the_simulated_one_does(name, options):
    """A polled measurement a tenth of a second, requests that come and end between polls, KV
    events, a replica that is lost: on both sides the same."""
    # llm-d's age is one that the live side cannot be told: there the poll is as old as it is
    text = name + options
    simulated = Scene(
        text + (",age=0" if name == "llm-d" else ""), replicas=REPLICAS, blocks=BLOCKS
    )
    clock = Clock()
    profile = "llama-13b@v100-16g:tp4" if name == "conductor" else None
    live = RoutedFleet(router_of(text, True, profile), REPLICAS, clock, simulated.view.models[0])
    for worker in range(REPLICAS):
        live.came(worker, KvMemory(BLOCKS, 16))
    rng = np.random.default_rng(11)
    under_way, picks = [], []
    for i, request in enumerate(requests(400)):
        now = clock.now = simulated.view.now = i * 0.03 + 0.001
        tick = int(now / 0.1) * 0.1
        if not simulated.history or simulated.history[-1][0] < tick - 0.05:
            loads = [tuple(rng.integers(0, (20, 9, BLOCKS)).tolist()) for _ in range(REPLICAS)]
            simulated.history.append((tick - 1e-6, loads))
            for worker in live.up:
                live.measured(worker, Load(tick, *loads[worker], BLOCKS))
        if i == 250:
            simulated.down(1)
            live.failed(1)
            for stay in [one for one in under_way if one[1].worker == 1]:
                under_way.remove(stay)
                simulated.end(stay[0], 1)
                live.ended(stay[1])
        pick = live.choose(request)
        assert pick == simulated.send(request), i
        picks.append(pick)
        if isinstance(pick, int):
            under_way.append((request, live.sent(request, pick)))
            blocks = request.contents(16)
            stored = blocks[: rng.integers(0, len(blocks) + 1)]
            for news, contents in ((True, stored), (False, stored[len(stored) * 2 // 3 :])):
                if len(contents) and (news or i % 3 == 0):
                    router = simulated.router
                    (router.on_stored if news else router.on_removed)(pick, contents)
                    live.heard(pick, news, contents)
            if rng.random() < 0.7:
                simulated.first_token(request, pick)
                live.first_token(under_way[-1][1])
        while under_way and rng.random() < 0.45 or len(under_way) > 30:
            gone, stay = under_way.pop(int(rng.integers(len(under_way))))
            simulated.end(gone, stay.worker)
            live.ended(stay)
    assert live.view.in_flight == simulated.view.in_flight
    assert {0, 2, 3} <= set(picks) and 1 not in picks[250:]


def test_a_worker_that_comes_back_is_a_new_replica():
    live = RoutedFleet(router_of("session"), 2, Clock())
    (request, *_) = requests(3)
    live.came(0, KvMemory(10, 16))
    live.came(0, KvMemory(10, 16))  # it is here
    stay = live.sent(request, 0)
    live.failed(0)
    assert live.up == [] and live.choose(request).name == "HOLD"
    live.came(0, KvMemory(10, 16))
    assert live.at(0) == 0 and live.in_flight == 1
    live.ended(stay)
    live.ended(stay)
    assert live.in_flight == 0 and live.view.in_flight == [0, 0] and live.up == [0]


def test_a_worker_that_lost_a_request_does_not_get_it_again():
    live = RoutedFleet(router_of("spread"), 2, Clock())
    (request, *_) = requests(3)
    for worker in range(2):
        live.came(worker, KvMemory(10, 16))
    assert [live.choose(request), live.choose(request, {0})] == [0, 1]
    assert live.view.up == [0, 1] and live.view.takes == [True, True]
    assert live.choose(request, {0, 1}) == 0  # nobody else is there


def test_an_older_measurement_replaces_no_newer_one():
    live = RoutedFleet(router_of("vllm-dp"), 1, Clock())
    live.came(0, KvMemory(10, 16))
    live.measured(0, Load(2.0, 5, 1, 3, 10))
    live.measured(0, Load(1.0, 9, 9, 9, 10))
    assert live.view.load(0) == Load(2.0, 5, 1, 3, 10) and live.view.measured_s(0) == 2.0


@pytest.mark.parametrize(
    ("router", "events", "said"),
    [
        ("dynamo-kv", False, "dynamo-kv:index=approximate"),
        ("conductor", False, "KV events"),
        ("conductor", True, "--profile"),
        ("llm-d:lost=0.1,interval=1", False, "drop lost"),
        ("llm-d:age=0.2", False, "drop age"),
        ("llm-d:index=exact", False, "--kv-events.*llm-d:index=approximate"),
        ("llm-d:index=exact,events_lost=0.5", True, "drop events_lost"),
        ("dynamo-kv:events_age=1", False, "--kv-events"),
        ("dynamo-kv:events_age=1", True, "drop events_age"),
    ],
)
def test_routers_that_cannot_be_live_are_refused(router, events, said):
    with pytest.raises(SettingsError, match=said) as error:
        router_of(router, events)
    assert "\n" not in str(error.value)


def test_a_router_that_is_not_there():
    with pytest.raises(RegistryError, match="round-robin"):
        router_of("rond-robin")


class Recorder(Router[Shedding]):
    """Where it may, and what it hears."""

    name = "recorder"
    Options = Shedding

    def setup(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def place(self, request, stage, view) -> int:
        self.heard.append(("asked", view.up[-1]))
        return view.up[-1]

    def on_dispatched(self, request, replica: int) -> None:
        self.heard.append(("dispatched", replica))

    def on_first_token(self, request, replica: int) -> None:
        self.heard.append(("first token", replica))

    def on_ended(self, request, replica: int) -> None:
        self.heard.append(("ended", replica))

    def on_came(self, replica: int) -> None:
        self.heard.append(("came", replica))

    def on_failed(self, replica: int) -> None:
        self.heard.append(("failed", replica))


def test_what_a_router_hears_and_when():
    router = Recorder()
    live = RoutedFleet(router, 1, Clock())
    (request, *_) = requests(1)
    live.came(0, KvMemory(10, 16))
    live.choose(request)
    stay = live.sent(request, 0)
    live.first_token(stay)
    live.first_token(stay)
    live.failed(0)
    live.failed(0)
    live.ended(stay)
    live.first_token(stay)
    live.came(0, KvMemory(10, 16))
    assert router.heard == [
        *(("came", 0), ("asked", 0), ("dispatched", 0), ("first token", 0), ("failed", 0)),
        *(("ended", 0), ("came", 1)),
    ]


def test_without_its_libraries_one_line_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setattr("twinserve.backends.live.route.settings.find_spec", lambda name: None)
    said = refused(capsys, main, ["route", "--worker", "http://127.0.0.1:9"])
    assert "aiohttp" in said and "pip install 'twinserve[route]'" in said


# -- what is remembered of sessions, and for how long ----------------------------------------------
def test_the_silent_ones_are_forgotten_first():
    gone: list[int] = []
    sessions = Sessions(10.0, gone.append, room=2)
    a, b = sessions.of(b"a", 0.0), sessions.of(b"b", 1.0)
    assert sessions.of(b"a", 2.0) == a != b
    c = sessions.of(b"c", 3.0)  # no room
    assert gone == [b] and len(sessions) == 2
    d = sessions.of(b"d", 12.5)  # a was silent for more than ten seconds
    assert gone == [b, a]
    assert sessions.of(b"c", 13.0) == c and gone == [b, a]
    assert sessions.of(b"d", 30.0) == d and gone == [b, a, c]  # it was silent, too, and is here


def test_a_session_has_the_same_number_in_every_front():
    one, other = prompts_of(), prompts_of()
    told({"prompt": "x"}, other, session="another")
    numbers = {told({"prompt": "x"}, made, session="s").affinity for made in (one, other)}
    assert len(numbers) == 1 and 0 <= numbers.pop() < 2**56


def test_two_clients_may_give_a_session_the_same_name(tmp_path):
    path = tmp_path / "clients.yaml"
    path.write_text("header: X-Client\nclients:\n  a: {header: [a]}\n  b: {header: [b]}\n")
    prompts = prompts_of(str(path))
    a, b = (
        told({"prompt": "x"}, prompts, session="s", headers=[(b"x-client", who)]).affinity
        for who in (b"a", b"b")
    )
    assert a != b


@pytest.mark.parametrize("name", ["session", "least-requests"])
def test_routers_forget_where_a_session_was(name):
    live = RoutedFleet(router_of(name), 2, lambda: 0.0)
    for worker in range(2):
        live.came(worker, KvMemory(10, 16))
    sessions = Sessions(10.0, live.forgotten, room=3)
    for i in range(50):
        request = told({"prompt": "x"}, session=f"s{i}")
        assert sessions.of(b"s/None/s%d" % i, float(i)) == request.affinity
        live.sent(request, live.choose(request))
    assert len(live.router._home) == 3
    live.forgotten(12345)  # nobody knows it


def test_a_session_that_was_forgotten_while_it_waited():
    live = RoutedFleet(router_of("session"), 1, lambda: 0.0)
    live.came(0, KvMemory(10, 16))
    sessions = Sessions(10.0, live.forgotten, room=1)
    live.remembers = sessions.__contains__
    request = told({"prompt": "x"}, session="s0")
    assert sessions.of(b"s/None/s0", 0.0) == request.affinity
    sessions.of(b"another", 1.0)
    stay = live.sent(request, live.choose(request))
    live.ended(stay)
    assert not live.router._home


@pytest.mark.usefixtures("http")
async def test_a_front_forgets_sessions():
    async with scene(2, router="least-requests", session_s=0.05) as made:
        for i in range(8):
            await made.post(prompt="w1", headers={"X-Session-Id": f"s{i}"})
        clock = made.front.fleet._now
        last = clock()
        await made.until(lambda: clock() > last + 0.06)
        await made.post(prompt="w1", headers={"X-Session-Id": "new"})
        assert len(made.front.sessions) == len(made.front.fleet.router._home) == 1


def test_a_replica_that_failed_leaves_nothing_behind():
    """A worker that flaps is a new replica each time."""
    live = RoutedFleet(router_of("dynamo-kv:index=approximate"), 1, lambda: 0.0)
    for _ in range(5):
        live.came(0, KvMemory(100, 16))
        request = told({"prompt": "word " * 100})
        stay = live.sent(request, live.choose(request))
        live.first_token(stay)
        live.failed(0)
        live.ended(stay)
    live.came(0, KvMemory(100, 16))
    live.failed(0)
    assert not live.router._active
