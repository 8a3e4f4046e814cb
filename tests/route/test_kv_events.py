"""A front that hears what fake servers publish of their caches."""

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from tests.route.fake_worker import tokens_of
from tests.route.fronts import Scene, scene
from tests.route.kv_publisher import BLOCK, CLEARED, KvPublisher, removed, stored
from twinserve.backends.live.route.settings import KvEndpoints, RouteSettings

pytestmark = pytest.mark.usefixtures("http")

TEXTS = [" ".join(f"w{(i * j + i) % 90}" for j in range(10 * BLOCK + 3)) for i in (3, 5)]
IDS = [tokens_of(text) for text in TEXTS]


@contextlib.asynccontextmanager
async def heard(
    replays: bool = True, keeps: int = 10_000, publishers: list[KvPublisher] | None = None, **given
) -> AsyncIterator[tuple[Scene, list[KvPublisher]]]:
    """Two workers that publish, and are listened to."""
    made = publishers or [KvPublisher(keeps) for _ in range(2)]
    endpoints = [one.both if replays else one.events for one in made]
    settings = {"router": "dynamo-kv", "kv_events": endpoints, "health_timeout_s": 5.0, **given}
    try:
        async with scene(2, **settings) as front:
            for one in made:
                await front.until(lambda one=one: one.listeners and (one.asked or not replays))
            yield front, made
    finally:
        for one in made:
            one.close()


def of(scene: Scene, worker: int, name: str, **labels: str) -> Any:
    """A metric of a worker."""
    more = "".join(f',{key}="{value}"' for key, value in labels.items())
    inner = f'worker="{scene.workers[worker].url}"'
    inner = (more.lstrip(",") + "," + inner) if labels else inner
    return scene.metric(f"twinserve_route_{name}{{{inner}}}")


async def knows(scene: Scene, worker: int, blocks: int) -> None:
    events = scene.front.workers.events
    assert events is not None
    await scene.until(lambda: events.held(worker) == blocks)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["dynamo-kv", "llm-d:index=exact,interval=0.02", "conductor"])
async def test_requests_go_where_their_prompts_are(router):
    profile = "llama-13b@v100-16g:tp4" if router == "conductor" else None
    async with heard(router=router, profile=profile) as (made, (first, second)):
        await first.publish(stored(IDS[0]))
        await second.publish(stored(IDS[1]))
        await knows(made, 0, 10)
        await knows(made, 1, 10)
        for _ in range(2):  # by token ids, by text, and as a chat
            for i in (1, 0):
                before = len(made.workers[i].seen)
                assert (await made.post(prompt=IDS[i]))[0] == 200
                assert (await made.post(prompt=TEXTS[i] + " w1"))[0] == 200
                assert len(made.workers[i].seen) == before + 2
        assert await of(made, 0, "kv_blocks") == 10
        assert await of(made, 1, "kv_batches_total") == 1
        await second.publish(removed(IDS[1]))
        await first.publish(stored(IDS[1]))
        await knows(made, 0, 20)
        await knows(made, 1, 0)
        before = len(made.workers[0].seen)
        assert (await made.post(prompt=TEXTS[1]))[0] == 200
        assert len(made.workers[0].seen) == before + 1
        await first.publish(CLEARED)
        await knows(made, 0, 0)


async def test_chats_are_tokenised_where_the_template_is():
    async with heard() as (made, publishers):
        said = [{"role": "user", "content": TEXTS[0]}]
        await publishers[1].publish(stored(tokens_of(f"user {TEXTS[0]}")))
        await knows(made, 1, 10)
        more = {"tools": [], "temperature": 0.5}
        assert (await made.post("/v1/chat/completions", messages=said, **more))[0] == 200
        assert len(made.workers[1].seen) == 1
        (asked,) = made.workers[0].seen_texts  # the one with the fewest requests
        assert asked == {"model": "fake", "messages": said, "tools": []}


