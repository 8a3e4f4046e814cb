"""The bidirectional ledger again, slot by slot with dictionaries: slow and obvious, to compare the
real one with.

Blocks without owners are taken by number here; the ledger may take any, so block numbers are not
compared.
"""

import copy
from dataclasses import dataclass, field

RT, BE = 0, 1


class Refused(Exception):
    """The operation is not possible; its changes are taken back."""


@dataclass
class Part:
    block: int
    tokens: list[int]


@dataclass
class State:
    parts: dict[int, list[Part]] = field(default_factory=dict)  # row -> its block table
    swapped: dict[int, int] = field(default_factory=dict)  # row -> tokens
    # (block, slot) -> (row, token)
    data: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    host: set[tuple[int, int]] = field(default_factory=set)  # (row, token)
    pinned: set[int] = field(default_factory=set)
    moves: list[tuple[int, str, int]] = field(default_factory=list)  # (row, "d2h" or "h2d", token)
    relocated: list[int] = field(default_factory=list)  # rows


class Reference:
    def __init__(self, table, blocks: int, size: int, host_blocks: int) -> None:
        self.table = table
        self.blocks, self.size, self.host_room = blocks, size, host_blocks * size
        self.s = State()

    # -- looking -----------------------------------------------------------------------------------
    def side(self, row):
        return int(self.table.service_class[row])

    def owner(self, block, side):
        for row, parts in self.s.parts.items():
            if self.side(row) == side and any(part.block == block for part in parts):
                return row
        return None

    def part(self, block, side):
        row = self.owner(block, side)
        return (
            next((p for p in self.s.parts[row] if p.block == block), None)
            if row is not None
            else None
        )

    def used(self, block, side):
        part = self.part(block, side)
        return len(part.tokens) if part else 0

    def free_in(self, block):
        return max(0, self.size - self.used(block, RT) - self.used(block, BE))

    def empty(self):
        return [
            b for b in range(self.blocks) if self.owner(b, RT) is None and self.owner(b, BE) is None
        ]

    def only(self, side):
        """Blocks with an owner of this class alone, most empty first."""
        found = []
        for b in range(self.blocks):
            row = self.owner(b, side)
            if row is not None and self.owner(b, 1 - side) is None:
                index = [p.block for p in self.s.parts[row]].index(b)
                found.append((self.used(b, side), row, index, b))
        return [b for *_, b in sorted(found)]

    def idle(self, blocks, side):
        return [b for b in blocks if self.owner(b, side) not in self.s.pinned]

    def slot(self, row, block, token):
        first = self.part(block, self.side(row)).tokens[0]
        return token - first if self.side(row) == RT else self.size - 1 - (token - first)

    def resident(self, row, block, token):
        return self.s.data.get((block, self.slot(row, block, token))) == (row, token)

    def missing(self, row):
        """(block, token) pairs; block None for a swapped row."""
        if row in self.s.swapped:
            return [(None, t) for t in range(self.s.swapped[row])]
        return [
            (part.block, t)
            for part in self.s.parts.get(row, [])
            for t in part.tokens
            if not self.resident(row, part.block, t)
        ]

    def held(self, row):
        return sum(len(p.tokens) for p in self.s.parts.get(row, []))

    def summary(self):
        """Everything that matters later, without block numbers."""
        rows = {}
        for row, parts in self.s.parts.items():
            rows[row] = []
            for part in parts:
                peer = self.owner(part.block, 1 - self.side(row))
                at = None
                if peer is not None:
                    at = peer, [p.block for p in self.s.parts[peer]].index(part.block)
                lost = sum(not self.resident(row, part.block, t) for t in part.tokens)
                rows[row].append((len(part.tokens), lost, at))
        return {
            "rows": rows,
            "swapped": dict(self.s.swapped),
            "host": sorted(self.s.host),
            "pinned": sorted(self.s.pinned),
            "empty": len(self.empty()),
            "moves": sorted(self.s.moves),
            "relocated": sorted(self.s.relocated),
        }

    # -- writing -----------------------------------------------------------------------------------
    def make_room(self, copies):
        for row in sorted({row for row, _ in self.s.host}):
            if len(self.s.host) + copies <= self.host_room or not copies:
                return
            if row not in self.s.pinned:
                needed = {(row, t) for _, t in self.missing(row)}
                self.s.host = {c for c in self.s.host if c[0] != row or c in needed}
        if copies and len(self.s.host) + copies > self.host_room:
            raise Refused

    def put(self, row, block, tokens):
        """Data of these tokens, in the row's part of the block, goes to their slots; what is there
        is evicted.
        """
        evicted = []
        for token in tokens:
            place = block, self.slot(row, block, token)
            if place in self.s.data:
                evicted.append(self.s.data[place])
            self.s.data[place] = (row, token)
        return evicted

    def evict(self, evicted):
        assert not {row for row, _ in evicted} & self.s.pinned
        fresh = [e for e in evicted if e not in self.s.host]
        self.make_room(len(fresh))
        self.s.host |= set(fresh)
        self.s.moves += [(row, "d2h", token) for row, token in fresh]

    def lengthen(self, row, block, count):
        """The row's next `count` tokens go into this block: its last one, or a new one."""
        parts = self.s.parts.setdefault(row, [])
        tokens = list(range(self.held(row), self.held(row) + count))
        if parts and parts[-1].block == block:
            parts[-1].tokens += tokens
        else:
            parts.append(Part(block, tokens))
        return self.put(row, block, tokens)

    def clear(self, row, block):
        self.s.data = {k: v for k, v in self.s.data.items() if k[0] != block or v[0] != row}

    def relocate(self, row, block):
        side = self.side(row)
        part = self.part(block, side)
        count = len(part.tokens)
        if self.empty():
            new = self.empty()[0]
        elif side == RT:
            new = self.first(self.idle(self.only(BE), BE))
        else:
            best = self.only(RT)[:1]
            if best and self.free_in(best[0]) >= count:
                new = best[0]
            else:
                new = self.first(self.idle(self.only(RT), RT))
        if any(self.resident(row, block, t) for t in part.tokens):
            self.s.relocated.append(row)
        self.clear(row, block)
        part.block = new
        self.evict(self.put(row, new, part.tokens))

    @staticmethod
    def first(blocks):
        if not blocks:
            raise Refused
        return blocks[0]

    def restore(self, row):
        lost = self.missing(row)
        self.s.moves += [(row, "h2d", t) for _, t in lost]
        blocks = list(dict.fromkeys(b for b, _ in lost))
        side = self.side(row)
        stuck = []
        evicted = []
        for b in blocks:
            clash = self.used(b, RT) + self.used(b, BE) > self.size
            if clash and self.owner(b, 1 - side) in self.s.pinned:
                stuck.append(b)
            else:
                evicted += self.put(row, b, [t for block, t in lost if block == b])
        self.evict(evicted)
        for b in stuck:
            self.relocate(row, b)

    def expand(self, row, need, keep_free=0):
        if need <= 0:
            return
        parts = self.s.parts.get(row, [])
        if self.side(row) == RT:
            if parts:
                take = min(need, self.size - len(parts[-1].tokens))
                need -= take
                self.fill_rt(row, parts[-1].block, take)
            evicted = []
            empty = self.empty()[: len(self.empty()) - keep_free]
            preempt = self.idle(self.only(BE), BE)
            while need:
                take = min(need, self.size)
                block = empty.pop(0) if empty else self.pop(preempt)
                evicted += self.lengthen(row, block, take)
                need -= take
            self.evict(evicted)
            return
        if parts:
            take = min(need, self.free_in(parts[-1].block))
            if take:
                self.lengthen(row, parts[-1].block, take)
                need -= take
        for block in self.empty()[: len(self.empty()) - keep_free]:
            if need:
                take = min(need, self.size)
                self.lengthen(row, block, take)
                need -= take
        for block in self.only(RT):
            if need and self.free_in(block):
                take = min(need, self.free_in(block))
                self.lengthen(row, block, take)
                need -= take
        parts = self.s.parts.get(row, [])
        if need and parts:
            block = parts[-1].block
            peer = self.owner(block, RT)
            take = min(need, self.size - len(parts[-1].tokens))
            if peer is not None and peer not in self.s.pinned and take:
                self.evict(self.lengthen(row, block, take))
                need -= take
        evicted = []
        victims = self.idle(self.only(RT), RT)
        while need:
            take = min(need, self.size)
            evicted += self.lengthen(row, self.pop(victims), take)
            need -= take
        self.evict(evicted)

    @staticmethod
    def pop(blocks):
        if not blocks:
            raise Refused
        return blocks.pop(0)

    def fill_rt(self, row, block, take):
        if not take:
            return
        peer = self.owner(block, BE)
        meets = take > self.free_in(block)
        if meets and peer in self.s.pinned:
            # The peer has to leave first, for a place that is not the room this row is about to
            # take.
            self.part(block, RT).tokens += range(self.held(row), self.held(row) + take)
            mine = self.part(block, RT).tokens[-take:]
            self.relocate(peer, block)
            assert not self.put(row, block, mine)
        else:
            self.evict(self.lengthen(row, block, take))

    # -- operations --------------------------------------------------------------------------------
    def attempt(self, row, change):
        before = copy.deepcopy(self.s)
        try:
            if row is not None:
                self.s.pinned.add(row)
            change()
        except Refused:
            self.s = before
            return False
        return True

    def begin_step(self):
        self.s.pinned, self.s.moves, self.s.relocated = set(), [], []

    def fits(self, row, tokens, keep_free):
        room = (len(self.empty()) - keep_free) * self.size
        if self.side(row) == RT:
            room += len(self.idle(self.only(BE), BE)) * self.size
        else:
            idle = self.idle(self.only(RT), RT)
            room += sum(self.size if b in idle else self.free_in(b) for b in self.only(RT))
        return tokens <= room

    def admit(self, row, tokens, keep_free=0, reserve_tokens=0):
        if keep_free > len(self.empty()):
            return False
        if reserve_tokens and not self.fits(row, reserve_tokens, keep_free):
            return False
        return self.attempt(row, lambda: self.expand(row, tokens, keep_free))

    def grow(self, row, tokens):
        def change():
            self.restore(row)
            self.expand(row, tokens - self.held(row))

        return self.attempt(row, change)

    def grow_all(self, rows, tokens):
        """Possible in any order of the classes, with the same result, and without touching any
        other row.
        """
        results = []
        shared = self.shared()
        before = self.s
        for first in (RT, BE):
            self.s = copy.deepcopy(before)
            moves = len(self.s.moves), len(self.s.relocated)
            order = sorted(range(len(rows)), key=lambda i: (self.side(rows[i]) != first, i))
            plain = not any(self.missing(row) for row in rows)
            plain = plain and all(self.grow(rows[i], tokens[i]) for i in order)
            plain = plain and self.shared() == shared
            plain = plain and moves == (len(self.s.moves), len(self.s.relocated))
            results.append((self.s, self.summary()) if plain else None)
        self.s = before
        if None in results or results[0][1] != results[1][1]:
            return False
        self.s = results[0][0]
        return True

    def shared(self):
        """The blocks with two owners, and how many slots both claim."""
        both = [b for b in range(self.blocks) if self.used(b, RT) and self.used(b, BE)]
        return {b: max(0, self.used(b, RT) + self.used(b, BE) - self.size) for b in both}

    def leave(self, row):
        for part in self.s.parts.pop(row, []):
            self.s.data = {
                k: v for k, v in self.s.data.items() if k[0] != part.block or v[0] != row
            }

    def free(self, row):
        self.leave(row)
        self.s.swapped.pop(row, None)
        self.s.host = {c for c in self.s.host if c[0] != row}
        self.s.pinned.discard(row)
        self.s.moves = [m for m in self.s.moves if m[0] != row]
        self.s.relocated = [r for r in self.s.relocated if r != row]

    def withdraw(self, row):
        if row not in self.s.pinned:
            return
        computed = int(self.table.computed_tokens[row])
        if computed == 0:
            self.free(row)
            return
        for part in self.s.parts[row]:
            for token in [t for t in part.tokens if t >= computed]:
                del self.s.data[part.block, self.slot(row, part.block, token)]
        for part in self.s.parts[row]:
            part.tokens = [t for t in part.tokens if t < computed]
        self.s.parts[row] = [p for p in self.s.parts[row] if p.tokens]
        lands = any(m[:2] == (row, "h2d") for m in self.s.moves) or row in self.s.relocated
        if not lands:
            self.s.pinned.discard(row)

    def swap_out(self, row):
        if row in self.s.pinned:
            return False

        def change():
            tokens = self.held(row)
            fresh = [(row, t) for t in range(tokens) if (row, t) not in self.s.host]
            self.leave(row)
            self.s.swapped[row] = tokens
            self.make_room(len(fresh))
            self.s.host |= set(fresh)
            self.s.moves += [(r, "d2h", t) for r, t in fresh]

        return self.attempt(None, change)

    def swap_in(self, row, keep_free=0):
        if keep_free > len(self.empty()):
            return False

        def change():
            tokens = self.s.swapped.pop(row)
            self.expand(row, tokens, keep_free)
            self.s.moves += [(row, "h2d", t) for t in range(tokens)]

        return self.attempt(row, change)
