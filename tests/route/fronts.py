"""A front before fake workers in one event loop, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from twinserve.backends.live.route.names import Sessions
from twinserve.backends.live.route.prompts import Prompts
from twinserve.backends.live.route.settings import RouteSettings
from twinserve.backends.live.serving.clients import read_clients

if TYPE_CHECKING:  # libraries that may not be there load when a test begins
    from tests.route.fake_worker import FakeWorker
    from twinserve.backends.live.route.front import Front

FAST = {"health_s": 0.05, "health_timeout_s": 0.2, "misses": 2, "poll_s": 0.02, "port": 0}


def prompts_of(clients: str | None = None) -> Prompts:
    """What a router is told, and no session is forgotten."""
    return Prompts(read_clients(clients), Sessions(1e9, lambda number: None))


class Scene:
    def __init__(self, front: Front, port: int, workers: list[FakeWorker]) -> None:
        import aiohttp

        self.front, self.port, self.workers = front, port, workers
        self.url = f"http://127.0.0.1:{port}"
        self.session = aiohttp.ClientSession()

    async def post(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, dict[str, Any], Any]:
        """Status, JSON, headers."""
        body = {"model": "fake", "max_tokens": 4, **body}
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The data of all events; the last one is {} where [DONE] came."""
        body = {"model": "fake", "max_tokens": 8, "stream": True, **body}
        found: list[dict[str, Any]] = []
        async with self.session.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            for line in (await answer.text()).splitlines():
                if line:
                    assert line.startswith("data: ")
                    found.append({} if line == "data: [DONE]" else json.loads(line[6:]))
        return found

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def metric(self, name: str) -> float:
        """A sample of the front's /metrics, `name{labels}` as it stands there."""
        _, page = await self.get("/metrics")
        (line,) = [line for line in page.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[-1])

    async def until(self, holds: Callable[[], object]) -> None:
        """The deadline is for what never comes: no machine is so busy."""
        async with asyncio.timeout(60.0):
            while not holds():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def scene(
    workers: int = 2, pace_s: float = 0.0, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[Scene]:
    """All workers are up when it begins. host: by which they are called."""
    from tests.route.fake_worker import FakeWorker
    from twinserve.backends.live.route.front import Front

    fakes = [FakeWorker(pace_s) for _ in range(workers)]
    for fake in fakes:
        fake.host = host
        await fake.start()
    given = {**FAST, **settings}
    front = Front(RouteSettings(workers=[fake.url for fake in fakes], **given))
    made = Scene(front, await front.start(), fakes)
    try:
        await made.until(lambda: len(front.fleet.up) == workers)
        yield made
    finally:
        await made.session.close()
        await front.stop()
        for fake in fakes:
            await fake.stop()


def text(events: list[dict[str, Any]]) -> str:
    """What a client of completions or chats puts together."""
    found = ""
    for event in events:
        for choice in event.get("choices", []):
            found += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found
