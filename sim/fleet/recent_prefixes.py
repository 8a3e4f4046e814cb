"""Which replica was sent how much of a prompt: what routers keep that hear no KV events, and guess
what is cached from what they dispatched."""

from __future__ import annotations

from collections import deque

import numpy as np


class RecentPrefixes:
    """Prompts that went to each replica, as a cache with the least recent use would keep them.

    Contents are dense ids, as for `PrefixIndex`. ttl_s: what was sent longer ago counts no more;
    None: as long as there is room.
    """

    def __init__(self, ttl_s: float | None = None) -> None:
        self._ttl_s = ttl_s
        self._recent: dict[int, _Recent] = {}

    def add(self, replica: int, capacity: int) -> None:
        """A replica comes, that is thought to keep so many blocks."""
        self._recent[replica] = _Recent(capacity)

    def remove(self, replica: int) -> None:
        self._recent.pop(replica, None)

    def sent(self, replica: int, contents: np.ndarray, now: float) -> None:
        """A prompt goes to a replica: int64[n], its blocks from the first on."""
        if len(contents) and replica in self._recent:
            self._recent[replica].put(contents, now)

    def longest_prefix(self, replica: int, contents: np.ndarray, now: float) -> int:
        """Leading blocks of a prompt that are thought to be there."""
        recent = self._recent[replica]
        if self._ttl_s is not None:
            recent.expire(now - self._ttl_s)
        return recent.longest_prefix(contents)

    def size(self, replica: int) -> int:
        """Blocks that are thought to be there."""
        return self._recent[replica].size


class _Recent:
    """Of one replica. A stamp a content says in which prompt it was used last; the prompts are
    listed by stamp, so that the oldest are found without a search."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # 0: not here; the last one stands for all that come after it
        self._stamps = np.zeros(1024, np.int64)
        self._prompts: deque[tuple[int, np.ndarray, float]] = deque()  # stamp, contents, when
        self._listed = 0  # contents of all of these
        self._stamp = 0
        self.size = 0

    def put(self, contents: np.ndarray, now: float) -> None:
        need = int(contents.max()) + 2
        if need > len(self._stamps):
            grown = np.zeros(max(need, 2 * len(self._stamps)), np.int64)
            grown[: len(self._stamps)] = self._stamps
            self._stamps = grown
        self._stamp += 1
        self.size += int(np.count_nonzero(self._stamps[contents] == 0))
        self._stamps[contents] = self._stamp
        self._prompts.append((self._stamp, contents, now))
        self._listed += len(contents)
        while self.size > self._capacity:
            self._drop_oldest(self.size - self._capacity)
        if self._listed > 4 * self.size + 4096:
            self._tidy()

    def expire(self, before_s: float) -> None:
        while self._prompts and self._prompts[0][2] < before_s:
            self._drop_oldest(self.size)

    def longest_prefix(self, contents: np.ndarray) -> int:
        if not len(contents):
            return 0
        there = self._stamps.take(contents, mode="clip") > 0
        first = int(there.argmin())  # that is False, if one is
        return len(there) if there[first] else first

    def _drop_oldest(self, most: int) -> None:
        """Up to so many contents of the oldest prompt, its last ones first: these are the leaves of
        the tree of prefixes."""
        stamp, contents, when = self._prompts.popleft()
        self._listed -= len(contents)
        mine = contents[self._stamps[contents] == stamp]
        kept, dropped = mine[: max(len(mine) - most, 0)], mine[max(len(mine) - most, 0) :]
        self._stamps[dropped] = 0
        self.size -= len(dropped)
        if len(kept):
            self._prompts.appendleft((stamp, kept, when))
            self._listed += len(kept)

    def _tidy(self) -> None:
        """Without what was used again later."""
        live = [(s, c[self._stamps[c] == s], when) for s, c, when in self._prompts]
        self._prompts = deque(entry for entry in live if len(entry[1]))
        self._listed = sum(len(contents) for _, contents, _ in self._prompts)
