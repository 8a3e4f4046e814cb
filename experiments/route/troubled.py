"""Clients for a soak of the front: good ones, and those that give fronts trouble.

steady     one whole answer after the other; each must come whole
slow       take a few kilobytes a second of answers that do not fit into a connection; whole, too
stalled    ask for as much, and take nothing: the front has to cut them off
leaving    hang up in the middle of an answer
silent     connect and send nothing; half_head, half_body: stop within a request. They never close:
           the front has to
vanished   like silent ones after a whole answer: kept alive, and never used again

Each counts what became of it: `Tally`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from twinserve.experiments.route.worker import AT_ONCE

_PROMPTS, _PROMPT_BYTES = 2000, 1024
_WIDE_TOKENS = 1500  # of answers that do not fit; about 1.7 MB
_TURNS = 10  # requests of a session
_BUFFER = 4096  # bytes that the system may hold for a client that is slow
_SLOW_BYTES_S = 16384
_HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Half: b"
_NO_LINGER = b"\1\0\0\0\0\0\0\0"  # a close is a reset
STEADY, SLOW = "steady", "slow"
WHOLE = (STEADY, SLOW)  # must get whole answers
LEFT_OPEN = ("stalled", "silent", "half_head", "half_body", "vanished")  # the front must close
KINDS = (*WHOLE, "leaving", *LEFT_OPEN)


@dataclass
class Tally:
    """began: requests, or connections, by kind. well: of these that ended as they must. wrong: how
    many ended otherwise, by kind and how."""

    began: Counter[str] = field(default_factory=Counter)
    well: Counter[str] = field(default_factory=Counter)
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def open(self) -> int:
        return self.began.total() - self.well.total() - self.wrong.total()


class Clients:
    """url: of the front. tokens: of a steady answer. patience_s: after which a connection that the
    front must close counts as forgotten by it."""

    def __init__(self, url: str, tokens: int, patience_s: float) -> None:
        self.tally = Tally()
        self._url, self._tokens, self._patience_s = url, tokens, patience_s
        parts = urlsplit(url)
        self._address = str(parts.hostname), int(parts.port or 80)

    async def run(self, counts: dict[str, int], spread_s: float, time_s: float) -> None:
        """As many of each kind as counts says, from now on for time_s; what is under way then
        ends. They begin at any moment of spread_s."""
        end = time.monotonic() + time_s

        async def again(kind: str, number: int) -> None:
            draws = random.Random(f"{kind} {number}")
            await asyncio.sleep(draws.uniform(0, spread_s))
            turn, name = 0, ""
            while time.monotonic() < end:
                if kind == STEADY:
                    name = name if turn % _TURNS else f"{number}-{draws.random()}"
                    await self._counted(kind, self._steady(draws, session, name))
                    turn += 1
                else:
                    await self._counted(kind, self._raw(kind, draws))
                    await asyncio.sleep(draws.uniform(0, 1))

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            async with asyncio.TaskGroup() as group:
                for kind, count in counts.items():
                    for number in range(count):
                        group.create_task(again(kind, number))

    async def _counted(self, kind: str, way: Awaitable[None]) -> None:
        self.tally.began[kind] += 1
        try:
            await way
        except _WrongError as wrong:
            self.tally.wrong[kind, str(wrong)] += 1
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self.tally.wrong[kind, type(error).__name__] += 1
        else:
            self.tally.well[kind] += 1

    async def _steady(
        self, draws: random.Random, session: aiohttp.ClientSession, name: str
    ) -> None:
        headers = {"Content-Type": "application/json", "X-Session-Id": name}
        body = _body(draws, self._tokens)
        url = self._url + "/v1/completions"
        async with session.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise _WrongError(str(answer.status))
            _check(await answer.read(), self._tokens)

    async def _raw(self, kind: str, draws: random.Random) -> None:
        """One connection of a kind that is not steady, with little room in the system."""
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        line.setblocking(False)
        with line:
            await asyncio.get_running_loop().sock_connect(line, self._address)
            reader, writer = await asyncio.open_connection(sock=line, limit=_BUFFER)
            try:
                writer.write(self._sent(kind, draws))
                await writer.drain()
                if kind == SLOW:
                    _check(await self._slowly(reader), _WIDE_TOKENS)
                elif kind == "leaving":
                    await reader.read(1)
                    await asyncio.sleep(draws.uniform(0, 5))
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                else:
                    await self._until_closed(reader, kind == "stalled")
            finally:
                writer.transport.abort()

    def _sent(self, kind: str, draws: random.Random) -> bytes:
        if kind in (SLOW, "stalled"):
            many = 4 if kind == "stalled" else 1
            return _request(_body(draws, _WIDE_TOKENS * many, AT_ONCE))
        return {
            "leaving": _request(_body(draws, self._tokens)),
            "silent": b"",
            "half_head": _HALF_HEAD,
            "half_body": _request(_body(draws, 1))[:-100],
            "vanished": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
        }[kind]

    async def _slowly(self, reader: asyncio.StreamReader) -> bytes:
        found = bytearray()
        while not found.endswith(b"\r\n0\r\n\r\n"):
            piece = await asyncio.wait_for(reader.read(_BUFFER), self._patience_s)
            if not piece:
                raise _WrongError("closed")
            found += piece
            await asyncio.sleep(len(piece) / _SLOW_BYTES_S)
        if not found.startswith(b"HTTP/1.1 200"):
            raise _WrongError(found[9:12].decode(errors="replace"))
        return bytes(found)

    async def _until_closed(self, reader: asyncio.StreamReader, stalls: bool) -> None:
        """What the front still says is read. A client that stalls reads nothing for half of its
        patience: it finds what the system held, and no end."""
        patience_s, last = self._patience_s, b""
        if stalls:
            patience_s /= 2
            await asyncio.sleep(patience_s)
        try:
            async with asyncio.timeout(patience_s):
                while piece := await reader.read(2**16):
                    last = (last + piece)[-200:]
        except ConnectionError:
            pass
        except TimeoutError:
            raise _WrongError("left open") from None
        if stalls and b"[DONE]" in last:
            raise _WrongError("not cut off")


class _WrongError(Exception):
    """Ended as it must not; the text says how."""


def _check(answer: bytes, wanted: int) -> None:
    """Raises _WrongError if the answer is not whole."""
    texts = answer.count(b'"text": "') + answer.count(b'"text":"')
    if b"data: [DONE]" not in answer[-200:]:
        raise _WrongError("cut short")
    if texts != wanted:
        raise _WrongError("tokens missing" if texts < wanted else "tokens too many")


def _body(draws: random.Random, tokens: int, model: str = "stamps") -> bytes:
    prompt = (f"{draws.randrange(_PROMPTS)} " * _PROMPT_BYTES)[:_PROMPT_BYTES]
    given = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}
    return json.dumps(given).encode()


def _request(body: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
