"""The paged ledger: fixed blocks, prefix caching by chained contents, eviction by least recent use.

This is the memory of vLLM: V1 with prefix caching (block pool semantics in `pool.py`), 0.x without
it and with swap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from twinserve.native.chosen import paged
from twinserve.policies.kv.base import KvUsage, LedgerError
from twinserve.policies.kv.events import KvEvents, KvListener
from twinserve.policies.kv.free import zeros_by_page
from twinserve.policies.kv.paged.one_queue import OneQueuePool
from twinserve.policies.kv.paged.pool import BlockPool
from twinserve.policies.kv.tiers import Tier
from twinserve.policies.kv.undo import UndoLedger
from twinserve.policies.plan import DEVICE, HOST, KvMove
from twinserve.policies.requests import FIRST_ROWS, RequestClass, RequestTable


@dataclass(slots=True)
class _BlockTable:
    """A row's blocks in order of its text; `contents[i]` names what block i holds once it is
    full."""

    blocks: np.ndarray
    contents: np.ndarray

    def put(self, held: int, blocks: np.ndarray) -> None:
        """Write `blocks` behind the first `held`."""
        need = held + len(blocks)
        if need > len(self.blocks):
            grown = np.empty(max(need, held + held // 4 + 8), np.int64)
            grown[:held] = self.blocks[:held]
            self.blocks = grown
        self.blocks[held:need] = blocks


class PagedLedger(UndoLedger):
    """Blocks of `block_tokens` tokens; with `prefix_caching`, full blocks stay findable until they
    are evicted.

    shared_contents  content ids 0 .. shared_contents - 1 are those of the workload's prefix blocks
                     (RequestTable.prefix)
    host_blocks      room for swapped requests
    """

    name = "paged"
    caches_prefixes = True
    publishes_events = True
    hands_over = True
    own_contents = 32  # ids reserved at a time for text that no other request shares, blocks
    pool: BlockPool

    def __init__(
        self,
        table: RequestTable,
        num_blocks: int,
        block_tokens: int,
        host_blocks: int = 0,
        prefix_caching: bool = True,
        shared_contents: int = 0,
    ) -> None:
        super().__init__(table, num_blocks, block_tokens, host_blocks)
        self.prefix_caching = prefix_caching
        self.shared_contents = shared_contents if prefix_caching else 0
        self.pool = BlockPool(num_blocks, self.shared_contents)
        self._tables: dict[int, _BlockTable] = {}
        self._contents: dict[int, np.ndarray] = {}  # of dropped rows: they may find their blocks
        # row -> hit_tokens, with the pool's version and the known tokens that it is of
        self._hits: dict[int, tuple[int, int, int]] = {}
        self._held = np.zeros(FIRST_ROWS, np.int64)  # row -> blocks
        # row -> leading blocks that others can find
        self._published = np.zeros(FIRST_ROWS, np.int64)
        self._swapped: dict[int, int] = {}  # row -> tokens on the host
        self.host = Tier(host_blocks, f"blocks of {block_tokens} tokens", self._undo)
        # rows of both classes have been seen; until then all used blocks are real-time
        self._mixed = False
        self._rt_refs = np.zeros(0, np.int64)  # real-time rows that use a block, kept once mixed
        self._rt_blocks = 0
        # Does what every step asks for, where nothing is overridden; None: the Python below does.
        self._kernel = paged if type(self) is PagedLedger else None
        self.setup()

    def setup(self) -> None:
        """What a subclass keeps besides; the parameters are set."""

    def reuse_in_order(self) -> None:
        if self.prefix_caching and type(self.pool) is BlockPool:
            self.pool = OneQueuePool(self.num_blocks, self.shared_contents)
            self._kernel = None

    # -- questions ---------------------------------------------------------------------------------
    @property
    def free_blocks(self) -> int:
        return self.pool.free

    def held_blocks(self, row: int) -> int:
        return int(self._held[row]) if row < len(self._held) else 0

    def relief(self, row: int, tokens: int, victims: np.ndarray) -> tuple[int, np.ndarray]:
        """In blocks; those that victims share with others count as if they were their own."""
        hits = 0 if self.held_blocks(row) else self.hit_tokens(row) // self.block_tokens
        fresh = -(-tokens // self.block_tokens) - self.held_blocks(row) - hits
        return fresh - self.pool.free, self._held[victims]

    def blocks_of(self, row: int) -> np.ndarray:
        """int64[held]: device blocks of the row, in order of its text."""
        return self._tables[row].blocks[: self.held_blocks(row)]

    def shared_tokens(self, rows: np.ndarray) -> int:
        """Only whole blocks of known text are shared, so all their tokens have been computed."""
        tables = [self.blocks_of(row) for row in rows.tolist() if self.held_blocks(row)]
        return self.pool.spared(tables) * self.block_tokens

    def hit_tokens(self, row: int) -> int:
        if not self.prefix_caching:
            return 0
        if self._kernel is not None:
            return self._kernel.hit_tokens(self, row)
        known, version = int(self.table.known_tokens(row)), self.pool.version
        hit = self._hits.get(row)
        if hit is None or hit[0] != version or hit[1] != known:
            found = self.pool.find(self._contents_of(row)[: (known - 1) // self.block_tokens])
            self._hits[row] = hit = (version, known, len(found) * self.block_tokens)
        return hit[2]

    def missing_tokens(self, row):
        if np.ndim(row) == 0:
            return self._swapped.get(int(row), 0)
        missing = np.zeros(len(row), np.int64)
        if self._swapped:
            missing[:] = [self._swapped.get(r, 0) for r in row.tolist()]
        return missing

    def slack_tokens(self, rows: np.ndarray) -> np.ndarray:
        return self._held[rows] * self.block_tokens - self.table.computed_tokens[rows]

    def usage(self) -> KvUsage:
        free = self.pool.free
        used = self.num_blocks - free
        return KvUsage(
            total=self.num_blocks,
            free=free,
            real_time=self._rt_blocks if self._mixed else used,
            best_effort=used - self._rt_blocks if self._mixed else 0,
            cached=self.pool.cached - self.pool.queued_blank,
            host_tokens=sum(self._swapped.values()) if self._swapped else 0,
        )

    def evicted_by(self, taken: np.ndarray) -> np.ndarray | None:
        return self.pool.evicted_by(taken)

    # -- changes -----------------------------------------------------------------------------------
    def admit(
        self,
        row: int,
        tokens: int,
        hit_tokens: int = 0,
        keep_free: int = 0,
        reserve_tokens: int = 0,
    ) -> bool:
        if self._kernel is not None:
            asked = (row, tokens, hit_tokens, keep_free, reserve_tokens)
            done = self._kernel.admit(self, _BlockTable, *asked)
            if done is not None:
                return done
        if not self._admit(row, self._room(tokens), hit_tokens, keep_free, reserve_tokens):
            return False
        self._publish(row, tokens // self.block_tokens)
        return True

    def admit_remote(self, row: int, tokens: int, hit_tokens: int, keep_free: int) -> bool:
        return self._admit(row, tokens, hit_tokens, keep_free, 0)

    def _admit(
        self, row: int, tokens: int, hit_tokens: int, keep_free: int, reserve_tokens: int
    ) -> bool:
        self._make_room_for_row(row)
        if row in self._tables:
            raise LedgerError(f"row {row} is admitted though it holds {self._held[row]} blocks")
        size = self.block_tokens
        hits = hit_tokens // size
        contents = self._contents_of(row) if self.prefix_caching else _NOTHING
        found = self.pool.find(contents[:hits]) if hits else _NOTHING
        if len(found) != hits:
            raise LedgerError(
                f"row {row} is admitted with {hits} cached blocks, {len(found)} are there"
            )
        idle = int((self.pool.refs[found] == 0).sum()) if hits else 0
        fresh = -(-tokens // size) - hits
        must_fit = max(fresh, -(-reserve_tokens // size) - hits)
        if must_fit + idle + keep_free > self.pool.free:
            return False
        if hits:
            self.pool.use(found)
        taken = self.pool.take(fresh)
        blocks = np.concatenate([found, taken]) if hits else taken
        self._tables[row] = _BlockTable(blocks, contents)
        self._held[row] = len(blocks)
        self._published[row] = hits
        self._count_row(row, blocks, +1)
        self._undo(lambda: self._forget_row(row))
        return True

    def grow(self, row: int, tokens: int) -> bool:
        if self._kernel is not None:
            done = self._kernel.grow(self, row, tokens)
            if done is not None:
                return done
        fresh = -(-self._room(tokens) // self.block_tokens) - int(self._held[row])
        if fresh > self.pool.free:
            return False
        if fresh > 0:
            self._append(row, self.pool.take(fresh))
        self._publish(row, tokens // self.block_tokens)
        return True

    def grow_each(self, rows: np.ndarray, tokens: np.ndarray) -> int:
        # No row gets a block that another one of them has just filled, so that all may take theirs
        # before the first is published.
        fresh = np.maximum(self._lacking_blocks(rows, tokens), 0)
        done = int(fresh.cumsum().searchsorted(self.pool.free, side="right"))
        self._take_all(rows[:done], fresh[:done])
        self._publish_all(rows[:done], tokens[:done])
        return done

    def _lacking_blocks(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int64[n]: blocks that each row needs beyond its own up to `tokens`; below 0: it has
        more."""
        return -(-self._room(tokens) // self.block_tokens) - self._held[rows]

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> bool:
        if self._kernel is not None:
            done = self._kernel.grow_all(self, rows, tokens)
            if done is not None:
                return done
        if not self._take_all(rows, self._lacking_blocks(rows, tokens)):
            return False
        self._publish_all(rows, tokens)
        return True

    def publish(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        if self._kernel is None or self._kernel.grow_all(self, rows, tokens) is None:
            self._publish_all(rows, tokens)

    def _take_all(self, rows: np.ndarray, fresh: np.ndarray) -> bool:
        """Take so many blocks for each row, none below 1; False and nothing changed if there are
        too few."""
        growing = fresh > 0
        if np.count_nonzero(growing):
            counts = fresh[growing]
            total = sum(counts.tolist())
            if total > self.pool.free:
                return False
            self._append_each(rows[growing], counts, self.pool.take(total))
        return True

    def _publish_all(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """The first `tokens` of each row are computed with this step: what they fill is found."""
        if not self.prefix_caching:
            return
        full = tokens // self.block_tokens
        if self.known_text_only:
            full = np.minimum(full, self._known_blocks(rows))
        filled = full > self._published[rows]
        if np.count_nonzero(filled):
            self._publish_each(rows[filled], full[filled])

    def block_growth(self, rows: np.ndarray, steps: int) -> np.ndarray:
        if self._kernel is not None:
            growth = self._kernel.block_growth(self, rows, steps)
            if growth is not None:
                return growth
        return super().block_growth(rows, steps)

    def extend(self, rows: np.ndarray, steps: int) -> None:
        done = None if self._kernel is None else self._kernel.extend(self, rows, steps)
        if done is None:
            done = self.grow_all(rows, self.table.computed_tokens[rows] + steps)
        if not done:
            raise LedgerError(
                f"{steps} steps of {len(rows)} rows do not fit into {self.pool.free} free blocks"
            )

    @property
    def runs_of_chunks(self) -> bool:
        """A listener hears of a block when it is full."""
        return self.pool.events is None

    def extend_chunks(self, rows: np.ndarray, tokens: np.ndarray, steps: int) -> None:
        computed = self.table.computed_tokens[rows]
        # Of prompts side by side with the same text, the first to compute a block is the one found.
        alone = not self.prefix_caching or np.count_nonzero(tokens > 1) < 2
        for step in (steps,) if alone else range(1, steps + 1):
            if not self.grow_all(rows, computed + tokens * step):
                raise LedgerError(
                    f"{steps} steps of {len(rows)} rows do not fit into {self.pool.free} free "
                    "blocks"
                )

    def free(self, row: int) -> None:
        self._name_text(row, None)
        self._leave(row)

    def drop(self, row: int) -> None:
        self._remember_text(row)
        self._leave(row)

    def swap_out(self, row: int) -> bool:
        tokens = int(self.table.computed_tokens[row])
        blocks = -(-tokens // self.block_tokens)
        if blocks > self.host.free:
            return False
        self._moves.append(
            KvMove(row, DEVICE, HOST, tokens, blocks=self.blocks_of(row)[:blocks].copy())
        )
        self._remember_text(row)
        self._give_back(row)
        self._put_on_host(row, tokens, blocks)
        return True

    def swap_in(self, row: int, keep_free: int = 0) -> bool:
        tokens = self._swapped[row]
        blocks = -(-tokens // self.block_tokens)
        if blocks + keep_free > self.pool.free:
            return False
        self._take_from_host(row)
        self.admit(row, tokens)
        self._moves.append(KvMove(row, HOST, DEVICE, tokens, blocks=self.blocks_of(row).copy()))
        return True

    # -- events and tries --------------------------------------------------------------------------
    def subscribe(self, listener: KvListener) -> None:
        """As the base says. Names that the pool gives to text of one row (`new_contents`) are no
        events: another engine gives the same numbers to other texts."""
        if self.pool.undo is not None:
            raise LedgerError(
                "a listener cannot be added while a change is tried; add it between steps"
            )
        if self.pool.events is None:
            self.pool.events = KvEvents(self.pool, self.shared_contents)
        self.pool.events.subscribe(listener)

    def lost_in_run(
        self, rows: np.ndarray, told: int, steps: Sequence[int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        blank = self.pool.blank
        if len(rows) * -(-steps[-1] // self.block_tokens) <= blank:
            return
        evicted = self.block_growth(rows, steps[-1]).cumsum() - blank
        seen, last = max(evicted.item(told - 1), 0) if told else 0, evicted.item(-1)
        if last <= seen:
            return
        blocks = self.pool.evicted_first(last)
        for step in steps:
            if (upto := evicted.item(step - 1)) > seen:
                yield step, self.pool.lost_with(blocks[:upto], seen)
                seen = upto

    def foretell(self, contents: np.ndarray) -> None:
        if self.pool.events is not None:
            self.pool.events.foretell(contents)

    def rollback(self, mark: int) -> None:
        super().rollback(mark)
        self._publish_events()

    def commit(self, mark: int) -> None:
        super().commit(mark)
        self._publish_events()

    def _publish_events(self) -> None:
        if self.pool.events is not None and self.pool.undo is None:
            self.pool.events.publish()

    # -- bookkeeping -------------------------------------------------------------------------------
    def _room(self, tokens):
        """Tokens that a row with so many has memory for, int or int64[n]: a subclass may want
        more."""
        return tokens

    def _make_room_for_row(self, row: int) -> None:
        if row >= len(self._held):
            size = max(row + 1, 2 * len(self._held))
            self._held = np.concatenate([self._held, np.zeros(size - len(self._held), np.int64)])
            self._published = np.concatenate(
                [self._published, np.zeros(size - len(self._published), np.int64)]
            )

    def _contents_of(self, row: int) -> np.ndarray:
        contents = self._contents.get(row)
        if contents is None:
            prefix = self.table.prefix[row]
            contents = _NOTHING if prefix is None else prefix
        return contents

    def _known_blocks(self, rows):
        """Full blocks of known text; an int for a row, int64[n] for an array of rows.

        Source: vLLM `v1/core/kv_cache_manager.py` (`allocate_slots` caches up to
        `request.num_tokens`) and `v1/core/sched/async_scheduler.py`
        (`_update_request_with_output` caches when a token has come).
        """
        table = self.table
        return (table.known_tokens(rows) - table.in_flight[rows]) // self.block_tokens

    def _publish(self, row: int, full: int) -> None:
        """The row's first `full` blocks are full: those not yet findable become so."""
        if not self.prefix_caching:
            return
        if self.known_text_only:
            full = min(full, int(self._known_blocks(row)))
        old = int(self._published[row])
        if full <= old:
            return
        entry = self._tables[row]
        if full > len(entry.contents):
            self._name_contents(entry, full)
        self.pool.publish(entry.blocks[old:full], entry.contents[old:full])
        self._published[row] = full
        self._undo(lambda: self._published.__setitem__(row, old))

    def _name_contents(self, entry: _BlockTable, full: int) -> None:
        """Give text that no other request shares its own content ids, up to block `full`."""
        own = -(-(full - len(entry.contents)) // self.own_contents) * self.own_contents
        first = self.pool.new_contents(own)
        entry.contents = np.concatenate([entry.contents, np.arange(first, first + own)])

    def _append(self, row: int, blocks: np.ndarray) -> None:
        entry, held = self._tables[row], int(self._held[row])
        need = held + len(blocks)
        entry.put(held, blocks)
        self._held[row] = need
        self._count_row(row, blocks, +1)
        if self.pool.undo is not None:

            def undo() -> None:
                self._held[row] = held
                self._count_row(row, blocks, -1)

            self.pool.undo.append(undo)

    def _append_each(self, rows: np.ndarray, counts: np.ndarray, blocks: np.ndarray) -> None:
        """`counts[i]` of `blocks` to the end of each row's table."""
        held, begin = self._held[rows], 0
        for row, start, count in zip(rows.tolist(), held.tolist(), counts.tolist(), strict=True):
            part = blocks[begin : begin + count]
            if self.pool.undo is None:
                self._tables[row].put(start, part)
            else:
                self._append(row, part)
            begin += count
        if self.pool.undo is not None:
            return
        self._held[rows] = held + counts
        if self._mixed:
            real_time = np.repeat(self.table.service_class[rows] == _REAL_TIME, counts)
            self._count_users(blocks[real_time], +1)

    def _publish_each(self, rows: np.ndarray, full: np.ndarray) -> None:
        """`_publish` for many rows, all at once if no text is in it twice."""
        blocks, contents = [], []
        for row, old, new in zip(
            rows.tolist(), self._published[rows].tolist(), full.tolist(), strict=True
        ):
            entry = self._tables[row]
            if new > len(entry.contents):
                self._name_contents(entry, new)
            blocks.append(entry.blocks[old:new])
            contents.append(entry.contents[old:new])
        named = np.concatenate(contents)
        if self.pool.undo is None and (len(rows) == 1 or len(set(named.tolist())) == len(named)):
            self.pool.publish(np.concatenate(blocks), named)
            self._published[rows] = full
            return
        # Of two rows that compute the same text side by side, the first in order is the one found
        # later.
        for row, new in zip(rows.tolist(), full.tolist(), strict=True):
            self._publish(row, new)

    def _count_row(self, row: int, blocks: np.ndarray, change: int) -> None:
        """Keep the number of blocks that a real-time row uses, once there are rows of both
        classes."""
        if not self._mixed:
            if self.table.service_class[row] == _REAL_TIME:
                return
            self._mixed = True
            (self._rt_refs,) = zeros_by_page((self.num_blocks, np.int64))
            for other in self._tables:
                if other != row and self.table.service_class[other] == _REAL_TIME:
                    self._count_users(self.blocks_of(other), +1)
        elif self.table.service_class[row] == _REAL_TIME:
            self._count_users(blocks, change)

    def _count_users(self, blocks: np.ndarray, change: int) -> None:
        edge = 0 if change > 0 else 1
        self._rt_blocks += change * int((self._rt_refs[blocks] == edge).sum())
        self._rt_refs[blocks] += change

    def _give_back(self, row: int) -> None:
        if self._kernel is not None and self._kernel.give_back(self, row):
            return
        held, entry = int(self._held[row]), self._tables.pop(row)
        blocks, published = entry.blocks[:held], int(self._published[row])
        self._held[row] = 0
        self._count_row(row, blocks, -1)
        if self.pool.undo is not None:

            def undo() -> None:
                self._tables[row] = entry
                self._held[row] = held
                self._published[row] = published
                self._count_row(row, blocks, +1)

            self.pool.undo.append(undo)
        # the tail first: the start of a text is the likelier to be asked for again
        self.pool.release(blocks[::-1])

    def _forget_row(self, row: int) -> None:
        blocks = self._tables[row].blocks[: self._held[row]]
        self._count_row(row, blocks, -1)
        self._held[row] = 0
        del self._tables[row]

    def _leave(self, row: int) -> None:
        """Give back whatever the row holds, on the device and on the host."""
        if row in self._swapped:
            self._take_from_host(row)
        if row in self._tables:
            self._give_back(row)

    def _put_on_host(self, row: int, tokens: int, blocks: int) -> None:
        self.host.reserve(row, blocks)
        self._swapped[row] = tokens
        self._undo(lambda: self._swapped.pop(row))

    def _take_from_host(self, row: int) -> None:
        self.host.release(row, self.host.held_by(row))
        tokens = self._swapped.pop(row)
        self._undo(lambda: self._swapped.__setitem__(row, tokens))

    def _remember_text(self, row: int) -> None:
        """The row gives up its blocks and will come again: it may find them by their contents."""
        if self.prefix_caching and row in self._tables:
            self._name_text(row, self._tables[row].contents)

    def _name_text(self, row: int, contents: np.ndarray | None) -> None:
        self._hits.pop(row, None)
        before = self._contents.pop(row, None)
        if contents is not None:
            self._contents[row] = contents
        self._undo(lambda: self._name_text(row, before))

    # -- auditor -----------------------------------------------------------------------------------
    def check(self) -> None:
        wrong = self.pool.problems()
        users = np.zeros(self.num_blocks, np.int64)
        real_time = np.zeros(self.num_blocks, np.int64)
        for row, entry in self._tables.items():
            blocks = entry.blocks[: self._held[row]]
            if len(set(blocks.tolist())) != len(blocks):
                wrong.append(f"row {row} lists a block twice")
            users[blocks] += 1
            if self._mixed and self.table.service_class[row] == _REAL_TIME:
                real_time[blocks] += 1
            if len(blocks) * self.block_tokens < self.table.computed_tokens[row]:
                wrong.append(
                    f"row {row} has computed {self.table.computed_tokens[row]} tokens in "
                    f"{len(blocks)} blocks"
                )
            full = blocks[: self._published[row]]
            if not np.array_equal(self.pool.content[full], entry.contents[: len(full)]):
                wrong.append(f"row {row}: its blocks do not hold its text")
        reached = len(self.pool.refs)
        if users[reached:].any() or not np.array_equal(users[:reached], self.pool.refs):
            wrong.append("block users do not match the rows' block tables")
        if (self._mixed and not np.array_equal(real_time, self._rt_refs)) or int(
            (real_time > 0).sum()
        ) != self._rt_blocks:
            wrong.append("the count of real-time blocks is off")
        wrong += self.host.problems(self._on_host())
        if set(self._tables) & set(self._swapped):
            wrong.append("a row is on the device and on the host")
        if wrong:
            raise LedgerError("; ".join(wrong))

    def _on_host(self) -> dict[int, int]:
        """Row -> blocks that it should hold on the host."""
        return {row: -(-tokens // self.block_tokens) for row, tokens in self._swapped.items()}


_NOTHING = np.zeros(0, np.int64)
_REAL_TIME = int(RequestClass.REAL_TIME)