async def test_without_token_ids_a_prompt_is_nowhere():
    """And is answered all the same."""
    async with heard() as (made, publishers):
        for worker in made.workers:
            worker.no_tokens = True
        await publishers[1].publish(stored(IDS[0]))
        await knows(made, 1, 10)
        assert (await made.post(prompt=TEXTS[0]))[0] == 200
        assert len(made.workers[0].seen) == 1
        assert await made.metric('twinserve_route_errors_total{kind="tokenize"}') == 1
        assert (await made.post(prompt=IDS[0]))[0] == 200  # has them; nobody is asked
        assert len(made.workers[0].seen_texts) + len(made.workers[1].seen_texts) == 1


async def test_what_was_published_before_the_front_came():
    publishers = [KvPublisher(), KvPublisher()]
    await publishers[1].publish(stored(IDS[0]))
    await publishers[1].publish(removed(IDS[0], first=6))
    async with heard(publishers=publishers) as (made, _):
        await knows(made, 1, 6)
        await publishers[1].publish(stored(IDS[0], first=6))
        await knows(made, 1, 10)


async def test_lost_events_are_replayed():
    async with heard() as (made, (one, _)):
        await one.publish(stored(IDS[0][: 4 * BLOCK]))
        await knows(made, 0, 4)
        await one.publish(stored(IDS[0], first=4), lost=True)
        await one.publish(removed(IDS[0], first=9))
        await knows(made, 0, 9)
        assert one.asked == [0, 1]
        assert await of(made, 0, "kv_gaps_total", outcome="replayed") == 1


@pytest.mark.parametrize("replays", [False, True])
async def test_lost_events_that_nobody_has_empty_the_index(replays):
    """Without a replay socket, or where its buffer is too short."""
    async with heard(replays, keeps=1) as (made, (one, _)):
        events = made.front.workers.events
        await one.publish(stored(IDS[0]))
        await knows(made, 0, 10)
        for _ in range(3):
            await one.publish(CLEARED, lost=True)
        await one.publish(stored(IDS[1]))
        await made.until(lambda: events.held(0) == 10 and _gaps(made, "dropped"))
        before = len(made.workers[0].seen)
        assert (await made.post(prompt=IDS[1]))[0] == 200
        assert len(made.workers[0].seen) == before + 1
        assert await of(made, 0, "kv_gaps_total", outcome="dropped") == 1


def _gaps(made: Scene, outcome: str) -> float:
    url = made.workers[0].url
    return made.front.counters.kv_gaps.labels(url, outcome)._value.get()


@pytest.mark.slow
async def test_a_worker_that_was_down_is_listened_to_again():
    async with heard() as (made, (one, _)):
        await one.publish(stored(IDS[0]))
        await knows(made, 0, 10)
        await made.workers[0].die()
        await made.until(lambda: made.front.fleet.up == [1])
        assert made.front.workers.events.held(0) is None
        one.begin_anew()
        await made.workers[0].start()
        await made.until(lambda: made.front.fleet.up == [0, 1])
        await made.until(lambda: len(one.asked) == one.listeners == 2)
        await one.publish(stored(IDS[0][: 2 * BLOCK]))
        await knows(made, 0, 2)
        assert (await made.post(prompt=IDS[0]))[0] == 200


async def test_messages_that_cannot_be_read_empty_the_index_and_the_next_is_heard():
    async with heard() as (made, (one, _)):
        await one.publish(stored(IDS[0]))
        await knows(made, 0, 10)
        await one.publish_bytes(b"\xc1 no msgpack")
        await knows(made, 0, 0)
        assert await of(made, 0, "kv_gaps_total", outcome="dropped") == 1
        await one.publish(stored(IDS[1]))
        await knows(made, 0, 10)


async def test_a_replay_that_cannot_be_read_is_none():
    """What waits for it is taken in all the same."""
    publishers = [KvPublisher(), KvPublisher()]
    publishers[0].garbled = True
    async with heard(publishers=publishers) as (made, (one, _)):
        await one.publish(stored(IDS[0]))
        await knows(made, 0, 10)
        await one.publish(CLEARED, lost=True)
        await one.publish(stored(IDS[1][: 3 * BLOCK]))
        await knows(made, 0, 3)
        assert await of(made, 0, "kv_gaps_total", outcome="dropped") == 1
        await one.publish(stored(IDS[1], first=3))
        await knows(made, 0, 10)
        assert len(one.asked) == 2


