"""A server that streams stamps instead of words: each token's text is when it was sent, by the
clock that all processes of a host share. So what lies between server and client can be measured
token by token, whatever a token takes to generate.
`python -m twinserve.experiments.route.worker PORT TOKENS PACE_S`."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from aiohttp import web

_PAGE = (
    'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_waiting{engine="0"} 0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1\n'
)


def application(tokens: int, pace_s: float) -> web.Application:
    """tokens: of an answer that asks for no number of them."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=_PAGE)

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tells = bool(body.get("return_token_ids"))
        count = body.get("max_tokens") or tokens
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for i in range(count):
            await asyncio.sleep(pace_s)
            choice: dict = {"index": 0, "logprobs": None, "finish_reason": None}
            if i == count - 1:
                choice["finish_reason"] = "length"
            if tells:
                choice["token_ids"] = [i]
                if not i:
                    choice["prompt_token_ids"] = list(range(256))
            choice["text"] = f" {time.monotonic_ns()}"
            data = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "stamps"}
            await answer.write(b"data: %s\n\n" % json.dumps({**data, "choices": [choice]}).encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    app = web.Application()
    app.router.add_get("/health", page)
    app.router.add_get("/metrics", page)
    app.router.add_post("/v1/completions", generate)
    return app


async def run(port: int, tokens: int, pace_s: float) -> None:
    runner = web.AppRunner(application(tokens, pace_s), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
