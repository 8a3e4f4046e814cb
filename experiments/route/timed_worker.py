"""A server whose step times are known: a simulated replica that does not run ahead of the wall's
clock, behind the API of `vllm serve`. Before it the front, the network, polls and clients are real.
`python -m twinserve.experiments.route.timed_worker SETTINGS.json PORT`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web

from twinserve.policies.requests import End
from twinserve.sim.engine.clock import Clock
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.replicas import SimulatedBackends, compose, kinds

_TOKEN = 5  # that it generates, always


class TimedEngine:
    """config: of one replica, `exact`: each step ends by itself, so that its tokens can leave."""

    def __init__(self, config: SimulationConfig) -> None:
        inputs = resolve(config)
        ((description, _),) = kinds(inputs, inputs.policies[0])
        self.clock = Clock()
        made = description.inputs(inputs)
        self.engine = compose(made, description, 0, self.clock, backend=SimulatedBackends()).engine
        self.engine.on_ended = lambda rows: None
        self.open: dict[int, asyncio.Queue[int]] = {}
        self._told: dict[int, int] = {}
        self._news = asyncio.Event()
        self._began_s = asyncio.get_running_loop().time()
        self._count = 0

    def catch_up(self) -> None:
        """All that was due has happened."""
        now = asyncio.get_running_loop().time() - self._began_s
        if now > self.clock.now:
            self.clock.run(until=now)
        outputs = self.engine.core.requests.output_tokens
        for row, tokens in self.open.items():
            for _ in range(int(outputs[row]) - self._told[row]):
                tokens.put_nowait(_TOKEN)
            self._told[row] = int(outputs[row])

    async def drive(self) -> None:
        while True:
            self.catch_up()
            self._news.clear()
            due_s = self._began_s + self.clock.peek() - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(min(max(due_s, 0.0), 3600.0)):
                    await self._news.wait()
            except TimeoutError:
                pass

    def submit(self, prompt_tokens: int, output_tokens: int) -> int:
        self.catch_up()
        self._count += 1
        row = self.engine.submit(
            f"r{self._count}", output_tokens, prompt_tokens=prompt_tokens, arrival_s=self.clock.now
        )
        self.open[row], self._told[row] = asyncio.Queue(), 0
        self._news.set()
        return row

    def ends(self, row: int) -> None:
        """Its client has all, or has left."""
        self.catch_up()
        del self.open[row], self._told[row]
        self.engine.withdraw(row, End.DISCONNECTED)
        self._news.set()

    def page(self) -> str:
        self.catch_up()
        load = self.engine.load(self.clock.now)
        blocks, size = self.engine.core.ledger.num_blocks, self.engine.core.ledger.block_tokens
        return (
            f'vllm:num_requests_running{{engine="0"}} {load.running}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {load.waiting}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {load.used / blocks}\n'
            f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}"}} 1\n'
        )


def application(engine: TimedEngine) -> web.Application:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="\n" + engine.page())

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "timed", "object": "model"}]})

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, count = body["prompt"], body["max_tokens"]
        row = engine.submit(len(prompt), count)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        tokens = engine.open[row]
        data = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "timed"}
        try:
            for i in range(count):
                token = await tokens.get()
                choice: dict = {"index": 0, "text": f" w{token}", "token_ids": [token]}
                choice["finish_reason"] = "length" if i == count - 1 else None
                if not i:
                    choice["prompt_token_ids"] = prompt
                said = json.dumps({**data, "choices": [choice]})
                await answer.write(b"data: %s\n\n" % said.encode())
            if (body.get("stream_options") or {}).get("include_usage"):
                total = len(prompt) + count
                usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
                said = json.dumps({**data, "choices": [], "usage": usage | {"total_tokens": total}})
                await answer.write(b"data: %s\n\n" % said.encode())
            await answer.write(b"data: [DONE]\n\n")
        finally:
            engine.ends(row)
        return answer

    app = web.Application(client_max_size=2**26)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", generate)
    return app


async def run(settings: Path, port: int) -> None:
    engine = TimedEngine(SimulationConfig(**json.loads(settings.read_text())))
    runner = web.AppRunner(application(engine), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await engine.drive()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
