"""Storage of the bidirectional ledger: which row holds which slots, what is on the host, and how to
undo changes.

A *cell* is one side of a block: cell b is the real-time side of block b, cell num_blocks + b its
best-effort side. Every per-side array is indexed by cell, so the two classes share all code. The
opposite side of cell c is c - num_blocks: for a real-time cell that index is negative and numpy
reads it from the array's end.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from twinserve.native.chosen import slots
from twinserve.policies.kv.bidirectional.journal import Journal
from twinserve.policies.kv.free import FreeStack, zeros_by_page
from twinserve.policies.kv.tiers import Tier
from twinserve.policies.requests import FIRST_ROWS

_CELL_COLUMNS = ("owner", "count", "lack", "index", "start")
_TABLE_COLUMNS = ("held", "last", "tokens")
_ROW_COLUMNS = {
    "tokens": 0,  # tokens with a place on the device, or all on the host where held is 0
    "held": 0,  # blocks
    "last": 0,  # cell of the last block
    "missing_tokens": 0,
    "missing_blocks": 0,
    "pinned": -1,  # the step for which the row was granted memory
}


def spans(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int64[sum of length]: first[0], first[0] + 1, ... for length[0] numbers, then the same for
    the next.
    """
    ends = np.cumsum(length)
    return np.repeat(first - ends + length, length) + np.arange(int(ends[-1]) if len(ends) else 0)


def filled(tokens: int, blocks: int, size: int) -> np.ndarray:
    """int64[blocks]: slots used in each when all but the last are full."""
    counts = np.full(blocks, size)
    counts[-1] = tokens - (blocks - 1) * size
    return counts


@dataclass(frozen=True, slots=True)
class CellNumbers:
    """What a cell's number says, looked up: for a few cells, numpy's arithmetic with a plain number
    takes eight times as long. Each is an array by cell that cannot be written to.

    peer       the opposite cell        side  first cell of its side
    real_time  whether it is of that side
    block      that it is a side of     bit   of its side, in `SlotState.kind`
    """

    peer: np.ndarray
    side: np.ndarray
    real_time: np.ndarray
    block: np.ndarray
    bit: np.ndarray


@lru_cache(maxsize=8)
def numbers_of_cells(num_blocks: int) -> CellNumbers:
    """One for all ledgers of so many blocks."""
    cells = np.arange(2 * num_blocks)
    real_time = cells < num_blocks
    numbers = CellNumbers(
        np.roll(cells, num_blocks),
        np.where(real_time, 0, num_blocks),
        real_time,
        cells % num_blocks,
        np.where(real_time, 1, 2).astype(np.int8),
    )
    for name in CellNumbers.__slots__:
        getattr(numbers, name).setflags(write=False)
    return numbers


