"""How much of a prompt each replica has: an index fed by KV events, or a guess from sent requests.
Also the names of contents, and KV events on their way to the router."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from twinserve.policies.kv.events import KvListener
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.step import Step
from twinserve.sim.fleet.replica import Life, Replica
from twinserve.sim.fleet.routers.base import Router
from twinserve.traces.workload import Workload, WorkloadError


class PrefixIndex:
    """The contents of each replica's prefix cache, as its KV events tell them.

    Contents are dense ids (`content_ids`) for one block size; replicas with another one
    need an index of their own.
    """

    def __init__(self) -> None:
        self._caches: dict[int, _Cache] = {}

    @property
    def replicas(self) -> list[int]:
        """Return the replicas of the index, in order of coming."""
        return list(self._caches)

    def add(self, replica: int) -> KvListener:
        """Add a replica with an empty cache. Returns the listener for its events:
        `ledger.subscribe(index.add(replica))`. Raises ValueError if the replica is here already."""
        if replica in self._caches:
            raise ValueError(f"replica {replica} is in the prefix index already; remove it first")
        cache = self._caches[replica] = _Cache()
        return cache

    def remove(self, replica: int) -> None:
        """Remove a replica and its contents; later events of it are dropped. Raises KeyError if it
        is not here."""
        del self._caches[replica]

    def longest_prefix(self, replica: int, contents: np.ndarray) -> int:
        """Leading blocks of a prompt (int64[n], from its first block on) that the replica has.

        At most `(prompt_tokens - 1) // block_tokens` of them help a request: the last token is
        always computed. Raises KeyError for an unknown replica.
        """
        return self._caches[replica].longest_prefix(contents)

    def longest_prefixes(self, contents: np.ndarray) -> dict[int, int]:
        """Return `longest_prefix` of every replica."""
        return {name: cache.longest_prefix(contents) for name, cache in self._caches.items()}

    def size(self, replica: int) -> int:
        """Return how many contents the replica has. Raises KeyError if it is not here."""
        return self._caches[replica].size

    def contents(self, replica: int) -> np.ndarray:
        """Return int64[n]: the replica's contents, ascending. Raises KeyError if it is not here."""
        return self._caches[replica].contents()


class _Cache:
    """The cache of one replica: a KvListener. It has a flag for each content, so that a whole
    prompt is looked up at once."""

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


class RecentPrefixes:
    """Prompts that went to each replica, as a cache with the least recent use would keep them: the
    guess of routers that hear no KV events.

    Contents are dense ids, as for `PrefixIndex`. ttl_s: what was sent longer ago counts no more;
    None: as long as there is room.
    """

    def __init__(self, ttl_s: float | None = None) -> None:
        self._ttl_s = ttl_s
        self._recent: dict[int, _Recent] = {}

    def add(self, replica: int, capacity: int) -> None:
        """Add a replica that is assumed to keep so many blocks."""
        self._recent[replica] = _Recent(capacity)

    def remove(self, replica: int) -> None:
        self._recent.pop(replica, None)

    def sent(self, replica: int, contents: np.ndarray, now: float) -> None:
        """A prompt was sent to a replica. Given: int64[n], its blocks from the first on."""
        if len(contents) and replica in self._recent:
            self._recent[replica].put(contents, now)

    def longest_prefix(self, replica: int, contents: np.ndarray, now: float) -> int:
        """Return the leading blocks of a prompt that are assumed to be cached."""
        recent = self._recent[replica]
        if self._ttl_s is not None:
            recent.expire(now - self._ttl_s)
        return recent.longest_prefix(contents)

    def size(self, replica: int) -> int:
        """Return the blocks that are assumed to be cached."""
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


def content_ids(workload: Workload, row: int, block_tokens: int) -> np.ndarray | None:
    """int64[n]: ids of the row's full KV blocks of `block_tokens` tokens, from the trace's prefix
    blocks.

    Trace ids name everything up to their block's end. A KV block inside a trace block is named by
    (trace block, place in it); one that spans several is named by the last of them.
    """
    prefix = workload.prefix
    if prefix is None or not _nest(prefix.block_tokens, block_tokens):
        return None  # a ledger that would use them has refused already (shared_contents)
    blocks = prefix.of(row)
    full = int(workload.prompt_tokens[row]) // block_tokens
    if prefix.block_tokens % block_tokens == 0:
        parts = prefix.block_tokens // block_tokens
        return (blocks[:, None] * parts + np.arange(parts)).ravel()[:full]
    parts = block_tokens // prefix.block_tokens
    return blocks[parts - 1 :: parts][:full]


