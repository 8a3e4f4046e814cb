"""Clients that each send one request after the other, and what the tokens took to reach them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field

import aiohttp

_STAMP = re.compile(rb'"text": ?" (\d+)"')
PROMPT = "Once upon a time there was a router in front of real servers. " * 16  # about 1 kB


@dataclass
class Seen:
    """Seconds. first_s: from sending a request to its first token; on_the_way_s: of every token,
    from the worker to its client. failed: requests without a whole answer."""

    first_s: list[float] = field(default_factory=list)
    on_the_way_s: list[float] = field(default_factory=list)
    failed: int = 0


async def load(urls: list[str], clients: int, tokens: int, answer_s: float, time_s: float) -> Seen:
    """Clients begin at any moment of `answer_s`, so that requests are spread; what ends within
    `time_s` after that counts. Several urls are taken in turn."""
    seen, turn = Seen(), 0
    begin = time.monotonic() + answer_s
    end = begin + time_s
    body = json.dumps({"model": "stamps", "prompt": PROMPT, "max_tokens": tokens, "stream": True})
    draws = random.Random(1)

    async def one(delay_s: float) -> None:
        nonlocal turn
        await asyncio.sleep(delay_s)
        while time.monotonic() < end:
            turn += 1
            await ask(urls[turn % len(urls)] + "/v1/completions")

    async def ask(url: str) -> None:
        sent, times, whole = time.monotonic(), [], False
        first, rest = 0.0, b""
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                async for piece in answer.content.iter_any():
                    now = time.monotonic_ns()
                    first = first or now / 1e9 - sent
                    lines, _, rest = (rest + piece).rpartition(b"\n")  # a piece may end anywhere
                    times += [(now - int(stamp)) / 1e9 for stamp in _STAMP.findall(lines)]
                    whole |= b"[DONE]" in lines
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        if begin <= time.monotonic() <= end:
            seen.failed += not (whole and len(times) == tokens)
            seen.first_s += [first] if first else []  # without an answer there is no time to it
            seen.on_the_way_s += times

    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one(draws.uniform(0, answer_s)))
    return seen
