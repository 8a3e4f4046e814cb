"""The host tier of KV chunks: what is in it, its readers and writers, what it admits and gives up.

Source: vLLM 0.32, `v1/kv_offload/cpu/manager.py` (`CPUOffloadingManager`). One engine has one, as
in vLLM, or several engines share one: keys are of text, the same on all of them.

Chunks leave by least recent use, or ARC (`v1/kv_offload/cpu/policies`; Megiddo and Modha, "ARC: A
Self-Tuning, Low Overhead Replacement Cache", FAST 2003). Use counts once for each request, when it
has ended, from the end of its text to the start: so the start of a text leaves last.
"""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from twinserve.policies.kv.base import LedgerError

WRITING = -1


@dataclass(slots=True, eq=False)
class Chunk:
    """slot: its place in host memory. users: transfers that read it; WRITING: not readable yet."""

    slot: int
    users: int = WRITING

    @property
    def ready(self) -> bool:
        return self.users >= 0


class Eviction(ABC):
    """Chunks by key, and the order in which they leave. capacity: chunks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def get(self, key: int) -> Chunk | None: ...

    @abstractmethod
    def chunks(self) -> Iterator[tuple[int, Chunk]]: ...

    @abstractmethod
    def insert(self, key: int, chunk: Chunk) -> None: ...

    @abstractmethod
    def remove(self, key: int) -> None: ...

    @abstractmethod
    def evict(self, n: int, kept: Collection[int]) -> list[tuple[int, Chunk]] | None:
        """Remove `n` chunks that are not read or written, none of `kept`; None, and nothing
        changed, if there are fewer."""

    def missed(self, keys: Sequence[int]) -> None:
        """A request would store these for the first time, and they are not here."""

    @abstractmethod
    def used(self, keys: Sequence[int], inserted: Collection[int], reused: Collection[int]) -> None:
        """A request has ended that came upon `keys`, in order of its text. inserted: it stored them
        and did nothing else with them. reused: they were there, and readable."""


class Lru(Eviction):
    """Both storing and use make a chunk the one used last."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[int, Chunk] = OrderedDict()  # used longest ago first

    def get(self, key: int) -> Chunk | None:
        return self._order.get(key)

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        return iter(self._order.items())

    def insert(self, key: int, chunk: Chunk) -> None:
        self._order[key] = chunk

    def remove(self, key: int) -> None:
        del self._order[key]

    def evict(self, n: int, kept: Collection[int]) -> list[tuple[int, Chunk]] | None:
        chosen = []
        idle = ((k, c) for k, c in self._order.items() if c.users == 0 and k not in kept)
        for entry in idle:
            chosen.append(entry)
            if len(chosen) == n:
                break
        if len(chosen) < n:
            return None
        for key, _ in chosen:
            del self._order[key]
        return chosen

    def used(self, keys: Sequence[int], inserted: Collection[int], reused: Collection[int]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)


class Arc(Eviction):
    """recent, frequent    T1 and T2: used by one request, by more
    was_recent, was_frequent  B1 and B2: keys that have left these
    target              chunks that `recent` should have; it learns from keys that come back
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0
        self.recent: OrderedDict[int, Chunk] = OrderedDict()
        self.frequent: OrderedDict[int, Chunk] = OrderedDict()
        self.was_recent: OrderedDict[int, None] = OrderedDict()
        self.was_frequent: OrderedDict[int, None] = OrderedDict()

    def get(self, key: int) -> Chunk | None:
        return self.recent.get(key) or self.frequent.get(key)

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        yield from self.recent.items()
        yield from self.frequent.items()

    def insert(self, key: int, chunk: Chunk) -> None:
        self.recent[key] = chunk
        self.was_recent.pop(key, None)
        self.was_frequent.pop(key, None)

    def remove(self, key: int) -> None:
        del (self.recent if key in self.recent else self.frequent)[key]

    def missed(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            recent, frequent = len(self.was_recent), len(self.was_frequent)
            if key in self.was_recent:
                self.target = min(self.target + max(1, frequent / recent), self.capacity)
                self.was_recent.move_to_end(key)
            elif key in self.was_frequent:
                self.target = max(self.target - max(1, recent / frequent), 0)
                self.was_frequent.move_to_end(key)

    def evict(self, n: int, kept: Collection[int]) -> list[tuple[int, Chunk]] | None:
        recent = _idle(self.recent, kept)
        frequent = _idle(self.frequent, kept)
        left, chosen = len(self.recent), []
        for _ in range(n):
            entry = None
            if left >= int(self.target):
                entry = next(recent, None)
            from_recent = entry is not None
            if entry is None:
                entry = next(frequent, None)
            if entry is None:
                entry = next(recent, None)
                from_recent = True
            if entry is None:
                return None
            left -= from_recent
            chosen.append((entry, from_recent))
        for (key, _), from_recent in chosen:
            if from_recent:
                del self.recent[key]
                self.was_recent[key] = None
            else:
                del self.frequent[key]
                self.was_frequent[key] = None
        for gone in (self.was_recent, self.was_frequent):
            while len(gone) > self.capacity:
                gone.popitem(last=False)
        return [entry for entry, _ in chosen]

    def used(self, keys: Sequence[int], inserted: Collection[int], reused: Collection[int]) -> None:
        for key in reversed(keys):
            if key in inserted:
                for part in (self.recent, self.frequent):
                    if key in part:
                        part.move_to_end(key)
            elif key in reused:
                if key in self.recent:
                    self.frequent[key] = self.recent.pop(key)
                elif key in self.frequent:
                    self.frequent.move_to_end(key)


def _idle(part: OrderedDict[int, Chunk], kept: Collection[int]) -> Iterator[tuple[int, Chunk]]:
    return ((k, c) for k, c in part.items() if c.users == 0 and k not in kept)


EVICTION: dict[str, type[Eviction]] = {"lru": Lru, "arc": Arc}


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
            raise ValueError(f"a host tier of {capacity} chunks is impossible: give 1 or more")
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
        if one cannot be read."""
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
        readable after `written`. None if they do not fit: then nothing has changed but what was
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