@pytest.mark.parametrize("limit", ["REPLAY_BYTES", "_WHOLE_REPLAY_S"])
async def test_a_replay_without_end_is_not_taken(limit, monkeypatch):
    """What comes live counts then."""
    from twinserve.backends.live.route import kv_events

    async with heard() as (made, (one, _)):
        await one.publish(stored(IDS[0]))
        await knows(made, 0, 10)
        monkeypatch.setattr(kv_events, limit, 0)
        await one.publish(CLEARED, lost=True)
        await one.publish(stored(IDS[1][: 3 * BLOCK]))
        await knows(made, 0, 3)
        assert await of(made, 0, "kv_gaps_total", outcome="dropped") == 1
        monkeypatch.undo()
        await one.publish(stored(IDS[1], first=3), lost=True)
        await one.publish(CLEARED)
        await knows(made, 0, 0)
        assert await of(made, 0, "kv_gaps_total", outcome="replayed") == 1


async def test_events_come_over_ipv6_too():
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    publishers = [KvPublisher(host=host) for host in ("[::1]", "127.0.0.1")]
    await publishers[0].publish(stored(IDS[0][:BLOCK]))
    async with heard(publishers=publishers) as (made, (one, _)):
        await one.publish(stored(IDS[0], first=1))
        await knows(made, 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("said", [[2**70], [-1], ["w"], [True]])
async def test_token_ids_that_are_none(said):
    async with heard() as (made, _):
        for worker in made.workers:
            worker.odd_tokens = said * (2 * BLOCK)
        assert (await made.post(prompt=TEXTS[0]))[0] == 200
        assert await made.metric('twinserve_route_errors_total{kind="tokenize"}') == 1


async def test_headers_of_a_question_for_token_ids():
    async with heard() as (made, _):
        headers = {"content-type": "text/plain"}
        await made.post(prompt=TEXTS[0], headers=headers)
        assert made.workers[0].seen_types == [["application/json"]]


async def test_nobody_asks_for_token_ids_for_a_router_that_hears_no_events():
    async with heard(router="dynamo-kv:index=approximate") as (made, _):
        for _ in range(4):
            assert (await made.post(prompt=TEXTS[0]))[0] == 200
        assert [len(worker.seen_texts) for worker in made.workers] == [0, 0]
        assert sum(len(worker.seen) for worker in made.workers) == 4


def test_endpoints_of_workers():
    workers = ["http://10.0.0.1:8000", "http://[::1]:8000"]
    both = "tcp://*:5557,tcp://*:5558"
    found = RouteSettings(workers=workers, kv_events=[both]).endpoints
    assert found == [
        KvEndpoints("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        KvEndpoints("tcp://[::1]:5557", "tcp://[::1]:5558"),
    ]
    named = RouteSettings(workers=workers[:1], kv_events=["tcp://other:1"]).endpoints
    assert (
        named == [KvEndpoints("tcp://other:1")] and RouteSettings(workers=workers).endpoints == []
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["tcp://a:1"], "1 for 2 workers"),
        (["tcp://a:1", "ipc://b"], "'ipc://b' is no endpoint"),
        (["tcp://a:1", "tcp://b"], "'tcp://b' is no endpoint"),
        (["tcp://a:1", "tcp://b:x"], "no endpoint"),
        (["tcp://a:1", "tcp://[::1:5"], "no endpoint"),
        (["tcp://a:1", "tcp://you@b:1"], "no endpoint"),
        (["tcp://a:1", "tcp://b:1?x"], "no endpoint"),
        (["tcp://a:1", "tcp://a:1"], "'?tcp://a:1'? is named twice"),
        (["tcp://a:1,tcp://a:1", "tcp://b:1"], "named twice"),
        (["tcp://a:1", "tcp://b:1,http://b:2"], "'http://b:2' is no endpoint"),
    ],
)
def test_endpoints_that_are_none(given, said):
    with pytest.raises(ValueError, match=said):
        RouteSettings(workers=["http://a:1", "http://b:1"], kv_events=given)
