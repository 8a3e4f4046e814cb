"""A workload sent to a live front as it arrives, and when its tokens came."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import numpy as np
import pandas as pd

from twinserve.traces.workload import Workload

_VOCABULARY = range(5, 400)  # token ids that any model has


@dataclass
class _Answer:
    """Seconds from the sending of the request. tokens: that came."""

    tokens: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    whole: bool = False


async def replayed(
    url: str,
    model: str,
    workload: Workload,
    seed: int,
    beside: Callable[[float], Awaitable[None]] | None = None,
) -> pd.DataFrame:
    """Requests in the order of `workload`: ttft_s, tpot_s, e2el_s, and whether all tokens came.

    seed    of the prompts, that no two requests begin alike
    beside  called with the start by time.monotonic(); it goes on while requests do
    """
    draws = random.Random(seed)
    bodies = [
        {
            "model": model,
            "prompt": draws.choices(_VOCABULARY, k=int(prompt)),
            "max_tokens": int(output),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt, output in zip(workload.prompt_tokens, workload.output_tokens, strict=True)
    ]
    answers = [_Answer() for _ in bodies]
    begin = time.monotonic() + 0.5

    async def one(number: int) -> None:
        due_s = begin + float(workload.arrival_s[number])
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        await _ask(session, url, bodies[number], answers[number], due_s)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        other = None if beside is None else asyncio.create_task(_from(beside, begin))
        async with asyncio.TaskGroup() as group:
            for number in range(len(bodies)):
                group.create_task(one(number))
        if other is not None:
            await other
    return pd.DataFrame([_row(*found) for found in zip(answers, bodies, strict=True)])


async def _from(beside: Callable[[float], Awaitable[None]], begin: float) -> None:
    await beside(begin)


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict, answer: _Answer, due_s: float
) -> None:
    """Latencies count from when the request was due: a client that is late is not forgiven."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if b"[DONE]" in line:
                    answer.whole = answer.tokens == body["max_tokens"]
                    continue
                event, now = json.loads(line[6:]), time.monotonic() - due_s
                if event.get("choices"):
                    answer.first_s = now if math.isnan(answer.first_s) else answer.first_s
                    answer.last_s = now
                if usage := event.get("usage"):
                    answer.tokens = usage["completion_tokens"]
    except (aiohttp.ClientError, OSError, TimeoutError):
        return


def _row(answer: _Answer, body: dict) -> dict[str, object]:
    gaps = body["max_tokens"] - 1
    whole = answer.whole
    tpot = (answer.last_s - answer.first_s) / gaps if gaps else np.nan
    return {
        "ttft_s": answer.first_s if whole else np.nan,
        "tpot_s": tpot if whole else np.nan,
        "e2el_s": answer.last_s if whole else np.nan,
        "finished": whole,
    }
