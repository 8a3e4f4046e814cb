"""A server that speaks as `vllm serve` does and generates by arithmetic: the next token follows
from all tokens before it, so that answers that go on elsewhere can be told from those that do not.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

WORDS = 997


def tokens_of(text: str) -> list[int]:
    return [int(word[1:]) if word[1:].isdigit() else len(word) for word in text.split()]


def generated(prompt: str | list[int], count: int) -> list[int]:
    """Each token of all before it, those of the prompt too."""
    state, answer = 7, []
    for token in tokens_of(prompt) if isinstance(prompt, str) else prompt:
        state = (state * 31 + token + 1) % 1_000_003
    for _ in range(count):
        answer.append(state % WORDS)
        state = (state * 31 + answer[-1] + 1) % 1_000_003
    return answer


def text_of(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def chat_prompt(messages: list[dict[str, str]]) -> str:
    return " ".join(f"{one['role']} {one['content']}" for one in messages)


class FakeWorker:
    """pace_s     between two tokens
    dies_after    tokens of one answer after which the process is gone; None: never
    fails_with    (status, body) of the next answers
    healthy       what /health says; silent: it accepts connections, and says nothing
    fails_after   tokens of one answer after which an error ends it, and no [DONE] follows
    aborts_after  tokens of one answer after which it is given up, as by a server that ends
    adds          headers of answers
    host          by which it is called
    running, waiting, kv_use  what /metrics says
    block_tokens  what it says of its cache; 0: nothing
    seen          bodies that came, with their paths; seen_texts: those for /tokenize, and the types
                  that these said they had
    no_tokens     /tokenize fails; odd_tokens: what it answers
    """

    def __init__(self, pace_s: float = 0.0, blocks: int = 100) -> None:
        self.pace_s, self.blocks = pace_s, blocks
        self.dies_after: int | None = None
        self.fails_after: int | None = None
        self.aborts_after: int | None = None
        self.adds: dict[str, str] = {}
        self.host = "127.0.0.1"
        self.drops_before_answer = 0
        self.fails_with: tuple[int, dict[str, Any]] | None = None
        self.healthy = True
        self.silent = False
        self.running, self.waiting, self.kv_use = 0, 0, 0.0
        self.block_tokens = 16
        self.seen: list[tuple[str, dict[str, Any], Mapping[str, str]]] = []
        self.seen_texts: list[dict[str, Any]] = []
        self.seen_types: list[list[str]] = []
        self.no_tokens = False
        self.odd_tokens: list[Any] | None = None
        self.gate = asyncio.Event()  # answers wait for it
        self.gate.set()
        self.busy = 0
        self.left = 0  # whose client hung up
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """As kill -9 does: no answer ends, and nobody listens."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for site in list(runner.sites):
            await site.stop()
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    stop = die

    async def _health(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(3600)
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        where = 'engine="0",model_name="fake"'
        return web.Response(
            text="# HELP vllm:num_requests_running Number of requests\n"
            f"vllm:num_requests_running{{{where}}} {float(self.running)}\n"
            f"vllm:num_requests_waiting{{{where}}} {float(self.waiting)}\n"
            f'vllm:num_requests_waiting_by_reason{{{where},reason="capacity"}} 77.0\n'
            f"vllm:kv_cache_usage_perc{{{where}}} {self.kv_use}\n"
            + (
                f'vllm:cache_config_info{{block_size="{self.block_tokens}",engine="0",'
                f'num_gpu_blocks="{self.blocks}"}} 1.0\n'
                if self.block_tokens
                else ""
            )
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen_texts.append(body)
        self.seen_types.append(request.headers.getall("Content-Type"))
        if self.no_tokens:
            return web.json_response({"error": {"message": "no"}}, status=501)
        prompt = chat_prompt(body["messages"]) if "messages" in body else body["prompt"]
        tokens = tokens_of(prompt) if self.odd_tokens is None else self.odd_tokens
        return web.json_response({"count": len(tokens), "tokens": tokens, "max_model_len": 9999})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, body, request.headers))
        self.busy += 1
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        finally:
            self.busy -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.silent:
            await asyncio.sleep(3600)
        if self.drops_before_answer:
            self.drops_before_answer -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        await self.gate.wait()
        if self.fails_with is not None:
            status, said = self.fails_with
            return web.json_response(said, status=status, headers=self.adds)
        chat = request.path.endswith("/chat/completions")
        prompt = chat_prompt(body["messages"]) if chat else body["prompt"]
        ids = tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
        answer = generated(ids, body.get("max_tokens") or 16)
        if body.get("stream"):
            return await self._stream(request, body, chat, ids, answer)
        for _ in answer:
            await asyncio.sleep(self.pace_s)
        choice = {"index": 0, "finish_reason": "length"}
        if self.aborts_after is not None:
            answer, choice["finish_reason"] = answer[: self.aborts_after], "abort"
        if chat:
            choice["message"] = {"role": "assistant", "content": text_of(answer)}
        else:
            choice["text"] = text_of(answer)
        said = {"id": "x", "choices": [choice], "usage": usage(ids, answer)}
        return web.json_response(said, headers=self.adds)

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        chat: bool,
        ids: list[int],
        answer: list[int],
    ) -> web.StreamResponse:
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers=kind | self.adds)
        await response.prepare(request)
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": f"{self.port}-{len(self.seen)}", "object": kind, "created": self.port}
        tells = bool(body.get("return_token_ids"))

        async def send(**data: Any) -> None:
            await response.write(b"data: " + json.dumps({**head, **data}).encode() + b"\n\n")

        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await send(choices=[first], **({"prompt_token_ids": ids} if tells else {}))
        for i, token in enumerate(answer):
            if self.dies_after is not None and i >= self.dies_after:
                await asyncio.shield(asyncio.create_task(self.die()))
                return response
            if self.fails_after is not None and i >= self.fails_after:
                await send(error={"message": "out of memory", "code": 500})
                return response
            if self.aborts_after is not None and i >= self.aborts_after:
                last: dict[str, Any] = {"index": 0, "finish_reason": "abort"}
                last |= {"delta": {"content": ""}} if chat else {"text": ""}
                await send(choices=[last])
                break
            await asyncio.sleep(self.pace_s)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": f" w{token}"}} if chat else {"text": f" w{token}"}
            if i == len(answer) - 1:
                choice["finish_reason"] = "length"
            if tells:
                choice["token_ids"] = [token]
                if not chat and i == 0:
                    choice["prompt_token_ids"] = ids
            await send(choices=[choice])
        if (body.get("stream_options") or {}).get("include_usage"):
            await send(choices=[], usage=usage(ids, answer))
        await response.write(b"data: [DONE]\n\n")
        return response


def usage(ids: list[int], answer: list[int]) -> dict[str, int]:
    total = len(ids) + len(answer)
    return {"prompt_tokens": len(ids), "completion_tokens": len(answer), "total_tokens": total}