def _nest(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def shared_contents(workload: Workload, block_tokens: int) -> int:
    """Return how many content ids `content_ids` can give. Raises WorkloadError if the block sizes
    do not fit together."""
    prefix = workload.prefix
    if prefix is None:
        return 0
    if not _nest(prefix.block_tokens, block_tokens):
        raise WorkloadError(
            f"{workload.provenance.name}: prefix blocks of {prefix.block_tokens} tokens and KV "
            "blocks of "
            f"{block_tokens} tokens do not nest; choose --block-tokens so that one divides the "
            "other"
        )
    return prefix.distinct * max(1, prefix.block_tokens // block_tokens)


class News(NamedTuple):
    """due_s  when the router hears it (seconds)"""

    due_s: float
    source: KvNews
    stored: bool
    contents: np.ndarray


class KvNews:
    """A KvListener: what a replica's prefix cache tells its router, until the replica is down.

    on_the_way  where news wait that take their time (`Signals.events_age_s`), in order; the fleet
                delivers what is due before the router decides

    A ledger gives a run of steps its memory at the run's end. So what the steps until now evict is
    asked for (`catch_up`) before the router decides, and before its replica fails or falls silent.
    """

    def __init__(
        self, replica: Replica, router: Router, clock: Clock, on_the_way: deque[News]
    ) -> None:
        self._replica = replica
        self._router = router
        self._clock = clock
        self._on_the_way = on_the_way
        self._count = 0
        self._run: Step | None = None  # caught up with, as far as `_told` of its steps
        self._told = 1
        self._at_s: float | None = None  # when the step planned that is told of; None: now
        signals = router.signals
        self._step_by_step = signals.events_age_s > 0 or signals.events_lost > 0
        if self._step_by_step:  # when each event was, or its number, says what comes of it
            replica.engine.on_run = self.catch_up

    def stored(self, contents: np.ndarray) -> None:
        self._tell(True, contents)

    def removed(self, contents: np.ndarray) -> None:
        self._tell(False, contents)

    def catch_up(self) -> None:
        """Tell what the steps of a run under way have evicted by now."""
        engine = self._replica.engine
        run = engine.run()
        if run is None:
            return
        step, steps = run
        if step is not self._run:
            self._run, self._told = step, 1
        if steps <= self._told:
            return
        ledger, outcome = engine.core.ledger, step.executed.outcome
        upto = range(self._told + 1, steps + 1) if self._step_by_step else (steps,)
        for planned, contents in ledger.lost_in_run(step.plan.rows, self._told, upto):
            before = planned - 2 - engine.core.asynchronous  # step at whose end it was planned
            self._at_s = float(outcome.ends_s[before]) if before >= 0 else outcome.start_s
            ledger.foretell(contents)
        self._told, self._at_s = steps, None

    def _tell(self, stored: bool, contents: np.ndarray) -> None:
        signals = self._router.signals
        self._count += 1
        index = self._replica.index
        if signals.event_is_lost(index, self._count - 1) or index in self._router.view.silent_s:
            return
        if signals.events_age_s:
            at_s = self._clock.now if self._at_s is None else self._at_s
            news = News(at_s + signals.events_age_s, self, stored, contents.copy())
            insort(self._on_the_way, news, key=_due_s)
        else:
            self.arrive(stored, contents)

    def arrive(self, stored: bool, contents: np.ndarray) -> None:
        """Deliver the event to the router."""
        if self._replica.life is not Life.DOWN:
            self._router.view.now = self._clock.now
            hear = self._router.on_stored if stored else self._router.on_removed
            hear(self._replica.index, contents)


_due_s = attrgetter("due_s")


def deliver(news: deque[News], now: float) -> None:
    """Deliver all events that are due."""
    while news and news[0].due_s <= now:
        _, source, stored, contents = news.popleft()
        source.arrive(stored, contents)
