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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from twinserve.experiments.route.worker import AT_ONCE

_PROMPTS, _PROMPT_BYTES = 2000, 1024
_WIDE_TOKENS = 1500  # of answers that do not fit; about 1.7 MB
_TURNS = 10  # requests of a session
_BUFFER = 4096  # bytes that the system may hold for a client that is slow
_SLOW_BYTES_S = 16384
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
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._ending = False

    async def run(self, counts: dict[str, int], spread_s: float, time_s: float) -> None:
        """As many of each kind as counts says, from now on for time_s; what is under way then
        ends. They begin at any moment of spread_s."""
        ways: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            SLOW: self._slow,
            "leaving": self._leaving,
            "stalled": self._stalled,
            "silent": self._silent,
            "half_head": self._half_head,
            "half_body": self._half_body,
            "vanished": self._vanished,
        }
        end = time.monotonic() + time_s

        async def again(kind: str, number: int) -> None:
            draws = random.Random(f"{kind} {number}")
            await asyncio.sleep(draws.uniform(0, spread_s))
            while time.monotonic() < end:
                if kind == STEADY:
                    await self._session(draws, session, f"{number}-{draws.random()}", end)
                else:
                    await self._counted(kind, ways[kind](draws))
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

    # -- whole answers -----------------------------------------------------------------------------
    async def _session(
        self, draws: random.Random, session: aiohttp.ClientSession, name: str, end: float
    ) -> None:
        for _ in range(_TURNS):
            if time.monotonic() >= end:
                return
            await self._counted(STEADY, self._steady(draws, session, name))

    async def _steady(
        self, draws: random.Random, session: aiohttp.ClientSession, name: str
    ) -> None:
        headers = {"Content-Type": "application/json", "X-Session-Id": name}
        body = _body(draws, self._tokens)
        texts, last = 0, b""
        async with session.post(
            self._url + "/v1/completions", data=body, headers=headers
        ) as answer:
            if answer.status != 200:
                raise _WrongError(str(answer.status))
            async for line in answer.content:
                texts += b'"text": "' in line or b'"text":"' in line
                last = line.strip() or last
        _check(texts, self._tokens, last)

    async def _slow(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._send(connection, _request(_body(draws, _WIDE_TOKENS, AT_ONCE)))
            found = bytearray()
            while not found.endswith(b"\r\n0\r\n\r\n"):
                piece = await asyncio.wait_for(
                    asyncio.get_running_loop().sock_recv(connection, _BUFFER), self._patience_s
                )
                if not piece:
                    raise _WrongError("closed")
                found += piece
                await asyncio.sleep(len(piece) / _SLOW_BYTES_S)
        if not found.startswith(b"HTTP/1.1 200"):
            raise _WrongError(found[9:12].decode(errors="replace"))
        last = b"data: [DONE]" if b"data: [DONE]" in found[-200:] else b""
        texts = found.count(b'"text": "') + found.count(b'"text":"')
        _check(texts, _WIDE_TOKENS, last)

    # -- those that the front must be rid of -------------------------------------------------------
    async def _leaving(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._send(connection, _request(_body(draws, self._tokens)))
            await asyncio.get_running_loop().sock_recv(connection, 1)
            await asyncio.sleep(draws.uniform(0, 5))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async def _stalled(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._send(connection, _request(_body(draws, _WIDE_TOKENS * 4, AT_ONCE)))
            await self._until_cut(connection)

    async def _silent(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._until_closed(connection)

    async def _half_head(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._send(connection, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Half: b")
            await self._until_closed(connection)

    async def _half_body(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._send(connection, _request(_body(draws, 1))[:-100])
            await self._until_closed(connection)

    async def _vanished(self, draws: random.Random) -> None:
        with self._connected() as connection:
            await self._send(connection, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            await self._until_closed(connection)

    # -- connections -------------------------------------------------------------------------------
    def _connected(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        connection.setblocking(False)
        return connection

    async def _send(self, connection: socket.socket, text: bytes) -> None:
        loop = asyncio.get_running_loop()
        await self._connect(connection)
        await loop.sock_sendall(connection, text)

    async def _connect(self, connection: socket.socket) -> None:
        if connection.getsockname()[1] == 0:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (self._host, self._port))

    async def _until_closed(self, connection: socket.socket) -> None:
        """What the front still says is read."""
        await self._connect(connection)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience_s):
                while await loop.sock_recv(connection, _BUFFER):
                    pass
        except ConnectionError:
            pass
        except TimeoutError:
            raise _WrongError("left open") from None

    async def _until_cut(self, connection: socket.socket) -> None:
        """Nothing is read for long. What is found then is what the system held, and no end."""
        await asyncio.sleep(self._patience_s / 2)
        loop, last = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(self._patience_s / 2):
                while piece := await loop.sock_recv(connection, 2**16):
                    last = (last + piece)[-200:]
        except ConnectionError:
            pass
        except TimeoutError:
            raise _WrongError("left open") from None
        if b"[DONE]" in last:
            raise _WrongError("not cut off")


class _WrongError(Exception):
    """Ended as it must not; the text says how."""


def _check(texts: int, wanted: int, last: bytes) -> None:
    if b"[DONE]" not in last:
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
