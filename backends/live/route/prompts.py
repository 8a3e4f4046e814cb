"""A router's view of a request: prompt length, prefix, and owner.

A front has texts, engines have tokens. To ask a worker's /tokenize first would cost each request a
round trip, and tokens are only compared with each other here. So a text counts a token for every
four bytes, and its KV blocks are named by their text. Two prompts share a block's name if their
texts up to its end are equal. Prompts of token ids are counted and named exactly.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from twinserve.backends.live.route.names import (
    NAMES,
    Numbers,
    Sessions,
    bytes_of,
    digest,
    first_key,
    next_key,
    salt_of,
)
from twinserve.backends.live.serving.attributes import (
    BadAttributeError,
    RequestAttributes,
    read_attributes,
)
from twinserve.backends.live.serving.clients import Clients, stamped
from twinserve.sim.fleet.request import Request

BYTES_A_TOKEN = 4


class Prompts:
    """Makes a `Request` of a body.

    clients   how far claims about requests are believed, as the servers' own file says
    sessions  those that are remembered

    numbers   of KV blocks
    adapters  models that are LoRA adapters, as KV events say
    """

    def __init__(self, clients: Clients, sessions: Sessions, names: int = NAMES) -> None:
        self._clients, self._sessions = clients, sessions
        self.numbers = Numbers(names)
        self.adapters: set[str] = set()

    def request(
        self,
        name: str,
        body: Mapping[str, Any],
        now: float,
        headers: list[tuple[bytes, bytes]],
        session: str | None = None,
        tokens: list[int] | None = None,
    ) -> Request:
        """body: of /v1/completions or /v1/chat/completions. tokens: of its prompt, as the engine
        has them; None: they are not known. Attributes that are wrong count as not given: to refuse
        them is the server's affair."""
        prompt = prompt_of(body) if tokens is None else tokens
        if isinstance(prompt, bytes):
            count = -(-len(prompt) // BYTES_A_TOKEN)
        else:
            count = len(prompt)
        given = self._attributes(body, headers)
        values = {
            "prompt_tokens": max(count, 1),
            "service_class": int(given.service_class),
            "slo_ttft_s": given.slo_ttft_s,
            "slo_tpot_s": given.slo_tpot_s,
        }
        affinity = -1
        if session is not None or given.app is not None:
            # two clients may give a session the same name
            kind, own = ("s", session) if session is not None else ("a", given.app)
            key = f"{kind}/{given.client}/{own}"
            affinity = self._sessions.of(key.encode(errors="replace"), now)
        known: dict[int, np.ndarray] = {}
        adapter = body.get("model")
        adapter = adapter if isinstance(adapter, str) and adapter in self.adapters else ""
        salt = body.get("cache_salt")
        salt = salt if isinstance(salt, str) else ""

        def contents(block_tokens: int) -> np.ndarray:
            if block_tokens not in known:
                known[block_tokens] = self._named(prompt, block_tokens, adapter, salt)
            return known[block_tokens]

        return Request(name, 0, now, values, contents, affinity, affinity)

    def _attributes(
        self, body: Mapping[str, Any], headers: list[tuple[bytes, bytes]]
    ) -> RequestAttributes:
        clients, said = self._clients, body.get("vllm_xargs")
        try:
            given = read_attributes(said)
            if clients.stamped:
                given = read_attributes(stamped(said, clients.identify(headers)))
        except BadAttributeError:
            given = RequestAttributes()
        return clients.believed(given)

    def _named(
        self, prompt: bytes | list[int], block_tokens: int, adapter: str, salt: str
    ) -> np.ndarray:
        """int64[n]: of full blocks. Each name is of all up to the block's end."""
        if isinstance(prompt, bytes):
            whole, size = prompt, block_tokens * BYTES_A_TOKEN
        else:
            whole, size = bytes_of(prompt), block_tokens * 8
        ends = range(size, len(whole) + 1, size)
        names = np.empty(len(ends), np.int64)
        before = first_key(block_tokens, isinstance(prompt, bytes), adapter)
        more = salt_of([salt]) if salt else b""  # of the first block alone, as in engines
        for i, end in enumerate(ends):
            before = next_key(before, whole[end - size : end], more)
            names[i] = self.numbers.of(before)
            more = b""
        return names


def prompt_of(body: Mapping[str, Any]) -> bytes | list[int]:
    """Its text, or its token ids. Of several prompts the text of all, one after the other."""
    if "messages" in body:
        return _chat(body).encode(errors="replace")
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    if not isinstance(prompt, list) or not prompt:
        return b""
    if all(is_token(one) for one in prompt):
        return prompt
    if all(isinstance(one, list) and all(map(is_token, one)) for one in prompt):
        return [token for one in prompt for token in one]
    return "".join(one for one in prompt if isinstance(one, str)).encode(errors="replace")


def is_token(one: Any) -> bool:
    """What has room in 64 bits, as names of blocks are made."""
    return type(one) is int and 0 <= one < 2**63


def _chat(body: Mapping[str, Any]) -> str:
    """Return tools, then messages, as templates do: a conversation begins with its last turn."""
    parts = [json.dumps(body["tools"], sort_keys=True)] if body.get("tools") else []
    messages = body["messages"]
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, Mapping):
            parts.append(f"<{message.get('role')}>{_content(message.get('content'))}")
    return "".join(parts)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    found = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            found.append(part["text"])
        else:  # a picture: whose it is counts, how long its text is does not
            found.append(digest(json.dumps(part, sort_keys=True).encode()).hex())
    return "".join(found)
