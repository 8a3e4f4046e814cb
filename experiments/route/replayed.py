"""A workload sent to a live front as it arrives, and when its tokens came."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np

from twinserve.traces.workload import Workload

_VOCABULARY = range(5, 400)  # token ids that any model has


async def replayed(
    url: str,
    model: str,
    workload: Workload,
    seed: int,
    beside: Callable[[float], Awaitable[None]] | None = None,
) -> dict[str, np.ndarray]:
    """Requests in the order of `workload`. Seconds from when a request was due: ttft, tpot, e2el of
    those that got all their tokens. A client that is late counts as latency.

    seed    of the prompts, that no two requests begin alike
    beside  called with the start by time.monotonic(); it goes on while requests do
    """
    draws = random.Random(seed)
    lengths = zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)
    bodies = [
        {
            "model": model,
            "prompt": draws.choices(_VOCABULARY, k=prompt),
            "max_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt, output in lengths
    ]
    begin = time.monotonic() + 0.5

    async def one(number: int) -> tuple[float, float] | None:
        due_s = begin + float(workload.arrival_s[number])
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        return await _ask(session, url, bodies[number], due_s)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        sent = [one(number) for number in range(len(bodies))]
        more = [] if beside is None else [beside(begin)]
        answers = (await asyncio.gather(*sent, *more))[: len(bodies)]
    whole = [answer is not None for answer in answers]
    first, last = np.array([answer for answer in answers if answer is not None]).reshape(-1, 2).T
    gaps = (workload.output_tokens[whole] - 1).astype(float)
    gaps[gaps == 0] = np.nan
    return {"ttft": first, "tpot": (last - first) / gaps, "e2el": last}


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict, due_s: float
) -> tuple[float, float] | None:
    """Seconds to the first token and to the last; None without all tokens."""
    first_s, last_s, tokens, ended = math.nan, math.nan, 0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if b"[DONE]" in line:
                    ended = True
                    continue
                event, now = json.loads(line[6:]), time.monotonic() - due_s
                if event.get("choices"):
                    first_s = now if math.isnan(first_s) else first_s
                    last_s = now
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    return (first_s, last_s) if ended and tokens == body["max_tokens"] else None
