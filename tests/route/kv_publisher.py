"""A server's KV events without a server: batches as vLLM 0.32 writes them, published over ZMQ with
a replay socket, and lost where a test says so."""

import asyncio
from hashlib import sha256
from typing import Any

import msgspec
import zmq
import zmq.asyncio

BLOCK = 16


def hashes_of(tokens: list[int], salt: str = "", block: int = BLOCK) -> list[bytes]:
    """Chained, in a way of its own."""
    found: list[bytes] = []
    before = b"root" + salt.encode()
    for end in range(block, len(tokens) + 1, block):
        before = sha256(before + repr(tokens[end - block : end]).encode()).digest()
        found.append(before)
    return found


def stored(tokens: list[int], first: int = 0, salt: str = "", **more: Any) -> dict[str, Any]:
    """An event: the blocks of a text from number `first` on. more: other fields."""
    names = hashes_of(tokens, salt)
    count = len(names) - first
    keys = [[salt] if salt and not i else None for i in range(first, len(names))]
    return {
        "type": "BlockStored",
        "block_hashes": names[first:],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK : (first + count) * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": keys,
        "group_idx": 0,
        **more,
    }


def removed(tokens: list[int], first: int = 0, **more: Any) -> dict[str, Any]:
    names = hashes_of(tokens)[first:]
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0, **more}


CLEARED = {"type": "AllBlocksCleared"}


def packed(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


class KvPublisher:
    """keeps      batches for replays (`buffer_steps`)
    asked      numbers from which replays were asked for
    garbled    what is answered there is no replay
    listeners  subscriptions that there were
    """

    def __init__(self, keeps: int = 10_000, host: str = "127.0.0.1") -> None:
        self._context = zmq.asyncio.Context()
        self._keeps = keeps
        self.sent: list[tuple[int, bytes]] = []
        self.number = 0
        self.asked: list[int] = []
        self.garbled = False
        self.listeners = 0
        self._pub = self._context.socket(zmq.XPUB)  # as PUB, but that it tells who subscribes
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.set(zmq.IPV6, 1)
        at = f"tcp://{host}"
        self.events = f"{at}:{self._pub.bind_to_random_port(at)}"
        self.replay = f"{at}:{self._router.bind_to_random_port(at)}"
        self._tasks = [asyncio.create_task(one) for one in (self._replays(), self._listeners())]

    @property
    def both(self) -> str:
        return f"{self.events},{self.replay}"

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        """One batch. lost: it reaches nobody, but for replays."""
        await self.publish_bytes(packed(*events), lost)

    async def publish_bytes(self, payload: bytes, lost: bool = False) -> None:
        if not lost:
            await self._pub.send_multipart([b"kv", self.number.to_bytes(8, "big"), payload])
        self.sent = [*self.sent, (self.number, payload)][-self._keeps :]
        self.number += 1

    def begin_anew(self) -> None:
        """As a server that was started again."""
        self.number, self.sent = 0, []

    async def _listeners(self) -> None:
        while True:
            self.listeners += (await self._pub.recv()).startswith(b"\1")

    async def _replays(self) -> None:
        while True:
            client, _, asked = await self._router.recv_multipart()
            start = int.from_bytes(asked, "big")
            self.asked.append(start)
            if self.garbled:
                await self._router.send_multipart([client, b"", b"nothing"])
                continue
            for number, payload in self.sent:
                if number >= start:
                    frames = [client, b"", b"kv", number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([client, b"", b"", end, b""])

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)
