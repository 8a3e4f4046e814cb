"""A workload sent to a live server as it arrives, and when its tokens came."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.sim.fleet.prefix_index import content_ids
from twinserve.traces.workload import Workload

_VOCAB = 400  # token ids below it are those of any model


@dataclass(frozen=True)
class Seen:
    """By time.monotonic(), an entry a request: when it was due, when it was sent, when its first
    token and its last came; NaN without all tokens. tokens: that were asked for; cached: of the
    prompt, found in a cache, NaN if the server does not say (--enable-prompt-tokens-details)."""

    due_s: np.ndarray
    sent_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    cached: np.ndarray
    tokens: np.ndarray

    def latencies(self) -> dict[str, np.ndarray]:
        """Seconds from when a request was due: ttft, tpot, e2el of those that got all their tokens.
        A client that is late counts as latency."""
        whole = ~np.isnan(self.last_s)
        first, last, due = self.first_s[whole], self.last_s[whole], self.due_s[whole]
        gaps = (self.tokens[whole] - 1).astype(float)
        gaps[gaps == 0] = np.nan
        return {"ttft": first - due, "tpot": (last - first) / gaps, "e2el": last - due}


def prompts_of(
    workload: Workload, block_tokens: int, seed: int, vocab: int = _VOCAB
) -> list[list[int]]:
    """Return token ids, equal in equal prefix blocks of the workload."""
    texts = PromptTexts(vocab, block_tokens, seed)
    return [
        texts.tokens(workload.ids[row], int(n), content_ids(workload, row, block_tokens))
        for row, n in enumerate(workload.prompt_tokens)
    ]


async def replayed(
    url: str,
    model: str,
    workload: Workload,
    prompts: Sequence[list[int] | str],
    further: Sequence[dict] | None = None,
    beside: Callable[[float], Awaitable[None]] | None = None,
) -> Seen:
    """Send requests in the order of `workload`, when they are due. The row is the request's id. In
    a closed loop a request is due when another one has ended, as `vllm bench serve` counts.

    further  more fields of each body
    beside  called with the start by time.monotonic(); it goes on while requests do
    """
    bodies = [
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(further[row] if further else {}),
        }
        for row, (prompt, output) in enumerate(
            zip(prompts, workload.output_tokens.tolist(), strict=True)
        )
    ]
    begin = time.monotonic() + 0.5
    due, loop = begin + workload.arrival_s, workload.concurrency
    seats = asyncio.Semaphore(loop or len(bodies))

    async def one(row: int) -> tuple[float, ...]:
        async with seats:
            sent_s = time.monotonic()
            if loop is not None:
                due[row] = sent_s
            return sent_s, *await _ask(session, url, bodies[row], {"X-Request-Id": str(row)})

    async def in_order() -> list[tuple[float, ...]]:
        asked: list[asyncio.Task] = []
        for row, due_s in enumerate(due.tolist()):  # timers of one moment go off in any order
            if (left := due_s - time.monotonic()) > 0:
                await asyncio.sleep(left)
            asked.append(asyncio.create_task(one(row)))
        return await asyncio.gather(*asked)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        answers, *_ = await asyncio.gather(in_order(), *([] if beside is None else [beside(begin)]))
    return Seen(due, *np.array(answers).reshape(-1, 4).T, workload.output_tokens)


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict, headers: dict
) -> tuple[float, float, float]:
    """When the first token and the last came, and what was cached; NaN without all tokens."""
    first_s, last_s, cached, tokens, ended = math.nan, math.nan, math.nan, 0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if b"[DONE]" in line:
                    ended = True
                    continue
                event, now = json.loads(line[6:]), time.monotonic()
                if event.get("choices"):
                    first_s = now if math.isnan(first_s) else first_s
                    last_s = now
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens", math.nan)
    except (aiohttp.ClientError, OSError, TimeoutError):
        tokens = -1
    whole = ended and tokens == body["max_tokens"]
    return (first_s, last_s, cached) if whole else (math.nan,) * 3
