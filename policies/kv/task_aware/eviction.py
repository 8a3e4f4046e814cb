"""The order in which cached blocks are evicted: Echo's (Sec. 4.2), and LRU within it.

Source: Wang et al., "Echo: Efficient Co-Scheduling of Hybrid Online-Offline Tasks for Large
Language Model Serving", Sec. 4.2 and Sec. 6 (KV cache manager). Blocks that a row uses are never
evicted (the paper's priority infinity). Of the others the lowest priority goes first, and within
one priority the block that was used longest ago:

    rc    offline requests that will use the content, if any
    0.5   finished online requests' blocks
    0     finished offline requests' blocks

Blocks that hold nothing findable are taken before all of them.
"""

import heapq
from collections import deque

import numpy as np

from twinserve.policies.kv.free import zeros_by_page
from twinserve.policies.kv.paged.pool import LOOK_AHEAD, BlockPool, longer

# Priorities are kept doubled, as whole numbers.
_OFFLINE, _ONLINE = 0, 1
_FEW = 4  # blocks that are evicted one by one


class CountedPool(BlockPool):
    """A block pool that counts, content by content, the offline requests that will use it (`rc`).

    by_priority  eviction in Echo's order; False: by last use alone, as vLLM does, with the counts
                 there to be read
    needed       cached blocks with rc > 0
    lost         of them, how many were evicted so far; taken back evictions count again
    """

    evicts_in_order = False
    _columns = {**BlockPool._columns, "online": False, "_rank": 0, "_used_at": 0}

    def __init__(self, num_blocks: int, contents: int = 0, by_priority: bool = True) -> None:
        super().__init__(num_blocks, contents)
        self.by_priority = by_priority
        (self.rc,) = zeros_by_page((len(self._found_at), np.int64))
        # an online request has used the block since it was filled
        self.online = np.zeros(0, bool)
        self.needed = 0
        self.lost = 0
        self._rank = np.zeros(0, np.int64)  # doubled priority of a cached block
        # when it was last used, as a serial number; 0: not cached
        self._used_at = np.zeros(0, np.int64)
        # (rank, first serial number, tie break, blocks, their serial numbers, ascending). A block
        # leaves by changing its rank or number, and what is left of it here is skipped.
        self._heap: list[tuple[int, int, int, np.ndarray, np.ndarray]] = []
        self._uses = 0
        self._pushed = 0
        self._listed = 0  # blocks in the heap, stale ones included

    def new_contents(self, n: int) -> int:
        first = super().new_contents(n)
        if len(self.rc) < len(self._found_at):
            self.rc = longer(self.rc, len(self._found_at))
        return first

    # -- what is needed ----------------------------------------------------------------------------
    def count(self, contents: np.ndarray, change: int) -> None:
        """One offline request more (+1) or less (-1) will use `contents` (distinct)."""
        if not len(contents):
            return
        self._count(contents, change)
        if self.undo is not None:
            self.undo.append(lambda: self._count(contents, -change))

    def _count(self, contents: np.ndarray, change: int) -> None:
        self.rc[contents] += change
        blocks = self._first_blocks(contents)
        blocks = blocks[blocks >= 0]
        if self._copies:
            held_twice = sorted(self._copies.keys() & set(contents.tolist()))
            more = [block for content in held_twice for block in self._copies[content][1:]]
            blocks = np.concatenate([blocks, np.array(more, np.int64)])
        blocks = blocks[self._used_at[blocks] > 0]
        if not len(blocks):
            return
        rc = self.rc[self.content[blocks]]
        edge = 1 if change > 0 else 0
        self.needed += change * int((rc == edge).sum())
        if self.by_priority:
            self._rank[blocks] = self._rank_of(blocks)
            self._enter(blocks)

    def _rank_of(self, blocks: np.ndarray) -> np.ndarray:
        if not self.by_priority:
            return np.zeros(len(blocks), np.int64)
        rc = self.rc[self.content[blocks]]
        return np.where(rc > 0, 2 * rc, np.where(self.online[blocks], _ONLINE, _OFFLINE))

    def mark_online(self, blocks: np.ndarray) -> None:
        """An online request uses these blocks (in use now)."""
        fresh = blocks[~self.online[blocks]]
        self.online[fresh] = True
        if self.undo is not None:
            self.undo.append(lambda: self.online.__setitem__(fresh, False))

    def needed_among_first(self, n: int) -> int:
        """How many blocks with rc > 0 would be evicted if `n` free blocks were taken now."""
        from_cache = n - self.blank
        if from_cache <= 0 or not self.needed:
            return 0
        if self.by_priority:
            return max(0, min(from_cache, self.cached) - (self.cached - self.needed))
        cached = np.flatnonzero(self._used_at > 0)
        if from_cache < len(cached):
            cached = cached[np.argpartition(self._used_at[cached], from_cache - 1)[:from_cache]]
        return int((self.rc[self.content[cached]] > 0).sum())

    # -- the order ---------------------------------------------------------------------------------
    def _enter(self, blocks: np.ndarray) -> None:
        """Cached blocks, whose rank and serial number are set, into the order."""
        used_at = self._used_at[blocks]
        if len(blocks) > 1 and not (used_at[1:] > used_at[:-1]).all():
            order = np.argsort(used_at)
            blocks, used_at = blocks[order], used_at[order]
        ranks = self._rank[blocks]
        first = int(ranks[0])
        if (ranks == first).all():
            self._push(first, blocks, used_at)
        else:
            for rank in np.unique(ranks).tolist():
                same = ranks == rank
                self._push(rank, blocks[same], used_at[same])
        if self._listed > 4 * self.num_blocks + 1024:
            self._rebuild()

    def _push(self, rank: int, blocks: np.ndarray, used_at: np.ndarray) -> None:
        self._pushed += 1
        self._listed += len(blocks)
        heapq.heappush(self._heap, (rank, int(used_at[0]), self._pushed, blocks, used_at))

    def _rebuild(self) -> None:
        """Without what is stale."""
        self._heap, self._listed = [], 0
        cached = np.flatnonzero(self._used_at > 0)
        if len(cached):
            self._enter(cached)

    def _evict(self, n: int) -> np.ndarray:
        """The `n` cached blocks of lowest priority, least recently used first; no longer
        findable."""
        if n <= _FEW and (few := self._evict_few(n)) is not None:
            return few
        parts, missing = [], n
        while missing:
            rank, _, _, blocks, used_at = heapq.heappop(self._heap)
            self._listed -= len(blocks)
            # an entry may be a long prompt: not all of it for every block
            seen = missing + LOOK_AHEAD
            head, at = blocks[:seen], used_at[:seen]
            alive = ((self._used_at[head] == at) & (self._rank[head] == rank)).nonzero()[0]
            take = min(missing, len(alive))
            if take and self._heap:
                other, its_first = self._heap[0][:2]
                if (other, its_first) < (rank, int(at[alive[0]])):
                    take = 0  # its first blocks were stale: others come before what is left
                elif other == rank:  # those of another entry may come in between
                    take = min(take, max(1, int(at[alive].searchsorted(its_first))))
            rest = int(alive[take]) if take < len(alive) else seen
            if rest < len(blocks):
                self._push(rank, blocks[rest:], used_at[rest:])
            if take:
                chosen = alive[:take]
                parts.append(head[chosen])
                missing -= take
                # taken: an entry that lists it twice is stale now
                self._used_at[parts[-1]] = -at[chosen]
        evicted = parts[0] if len(parts) == 1 else np.concatenate(parts)
        needed = int(np.count_nonzero(self.rc[self.content[evicted]]))
        if self.undo is not None:
            used_at, ranks = -self._used_at[evicted], self._rank[evicted]

            def undo() -> None:
                self._used_at[evicted], self._rank[evicted] = used_at, ranks
                self.cached += n
                self.needed += needed
                self.evicted -= n
                self.lost += needed  # what was told in between is not true any more
                self._enter(evicted)

            self.undo.append(undo)
        self._used_at[evicted] = 0
        self.cached -= n
        self.needed -= needed
        self.evicted += n
        self.lost += needed
        self._forget(evicted)
        return evicted

    def _evict_few(self, n: int) -> np.ndarray | None:
        """The same for what tokens of decodes take, block by block: for few blocks, numbers are
        faster than arrays. None, and nothing changed, if that is not the plain case."""
        if self.undo is not None or self._copies or self.events is not None:
            return None
        heap, used_at_of, rank_of, rc = self._heap, self._used_at, self._rank, self.rc
        content_of, found_at = self.content, self._found_at
        evicted: list[int] = []
        needed = 0
        while len(evicted) < n:
            rank, at, number, blocks, used_at = heap[0]
            block = blocks.item(0)
            stale = used_at_of.item(block) != at or rank_of.item(block) != rank
            if len(blocks) > 1:
                rest = (rank, used_at.item(1), number, blocks[1:], used_at[1:])
                heapq.heapreplace(heap, rest)
            else:
                heapq.heappop(heap)
            self._listed -= 1
            if stale:
                continue
            content = content_of.item(block)
            needed += rc.item(content) > 0
            used_at_of[block], content_of[block], found_at[content] = 0, -1, 0
            evicted.append(block)
        self.cached -= n
        self.needed -= needed
        self.evicted += n
        self.lost += needed
        self.version += 1
        return np.array(evicted)

    # -- taking and giving -------------------------------------------------------------------------
    def take(self, n: int) -> np.ndarray:
        blocks = super().take(n)
        was_online = blocks[self.online[blocks]]
        if len(was_online):
            self.online[was_online] = False
            if self.undo is not None:
                self.undo.append(lambda: self.online.__setitem__(was_online, True))
        return blocks

    def use(self, blocks: np.ndarray) -> None:
        idle = blocks[self.refs[blocks] == 0]
        used_at, ranks = self._used_at[idle], self._rank[idle]
        needed = int((self.rc[self.content[idle]] > 0).sum())
        self._used_at[idle] = 0
        self.cached -= len(idle)
        self.needed -= needed
        self.refs[blocks] += 1
        if self.undo is not None:

            def undo() -> None:
                self.refs[blocks] -= 1
                self._used_at[idle], self._rank[idle] = used_at, ranks
                self.cached += len(idle)
                self.needed += needed
                if len(idle):
                    self._enter(idle)

            self.undo.append(undo)

    def release(self, blocks: np.ndarray) -> None:
        self.refs[blocks] -= 1
        idle = blocks[self.refs[blocks] == 0]
        findable = self.content[idle] >= 0
        kept, blank = idle[findable], idle[~findable]
        needed = 0
        if len(kept):
            self._used_at[kept] = np.arange(self._uses + 1, self._uses + 1 + len(kept))
            self._uses += len(kept)
            self._rank[kept] = self._rank_of(kept)
            needed = int((self.rc[self.content[kept]] > 0).sum())
            self.cached += len(kept)
            self.needed += needed
            self._enter(kept)
        if len(blank):
            self._blank.put(blank)
        if self.undo is not None:

            def undo() -> None:
                self._blank.lift(len(blank))
                self._used_at[kept] = 0
                self.cached -= len(kept)
                self.needed -= needed
                self.refs[blocks] += 1

            self.undo.append(undo)

    def evicted_first(self, n: int) -> np.ndarray:
        return self.eviction_order()[:n]

    # -- auditor -----------------------------------------------------------------------------------
    def eviction_order(self) -> np.ndarray:
        """int64[cached]: cached blocks, the first to be evicted first; sorted anew."""
        cached = np.flatnonzero(self._used_at > 0)
        return cached[np.lexsort([self._used_at[cached], self._rank_of(cached)])]

    def problems(self) -> list[str]:
        order = self.eviction_order()
        # in the form in which the plain pool keeps its order
        self._stamp = np.minimum(self._used_at, 1)
        self._order = deque([(1, order)])
        wrong = super().problems()
        if not np.array_equal(self._rank[order], self._rank_of(order)):
            wrong.append("a cached block's priority is out of date")
        if self.needed != int((self.rc[self.content[order]] > 0).sum()):
            wrong.append(f"{self.needed} cached blocks counted as needed, which is not so")
        if (self.rc < 0).any():
            wrong.append("a content is needed by fewer than no requests")
        listed = [
            blocks[(self._used_at[blocks] == used_at) & (self._rank[blocks] == rank)]
            for rank, _, _, blocks, used_at in self._heap
        ]
        if not np.isin(order, np.concatenate([*listed, order[:0]])).all():
            wrong.append("a cached block is missing in the eviction order")
        return wrong
