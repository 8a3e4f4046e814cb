"""The block pool of a paged ledger: free blocks, cached prefixes, eviction order. vLLM V1's
semantics, on arrays.

vLLM keeps one queue of free blocks: blocks without a hash go back to its front, blocks with one to
its end, and allocation takes from the front. So the queue is always "blank blocks, then cached
blocks, least recently freed first", and is kept here as those two parts. Every operation handles a
whole run of blocks. A chunk of cached blocks enters the eviction order as one array. Blocks that
are used again leave it by losing their stamp, not by a search.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from twinserve.policies.kv.events import KvEvents
from twinserve.policies.kv.free import FreeStack, zeros_by_page

# blocks of a cached chunk that are looked at beyond those wanted: some may be in use again
LOOK_AHEAD = 64
_NONE = np.zeros(0, np.int64)
_FIRST = 64  # blocks that the columns reach when the first one is taken


def longer(column: np.ndarray, size: int) -> np.ndarray:
    """`column`, by content, with zeros behind it."""
    (grown,) = zeros_by_page((size, column.dtype.type))
    held = column.nonzero()[0]  # to copy zeros would take memory for them
    grown[held] = column[held]
    return grown


class BlockPool:
    """`num_blocks` blocks; contents are dense ids >= 0 of what a full block holds (equal id = same
    prefix).

    blank   blocks that hold nothing reusable
    cached  unused blocks whose content can still be found; evicted in order of release
    version changes whenever what can be found may have changed
    """

    evicts_in_order = True  # of release: kernels do it themselves
    queued_blank = 0  # blocks in the eviction order that hold nothing reusable
    # columns by block -> what they say of one that was never taken
    _columns = {"refs": 0, "content": -1, "_stamp": 0}

    def __init__(self, num_blocks: int, contents: int = 0) -> None:
        self.num_blocks = num_blocks
        self._blank = FreeStack(num_blocks)
        # By block, of those that were ever taken and some more (`_reach`).
        self.refs = np.zeros(0, np.int64)  # rows that use the block
        self.content = np.zeros(0, np.int64)  # -1: not findable
        # number of its chunk in the eviction order; 0: not in it
        self._stamp = np.zeros(0, np.int64)
        # chunks (number, blocks), first to be evicted first
        self._order: deque[tuple[int, np.ndarray]] = deque()
        self._chunks = 0
        self.cached = 0
        self.version = 0
        # content -> 1 + first block that holds it; 0: none does
        (self._found_at,) = zeros_by_page((max(contents, 16), np.int32))
        # content held by several blocks -> all of them, oldest first
        self._copies: dict[int, list[int]] = {}
        self.contents = contents
        self.evicted = 0  # cached contents lost so far, blocks
        # how to take back what was done, newest last
        self.undo: list[Callable[[], object]] | None = None
        self.events: KvEvents | None = None  # None: no listener

    @property
    def blank(self) -> int:
        return self._blank.free

    @property
    def free(self) -> int:
        return self._blank.free + self.cached

    def new_contents(self, n: int) -> int:
        """Reserve `n` content ids that nothing else will ever equal; returns the first."""
        first = self.contents
        self.contents += n
        size = len(self._found_at)
        if self.contents > size:
            self._found_at = longer(self._found_at, max(self.contents, size + size // 4))
        return first

    def _first_blocks(self, contents: np.ndarray) -> np.ndarray:
        """int64[n]: of each of `contents` the first block that holds it, -1 where none does."""
        blocks = self._found_at[contents].astype(np.int64)
        blocks -= 1
        return blocks

    def _reach(self, blocks: int) -> None:
        """Columns by block reach at least that many blocks."""
        old = len(self.refs)
        if blocks <= old:
            return
        size = min(self.num_blocks, max(blocks, 2 * old, _FIRST))
        for name, fill in self._columns.items():
            column = getattr(self, name)
            grown = np.full(size, fill, column.dtype)
            grown[:old] = column
            setattr(self, name, grown)

    def find(self, contents: np.ndarray) -> np.ndarray:
        """Blocks holding the longest findable prefix of the chain `contents` (int64[n], from the
        first block on)."""
        blocks = self._first_blocks(contents)
        missing = blocks < 0
        if np.count_nonzero(missing):
            blocks = blocks[: int(missing.argmax())]
        return blocks

    def holds(self, contents: np.ndarray) -> np.ndarray:
        """bool[n]: which of `contents` (int64[n]) can be found, each for itself."""
        return self._found_at[contents] > 0

    def findable(self) -> np.ndarray:
        """int64[n]: all contents that can be found, ascending."""
        return self._found_at.nonzero()[0]

    # -- taking ------------------------------------------------------------------------------------
    def take(self, n: int) -> np.ndarray:
        """`n` free blocks, referenced once each: blank ones first, then cached ones, which are
        evicted."""
        from_blank = min(n, self._blank.free)
        blocks = self._blank.take(from_blank) if from_blank else _NONE
        if self._blank.used > len(self.refs):
            self._reach(self._blank.used)
        if self.undo is not None:
            self.undo.append(lambda: self._blank.put(blocks[:from_blank]))
        if from_blank < n:
            evicted = self._evict(n - from_blank)
            blocks = np.concatenate([blocks, evicted]) if from_blank else evicted
        self.refs[blocks] = 1
        if self.undo is not None:
            self.undo.append(lambda: self.refs.__setitem__(blocks, 0))
        return blocks

    def _evict(self, n: int) -> np.ndarray:
        """The `n` cached blocks that were released first, no longer findable."""
        taken, missing, consumed = [], n, []
        while missing:
            number, chunk = self._order.popleft()
            consumed.append((number, chunk))
            # a chunk may be a long prompt: not all of it for every block
            head = chunk[: missing + LOOK_AHEAD]
            alive = (self._stamp[head] == number).nonzero()[0]
            rest = chunk[len(head) :]
            if len(alive) > missing:
                rest = chunk[alive[missing] :]
                alive = alive[:missing]
            if len(rest):
                self._order.appendleft((number, rest))
                consumed.append((-1, rest))
            taken.append(head[alive])
            missing -= len(alive)
        blocks = taken[0] if len(taken) == 1 else np.concatenate(taken)
        if self.undo is not None:
            stamps = self._stamp[blocks]
            self.undo.append(lambda: self._restore_order(consumed, blocks, stamps))
        self._stamp[blocks] = 0
        self.cached -= n
        self.evicted += n
        self._forget(blocks)
        return blocks

    def _restore_order(self, consumed: list, blocks: np.ndarray, stamps: np.ndarray) -> None:
        for number, chunk in reversed(consumed):
            if number < 0:
                self._order.popleft()  # the cut-off rest of the chunk that follows
            else:
                self._order.appendleft((number, chunk))
        self._stamp[blocks] = stamps
        self.cached += len(blocks)
        self.evicted -= len(blocks)

    def _forget(self, blocks: np.ndarray) -> None:
        contents = self.content[blocks]
        self.version += 1
        if self.undo is not None:
            first = self._found_at[contents]

            def undo() -> None:
                self.version += 1
                self.content[blocks] = contents
                self._found_at[contents] = first

            self.undo.append(undo)
        if self._copies:
            for block, content in zip(blocks.tolist(), contents.tolist(), strict=True):
                self._forget_one(block, content)
        else:
            self._found_at[contents] = 0
        self.content[blocks] = -1
        if self.events is not None:
            self.events.touch(contents)

    def _forget_one(self, block: int, content: int) -> None:
        holders = self._copies.get(content)
        if holders is None:
            self._found_at[content] = 0
            return
        if self.undo is not None:
            before = list(holders)
            self.undo.append(lambda: self._copies.__setitem__(content, before))
        holders.remove(block)
        self._found_at[content] = holders[0] + 1
        if len(holders) == 1:
            del self._copies[content]

    def evicted_first(self, n: int) -> np.ndarray:
        """Return int64[n]: the cached blocks that `_evict` would take, in its order."""
        parts, missing = [], n
        for number, chunk in self._order:
            at = 0
            while missing and at < len(chunk):
                head = chunk[at : at + missing + LOOK_AHEAD]
                parts.append(head[self._stamp[head] == number][:missing])
                missing -= len(parts[-1])
                at += len(head)
            if not missing:
                break
        return np.concatenate(parts) if parts else _NONE

    def lost_with(self, blocks: np.ndarray, first: int = 0) -> np.ndarray:
        """Return the contents of `blocks[first:]` that no block would hold if all `blocks` (cached)
        were evicted."""
        contents = self.content[blocks[first:]]
        if not self._copies:
            return contents
        gone, copies = set(blocks.tolist()), self._copies
        lost = {c for c in contents.tolist() if gone.issuperset(copies.get(c, ()))}
        return np.array(sorted(lost), np.int64)

    def evicted_by(self, taken: np.ndarray) -> np.ndarray | None:
        """`KvLedger.evicted_by`."""
        return None

    def spared(self, tables: list[np.ndarray]) -> int:
        """How many blocks fewer there are than entries in these block tables (int64[held] each, not
        empty), which share leading blocks or none."""
        sharing = [blocks for blocks in tables if self.refs[blocks[0]] > 1]
        if len(sharing) < 2:
            return 0
        entries = np.concatenate(sharing)
        seen = np.zeros(len(self.refs), bool)
        seen[entries] = True
        return len(entries) - int(np.count_nonzero(seen))

    def use(self, blocks: np.ndarray) -> None:
        """Another row uses these findable blocks; those that were unused leave the eviction
        order."""
        idle = blocks[self.refs[blocks] == 0]
        stamps = self._stamp[idle]
        self._stamp[idle] = 0
        self.cached -= len(idle)
        self.refs[blocks] += 1
        if self.undo is not None:

            def undo() -> None:
                self.refs[blocks] -= 1
                self._stamp[idle] = stamps
                self.cached += len(idle)

            self.undo.append(undo)

    # -- giving ------------------------------------------------------------------------------------
    def publish(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        """These blocks are full now and hold `contents` (distinct): later requests can find
        them."""
        self.version += 1
        before = self._found_at[contents]
        fresh = before == 0
        places = (blocks + 1).astype(np.int32)  # an index takes other types one by one
        if np.count_nonzero(fresh) == len(fresh):
            self._found_at[contents] = places
        else:
            self._found_at[contents[fresh]] = places[fresh]
            held = zip(
                blocks[~fresh].tolist(),
                contents[~fresh].tolist(),
                (before[~fresh] - 1).tolist(),
                strict=True,
            )
            for block, content, first in held:
                self._copies.setdefault(content, [first]).append(block)
        self.content[blocks] = contents
        if self.undo is not None:

            def undo() -> None:
                self.version += 1
                self.content[blocks] = -1
                self._found_at[contents] = before
                for block, content in zip(
                    blocks[~fresh].tolist(), contents[~fresh].tolist(), strict=True
                ):
                    holders = self._copies[content]
                    holders.remove(block)
                    if len(holders) == 1:
                        del self._copies[content]

            self.undo.append(undo)
        if self.events is not None:
            self.events.touch(contents)

    def release(self, blocks: np.ndarray) -> None:
        """A row stops using `blocks` (in the order in which they should be evicted)."""
        self.refs[blocks] -= 1
        idle = blocks[self.refs[blocks] == 0]
        findable = self.content[idle] >= 0
        kept, blank = idle[findable], idle[~findable]
        if len(kept):
            self._chunks += 1
            self._stamp[kept] = self._chunks
            self._order.append((self._chunks, kept))
            self.cached += len(kept)
        if len(blank):
            self._blank.put(blank)
        if self.undo is not None:

            def undo() -> None:
                self._blank.lift(len(blank))
                if len(kept):
                    self._order.pop()
                    self._stamp[kept] = 0
                    self.cached -= len(kept)
                self.refs[blocks] += 1

            self.undo.append(undo)

    # -- auditor -----------------------------------------------------------------------------------
    def problems(self) -> list[str]:
        """What does not add up, recounted from scratch."""
        wrong = []
        blank = self._blank.units()
        queued = [chunk[self._stamp[chunk] == number] for number, chunk in self._order]
        order = np.concatenate(queued) if queued else np.zeros(0, np.int64)
        used = np.flatnonzero(self.refs)
        everything = np.sort(np.concatenate([blank, order, used]))
        if not np.array_equal(everything, np.arange(self.num_blocks)):
            wrong.append("blank, cached and used blocks are not a partition of the pool")
        if (self.refs < 0).any():
            wrong.append("a block has fewer than no users")
        if len(order) != self.cached:
            wrong.append(f"{len(order)} blocks in eviction order, {self.cached} counted")
        known = blank[blank < len(self.content)]
        queued_blank = int(np.count_nonzero(self.content[order] < 0))
        if (self.content[known] >= 0).any() or queued_blank != self.queued_blank:
            wrong.append("a blank block is findable, or a cached one is not")
        holders = np.flatnonzero(self.content >= 0)
        held = self.content[holders]
        names, first, counts = np.unique(held, return_index=True, return_counts=True)
        if not np.array_equal(names, self.findable()):
            wrong.append("the content map and the blocks' contents name different contents")
        alone = (counts == 1) & (self._found_at[names] == holders[first] + 1)
        for content in sorted({*names[~alone].tolist(), *self._copies}):
            blocks = set(holders[held == content].tolist())
            found = int(self._found_at[content]) - 1
            listed = self._copies.get(content, [found])
            if set(listed) != blocks or listed[0] != found:
                wrong.append(f"content {content}: map says {listed}, blocks say {sorted(blocks)}")
        return wrong
