"""The layer-wise ledger's layout for an engine: the page of every block in every layer, copies
before a forward pass, and streams through staging pages during it.

A page holds a cell of the ledger: the KV of one block of tokens in one layer. Page 0 is vLLM's null
page, and cell c is page c + 1. Staging pages follow, which the layers of a step use one after
another. On the host a cell has the number of a cell, too.

As in `layout`, a model of all pages follows only executed plans. A plan that would have a request
read another one's page is refused here. Imports neither vLLM nor torch.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from twinserve.backends.live.transfer.host import Copies, Orders
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.kv.free import FreeStack
from twinserve.policies.kv.layerwise.ledger import AWAY, LayerwiseLedger
from twinserve.policies.plan import HOST, KvMove, StepPlan

NULL_PAGES = 1
NOBODY = -1
_NONE = np.zeros(0, np.int64)
_BLOCKS = 1 << 20  # more than any request has
# Of orders to a worker, which may still report on those of a run before this one.
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Memory as one step needs it.

    stages   copies before the forward pass, one after another
    streams  layer -> what comes before its attention (`back`) and leaves after it (`out`)
    tables   request id -> int32[layers, blocks]: pages
    free_blocks  of the ledger
    """

    stages: tuple[Orders, ...]
    streams: dict[int, Orders]
    tables: dict[str, np.ndarray]
    free_blocks: int

    @property
    def moves(self) -> bool:
        return bool(self.stages or self.streams)


@dataclass(slots=True)
class _Held:
    """A row's memory. cells, host: int64[layers, blocks], of the device and of the host, AWAY: none
    there; written: tokens that have KV; order: the latest one that wrote to the host."""

    cells: np.ndarray
    host: np.ndarray
    written: int = 0
    order: int = 0


@dataclass
class Moved:
    """Tokens of one layer that were copied, by kind."""

    offloaded: int = 0
    onloaded: int = 0
    streamed_in: int = 0
    streamed_out: int = 0


@dataclass
class _Stage:
    """Copies to the host, then copies back."""

    number: int = field(default_factory=lambda: next(_numbers))
    out: Copies = field(default_factory=Copies)
    back: Copies = field(default_factory=Copies)

    @property
    def orders(self) -> Orders:
        return Orders(self.number, self.out, self.back)


