"""KV events of real `vllm serve` processes: what `twinserve route` says is cached is what the
servers find, prompt by prompt, while they store and evict."""

import asyncio
import json
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from tests.live.serve_http import NAME, Server, write_served_model
from tests.live.test_route_live import CHAT
from tests.route.test_record import decided

pytestmark = [pytest.mark.nightly, pytest.mark.live, pytest.mark.alone]

BLOCK, BLOCKS = 32, 129
ARGUMENTS = ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
ARGUMENTS += ["--num-gpu-blocks-override", str(BLOCKS), "--enable-prefix-caching"]
ARGUMENTS += ["--enable-prompt-tokens-details"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def servers(vllm, tmp_path_factory) -> Iterator[tuple[list[Server], list[str]]]:
    """Two, and where they publish."""
    for name in ("aiohttp", "zmq", "msgspec"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("published")
    model = write_served_model(folder / "model")
    (folder / "chat.jinja").write_text(CHAT)
    started: list[Server] = []
    endpoints = []
    try:
        for i in range(2):
            (folder / str(i)).mkdir()
            events, replay = (f"tcp://*:{free_port()}" for _ in range(2))
            config = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events,
                "replay_endpoint": replay,
            }
            given = [*ARGUMENTS, "--chat-template", str(folder / "chat.jinja")]
            given += ["--kv-events-config", json.dumps(config)]
            started.append(Server(folder / str(i), model, None, given))
            endpoints.append(f"{events},{replay}".replace("*", "127.0.0.1"))
        for server in started:
            server.wait(420)
        yield started, endpoints
    finally:
        for server in started:
            server.stop()


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


class Conversations:
    """Prompts that begin with one of a few texts, and go on with what they had before."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._texts = [self._rng.integers(5, 400, 3 * BLOCK).tolist() for _ in range(8)]

    def next(self) -> list[int]:
        who = int(self._rng.integers(len(self._texts)))
        text = self._texts[who]
        new = self._rng.integers(5, 400, int(self._rng.integers(1, 3 * BLOCK))).tolist()
        self._texts[who] = text[: 3 * BLOCK] if len(text) > 24 * BLOCK else text + new
        return text


@pytest.mark.parametrize("router", ["dynamo-kv", "llm-d:index=exact,interval=0.1"])
def test_what_events_say_is_what_servers_find(servers, router, tmp_path):
    """Prompts as token ids, as text and as chats. Each server's cache is too small for all. What
    was recorded gives the same views and picks again."""
    from tests.route.fronts import Scene
    from twinserve.backends.live.route.front import Front
    from twinserve.backends.live.route.settings import RouteSettings
    from twinserve.sim.fleet.routers.prefixes import OfPrefixes
    from twinserve.sim.results.routing import read_routing

    real, endpoints = servers

    async def test() -> None:
        settings = RouteSettings(
            workers=[server.url for server in real],
            router=router,
            port=0,
            kv_events=endpoints,
            health_timeout_s=30.0,
            record=tmp_path / "routing.jsonl.gz",
        )
        front = Front(settings)
        made = Scene(front, await front.start(), [])
        made.workers = real  # type: ignore[assignment]
        try:
            await made.until(lambda: len(front.fleet.up) == 2, 60)
            found, cached = await followed(front, made)
        finally:
            await made.session.close()
            await front.stop()
        assert found == cached
        assert sum(cached) > 50 * BLOCK and cached.count(0) < 50

    async def followed(front, made) -> tuple[list[int], list[int]]:
        """Cached tokens of each prompt: as the router sees them, and as the server did."""
        router = front.fleet.router
        assert isinstance(router, OfPrefixes)
        conversations, seen, said = Conversations(1), [], []
        dispatched = router.on_dispatched

        def look(request, replica: int) -> None:
            blocks = router._prefixes.matched_at(request, replica, router.view)
            # the last token is always computed
            seen.append(min(blocks, (request.prompt_tokens - 1) // BLOCK) * BLOCK)
            dispatched(request, replica)

        router.on_dispatched = look
        for i in range(120):
            tokens = conversations.next()
            body: dict = {"prompt": tokens if i % 3 else words(tokens)}
            path = "/v1/completions"
            if i % 3 == 2:
                path = "/v1/chat/completions"
                body = {"messages": [{"role": "user", "content": words(tokens)}]}
            status, answer, _ = await made.post(path, temperature=0.0, **body, model=NAME)
            assert status == 200, answer
            said.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            await quiet(front)
        events = front.workers.events
        assert events.unnamed == [0, 0]
        held = [events.held(worker) for worker in range(2)]
        assert all(40 < count < BLOCKS for count in held), held
        assert sum(front.counters.kv_gaps.labels(s.url, "dropped")._value.get() for s in real) == 0
        return seen, said

    async def quiet(front) -> None:
        """The last events have come: a server with a core of its own publishes within a tenth of a
        second."""
        events = front.workers.events
        before = None
        while before != (before := list(events.batches)):
            await asyncio.sleep(0.4)

    asyncio.run(asyncio.wait_for(test(), 300))
    record = read_routing(tmp_path / "routing.jsonl.gz")
    again = decided(record)
    assert again.asked == 120 and sum(event.kind == "heard" for event in record.events) > 50
    assert (again.other_views, again.other_choices, again.first_other) == (0, 0, "")
