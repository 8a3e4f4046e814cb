"""The bidirectional ledger's layout for an engine: block tables in its own block numbers, and every
slot that moves between a plan and its forward pass.

The ledger gives the planned places of tokens; a model of the device's slots and the host's copies
gives the actual ones. Each plan is applied to that model as to the engine's memory, and a step's
reads are looked up in it. A plan that would have a request read another one's slot is refused here,
before any KV is touched. Imports neither vLLM nor torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from twinserve.backends.live.attention.slots import entries_of
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.kv.bidirectional.ledger import BidirectionalLedger
from twinserve.policies.plan import DEVICE, KvMove, StepPlan
from twinserve.policies.requests import RequestClass

NULL_BLOCKS = 1  # vLLM keeps block 0 for itself: block b of the ledger is b + 1 there
NOBODY = -1


@dataclass(slots=True)
class SlotStage:
    """What one plan does to memory before the forward pass: forget, copy out, relocate, copy back,
    in this order.

    forgotten    (request id, tokens) whose host copies are given up
    out, back    (request id, tokens, slots): int64[n] token positions, and the engine's slots that
                 they are copied from or to
    relocations  (slots read, slots written), int64[n] each, one after another
    """

    forgotten: list[tuple[str, np.ndarray]] = field(default_factory=list)
    out: list[tuple[str, np.ndarray, np.ndarray]] = field(default_factory=list)
    relocations: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    back: list[tuple[str, np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def moves(self) -> bool:
        """Whether any KV is copied."""
        return bool(self.out or self.relocations or self.back)


@dataclass(frozen=True, slots=True)
class Table:
    """A request's block table. entries: int32[n], as in `attention.slots`; counts: int64[n], its
    tokens in each block, those of this step included."""

    entries: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True)
class Layout:
    """Memory as one step needs it. stages: in order, those of plans without a step first; tables:
    of the requests that are granted tokens; free_blocks: of the ledger."""

    stages: tuple[SlotStage, ...]
    tables: dict[str, Table]
    free_blocks: int

    @property
    def moves(self) -> bool:
        return any(stage.moves for stage in self.stages)


class PhysicalMemory:
    """The content of each slot of the device and of the host, kept in step with the plans on
    `ledger`.

    Call `follow` once for every plan without a step and `step` once for every plan with one, before
    the ledger changes again. Raises LiveEngineError if ledger and memory disagree.

    owner, token  int64[num_blocks * block_tokens] by slot (the ledger's: block * block_tokens +
                  slot in it): the row, and the position in its text, of the KV that was last
                  written there; -1: none
    host          row -> bool[n]: which tokens the host has a copy of
    """

    def __init__(self, ledger: BidirectionalLedger) -> None:
        if not isinstance(ledger, BidirectionalLedger):
            raise LiveEngineError(
                f"the layout of ledger {ledger.name} cannot be made physical, only that of "
                "bidirectional and layerwise: leave physical off"
            )
        self.ledger = ledger
        self.owner, self.token = np.full((2, ledger.num_blocks * ledger.block_tokens), NOBODY)
        self.host: dict[int, np.ndarray] = {}
        self._stages: list[SlotStage] = []

    # -- plans -------------------------------------------------------------------------------------
    def follow(self, moves: Iterable[KvMove]) -> None:
        """A plan was made; its moves come with the next step."""
        stage = SlotStage()
        given = list(moves)
        leaving = [(m.row, *self._leaving(m)) for m in given if m.source == DEVICE]
        self._sync_host(stage, leaving)
        for row, tokens, slots in leaving:
            stage.out.append((self._name(row), tokens, self._on_engine(slots)))
        for record in self.ledger.relocations():
            self._relocate(stage, record)
        for move in given:
            if move.target == DEVICE:
                self._bring_back(stage, move)
        if stage.moves or stage.forgotten:
            self._stages.append(stage)

    def step(self, plan: StepPlan) -> Layout:
        """Return the layout for `plan`. New tokens count as written from here on."""
        self.follow(plan.moves)
        stages, self._stages = tuple(self._stages), []
        tables = {}
        for row, granted in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True):
            self._write_and_read(row, granted)
            tables[self._name(row)] = self._table(row)
        return Layout(stages, tables, self.ledger.free_blocks)

    # -- parts -------------------------------------------------------------------------------------
    def _name(self, row: int) -> str:
        return self.ledger.table.ids[row]

    def _on_engine(self, slots: np.ndarray) -> np.ndarray:
        return slots + NULL_BLOCKS * self.ledger.block_tokens

    def _slots(self, move: KvMove) -> np.ndarray:
        size = self.ledger.block_tokens
        runs = zip(move.blocks.tolist(), move.slots.tolist(), strict=True)
        return np.concatenate(
            [np.arange(block * size + first, block * size + end) for block, (first, end) in runs]
        )

    def _leaving(self, move: KvMove) -> tuple[np.ndarray, np.ndarray]:
        slots = self._slots(move)
        strange = slots[self.owner[slots] != move.row]
        if len(strange):
            raise self._disagreement(move.row, "copies to the host", int(strange[0]))
        return self.token[slots], slots

    def _sync_host(
        self, stage: SlotStage, leaving: list[tuple[int, np.ndarray, np.ndarray]]
    ) -> None:
        """Forget copies that the ledger gave up; others must be there or on their way."""
        now = self.ledger.host_copies()
        coming = {row: tokens for row, tokens, _ in leaving}
        for row, before in self.host.items():
            if now.get(row) is before:
                continue
            kept = _padded(now.get(row), len(before))
            lost = np.flatnonzero(before & ~kept)
            if len(lost):
                stage.forgotten.append((self._name(row), lost))
        for row, mask in now.items():
            had = self.host.get(row)
            if had is mask and row not in coming:
                continue
            there = _padded(had, len(mask))
            there[coming.get(row, [])] = True
            if (mask & ~there).any():
                token = int(np.flatnonzero(mask & ~there)[0])
                raise LiveEngineError(
                    f"the ledger counts on a host copy of token {token} of {self._name(row)}, "
                    "which was never made"
                )
        self.host = now

    def _relocate(self, stage: SlotStage, record) -> None:
        size = self.ledger.block_tokens
        sources = record.source * size + np.arange(*record.source_slots)
        targets = record.target * size + np.arange(*record.target_slots)
        stage.relocations.append((self._on_engine(sources), self._on_engine(targets)))
        self.owner[targets], self.token[targets] = self.owner[sources], self.token[sources]

    def _bring_back(self, stage: SlotStage, move: KvMove) -> None:
        slots, places = self._slots(move), self.ledger.places_of(move.row)
        by_place = np.argsort(places)
        tokens = by_place[np.searchsorted(places, slots, sorter=by_place)]
        copied = self.host.get(move.row)
        if (
            not np.array_equal(places[tokens], slots)
            or not _padded(copied, len(places))[tokens].all()
        ):
            raise LiveEngineError(
                f"KV of {self._name(move.row)} returns that is not on the host, or to slots of "
                "others"
            )
        stage.back.append((self._name(move.row), tokens, self._on_engine(slots)))
        self.owner[slots], self.token[slots] = move.row, tokens

    def _write_and_read(self, row: int, granted: int) -> None:
        computed = int(self.ledger.table.computed_tokens[row])
        places = self.ledger.places_of(row)[: computed + granted]
        if len(places) < computed + granted:
            raise LiveEngineError(
                f"{self._name(row)} computes token {len(places)}, for which the ledger has no slot"
            )
        self.owner[places[computed:]] = row
        self.token[places[computed:]] = np.arange(computed, computed + granted)
        own = (self.owner[places] == row) & (self.token[places] == np.arange(len(places)))
        if not own.all():
            raise self._disagreement(row, "reads", int(places[~own][0]))

    def _table(self, row: int) -> Table:
        ledger = self.ledger
        backward = ledger.table.service_class[row] == RequestClass.BEST_EFFORT
        return Table(
            entries_of(ledger.blocks_of(row) + NULL_BLOCKS, backward), ledger.counts_of(row)
        )

    def _disagreement(self, row: int, does: str, slot: int) -> LiveEngineError:
        block, offset = divmod(slot, self.ledger.block_tokens)
        there = int(self.owner[slot])
        what = (
            "nothing"
            if there == NOBODY
            else f"token {int(self.token[slot])} of {self._name(there)}"
        )
        return LiveEngineError(
            f"{self._name(row)} {does} slot {offset} of block {block}, where {what} lies"
        )


def _padded(mask: np.ndarray | None, length: int) -> np.ndarray:
    """A bool[length] of its own: `mask`, and False beyond it."""
    out = np.zeros(length, bool)
    if mask is not None:
        out[: len(mask)] = mask[:length]
    return out
