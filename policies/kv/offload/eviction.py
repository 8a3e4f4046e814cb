"""Which chunks leave a full host tier: least recently used, or ARC.

A chunk is what the tier keeps and gives up as a whole: KV of `blocks_per_chunk` device blocks.

Source: vLLM 0.32, `v1/kv_offload/cpu/policies` (`lru.py`, `arc.py`); ARC: Megiddo and Modha, "ARC:
A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Use counts once for each request, when
it has ended, from the end of its text to the start: so the start of a text leaves last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
        changed, where there are fewer."""

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
