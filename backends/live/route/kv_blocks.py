"""The content of one worker's prefix cache, from its KV events.

Messages are those of vLLM 0.32 (vllm/distributed/kv_events.py), of three frames: a topic, a
sequence number of eight bytes, and a batch of events in msgpack. What a server may add later is
passed over; a batch of another form is an error. Batches are numbered from 0, and the last ones are
kept (`buffer_steps`) for a subscriber that asks at the replay socket. A gap in the numbers means
lost batches: between subscriber and publisher, or because the server restarted.

vLLM names a block by a hash that only it can make, and sends the tokens and the hash of the block
before it. So each hash is known by the chain that leads to it: its block gets the name that the
same tokens have in a prompt. vLLM reports every block, copies too. A router hears of a text when
its first block comes, and when its last one is gone.
"""

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from twinserve.backends.live.route.names import Numbers, bytes_of, first_key, next_key, salt_of

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
_FRAMES = 3


class BlockStored(msgspec.Struct, tag=True):
    """token_ids: of all the blocks, one after the other. parent_block_hash: None for the first
    blocks of a text. medium: their place; None: the engine's own memory."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]  # as names are made of
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    """ts: when it was published, seconds of the server's own wall clock."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Message(NamedTuple):
    """payload  a batch, not decoded yet"""

    number: int
    payload: bytes


class UnreadableError(Exception):
    """A message that is not one of vLLM 0.32. One line."""


_DECODER = msgspec.msgpack.Decoder(Batch)


def message_of(frames: list[bytes]) -> Message | None:
    """Return the message, or None at the end of a replay. Raises UnreadableError."""
    if len(frames) != _FRAMES or len(frames[1]) != len(END):
        raise UnreadableError("a message that is not of a topic, a number and a batch")
    if frames[1] == END:
        return None
    return Message(int.from_bytes(frames[1], "big"), frames[2])


def decode(payload: bytes) -> Batch:
    """Return the batch of a message. Raises UnreadableError."""
    try:
        return _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise UnreadableError(f"a batch that cannot be read: {' '.join(str(error).split())}") from (
            None
        )


Hash = bytes | int
_OF_ENGINES = (None, "GPU")  # media from which a prefix needs no load


class KvBlocks:
    """numbers       shared by all workers and prompts
    block_tokens  tokens in a block, as prompts are cut
    tell          called with what can be found from now on (True), or no more (False): int64[n]
    adapters      names of LoRA adapters that were seen, shared by all workers
    most          blocks that the worker has room for

    unnamed  blocks whose names are not known: what came before them was missed, or they are cut
             otherwise than prompts
    """

    def __init__(
        self,
        numbers: Numbers,
        block_tokens: int,
        tell: Callable[[bool, np.ndarray], None],
        adapters: set[str],
        most: int,
    ) -> None:
        self._numbers, self._block_tokens, self._tell = numbers, block_tokens, tell
        self._adapters, self._most = adapters, most
        self._held: dict[Hash, tuple[bytes, int]] = {}  # key of its text, blocks that have it
        self._blocks = 0  # of these, copies too
        self.unnamed = 0

    def __len__(self) -> int:
        """Contents that the worker has."""
        return len(self._held)

    @property
    def too_many(self) -> bool:
        """Return whether there are more blocks than the worker has room for: events are wrong."""
        return self._blocks > self._most

    def stored(self, event: BlockStored) -> None:
        if not _counts(event):
            return
        hashes, size = event.block_hashes, event.block_size
        if size != self._block_tokens or len(event.token_ids) != size * len(hashes):
            self.unnamed += len(hashes)
            return
        before = self._before(event)
        if before is None:
            self.unnamed += len(hashes)
            return
        whole, width = bytes_of(event.token_ids), size * 8
        new = []
        for i, name in enumerate(hashes):
            before = next_key(before, whole[i * width : (i + 1) * width], _more(event, i))
            key, blocks = self._held.get(name, (before, 0))
            if not blocks:
                new.append(self._numbers.hold(key))
            self._held[name] = key, blocks + 1
            self._blocks += 1
        self._say(True, new)

    def removed(self, event: BlockRemoved) -> None:
        """Remove blocks that are known."""
        if not _counts(event):
            return
        gone = []
        for name in event.block_hashes:
            key, blocks = self._held.get(name, (b"", 0))
            self._blocks -= min(blocks, 1)
            if blocks > 1:
                self._held[name] = key, blocks - 1
            elif blocks:
                del self._held[name]
                gone.append(self._numbers.release(key))
        self._say(False, gone)

    def clear(self) -> None:
        """Forget all blocks: the worker has none, or its blocks are unknown."""
        gone = [self._numbers.release(key) for key, _ in self._held.values()]
        self._held.clear()
        self._blocks = 0
        self._say(False, gone)

    def _before(self, event: BlockStored) -> bytes | None:
        """The key that the first of its blocks follows; None: it is not known."""
        parent = event.parent_block_hash
        if parent is None:
            adapter = event.lora_name or ""
            if adapter:
                self._adapters.add(adapter)
            return first_key(self._block_tokens, adapter=adapter)
        known = self._held.get(parent)
        return None if known is None else known[0]

    def _say(self, stored: bool, contents: list[int]) -> None:
        if contents:
            self._tell(stored, np.array(contents, np.int64))


