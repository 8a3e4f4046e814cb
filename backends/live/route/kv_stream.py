"""The KV events of one worker in their order: what is missing is noticed, and replayed or given up.

vLLM numbers its batches from 0 and keeps the last ones (`buffer_steps`) for a subscriber that asks
at its replay socket. A number that is not the next one says that batches were lost: between
subscriber and publisher, or because the server was started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from zlib import crc32

from twinserve.backends.live.route.kv_blocks import KvBlocks
from twinserve.backends.live.route.kv_wire import (
    AllBlocksCleared,
    Batch,
    BlockStored,
    Message,
    decode,
)

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

    Messages go to `live` as they come. Where that says so, a replay is wanted from `wanted` on:
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
        """Whether batches before it are missing. Raises UnreadableError."""
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
        """All that a replay brought. first: before it nothing was known, so nothing is given up
        where it begins late. Raises UnreadableError."""
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
