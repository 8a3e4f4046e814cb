"""Echo's offline pool (Sec. 6): buckets of similar length, in each the requests by what their texts
share.

In a bucket requests hang in a radix tree of their prompts' blocks. Those that leave the tree at the
same node, typically questions on one document, are a family. The cached part of their shared text
is the same for all. The family with the longest cached text is found without looking at the others.
It is first in a heap, whose entries are checked again only when they may have changed. Computing
text can lengthen what is cached of families below it in the tree, so these are asked anew; an
eviction can only shorten it, so an entry is checked when it comes first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from twinserve.policies.kv.base import KvLedger
from twinserve.policies.requests import RequestTable

_NOTHING = np.zeros(0, np.int64)
_FEW = 64  # entries of a heap that may be old ones without harm


@dataclass(eq=False, slots=True)
class Family:
    """A node of a tree, and the queued requests that leave the tree here.

    edge     int64[n]: contents from its parent to here; depth: blocks from the root to here
    rows     unfinished requests whose prompt ends here
    queue    heap of queued rows, those that have moved elsewhere included; listed: which are in it,
             only asked
    queued   how many are
    leader   a running request that computes the text that all share; the others wait for it
    """

    parent: Family | None
    edge: np.ndarray
    depth: int
    bucket: int
    children: dict[int, Family] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    listed: set[int] = field(default_factory=set)
    queued: int = 0
    leader: int | None = None
    hit: int = 0  # tokens, when last asked
    asked: int | None = None  # blocks lost until then
    entry: int = 0  # number of its valid heap entry; 0: none


class _Order:
    """Queued rows by arrival. A row that has left is dropped when it comes first."""

    def __init__(self, queued: set[int]) -> None:
        self._queued = queued
        self._heap: list[int] = []
        self._listed: set[int] = set()  # only asked

    def add(self, row: int) -> None:
        if row not in self._listed:
            self._listed.add(row)
            heapq.heappush(self._heap, row)

    def first(self) -> int | None:
        while self._heap and self._heap[0] not in self._queued:
            self._listed.discard(heapq.heappop(self._heap))
        return self._heap[0] if self._heap else None


class OfflinePool:
    """Queued offline requests, chosen by cached text.

    buckets  by length (powers of two of prompt tokens); False: one for all
    """

    def __init__(self, buckets: bool = True) -> None:
        self.buckets = buckets
        self._roots: dict[int, Family] = {}
        self._heaps: dict[int, list[tuple[int, int, int, int, Family]]] = {}
        self._place: dict[int, Family] = {}  # unfinished row -> node where its prompt ends
        self._family: dict[int, Family] = {}  # unfinished row -> family
        self._texts: dict[int, np.ndarray] = {}
        self._queued: set[int] = set()  # only asked, never walked through
        self._order = _Order(self._queued)
        self._changed: dict[int, Family] = {}  # families to be asked anew, by id
        self._asked: list[Family] = []  # families asked since the last `keep`
        self._entries = 0
        self._best: list[tuple[int, int]] = []  # the last answer, while nothing has changed
        self._best_of: int | None = None  # blocks lost until then
        self._limits: dict[int, int] = {}  # of a heap's length, before it is cleared of old entries
        # text and number of a block from which on no queued row can find more by its being computed
        self._alone: tuple[np.ndarray, int] | None = None

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, row: int) -> bool:
        return row in self._queued

    # -- requests come and go ----------------------------------------------------------------------
    def add(self, row: int, requests: RequestTable) -> None:
        prefix = requests.prefix[row]
        # Text without a name belongs to one request: a request without a whole block of it is a
        # family of its own.
        text = prefix if prefix is not None and len(prefix) else np.array([-1 - row])
        bucket = int(requests.prompt_tokens[row]).bit_length() if self.buckets else 0
        self._alone = None
        root = self._roots.get(bucket)
        if root is None:
            root = self._roots[bucket] = Family(None, _NOTHING, 0, bucket)
            self._heaps[bucket] = []
        self._texts[row] = text
        self._queued.add(row)
        self._order.add(row)
        node = self._insert(root, text)
        node.rows.append(row)
        self._place[row] = node
        self._settle(node.rows[0])
        self._settle(row)

    def put_back(self, row: int) -> None:
        """It was preempted, and waits again."""
        self._alone = None
        self._queued.add(row)
        self._order.add(row)
        family = self._family[row]
        self._dismiss(family, row)
        self._list(family, row)
        family.queued += 1
        self._ask(family)

    def take(self, row: int, leads: bool) -> None:
        """It has been admitted. leads: others of its family wait until it has computed their shared
        text."""
        self._queued.discard(row)
        family = self._family[row]
        family.queued -= 1
        if leads and family.depth and family.leader is None:
            family.leader = row
        self._ask(family)

    def passed(self, row: int, blocks: int) -> None:
        """A running request has computed its first `blocks` blocks."""
        family = self._family.get(row)
        if family is not None and family.leader == row and blocks >= family.depth:
            self._dismiss(family, row)

    def first(self) -> int | None:
        """The queued row that arrived first; None if none is queued."""
        return self._order.first()

    def waits(self, row: int) -> bool:
        """Whether another request computes the text that it shares."""
        return self._family[row].leader is not None

    def shared_blocks(self, row: int) -> int:
        """Blocks at the start of its prompt that its family shares."""
        return self._family[row].depth

    # -- trying ------------------------------------------------------------------------------------
    def leads(self, row: int) -> bool:
        """Whether others wait for the text that it computes."""
        return self._family[row].leader == row

    def lead(self, row: int) -> None:
        """It leads, as before: what it had computed has been taken back."""
        self._family[row].leader = row

    def keep(self) -> None:
        """What the cache holds has been decided."""
        self._asked = []

    def ask_again(self) -> None:
        """What has been computed or evicted since the last `keep` may have been taken back."""
        for family in self._asked:
            self._ask(family)
        self._asked = []

    def remove(self, row: int) -> None:
        """It has ended."""
        family, node = self._family.pop(row), self._place.pop(row)
        if row in self._queued:
            self._queued.discard(row)
            family.queued -= 1
            self._ask(family)
        self._dismiss(family, row)
        del self._texts[row]
        node.rows.remove(row)
        while node.parent is not None and not node.rows and not node.children and not node.queued:
            del node.parent.children[int(node.edge[0])]
            node = node.parent

    def _dismiss(self, family: Family, row: int) -> None:
        if family.leader == row:
            family.leader = None
            self._ask(family)

    # -- the tree ----------------------------------------------------------------------------------
    def _insert(self, node: Family, text: np.ndarray) -> Family:
        """The node where `text` ends, made if need be."""
        at = 0
        while at < len(text):
            child = node.children.get(int(text[at]))
            if child is None:
                leaf = Family(node, text[at:], len(text), node.bucket)
                node.children[int(text[at])] = leaf
                if len(node.rows) == 1:
                    self._settle(node.rows[0])
                return leaf
            common = _common(child.edge, text[at:])
            node = child if common == len(child.edge) else self._split(node, child, common)
            at += common
        return node

    def _split(self, parent: Family, node: Family, at: int) -> Family:
        """A new node `at` blocks into the edge that leads from `parent` to `node`."""
        upper = Family(parent, node.edge[:at], node.depth - len(node.edge) + at, node.bucket)
        parent.children[int(node.edge[0])] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[int(node.edge[0])] = node
        if len(node.rows) == 1:
            self._settle(node.rows[0])
        return upper

    def _settle(self, row: int) -> None:
        """Put the row into its present family: that of the text shared with others, or of its own
        text if it shares none."""
        node = self._place.get(row)
        if node is None:  # being inserted
            return
        alone = len(node.rows) == 1 and not node.children
        family = (
            node.parent
            if alone and node.parent is not None and node.parent.parent is not None
            else node
        )
        before = self._family.get(row)
        if before is family:
            return
        self._family[row] = family
        if before is not None and before.leader == row:
            self._dismiss(before, row)
            family.leader = row if family.leader is None else family.leader
        if row in self._queued:
            if before is not None:
                before.queued -= 1
                self._ask(before)
            self._list(family, row)
            family.queued += 1
        self._ask(family)

    # -- what is cached ----------------------------------------------------------------------------
    def _ask(self, family: Family) -> None:
        family.entry = 0
        self._changed[id(family)] = family

    def computed(self, text: np.ndarray | None, first: int) -> None:
        """Blocks of `text` from number `first` on have been computed: rows that share them may find
        more now."""
        if text is None:
            return
        alone = self._alone
        if alone is not None and alone[0] is text and first >= alone[1]:
            return  # the next chunk of a question: it has passed the document
        shared = False
        for root in self._roots.values():
            node: Family | None = root
            at = 0
            while node is not None and at <= first < len(text):
                node = node.children.get(int(text[at]))
                at = node.depth if node is not None else at
            if node is not None and node is not root:
                shared = self._ask_below(node) or shared
        if not shared:
            self._alone = text, first

    def _ask_below(self, node: Family) -> bool:
        """Whether any row is there."""
        stack, parent, found = [node], node.parent, bool(node.children)
        if (
            parent is not None
            and parent.queued
            and parent.leader is None
            and not node.queued
            and any(row in self._queued for row in node.rows)
        ):
            # the text of one of its own requests may be computed by a request of another bucket
            self._ask(parent)
            found = True
        while stack:
            node = stack.pop()
            if node.queued:
                found = True
                if node.leader is None:
                    self._ask(node)
            stack.extend(node.children.values())
        return found

    def _first(self, family: Family) -> int:
        """The queued row that arrived first."""
        while (
            self._family.get(family.queue[0]) is not family or family.queue[0] not in self._queued
        ):
            family.listed.discard(heapq.heappop(family.queue))
        return family.queue[0]

    @staticmethod
    def _list(family: Family, row: int) -> None:
        if row not in family.listed:  # what is taken and put back within a plan has not left
            family.listed.add(row)
            heapq.heappush(family.queue, row)

    def _enter(self, family: Family, ledger: KvLedger) -> None:
        row = self._first(family)
        self._entries += 1
        self._asked.append(family)
        family.hit, family.asked, family.entry = (
            ledger.hit_tokens(row),
            ledger.lost_blocks,
            self._entries,
        )
        heap = self._heaps[family.bucket]
        heapq.heappush(heap, (-family.hit, -family.queued, row, self._entries, family))
        if len(heap) > self._limits.get(family.bucket, _FEW):  # mostly entries that count no more
            heap[:] = [item for item in heap if item[-1].entry == item[-2]]
            heapq.heapify(heap)
            self._limits[family.bucket] = 2 * len(heap) + _FEW

    def best(self, ledger: KvLedger) -> list[tuple[int, int]]:
        """(row, tokens found in the cache) of each bucket's best candidate, shorter buckets first:
        the longest cached text; of those the family with most queued requests, then the
        earliest."""
        lost = ledger.lost_blocks
        if not self._changed and lost is not None and lost == self._best_of:
            return self._best
        if self._changed:
            changed, self._changed = self._changed, {}
            for family in changed.values():
                if family.queued and family.leader is None:
                    self._enter(family, ledger)
        tops = (self._top(self._heaps[bucket], ledger) for bucket in sorted(self._heaps))
        self._best = [(self._first(family), family.hit) for family in tops if family is not None]
        self._best_of = lost
        return self._best

    def _top(self, heap: list, ledger: KvLedger) -> Family | None:
        evictions = ledger.lost_blocks
        while heap:
            *_, entry, family = heap[0]
            if family.entry != entry:
                heapq.heappop(heap)
            elif evictions is not None and family.asked == evictions:
                return family
            elif ledger.hit_tokens(self._first(family)) == family.hit:
                family.asked = evictions
                self._asked.append(family)
                return family
            else:
                heapq.heappop(heap)
                self._enter(family, ledger)
        return None


class FcfsPool:
    """The same in order of arrival, for the rungs without Echo's scheduler."""

    def __init__(self) -> None:
        self._queued: set[int] = set()  # only asked
        self._order = _Order(self._queued)

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, row: int) -> bool:
        return row in self._queued

    def add(self, row: int, requests: RequestTable) -> None:
        self.put_back(row)

    def put_back(self, row: int) -> None:
        self._queued.add(row)
        self._order.add(row)

    def take(self, row: int, leads: bool) -> None:
        self._queued.discard(row)

    def remove(self, row: int) -> None:
        self._queued.discard(row)

    def passed(self, row: int, blocks: int) -> None:
        pass

    def computed(self, text: np.ndarray | None, first: int) -> None:
        pass

    def shared_blocks(self, row: int) -> int:
        return 0

    def leads(self, row: int) -> bool:
        return False

    def lead(self, row: int) -> None:
        pass

    def keep(self) -> None:
        pass

    def ask_again(self) -> None:
        pass

    def first(self) -> int | None:
        return self._order.first()

    def waits(self, row: int) -> bool:
        return False

    def best(self, ledger: KvLedger) -> list[tuple[int, int]]:
        first = self.first()
        return [] if first is None else [(first, ledger.hit_tokens(first))]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements are equal."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
