"""The layer-wise ledger: a block of tokens is on the device in some layers and on the host in the
others.

Source: Xiong et al., "LayerKV", Sec. 3.1.1 and 3.1.2. docs/layerkv.md has our choices for the
paper's open points.

All blocks of a request have the same layers on the device. Which ones follows from how many there
are (`offload_order`), so a request's residency is a number. Its per-layer block table has the place
of each block of each resident layer. For a policy that knows nothing of layers this is a paged
memory without prefix cache: `admit`, `grow`, `swap_out` move whole requests.
"""

from collections.abc import Callable

import numpy as np

from twinserve.policies.kv.base import KvUsage, LedgerError
from twinserve.policies.kv.free import FreeStack
from twinserve.policies.kv.tiers import Tier
from twinserve.policies.kv.undo import UndoLedger
from twinserve.policies.plan import DEVICE, HOST, Hold, KvMove, Place
from twinserve.policies.requests import FIRST_ROWS, RequestClass, RequestTable


# Cells: the unit of memory of the layer-wise ledger, the KV of one block of tokens in one layer.
# Source: Xiong et al., "LayerKV", Sec. 4: one tensor for the whole KV memory instead of one a
# layer, so that any block of it can hold any layer's part of a request.
class CellPool:
    """`num_cells` cells of the device; any of them is as good as any other. `free`: how many no row
    has."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._free = FreeStack(num_cells)
        # how to take back what was done, newest last
        self.undo: list[Callable[[], object]] | None = None

    @property
    def free(self) -> int:
        return self._free.free

    def take(self, n: int) -> np.ndarray:
        """int64[n]: cells, of those that are free; the caller has asked whether there are so
        many."""
        cells = self._free.take(n)
        if self.undo is not None:
            self.undo.append(lambda: self._free.put(cells))
        return cells

    def give(self, cells: np.ndarray) -> None:
        self._free.put(cells)
        if self.undo is not None:
            self.undo.append(lambda: self._free.lift(len(cells)))

    def is_partition(self, taken: list[np.ndarray]) -> bool:
        """Whether the free cells and the `taken` ones are all cells there are, each once."""
        everything = np.sort(np.concatenate([self._free.units(), *taken]))
        return np.array_equal(everything, np.arange(self.num_cells))


def offload_order(layers: int, interleaved: bool = True) -> tuple[int, ...]:
    """Layer indices in the order in which a request's layers leave the device.

    interleaved  evenly spread at any number of layers, every other one first (Sec. 3.1.2): while a
                 layer on the host is fetched, the one before it, on the device, is computed. Sorted
                 by their bits read backwards, so that to offload more never means to bring one
                 back.
    """
    if not interleaved:
        return tuple(range(layers))
    bits = max(1, (layers - 1).bit_length())
    return tuple(sorted(range(layers), key=lambda layer: int(f"{layer:0{bits}b}"[::-1], 2)))


_REAL_TIME = int(RequestClass.REAL_TIME)
AWAY = -1  # in place of a cell: the layer is on the host


class LayerwiseLedger(UndoLedger):
    """`num_blocks` x `layers` cells on the device, `host_blocks` x `layers` on the host.

    layers  of the model; 1: requests are on the device or on the host as a whole

    A row with layers on the host may run in a step only if that step brings them (`stream`), or
    computes its prompt; until then its tokens count as missing.
    """

    name = "layerwise"
    knows_layers = True  # built with `layers`, those of the model
    pool: CellPool

    def __init__(
        self,
        table: RequestTable,
        num_blocks: int,
        block_tokens: int,
        host_blocks: int = 0,
        layers: int = 1,
    ) -> None:
        super().__init__(table, num_blocks, block_tokens, host_blocks)
        if layers < 1:
            raise ValueError(f"a model of {layers} layers is impossible: give 1 or more")
        self.layers = layers
        self.order = offload_order(layers)
        self.pool = CellPool(num_blocks * layers)
        unit = f"cells of {block_tokens} tokens in one layer"
        self.host = Tier(host_blocks * layers, unit, self._undo)
        # row -> int64[layers, capacity]: cell of each block, layers in `order`
        self._tables: dict[int, np.ndarray] = {}
        self._held = np.zeros(FIRST_ROWS, np.int64)  # row -> blocks in its table
        # row -> layers on the host: the first so many of `order`
        self._host = np.zeros(FIRST_ROWS, np.int64)
        # only asked: rows without a layer here that must come back as a whole
        self._swapped: set[int] = set()
        self._streamed: set[int] = set()  # only asked: rows whose layers this step brings or makes
        # cells being copied out, and whether a real-time row's
        self._leaving: list[tuple[bool, np.ndarray]] = []
        self._rt_cells = 0

    @classmethod
    def whole_blocks(cls, num_blocks: int, host_blocks: int) -> int:
        """A running row may have any of its layers on the host."""
        return num_blocks + host_blocks

    def interleave(self, interleaved: bool) -> None:
        """Which layers leave first. Before the first one has left."""
        if self.host.used:
            raise LedgerError("the order of layers changes while some are on the host")
        self.order = offload_order(self.layers, interleaved)

    # -- questions ---------------------------------------------------------------------------------
    @property
    def free_blocks(self) -> int:
        return self.pool.free // self.layers

    @property
    def free_cells(self) -> int:
        return self.pool.free

    @property
    def leaving_cells(self) -> int:  # free from the next step on
        return sum(len(cells) for _, cells in self._leaving)

    @property
    def free_host_cells(self) -> int:
        return self.host.free

    def held_blocks(self, row: int) -> int:
        """Device memory of the row, in blocks of all layers, rounded up."""
        if row not in self._tables:
            return 0
        return -(-int(self._held[row]) * self.resident_layers(row) // self.layers)

    def table_blocks(self, rows):
        """Blocks in the tables of `rows` (int or index array), wherever their layers are."""
        return self._held[rows]

    def host_layers(self, rows):
        """Layers on the host of `rows` (int or index array)."""
        return self._host[rows]

    def resident_layers(self, row: int) -> int:
        return self.layers - int(self._host[row])

    def holds(self, row: int) -> bool:
        """Whether the row has KV, or room for it, anywhere."""
        return row in self._tables

    def cells_of(self, row: int) -> np.ndarray:
        """int64[layers, blocks]: the cell of each block of a row in each layer of the model; AWAY
        if the layer is on the host."""
        host, held = int(self._host[row]), int(self._held[row])
        cells = np.full((self.layers, held), AWAY)
        cells[list(self.order[host:])] = self._tables[row][host:, :held]
        return cells

    def missing_tokens(self, row):
        if np.ndim(row) == 0:
            away = row in self._tables and self._host[row] > 0 and row not in self._streamed
            return int(self.table.computed_tokens[row]) if away else 0
        missing = np.where(self._host[row] > 0, self.table.computed_tokens[row], 0)
        if np.count_nonzero(missing):
            missing[[r in self._streamed for r in row.tolist()]] = 0
        return missing

    def slack_tokens(self, rows: np.ndarray) -> np.ndarray:
        return self._held[rows] * self.block_tokens - self.table.computed_tokens[rows]

    def decode_steps(self, rows: np.ndarray, limit: int) -> int:
        host = self._host[rows]
        if not np.count_nonzero(host):
            return super().decode_steps(rows, limit)
        device, away = np.zeros(limit, np.int64), np.zeros(limit, np.int64)
        for layers in np.unique(host).tolist():
            growth = self.block_growth(rows[host == layers], limit)
            device += growth * (self.layers - layers)
            away += growth * layers
        full = (device.cumsum() > self.pool.free) | (away.cumsum() > self.free_host_cells)
        return int(full.argmax()) if full.any() else limit

    def usage(self) -> KvUsage:
        free = self.free_blocks
        used = self.num_blocks - free
        real_time = min(used, -(-self._rt_cells // self.layers))
        return KvUsage(
            total=self.num_blocks,
            free=free,
            real_time=real_time,
            best_effort=used - real_time,
            cached=0,
            host_tokens=self.host.used * self.block_tokens // self.layers,
        )

    # -- changes of whole requests -----------------------------------------------------------------
    def begin_step(self) -> None:
        super().begin_step()
        self._make_room_for(len(self.table))
        self._streamed.clear()
        for real_time, cells in self._leaving:
            self._rt_cells -= len(cells) * real_time
            self.pool.give(cells)
        self._leaving = []

    def admit(
        self,
        row: int,
        tokens: int,
        hit_tokens: int = 0,
        keep_free: int = 0,
        reserve_tokens: int = 0,
    ) -> bool:
        return self._enter(row, tokens, 0, keep_free, reserve_tokens)

    def grow(self, row: int, tokens: int) -> bool:
        fresh = -(-tokens // self.block_tokens) - int(self._held[row])
        if fresh <= 0:
            return True
        host = int(self._host[row])
        if fresh * (self.layers - host) > self.pool.free or fresh * host > self.free_host_cells:
            return False
        self._append(row, fresh)
        return True

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> bool:
        fresh = -(-tokens // self.block_tokens) - self._held[rows]
        growing = fresh > 0
        if not np.count_nonzero(growing):
            return True
        some, counts = rows[growing], fresh[growing]
        away = int((counts * self._host[some]).sum())
        if int(counts.sum()) * self.layers - away > self.pool.free or away > self.free_host_cells:
            return False
        for row, count in zip(some.tolist(), counts.tolist(), strict=True):
            self._append(row, count)
        return True

    def extend(self, rows: np.ndarray, steps: int) -> None:
        if not self.grow_all(rows, self.table.computed_tokens[rows] + steps):
            raise LedgerError(
                f"{steps} steps of {len(rows)} rows do not fit into {self.free_blocks} free blocks"
            )

    def free(self, row: int) -> None:
        if row not in self._tables:
            return
        host, held = int(self._host[row]), int(self._held[row])
        table, swapped = self._tables.pop(row), self._swapped & {row}
        self._swapped -= swapped
        self._set(row, 0, 0)
        self.host.release(row, host * held)

        def undo() -> None:
            self._tables[row] = table
            self._swapped |= swapped

        self._undo(undo)
        self._release(row, table[host:, :held].ravel())

    def swap_out(self, row: int) -> bool:
        if row in self._swapped or not self._leave(
            row, self.resident_layers(row), Hold.STEP, at_once=True
        ):
            return False
        self._swapped.add(row)
        self._undo(lambda: self._swapped.discard(row))
        return True

    def swap_in(self, row: int, keep_free: int = 0) -> bool:
        if int(self._held[row]) * int(self._host[row]) + keep_free * self.layers > self.pool.free:
            return False
        self._swapped.discard(row)
        self._undo(lambda: self._swapped.add(row))
        return self.onload(row, int(self._host[row]))

    # -- changes of layers -------------------------------------------------------------------------
    def admit_layers(self, row: int, tokens: int, resident: int, keep_free: int = 0) -> bool:
        """`admit` with `resident` layers on the device. The KV of the others leaves while it is
        computed: the step ends no earlier than that transfer (Sec. 3.1.1, eq. 4)."""
        host = self.layers - resident
        if not 0 <= host <= self.layers:
            raise LedgerError(f"{resident} of {self.layers} layers on the device")
        if not self._enter(row, tokens, host, keep_free, 0):
            return False
        if host:
            self._move(row, HOST, tokens, 0, host, Hold.STEP)
        return True

    def offload(self, row: int, layers: int, at_once: bool = False) -> bool:
        """Copy `layers` more layers of the row to the host; False and nothing changed if the host
        has no room for them.

        Their cells are free from the next step on, when the copy has ended during this one.
        at_once: now, and the step waits for the copy. The row must not run in this step unless it
        is streamed.
        """
        return self._leave(row, layers, Hold.BEFORE_STEP if at_once else Hold.STEP, at_once)

    def onload(self, row: int, layers: int) -> bool:
        """Bring back `layers` layers of the row, during this step; False and nothing changed if
        there is no room."""
        host, held = int(self._host[row]), int(self._held[row])
        if not 0 < layers <= host:
            raise LedgerError(
                f"row {row}: {layers} layers are to come back, {host} are on the host"
            )
        if held * layers > self.pool.free:
            return False
        table, first = self._tables[row], host - layers
        before = table[first:host, :held].copy()
        table[first:host, :held] = self._take(row, held * layers).reshape(layers, held)
        self._undo(lambda: self._tables[row].__setitem__((slice(first, host), slice(held)), before))
        self._set(row, held, first)
        self.host.release(row, held * layers)
        self._move(row, DEVICE, int(self.table.computed_tokens[row]), first, host, Hold.STEP)
        return True

    def stream(self, row: int) -> None:
        """The row runs in this step: layers on the host are fetched one after another while it
        computes, and their part of its new token goes back. They do not stay, and take no
        cells."""
        host = int(self._host[row])
        if host and row not in self._streamed:
            self._streamed.add(row)
            self._undo(lambda: self._streamed.discard(row))
            self._move(row, DEVICE, int(self.table.computed_tokens[row]), 0, host, Hold.STEP)
            self._move(row, HOST, 1, 0, host, Hold.STEP)

    # -- bookkeeping -------------------------------------------------------------------------------
    def _make_room_for(self, rows: int) -> None:
        if rows > len(self._held):
            more = np.zeros(max(rows, 2 * len(self._held)) - len(self._held), np.int64)
            self._held, self._host = (
                np.concatenate([self._held, more]),
                np.concatenate([self._host, more]),
            )

    def _enter(self, row: int, tokens: int, host: int, keep_free: int, reserve_tokens: int) -> bool:
        self._make_room_for(row + 1)
        if row in self._tables:
            raise LedgerError(f"row {row} is admitted though it holds {self._held[row]} blocks")
        blocks, device = -(-tokens // self.block_tokens), self.layers - host
        must_fit = max(blocks, -(-reserve_tokens // self.block_tokens))
        if (
            must_fit * device + keep_free * self.layers > self.pool.free
            or must_fit * host > self.free_host_cells
        ):
            return False
        self._tables[row] = np.empty((self.layers, 0), np.int64)
        self._undo(lambda: self._tables.__delitem__(row))
        self._set(row, 0, host)
        if host:
            self._streamed.add(row)
            self._undo(lambda: self._streamed.discard(row))
        self._append(row, blocks)
        return True

    def _append(self, row: int, fresh: int) -> None:
        """`fresh` blocks behind those that the row has, in the layers' places."""
        host, held, table = int(self._host[row]), int(self._held[row]), self._tables[row]
        if held + fresh > table.shape[1]:
            wider = np.empty((self.layers, held + fresh + held // 4 + 2), np.int64)
            wider[:, :held] = table[:, :held]
            self._tables[row] = table = wider
        device = self.layers - host
        table[host:, held : held + fresh] = self._take(row, fresh * device).reshape(device, fresh)
        self.host.reserve(row, fresh * host)
        self._set(row, held + fresh, host)

    def _leave(self, row: int, layers: int, hold: Hold, at_once: bool) -> bool:
        host, held = int(self._host[row]), int(self._held[row])
        if not 0 <= layers <= self.layers - host:
            raise LedgerError(
                f"row {row}: {layers} layers are to leave, {self.layers - host} are on the device"
            )
        if held * layers > self.free_host_cells:
            return False
        cells = self._tables[row][host : host + layers, :held].ravel()
        self._set(row, held, host + layers)
        self.host.reserve(row, held * layers)
        if at_once:
            self._release(row, cells)
        else:
            self._leaving.append((bool(self.table.service_class[row] == _REAL_TIME), cells.copy()))
            self._undo(lambda: self._leaving.pop())
        if layers:
            tokens = int(self.table.computed_tokens[row])
            self._move(row, HOST, tokens, host, host + layers, hold)
        return True

    def _set(self, row: int, held: int, host: int) -> None:
        before = int(self._held[row]), int(self._host[row])
        self._held[row], self._host[row] = held, host

        def undo() -> None:
            self._held[row], self._host[row] = before

        self._undo(undo)

    def _take(self, row: int, n: int) -> np.ndarray:
        self._count(row, n)
        return self.pool.take(n)

    def _release(self, row: int, cells: np.ndarray) -> None:
        self._count(row, -len(cells))
        self.pool.give(cells)

    def _count(self, row: int, n: int) -> None:
        if self.table.service_class[row] == _REAL_TIME:
            self._rt_cells += n

            def undo() -> None:
                self._rt_cells -= n

            self._undo(undo)

    def _move(self, row: int, to: Place, tokens: int, first: int, end: int, hold: Hold) -> None:
        """A transfer of the layers from the `first` to before the `end`-th of `order`."""
        if tokens:
            layers = None if end - first == self.layers else tuple(sorted(self.order[first:end]))
            source = HOST if to == DEVICE else DEVICE
            self._moves.append(KvMove(row, source, to, tokens, hold, layers=layers))

    # -- auditor -----------------------------------------------------------------------------------
    def check(self) -> None:
        wrong, device = [], [cells for _, cells in self._leaving]
        rt_cells = sum(len(cells) for real_time, cells in self._leaving if real_time)
        on_host: dict[int, int] = {}
        for row, table in self._tables.items():
            host, held = int(self._host[row]), int(self._held[row])
            device.append(table[host:, :held].ravel())
            on_host[row] = host * held
            if self.table.service_class[row] == _REAL_TIME:
                rt_cells += (self.layers - host) * held
            if held * self.block_tokens < self.table.computed_tokens[row]:
                wrong.append(
                    f"row {row} has computed {self.table.computed_tokens[row]} tokens in {held} "
                    "blocks"
                )
            if not 0 <= host <= self.layers or (row in self._swapped and host != self.layers):
                wrong.append(f"row {row} has {host} of {self.layers} layers on the host")
        if not self.pool.is_partition(device):
            wrong.append(
                "free cells, leaving cells and those of the rows' tables are not a partition of "
                "the pool"
            )
        wrong += self.host.problems(on_host)
        if rt_cells != self._rt_cells:
            wrong.append("the count of real-time cells is off")
        if set(np.flatnonzero(self._held).tolist()) | self._swapped != set(self._tables):
            wrong.append("a row without a table holds memory")
        if wrong:
            raise LedgerError("; ".join(wrong))
