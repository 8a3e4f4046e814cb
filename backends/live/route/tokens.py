"""Token ids of prompts that come as text, asked of a worker: it has the tokenizer and the template
of chats. Only where routers hear KV events, which name blocks by token ids, is that worth a round
trip for each request.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from multidict import CIMultiDict

from twinserve.backends.live.route.counters import Counters
from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.prompts import is_token
from twinserve.backends.live.route.settings import RouteSettings
from twinserve.backends.live.route.workers import FAULTS

# what vLLM's /tokenize takes of a completion, and of a chat
_OF_TEXTS = ("model", "prompt", "add_special_tokens")
_OF_CHATS = (
    *("model", "messages", "add_special_tokens", "add_generation_prompt", "tools"),
    *("continue_final_message", "chat_template", "chat_template_kwargs"),
    *("media_io_kwargs", "mm_processor_kwargs"),
)


class Tokens:
    def __init__(
        self,
        settings: RouteSettings,
        session: aiohttp.ClientSession,
        fleet: RoutedFleet,
        counters: Counters,
    ) -> None:
        self._settings, self._session = settings, session
        self._fleet, self._counters = fleet, counters

    async def of(self, body: Mapping[str, Any], headers: CIMultiDict[str]) -> list[int] | None:
        """headers: for workers; changed here. None: token ids are given, or no worker answers."""
        asked = question(body)
        if asked is None or not self._fleet.up:
            return None
        began_s = time.perf_counter()
        worker = min(self._fleet.up, key=self._fleet.at)
        found = await self._ask(self._settings.workers[worker], asked, headers)
        self._counters.tokenize_s.observe(time.perf_counter() - began_s)
        if found is None:
            self._counters.errors.labels("tokenize").inc()
        return found

    async def _ask(
        self, url: str, asked: dict[str, Any], headers: CIMultiDict[str]
    ) -> list[int] | None:
        headers["Content-Type"] = "application/json"
        try:
            async with self._session.post(
                f"{url}/tokenize",
                data=json.dumps(asked).encode(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._settings.health_timeout_s),
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:  # a prompt that is wrong, too: the worker will say so
                    return None
                said = json.loads(await answer.read())
        except (*FAULTS, ValueError, RecursionError):
            return None
        tokens = said.get("tokens") if isinstance(said, dict) else None
        if not isinstance(tokens, list) or not all(map(is_token, tokens)):
            return None
        return tokens


def question(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the body for /tokenize. None if it cannot tell what the engine will compute."""
    if body.get("truncate_prompt_tokens") is not None:
        return None
    if "messages" in body:
        return _given(body, _OF_CHATS)
    return _given(body, _OF_TEXTS) if isinstance(body.get("prompt"), str) else None


def _given(body: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: body[name] for name in names if name in body}
