"""Listens to the KV events that workers publish over ZMQ, while they are up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.kv_blocks import (
    Gap,
    KvBlocks,
    KvStream,
    Message,
    UnreadableError,
    message_of,
)
from twinserve.backends.live.route.measured import KvMemory
from twinserve.backends.live.route.prompts import Prompts
from twinserve.backends.live.route.settings import KvEndpoints

_log = logging.getLogger("twinserve.route")
_REPLAY_S = 5.0  # for the next message of a replay
_WHOLE_REPLAY_S = 60.0
REPLAY_BYTES = 2**28  # vLLM keeps 10,000 batches, of some kilobytes each
_UNTOLD = 2**22  # blocks of a worker that does not say how many it has
_JOIN_S = 0.2  # a subscription takes effect meanwhile; what is published before it is replayed


class KvEvents:
    """endpoints  of each worker
    on_gap     called with a worker and what became of batches that did not come
    on_change  called when a worker's cache has changed"""

    def __init__(
        self,
        endpoints: list[KvEndpoints],
        fleet: RoutedFleet,
        prompts: Prompts,
        on_gap: Callable[[int, Gap], None],
        on_change: Callable[[], None],
    ) -> None:
        self._endpoints, self._fleet, self._prompts = endpoints, fleet, prompts
        self._on_gap, self._on_change = on_gap, on_change
        self._context = zmq.asyncio.Context()
        self._streams: list[KvStream | None] = [None] * len(endpoints)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.batches = [0] * len(endpoints)
        self.unnamed = [0] * len(endpoints)
        self._warned: set[int] = set()  # servers whose messages cannot be read

    def held(self, worker: int) -> int | None:
        """Return the contents that a worker has by its events, or None if it is not up."""
        stream = self._streams[worker]
        return None if stream is None else len(stream.blocks)

    def came(self, worker: int, memory: KvMemory) -> None:
        """A worker is up as a new replica; its cache is unknown."""
        self.failed(worker)
        blocks = KvBlocks(
            self._prompts.numbers,
            memory.block_tokens,
            lambda stored, contents: self._fleet.heard(worker, stored, contents),
            self._prompts.adapters,
            memory.num_blocks if memory != KvMemory() else _UNTOLD,
        )
        stream = self._streams[worker] = KvStream(blocks, lambda gap: self._gap(worker, gap))
        task = self._tasks[worker] = asyncio.create_task(self._listen(worker, stream))
        task.add_done_callback(lambda task: self._ended(worker, task))

    def failed(self, worker: int) -> None:
        """A worker is down. Its replica is gone, and the router has forgotten it."""
        if (task := self._tasks.pop(worker, None)) is not None:
            task.cancel()
        if (stream := self._streams[worker]) is not None:
            self._streams[worker] = None
            stream.blocks.clear()

    def _ended(self, worker: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled():  # it does not end by itself
            where, error = self._endpoints[worker].events, task.exception()
            _log.error("%s: KV events are no longer received: %s", where, error)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _gap(self, worker: int, gap: Gap) -> None:
        _log.warning("%s: KV events were missing: %s", self._endpoints[worker].events, gap.value)
        self._on_gap(worker, gap)

    async def _listen(self, worker: int, stream: KvStream) -> None:
        """Go on after any error: else the router would for ever believe what it heard last."""
        endpoints = self._endpoints[worker]
        with self._context.socket(zmq.SUB) as socket:
            socket.set_hwm(0)  # the publisher has a limit; here memory is
            _connect(socket, endpoints.events)
            socket.subscribe(b"")
            await asyncio.sleep(_JOIN_S)
            await self._understood(worker, stream, self._replay(endpoints, stream, first=True))
            while True:
                frames = await socket.recv_multipart()
                await self._understood(worker, stream, self._heard(endpoints, stream, frames))
                await asyncio.sleep(0)  # a crowd of messages lets requests pass

    async def _understood(self, worker: int, stream: KvStream, hearing: Awaitable[None]) -> None:
        before, unnamed = stream.batches, stream.blocks.unnamed
        try:
            await hearing
        except UnreadableError as error:
            stream.blocks.clear()  # what it changed is not known
            if worker not in self._warned:
                self._warned.add(worker)
                _log.warning("%s: %s", self._endpoints[worker].events, error)
            self._on_gap(worker, Gap.DROPPED)
        except Exception:
            stream.blocks.clear()
            _log.exception("%s: KV events could not be processed", self._endpoints[worker].events)
            self._on_gap(worker, Gap.DROPPED)
        self.batches[worker] += stream.batches - before
        self.unnamed[worker] += stream.blocks.unnamed - unnamed
        if stream.batches > before:
            self._on_change()

    async def _heard(self, endpoints: KvEndpoints, stream: KvStream, frames: list[bytes]) -> None:
        message = message_of(frames)
        if message is not None and stream.live(message):
            await self._replay(endpoints, stream)

    async def _replay(self, endpoints: KvEndpoints, stream: KvStream, first: bool = False) -> None:
        found: list[Message] | None = None
        if endpoints.replay:
            found = await self._replayed(endpoints.replay, stream.wanted or 0)
        await stream.replayed(found, first)

    async def _replayed(self, endpoint: str, wanted: int) -> list[Message] | None:
        """From a number on; None without an answer, or with more than there is room for."""
        found: list[Message] = []
        size, end = 0, asyncio.get_running_loop().time() + _WHOLE_REPLAY_S
        # a socket of its own for each: one that got no answer would not take another question
        with self._context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            _connect(socket, endpoint)
            try:
                await socket.send_multipart([b"", wanted.to_bytes(8, "big")])
                while True:
                    async with asyncio.timeout(_REPLAY_S):
                        frames = await socket.recv_multipart()
                    message = message_of(frames[1:])
                    if message is None:
                        return found
                    found.append(message)
                    size += sum(map(len, frames))
                    if size > REPLAY_BYTES or asyncio.get_running_loop().time() > end:
                        _log.warning("%s: ignored a replay that is too long", endpoint)
                        return None
            except (TimeoutError, UnreadableError):
                return found or None


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    socket.set(zmq.IPV6, int("[" in endpoint))  # a name with addresses of both kinds stays IPv4
    socket.connect(endpoint)
