"""What is remembered of sessions, and for how long."""

import pytest

from tests.route.fronts import prompts_of, scene
from tests.route.test_prompts import told
from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.measured import KvMemory
from twinserve.backends.live.route.names import Sessions
from twinserve.backends.live.route.settings import router_of


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