class LayerMemory:
    """What lies in each page and on the host, kept in step with the plans made on `ledger`.

    Call `follow` once for every plan without a step and `step` once for every plan with one, before
    the ledger changes again. Raises LiveEngineError where ledger and memory disagree.

    staging  pages behind the ledger's: one layer of all that a step streams
    owner    int64[cells]: which block of which layer of which row was last written there
    moved    what was copied so far
    """

    def __init__(self, ledger: LayerwiseLedger, staging: int) -> None:
        self.ledger, self.layers, self.size = ledger, ledger.layers, ledger.block_tokens
        self.staging = staging
        self.moved = Moved()
        self._first_staging = NULL_PAGES + ledger.pool.num_cells
        self.owner = np.full(ledger.pool.num_cells, NOBODY)
        self._host = FreeStack(ledger.host_blocks * ledger.layers)
        self._rows: dict[int, _Held] = {}
        self._stages: list[_Stage] = []

    @property
    def free_host_cells(self) -> int:
        return self._host.free

    def held(self, row: int) -> tuple[np.ndarray, np.ndarray, int]:
        """(pages, host cells, tokens written) of a row; int64[layers, blocks], AWAY where none."""
        held = self._rows[row]
        return np.where(held.cells == AWAY, AWAY, held.cells + NULL_PAGES), held.host, held.written

    def rows(self) -> list[int]:
        """Return the requests that have KV."""
        return [*self._rows]

    # -- plans -------------------------------------------------------------------------------------
    def follow(self, moves: Iterable[KvMove]) -> None:
        """A plan was made; its moves come with the next step."""
        self._forget_who_left()
        stage = _Stage()
        for move in moves:
            held = self._rows.get(move.row)
            if held is None:  # a prompt: its layers leave while they are computed; or dropped since
                continue
            layers = np.arange(self.layers) if move.layers is None else np.array(move.layers)
            there = held.cells[layers, 0] != AWAY
            if move.target == HOST and there.any():
                if stage.back.rows:  # what came back may have given up the room that this takes
                    self._stages.append(stage)
                    stage = _Stage()
                self._leave(move.row, held, layers[there], stage)
            elif move.target != HOST:
                stays = self.ledger.cells_of(move.row)[layers, 0] != AWAY
                self._come(move.row, held, layers[stays & ~there], stage)
        if stage.out.rows or stage.back.rows:
            self._stages.append(stage)

    def step(self, plan: StepPlan) -> LayerLayout:
        """Return the layout for `plan`. New tokens count as written from here on."""
        self.follow(plan.moves)
        stages, self._stages = self._stages, []
        streams: dict[int, Orders] = {}
        tables, staged = {}, 0
        for row, granted in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True):
            held = self._meet(row)
            pages = held.cells + NULL_PAGES
            away = np.flatnonzero(held.cells[:, 0] == AWAY)
            if len(away):
                places = self._first_staging + staged + np.arange(held.cells.shape[1])
                staged += len(places)
                self._check_staging(staged)
                pages[away] = places
                self._stream(held, away, places, granted, streams)
            held.written += granted
            tables[self._name(row)] = pages.astype(np.int32)
        orders = tuple(stage.orders for stage in stages)
        return LayerLayout(orders, streams, tables, self.ledger.free_blocks)

    # -- parts -------------------------------------------------------------------------------------
    def _name(self, row: int) -> str:
        return self.ledger.table.ids[row]

    def _forget_who_left(self) -> None:
        """Rows that ended or begin anew: their pages and host cells are free."""
        computed = self.ledger.table.computed_tokens
        for row, held in list(self._rows.items()):
            if not self.ledger.holds(row) or computed[row] < held.written:
                self._host.put(held.host[held.host != AWAY])
                del self._rows[row]

    def _leave(self, row: int, held: _Held, layers: np.ndarray, stage: _Stage) -> None:
        cells = held.cells[layers]
        self._check_owner(row, held, layers, "copies to the host")
        held.host[layers] = self._room(cells.size).reshape(cells.shape)
        self._copy(stage.out, cells + NULL_PAGES, held.host[layers], 0, held.written)
        held.cells[layers] = AWAY
        held.order = stage.number
        self.moved.offloaded += held.written * len(layers)

    def _come(self, row: int, held: _Held, layers: np.ndarray, stage: _Stage) -> None:
        if not len(layers):
            return
        host = held.host[layers]
        cells = self.ledger.cells_of(row)[layers, : host.shape[1]]
        self._copy(stage.back, cells + NULL_PAGES, host, 0, held.written, held.order)
        self._host.put(host.ravel())
        held.cells[layers], held.host[layers] = cells, AWAY
        self.owner[cells] = self._marks(row, held)[layers]
        self.moved.onloaded += held.written * len(layers)

    def _meet(self, row: int) -> _Held:
        """What the row has, grown to what the ledger gives it now."""
        cells = self.ledger.cells_of(row)
        computed = int(self.ledger.table.computed_tokens[row])
        held = self._rows.get(row)
        if held is None:
            nothing = np.empty((self.layers, 0), np.int64)
            held = self._rows[row] = _Held(nothing, nothing)
        before = held.cells.shape[1]
        if held.written != computed or not np.array_equal(cells[:, :before], held.cells):
            raise LiveEngineError(
                f"the ledger has {computed} tokens of {self._name(row)} in other pages than the "
                f"engine, which has {held.written}"
            )
        self._check_owner(row, held, np.arange(self.layers), "reads")
        added = cells[:, before:]
        if added.size:
            room = np.full(added.shape, AWAY)
            room[added == AWAY] = self._room(int((added == AWAY).sum()))
            held.cells, held.host = cells, np.concatenate([held.host, room], 1)
            self.owner[cells[cells != AWAY]] = self._marks(row, held)[cells != AWAY]
        return held

    def _stream(
        self,
        held: _Held,
        away: np.ndarray,
        places: np.ndarray,
        granted: int,
        streams: dict[int, Orders],
    ) -> None:
        start, end, host = held.written, held.written + granted, held.host[away]
        for layer in away.tolist():
            if layer not in streams:
                streams[layer] = Orders(next(_numbers))
        mine = [streams[layer] for layer in away.tolist()]
        self._each([orders.back for orders in mine], places, host, 0, start, held.order)
        self._each([orders.out for orders in mine], places, host, start, end, 0)
        held.order = max(streams[layer].number for layer in away.tolist())
        self.moved.streamed_in += start * len(away)
        self.moved.streamed_out += granted * len(away)

    def _each(
        self,
        copies: list[Copies],
        pages: np.ndarray,
        host: np.ndarray,
        start: int,
        end: int,
        after: int,
    ) -> None:
        """Tokens start..end-1 of one layer after another between the same `pages`, int64[blocks],
        and their host cells, int64[layers, blocks]."""
        slots, rows = self._runs(pages, start, end), self._runs(host, start, end)
        for number, of_layer in enumerate(copies):
            of_layer.slots.extend(slots)
            of_layer.rows.extend(rows[number * len(slots) : (number + 1) * len(slots)])
            of_layer.after = max(of_layer.after, after)

    def _copy(
        self,
        copies: Copies,
        pages: np.ndarray,
        host: np.ndarray,
        start: int,
        end: int,
        after: int = 0,
    ) -> None:
        """Tokens start..end-1 of each layer; pages, host: int64[..., blocks]."""
        copies.slots.extend(self._runs(pages, start, end))
        copies.rows.extend(self._runs(host, start, end))
        copies.after = max(copies.after, after)

    def _runs(self, cells: np.ndarray, start: int, end: int) -> list[tuple[int, int]]:
        blocks = np.arange(start // self.size, -(-end // self.size)) if end > start else _NONE
        first = np.maximum(start - blocks * self.size, 0)
        last = np.minimum(end - blocks * self.size, self.size)
        chosen = cells[..., blocks]
        counts = np.broadcast_to(last - first, chosen.shape)
        return list(
            zip((chosen * self.size + first).ravel().tolist(), counts.ravel().tolist(), strict=True)
        )

    def _room(self, cells: int) -> np.ndarray:
        if cells > self._host.free:
            raise LiveEngineError(
                f"{cells} cells must go to the host, which has room for {self._host.free}; the "
                "ledger counts fewer there"
            )
        return self._host.take(cells)

    def _marks(self, row: int, held: _Held) -> np.ndarray:
        """int64[layers, blocks]: a number for each block of each layer of the row."""
        layers, blocks = held.cells.shape
        return (row * layers + np.arange(layers)[:, None]) * _BLOCKS + np.arange(blocks)

    def _check_owner(self, row: int, held: _Held, layers: np.ndarray, does: str) -> None:
        used = -(-held.written // self.size)
        cells, marks = held.cells[layers, :used], self._marks(row, held)[layers, :used]
        strange = (cells != AWAY) & (self.owner[cells] != marks)
        if strange.any():
            cell = int(cells[strange][0])
            raise LiveEngineError(
                f"{self._name(row)} {does} page {cell + NULL_PAGES}, where another request's KV "
                "lies"
            )

    def _check_staging(self, staged: int) -> None:
        if staged > self.staging:
            raise LiveEngineError(
                f"a step streams {staged} blocks a layer, and {self.staging} pages were set aside "
                "for that"
            )