class SlotState:
    """Which row holds what; no decisions.

    Per cell, int64[2 * num_blocks]:
    owner  row                  count  its slots in this block, filled from its end of the block
    lack   the newest `lack` of them are on the host only
    index  place of the block in the owner's block table       start  first token held here

    If count is 0 no row holds anything, and the others are 0 too. kind, int8[num_blocks]: bit 0: a
    real-time owner; bit 1: a best-effort one. version changes whenever any of it does, or the
    running rows do. Tokens of a row are numbered 0, 1, ... as in its text. `on_host` counts those
    with copies.
    """

    kernel = slots  # None: Python does it all

    def __init__(self, num_blocks: int, block_tokens: int, host_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.size = block_tokens
        self.journal = Journal()
        cells = 2 * num_blocks
        # A ledger that holds little is small, however many blocks there are.
        columns = zeros_by_page(*[(cells, np.int64)] * 5, (num_blocks, np.int8))
        self.owner, self.count, self.lack, self.index, self.start, self.kind = columns
        numbers = numbers_of_cells(num_blocks)
        self.peer, self.side, self.real_time = numbers.peer, numbers.side, numbers.real_time
        self.block, self._bit = numbers.block, numbers.bit
        self.empty = FreeStack(num_blocks)
        self.rt_blocks = 0
        self.step = self.version = 0
        self.tables: dict[int, np.ndarray] = {}  # row -> cells, the first held[row] valid
        self.host: dict[
            int, np.ndarray
        ] = {}  # row -> bool[tokens or fewer]: has a copy on the host
        self.on_host = Tier(host_blocks * block_tokens, "tokens", self.journal.note)
        self.tokens = self.held = self.last = np.zeros(0, np.int64)
        self.missing_tokens = self.missing_blocks = self.pinned = np.zeros(0, np.int64)
        self.fit_rows(FIRST_ROWS)

    def fit_rows(self, rows: int) -> None:
        """Row columns reach at least `rows`."""
        old = len(self.tokens)
        if rows <= old:
            return
        for name, fill in _ROW_COLUMNS.items():
            column = np.full(max(rows, 2 * old), fill, np.int64)
            column[:old] = getattr(self, name)
            setattr(self, name, column)

    def put(self, name: str, key: Any, value: Any) -> None:
        """Change own array, dict or attribute (key None), undoably."""
        self.version += 1
        if self.journal.open:
            self.journal.put(self, name, key, value)
        elif key is None:
            setattr(self, name, value)
        else:
            getattr(self, name)[key] = value

    # -- questions -------------------------------------------------------------------------------
    @property
    def num_empty(self) -> int:
        return self.empty.free

    @property
    def used_kinds(self) -> np.ndarray:
        """int8[n]: `kind` of the blocks that were ever used; no row holds the others."""
        return self.kind[: self.empty.used]

    def cells_of(self, row: int) -> np.ndarray:
        """int64[held]: cells of the row, in order of its text."""
        held = int(self.held[row])
        return self.tables[row][:held] if held else np.zeros(0, np.int64)

    def room_in_last(self, row: int) -> int:
        """Unclaimed slots of the row's last block."""
        cell = int(self.last[row])
        taken = int(self.count[cell]) + int(self.count[cell - self.num_blocks])
        return max(self.size - taken, 0)

    def is_pinned(self, row):
        """Runs in the step being planned (row: int or index array)."""
        return self.pinned[row] == self.step

    def missing(self, row: int) -> np.ndarray:
        """int64[missing]: tokens of the row that are on the host only."""
        if self.held[row] == 0:
            return np.arange(self.tokens[row])
        cells = self.cells_of(row)
        cells = cells[self.lack[cells] > 0]
        lack = self.lack[cells]
        return spans(self.start[cells] + self.count[cells] - lack, lack)

    def copied(self, row: int, tokens: np.ndarray) -> np.ndarray:
        """bool[n]: the host has a copy."""
        mask = self.host.get(row)
        if mask is None:
            return np.zeros(len(tokens), bool)
        known = tokens < len(mask)
        known[known] = mask[tokens[known]]
        return known

    def cell_of_token(self, row: int, tokens: np.ndarray) -> np.ndarray:
        cells = self.cells_of(row)
        return cells[np.searchsorted(self.start[cells], tokens, side="right") - 1]

    def places(self, row: int) -> np.ndarray:
        """int64[tokens]: slot of each token of the row, block * size + slot in the block."""
        cells = self.cells_of(row)
        counts = self.count[cells]
        offset = spans(np.zeros(len(cells), np.int64), counts)
        backward = np.repeat(cells >= self.num_blocks, counts)
        slot = np.where(backward, self.size - 1 - offset, offset)
        return np.repeat(cells % self.num_blocks * self.size, counts) + slot

    # -- changes ---------------------------------------------------------------------------------
    def take_empty(self, n: int) -> np.ndarray:
        blocks = self.empty.take(n)
        if self.journal.open:
            self.journal.note(lambda: self.empty.put(blocks))
        return blocks[::-1]

    def claim(self, row: int, cells: np.ndarray, counts: np.ndarray) -> None:
        """Append cells to the row's table, holding its next sum(counts) tokens."""
        if self.journal.open:
            self._note(_TABLE_COLUMNS, row)
            self.journal.note(partial(self._leave, cells.copy()))
        if row not in self.tables:
            self.put("tables", row, np.empty(len(cells), np.int64))
        if self.kernel is not None:
            self.kernel.claim(self, row, cells, counts)
            return
        held, tokens = int(self.held[row]), int(self.tokens[row])
        ends = tokens + counts.cumsum()
        self._occupy(cells, row, counts, held + np.arange(len(cells)), ends - counts)
        self.append(row, held, cells)
        self.held[row] = held + len(cells)
        self.last[row] = cells[-1]
        self.tokens[row] = ends[-1]

    def claim_empty(self, row: int, side: int, need: int, blocks: int) -> int:
        """Up to `blocks` empty blocks for up to `need` tokens; tokens placed."""
        placed = min(need, blocks * self.size)
        if placed:
            cells = self.take_empty(blocks) + self.num_blocks * side
            self.claim(row, cells, filled(placed, blocks, self.size))
        return placed

    def claim_many(
        self, rows: np.ndarray, over: np.ndarray, fresh: np.ndarray, side: np.ndarray
    ) -> None:
        """`over` further tokens of each row go into `fresh` empty blocks each (all > 0), on its
        `side`.
        """
        ends = fresh.cumsum()
        if ends[-1] == len(rows):  # as in most steps
            self.claim_one_each(rows, self.take_empty(len(rows)) + side, over)
            return
        held, tokens = self.held[rows], self.tokens[rows]
        which = np.arange(len(rows)).repeat(fresh)  # whose block each one is
        nth = np.arange(len(which)) - (ends - fresh)[which]
        cells = self.take_empty(len(which)) + side[which]
        if self.journal.open:
            self._note(_TABLE_COLUMNS, rows)
            self.journal.note(partial(self._leave, cells))
        placed = nth * self.size
        counts = np.minimum(over[which] - placed, self.size)
        self._occupy(cells, rows[which], counts, held[which] + nth, tokens[which] + placed)
        begin = 0
        for row, first, end in zip(rows.tolist(), held.tolist(), ends.tolist(), strict=True):
            self.append(row, first, cells[begin:end])
            begin = end
        self.held[rows] = held + fresh
        self.last[rows] = cells[ends - 1]
        self.tokens[rows] = tokens + over

    def claim_one_each(self, rows: np.ndarray, cells: np.ndarray, counts: np.ndarray) -> None:
        """The next `counts` tokens of each row go into one of the free `cells` each."""
        if self.journal.open:
            self._note(_TABLE_COLUMNS, rows)
            self.journal.note(partial(self._leave, cells.copy()))
        held, tokens = self.held[rows], self.tokens[rows]
        self._occupy(cells, rows, counts, held, tokens)
        for i, (row, first) in enumerate(zip(rows.tolist(), held.tolist(), strict=True)):
            self.append(row, first, cells[i : i + 1])
        self.held[rows] = held + 1
        self.last[rows] = cells
        self.tokens[rows] = tokens + counts

    def append(self, row: int, held: int, cells: np.ndarray) -> None:
        """Write behind the valid part of the row's table: nothing to undo, since only `held` makes
        it valid.
        """
        table = self.tables.get(row)
        if table is None:
            self.put("tables", row, cells.copy())
            return
        need = held + len(cells)
        if need > len(table):
            grown = np.empty(need + need // 4 + 8, np.int64)
            grown[:held] = table[:held]
            table = self.tables[row] = grown
        table[held:need] = cells

    def _occupy(self, cells, rows, counts, indices, starts) -> None:
        """Free cells have owners; the caller has noted how to take that back (`_leave`)."""
        self.owner[cells] = rows
        self.count[cells] = counts
        self.index[cells] = indices
        self.start[cells] = starts
        self.kind[self.block[cells]] |= self._bit[cells]
        self.rt_blocks += int(np.count_nonzero(self.real_time[cells]))
        self.version += 1

    def _leave(self, cells: np.ndarray) -> None:
        """Undo `_occupy`: they were free, and so all of their columns 0."""
        for name in ("owner", "count", "index", "start"):
            getattr(self, name)[cells] = 0
        self.kind[self.block[cells]] &= ~self._bit[cells]
        self.rt_blocks -= int(np.count_nonzero(self.real_time[cells]))

    def _note(self, names: tuple[str, ...], key: Any) -> None:
        """Columns are about to be written at `key`, a number or an array: one entry undoes all."""
        kept = key.copy() if isinstance(key, np.ndarray) else key  # the caller may reuse it
        before = [getattr(self, name)[key] for name in names]
        self.journal.note(partial(self._write, names, kept, before))

    def _write(self, names: tuple[str, ...], key: Any, values: list) -> None:
        for name, value in zip(names, values, strict=True):
            getattr(self, name)[key] = value

    def widen(self, row: int, tokens: int) -> None:
        """The row's last block takes that many more of its tokens."""
        cell = self.last[row]
        self.put("count", cell, self.count[cell] + tokens)
        self.put("tokens", row, self.tokens[row] + tokens)

    def vacate(self, cells: np.ndarray) -> None:
        """No row holds these cells any more; blocks without any owner are empty again."""
        if self.journal.open:
            self._note(_CELL_COLUMNS, cells)
            self.journal.note(partial(self._hold_again, cells.copy()))
        if self.kernel is not None:
            self._empty_again(self.kernel.vacate(self, cells))
            return
        for name in _CELL_COLUMNS:
            getattr(self, name)[cells] = 0
        blocks = self.block[cells]
        kind = self.kind[blocks] & ~self._bit[cells]
        self.kind[blocks] = kind
        self.rt_blocks -= int(np.count_nonzero(self.real_time[cells]))
        self.version += 1
        self._empty_again(blocks[kind == 0])

    def _hold_again(self, cells: np.ndarray) -> None:
        """Undo what `vacate` did to blocks."""
        self.kind[self.block[cells]] |= self._bit[cells]
        self.rt_blocks += int(np.count_nonzero(self.real_time[cells]))

    def _empty_again(self, blocks: np.ndarray) -> None:
        self.empty.put(blocks[::-1])
        if self.journal.open:
            self.journal.note(lambda: self.empty.lift(len(blocks)))

    def replace(self, row: int, cells, new) -> None:
        """The parts of `row` that `cells` hold, all of them resident, move to the free cells `new`
        of the same side (ints or int64[n]).
        """
        index = self.index[cells]
        for name in ("owner", "count", "index", "start"):
            self.put(name, new, getattr(self, name)[cells])
        blocks = self.block[new]
        self.put("kind", blocks, self.kind[blocks] | self._bit[new])
        table = self.tables[row].copy()
        table[index] = new
        self.put("tables", row, table)
        if index.max() == self.held[row] - 1:
            self.put("last", row, table[self.held[row] - 1])
        for name in ("owner", "count", "lack", "index", "start"):
            self.put(name, cells, 0)
        blocks = self.block[cells]
        kind = self.kind[blocks] & ~self._bit[cells]
        self.put("kind", blocks, kind)
        if np.count_nonzero(kind) < np.size(kind):
            self._empty_again(np.atleast_1d(blocks)[np.atleast_1d(kind) == 0])

    def truncate(self, row: int, tokens: int) -> None:
        """Give back the slots beyond the row's first `tokens` tokens (at least 1), none of them
        missing.
        """
        cells = self.cells_of(row)
        keep = int(np.searchsorted(self.start[cells], tokens))
        if keep < len(cells):
            self.vacate(cells[keep:])
            # A copy: later growth writes behind the valid part, and a rollback needs what was valid
            # there.
            self.put("tables", row, cells[:keep].copy())
        cell = cells[keep - 1]
        self.put("count", cell, min(self.count[cell], tokens - self.start[cell]))
        self.put("held", row, keep)
        self.put("last", row, cell)
        self.put("tokens", row, tokens)

    # -- host ------------------------------------------------------------------------------------
    def add_copies(self, row: int, tokens: np.ndarray) -> None:
        old = self.host.get(row)
        mask = np.zeros(int(self.tokens[row]), bool)
        if old is not None:
            mask[: len(old)] = old
        mask[tokens] = True
        self.put("host", row, mask)
        self.on_host.reserve(row, len(tokens))

    def drop_copies(self, row: int, keep_missing: bool) -> int:
        """Forget host copies of the row, those it cannot do without excepted if asked to; tokens
        freed.
        """
        mask = self.host.get(row)
        if mask is None:
            return 0
        kept = np.zeros(len(mask), bool)
        if keep_missing:
            missing = self.missing(row)
            kept[missing[missing < len(mask)]] = True
            kept &= mask
        freed = int(np.count_nonzero(mask)) - int(np.count_nonzero(kept))
        if freed == 0:
            return 0
        if kept.any():
            self.put("host", row, kept)
        else:
            self.journal.remove(self, "host", row)
        self.on_host.release(row, freed)
        return freed
