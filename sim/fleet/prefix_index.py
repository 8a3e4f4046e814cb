"""Which replica has how much of a prompt: what KV-aware routers keep, fed by KV events."""

from __future__ import annotations

import numpy as np

from twinserve.policies.kv.events import KvListener


class PrefixIndex:
    """The contents of each replica's prefix cache, as its KV events tell them.

    Contents are dense ids (`twinserve.sim.fleet.contents.content_ids`) for one block size; replicas
    with another one need an index of their own.
    """

    def __init__(self) -> None:
        self._caches: dict[int, _Cache] = {}

    @property
    def replicas(self) -> list[int]:
        """Those that are in the index, in the order in which they came."""
        return list(self._caches)

    def add(self, replica: int) -> KvListener:
        """A replica comes, with nothing in its cache. Returns what is to hear its events:
        `ledger.subscribe(index.add(replica))`. Raises ValueError where it is here already."""
        if replica in self._caches:
            raise ValueError(f"replica {replica} is in the prefix index already; remove it first")
        cache = self._caches[replica] = _Cache()
        return cache

    def remove(self, replica: int) -> None:
        """A replica is gone, and what it had; its later events are dropped. Raises
        KeyError where it is not here."""
        del self._caches[replica]

    def longest_prefix(self, replica: int, contents: np.ndarray) -> int:
        """Leading blocks of a prompt (int64[n], from its first block on) that the replica has.

        A request that comes finds at most `(prompt_tokens - 1) // block_tokens` of them: its last
        token is always computed. Raises KeyError where the replica is not here.
        """
        return self._caches[replica].longest_prefix(contents)

    def longest_prefixes(self, contents: np.ndarray) -> dict[int, int]:
        """`longest_prefix` of every replica."""
        return {name: cache.longest_prefix(contents) for name, cache in self._caches.items()}

    def size(self, replica: int) -> int:
        """How many contents the replica has. Raises KeyError where it is not here."""
        return self._caches[replica].size

    def contents(self, replica: int) -> np.ndarray:
        """int64[n]: all that the replica has, ascending. Raises KeyError where it is not here."""
        return self._caches[replica].contents()


class _Cache:
    """The cache of one replica: a KvListener. A flag a content is looked up for a whole prompt at
    once, where a set would be asked block by block."""

    def __init__(self) -> None:
        self.size = 0
        self._held = np.zeros(1024, bool)  # the last one stands for all that come after it: False

    def stored(self, contents: np.ndarray) -> None:
        need = int(contents.max()) + 2
        if need > len(self._held):
            grown = np.zeros(max(need, 2 * len(self._held)), bool)
            grown[: len(self._held)] = self._held
            self._held = grown
        self.size += len(contents) - int(np.count_nonzero(self._held[contents]))
        self._held[contents] = True

    def removed(self, contents: np.ndarray) -> None:
        self.size -= int(np.count_nonzero(self._held.take(contents, mode="clip")))
        self._held[contents[contents < len(self._held)]] = False

    def longest_prefix(self, contents: np.ndarray) -> int:
        if not len(contents):
            return 0
        found = self._held.take(contents, mode="clip")
        first = int(found.argmin())  # that is False, if one is
        return len(found) if found[first] else first

    def contents(self) -> np.ndarray:
        return np.flatnonzero(self._held)
