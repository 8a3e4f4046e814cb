"""The host tier of KV chunks: what is in it, its readers and writers, what it admits and gives up.

Source: vLLM 0.32, `v1/kv_offload/cpu/manager.py` (`CPUOffloadingManager`). One engine has one, as
in vLLM, or several engines share one: keys are of text, the same on all of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from twinserve.policies.kv.base import LedgerError
from twinserve.policies.kv.offload.eviction import EVICTION, WRITING, Chunk

TRACKED = 64_000  # keys whose offers are counted (`max_tracker_size`)


class Found(Enum):
    MISS = auto()
    HIT = auto()
    PENDING = auto()  # there, and not readable before it has been written


@dataclass(slots=True, eq=False)
class Access:
    """What one request has done with a store. keys: each once, in no order."""

    keys: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    inserted: set[int] = field(default_factory=set)
    reused: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)

    def note(self, keys: Sequence[int]) -> None:
        fresh = [key for key in keys if key not in self.seen]
        self.keys += fresh
        self.seen.update(fresh)


class HostStore:
    """Room for `capacity` chunks.

    eviction   `lru` or `arc`
    threshold  a chunk is admitted when it is offered for the so-manieth time; below 2: at once
    counts     how often what happened
    """

    def __init__(
        self, capacity: int, eviction: str = "lru", threshold: int = 0, tracked: int = TRACKED
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a host tier of {capacity} chunks")
        self.capacity = capacity
        self.eviction = EVICTION[eviction](capacity)
        self.threshold, self.tracked = threshold, tracked
        self.counts: Counter[str] = Counter()
        self.idle = 0  # chunks that are not read or written
        self.held = 0  # chunks
        self._fresh = 0  # slots that were never used begin here
        self._free: list[int] = []
        self._offers: OrderedDict[int, int] = OrderedDict()
        # called when chunks have become readable, or never will: requests that wait for them may
        # go on
        self.listeners: list[Callable[[], None]] = []

    @property
    def free(self) -> int:
        return len(self._free) + self.capacity - self._fresh

    @property
    def busy(self) -> bool:
        """Whether the chunk is read or written now."""
        return self.idle < self.held

    # -- reading -----------------------------------------------------------------------------------
    def lookup(self, key: int) -> Found:
        chunk = self.eviction.get(key)
        if chunk is None:
            return Found.MISS
        return Found.HIT if chunk.ready else Found.PENDING

    def pin(self, keys: Sequence[int], access: Access) -> list[int]:
        """A load of `keys` begins: they stay until `unpin`. Returns their slots. Raises LedgerError
        where one cannot be read."""
        slots = []
        for key in keys:
            chunk = self.eviction.get(key)
            if chunk is None or not chunk.ready:
                raise LedgerError(f"chunk {key} is read, and is not on the host")
            self.idle -= chunk.users == 0
            chunk.users += 1
            slots.append(chunk.slot)
        access.note(keys)
        access.reused.update(key for key in keys if key not in access.inserted)
        return slots

    def unpin(self, keys: Sequence[int]) -> None:
        """That load has ended."""
        for key in keys:
            chunk = self.eviction.get(key)
            if chunk is None or chunk.users < 1:
                raise LedgerError(f"chunk {key} has no reader")
            chunk.users -= 1
            self.idle += chunk.users == 0

    # -- writing -----------------------------------------------------------------------------------
    def reserve(self, offered: Sequence[int], access: Access) -> dict[int, int] | None:
        """Room for those of `offered` that are not here and are admitted: key -> slot. They are
        readable after `written`. None where they do not fit: then nothing has changed but what was
        counted."""
        if self.threshold >= 2:
            self._count_offers(offered)
        wanted, ready = [], []
        for key in offered:
            chunk = self.eviction.get(key)
            if chunk is None:
                wanted.append(key)
            elif chunk.ready:
                ready.append(key)
        if self.threshold >= 2:
            chosen = [key for key in wanted if self._offers.get(key, 0) >= self.threshold]
            self.counts["not yet admitted"] += len(wanted) - len(chosen)
            wanted = chosen
        missed = [key for key in wanted if key not in access.missed]
        if missed:
            self.eviction.missed(missed)
            access.missed.update(missed)
        known = {*wanted, *ready}
        access.note([key for key in offered if key in known])
        access.reused.update(key for key in ready if key not in access.inserted)
        if not wanted:
            return {}
        if not self._make_room(len(wanted), offered):
            self.counts["full"] += 1
            return None
        slots = {key: self._slot() for key in wanted}
        for key, slot in slots.items():
            self.eviction.insert(key, Chunk(slot))
        self.held += len(slots)
        access.inserted.update(slots)
        return slots

    def written(self, keys: Sequence[int]) -> None:
        """Their store has ended: they can be read, and may leave."""
        for key in keys:
            chunk = self.eviction.get(key)
            if chunk is not None and not chunk.ready:
                chunk.users = 0
                self.idle += 1
        self._tell()

    def lost(self, keys: Sequence[int]) -> None:
        """Their store will never end: their writer has failed."""
        for key in keys:
            chunk = self.eviction.get(key)
            if chunk is None or chunk.ready:
                raise LedgerError(f"chunk {key} has no writer")
            self.eviction.remove(key)
            self._free.append(chunk.slot)
            self.held -= 1
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()

    def ended(self, access: Access, order: Sequence[int]) -> None:
        """A request has ended: its use counts now. order: all keys of its text."""
        keys = [key for key in order if key in access.seen]
        self.eviction.used(keys, access.inserted - access.reused, access.reused)

    def _count_offers(self, keys: Sequence[int]) -> None:
        """Those offered now are not forgotten for others that are."""
        known = {key for key in keys if key in self._offers}
        for key in keys:
            if key in known:
                self._offers.move_to_end(key)
                self._offers[key] += 1
        others = len(self._offers) - len(known)
        for key in keys:
            if key in self._offers:
                continue
            if len(self._offers) >= self.tracked:
                if not others:
                    continue
                self._offers.popitem(last=False)
                others -= 1
            self._offers[key] = 1

    def _make_room(self, chunks: int, kept: Sequence[int]) -> bool:
        lacking = chunks - self.free
        if lacking <= 0:
            return True
        if lacking > self.idle:
            return False
        evicted = self.eviction.evict(lacking, set(kept))
        if evicted is None:
            return False
        self.counts["evicted"] += lacking
        self.idle -= lacking
        self.held -= lacking
        self._free += [chunk.slot for _, chunk in evicted]
        return True

    def _slot(self) -> int:
        if self._fresh < self.capacity:
            self._fresh += 1
            return self._fresh - 1
        return self._free.pop()

    # -- auditor -----------------------------------------------------------------------------------
    def check(self) -> None:
        """Recount; raises LedgerError with what does not add up."""
        chunks = [chunk for _, chunk in self.eviction.chunks()]
        slots = sorted([*self._free, *(chunk.slot for chunk in chunks)])
        if slots != list(range(self._fresh)):
            raise LedgerError("a place on the host is held twice, or by no chunk")
        if len(chunks) != self.held or self.held + self.free != self.capacity:
            raise LedgerError(f"{self.held} chunks held and {self.free} free of {self.capacity}")
        if self.idle != sum(chunk.users == 0 for chunk in chunks):
            raise LedgerError(f"{self.idle} idle chunks are counted")
        if any(chunk.users < WRITING for chunk in chunks):
            raise LedgerError("a chunk has fewer than no readers")