def _counts(event: BlockStored | BlockRemoved) -> bool:
    """Of several groups of layers the first stands for all."""
    return (
        event.medium in _OF_ENGINES
        and event.group_idx in (None, 0)
        and event.locality in (None, "LOCAL")
    )


def _more(event: BlockStored, index: int) -> bytes:
    """Salts and pictures; an adapter is in the first key."""
    found = event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None
    parts = [one for one in found or () if one != event.lora_name]
    return salt_of(parts) if parts else b""


_BREATH = 16  # batches of a replay, after which others may run


class Gap(Enum):
    """What became of batches that did not come. DROPPED: they are lost, or what came does not add
    up, and what was known of the worker is forgotten. RESTARTED: so is it, since the publisher
    began anew."""

    REPLAYED = "replayed"
    DROPPED = "dropped"
    RESTARTED = "restarted"


class KvStream:
    """on_gap  called with what became of each

    Messages go to `live` as they come. If that says so, a replay is wanted from `wanted` on:
    its messages go to `replayed` (None: no answer). Until then live ones wait.
    """

    def __init__(self, blocks: KvBlocks, on_gap: Callable[[Gap], None]) -> None:
        self.blocks, self._on_gap = blocks, on_gap
        self.wanted: int | None = 0  # None: whatever comes next
        self._latest = -1  # number of the last live message
        self._waiting: dict[int, bytes] = {}
        self._sums: dict[int, int] = {}  # of the last replay's messages, which may come live, too
        self.batches = 0

    def live(self, message: Message) -> bool:
        """Take a live message. Returns whether batches are missing. Raises UnreadableError."""
        number, payload = message
        if number <= self._latest or self._is_another(message):  # a publisher counts upwards
            self._waiting.clear()
            self.blocks.clear()
            self.wanted = 0
            self._on_gap(Gap.RESTARTED)
        self._latest = number
        if self.wanted is None:
            self.wanted = number
        if number == self.wanted:
            self._take(payload)
        elif number > self.wanted:
            self._waiting[number] = payload
        # else it came with a replay
        return bool(self._waiting)

    def _is_another(self, message: Message) -> bool:
        """Than the one with its number that was taken in already: of a publisher that began anew
        before anything of the old one came live."""
        number, payload = message
        taken = self.wanted is not None and number < self.wanted
        return taken and self._sums.get(number) != crc32(payload)

    async def replayed(self, messages: Iterable[Message] | None, first: bool = False) -> None:
        """Take all messages of a replay. first: before it nothing was known, so a late begin loses
        nothing. Raises UnreadableError."""
        if first and messages is None:
            self.wanted = None
            return
        began_at, found = self.wanted or 0, dict(messages or ())
        self.wanted = began_at
        waiting, self._waiting = self._waiting, {}
        found |= waiting
        self._sums = {number: crc32(payload) for number, payload in found.items()}
        whole = True
        for number in sorted(found):
            if number < self.wanted:
                continue
            if number > self.wanted:
                whole = False
                self.blocks.clear()
                self.wanted = number
            self._take(found[number])
            if number % _BREATH == 0:
                await asyncio.sleep(0)
        if first:
            return
        if not whole:
            self._on_gap(Gap.DROPPED)
        elif self.wanted > began_at:
            self._on_gap(Gap.REPLAYED)

    def _take(self, payload: bytes) -> None:
        self.wanted = (self.wanted or 0) + 1
        self.apply(decode(payload))

    def apply(self, batch: Batch) -> None:
        self.batches += 1
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                self.blocks.stored(event)
                if self.blocks.too_many:
                    self.blocks.clear()
                    self._on_gap(Gap.DROPPED)
            else:
                self.blocks.removed(event)
