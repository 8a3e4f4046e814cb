"""The paged ledger in plain lists: an object a block, a list a row, a queue of free blocks."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """users: rows; content: what it holds once full, None while it cannot be found."""

    users: list[int] = field(default_factory=list)
    content: object = None


class PagedReference:
    """Free blocks are one queue, as in vLLM: blank ones go to its front, findable ones to its end,
    and blocks are taken from the front. in_order: all go to its end, as in vLLM up to 0.22."""

    def __init__(
        self, blocks: int, size: int, host: int, caching: bool, in_order: bool = False
    ) -> None:
        self.in_order = in_order
        self.size, self.host_room, self.caching = size, host, caching
        self.queue = [Block() for _ in range(blocks)]
        self.holders: dict[object, list[Block]] = {}  # content -> blocks, the first published first
        self.rows: dict[int, list[Block]] = {}
        self.names: dict[int, list] = {}  # row -> contents of its prompt's full blocks
        self.swapped: dict[int, int] = {}  # row -> tokens
        self.published: dict[int, int] = {}

    def content(self, row: int, i: int):
        names = self.names[row]
        return names[i] if i < len(names) else ("own", row, i)

    def find(self, row: int, known: int) -> list[Block]:
        found = []
        while self.caching and len(found) < (known - 1) // self.size:
            holders = self.holders.get(self.content(row, len(found)))
            if not holders:
                break
            found.append(holders[0])
        return found

    def hit_tokens(self, row: int, known: int) -> int:
        return len(self.find(row, known)) * self.size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, row: int, n: int) -> list[Block]:
        taken, self.queue = self.queue[:n], self.queue[n:]
        for block in taken:
            if block.content is not None:
                self.holders[block.content].remove(block)
                block.content = None
            block.users = [row]
        return taken

    def publish(self, row: int, tokens: int) -> None:
        while self.caching and self.published[row] < tokens // self.size:
            i = self.published[row]
            block = self.rows[row][i]
            block.content = self.content(row, i)
            self.holders.setdefault(block.content, []).append(block)
            self.published[row] += 1

    def admit(self, row: int, tokens: int, hit: int, known: int, keep: int, reserve: int) -> bool:
        found = self.find(row, known)[: hit // self.size]
        need = max(self.blocks_for(tokens), self.blocks_for(reserve)) - len(found)
        idle = sum(not block.users for block in found)
        if need + idle + keep > len(self.queue):
            return False
        for block in found:
            if not block.users:
                self.queue.remove(block)
            block.users.append(row)
        self.rows[row] = found + self.take(row, self.blocks_for(tokens) - len(found))
        self.published[row] = len(found)
        self.publish(row, tokens)
        return True

    def grow(self, row: int, tokens: int) -> bool:
        fresh = self.blocks_for(tokens) - len(self.rows[row])
        if fresh > len(self.queue):
            return False
        self.rows[row] += self.take(row, max(fresh, 0))
        self.publish(row, tokens)
        return True

    def grow_all(self, wanted: dict[int, int]) -> bool:
        fresh = sum(max(0, self.blocks_for(t) - len(self.rows[r])) for r, t in wanted.items())
        if fresh > len(self.queue):
            return False
        # All blocks are taken before the first is published: none of them is a hit of another.
        for row, tokens in wanted.items():
            self.rows[row] += self.take(row, max(0, self.blocks_for(tokens) - len(self.rows[row])))
        for row, tokens in wanted.items():
            self.publish(row, tokens)
        return True

    def give_back(self, row: int) -> None:
        blank, findable = [], []
        for block in reversed(self.rows.pop(row)):
            block.users.remove(row)
            if not block.users:
                blank_first = block.content is None and not self.in_order
                (blank if blank_first else findable).append(block)
        self.queue = blank + self.queue + findable
        del self.published[row]

    def free(self, row: int) -> None:
        if row in self.rows:
            self.give_back(row)
        self.swapped.pop(row, None)

    def host_used(self) -> int:
        return sum(self.blocks_for(tokens) for tokens in self.swapped.values())

    def swap_out(self, row: int, computed: int) -> bool:
        if self.host_used() + self.blocks_for(computed) > self.host_room:
            return False
        self.give_back(row)
        self.swapped[row] = computed
        return True

    def swap_in(self, row: int, keep: int) -> bool:
        tokens = self.swapped[row]
        if self.blocks_for(tokens) + keep > len(self.queue):
            return False
        del self.swapped[row]
        assert self.admit(row, tokens, 0, 0, 0, 0)
        return True
