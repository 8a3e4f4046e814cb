"""What the changes of one step mean for data: host transfers, gathered per row and direction, and
moves on the device.

An executor applies, in this order: all transfers to the host, the relocations one after another,
all transfers to the device. Then every slot of a row that runs holds its own token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinserve.policies.kv.bidirectional.state import SlotState
from twinserve.policies.plan import Direction, Hold, KvMove


@dataclass(frozen=True, slots=True)
class Relocation:
    """Slots of a row copied from one block to another on the device; costs no transfer to or from
    the host.

    source, target              blocks
    source_slots, target_slots  half-open slot ranges of equal length
    """

    row: int
    source: int
    source_slots: tuple[int, int]
    target: int
    target_slots: tuple[int, int]


class StepMoves:
    """Collected since the step began; tries undo it with everything else."""

    def __init__(self, state: SlotState) -> None:
        self._state = state
        # (row, direction) -> pieces (tokens, blocks, slots); the place of arriving tokens is looked
        # up last
        self.pieces: dict[tuple[int, Direction], tuple] = {}
        self.relocations: tuple[Relocation, ...] = ()

    def clear(self) -> None:
        journal = self._state.journal
        if self.pieces:
            journal.put(self, "pieces", None, {})
        if self.relocations:
            journal.put(self, "relocations", None, ())

    def to_host(self, row: int, tokens: np.ndarray) -> None:
        """Copied from where they are now."""
        self.to_host_from(row, tokens, *self._places(row, tokens))

    def to_host_from(
        self, row: int, tokens: np.ndarray, blocks: np.ndarray, slots: np.ndarray
    ) -> None:
        """Copied from these places."""
        self._add(row, Direction.TO_HOST, (tokens, blocks, slots))

    def to_device(self, row: int, tokens: np.ndarray) -> None:
        """Written to where they are when the step starts."""
        self._add(row, Direction.TO_DEVICE, (tokens,))

    def _add(self, row: int, direction: Direction, piece: tuple[np.ndarray, ...]) -> None:
        if len(piece[0]):
            pieces = self.pieces.get((row, direction), ())
            self._state.journal.put(self, "pieces", (row, direction), (*pieces, piece))

    def relocate(self, row: int, source: int, target: int, resident: int) -> None:
        """The first `resident` slots of cell `source`, counted from its end of the block, go to
        cell `target`.
        """
        if resident:
            old, new = self._range(source, resident), self._range(target, resident)
            blocks = self._state.num_blocks
            record = Relocation(row, source % blocks, old, target % blocks, new)
            self._state.journal.put(self, "relocations", None, (*self.relocations, record))

    def forget(self, row: int) -> None:
        """The row is gone: its data need not go anywhere."""
        if self.pieces:
            for direction in Direction:
                self._state.journal.remove(self, "pieces", (row, direction))
        if any(record.row == row for record in self.relocations):
            kept = tuple(record for record in self.relocations if record.row != row)
            self._state.journal.put(self, "relocations", None, kept)

    def landing(self, row: int) -> bool:
        """Data of the row reaches a new place in this step."""
        arrives = (row, Direction.TO_DEVICE) in self.pieces
        return arrives or any(record.row == row for record in self.relocations)

    def take(self) -> list[KvMove]:
        """One KvMove per row and direction: first those to the host, then those to the device, by
        row.

        The relocations stay readable until the next step.
        """
        if not self.pieces:
            return []
        order = sorted(self.pieces, key=lambda key: (key[1] is Direction.TO_DEVICE, key[0]))
        moves = [self._move(row, direction) for row, direction in order]
        self._state.journal.put(self, "pieces", None, {})
        return moves

    def _move(self, row: int, direction: Direction) -> KvMove:
        pieces = self.pieces[row, direction]
        tokens = np.concatenate([piece[0] for piece in pieces])
        if direction is Direction.TO_DEVICE:
            blocks, slots = self._places(row, tokens)
        else:
            blocks = np.concatenate([piece[1] for piece in pieces])
            slots = np.concatenate([piece[2] for piece in pieces])
        return KvMove(row, direction, len(tokens), Hold.STEP, *_ranges(blocks, slots))

    def _places(self, row: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and slot of each token: real-time tokens lie from the left, best-effort ones from
        the right.
        """
        state = self._state
        cells = state.cell_of_token(row, tokens)
        offset = tokens - state.start[cells]
        slots = np.where(cells < state.num_blocks, offset, state.size - 1 - offset)
        return cells % state.num_blocks, slots

    def _range(self, cell: int, count: int) -> tuple[int, int]:
        size = self._state.size
        return (0, count) if cell < self._state.num_blocks else (size - count, size)


def _ranges(blocks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks int64[n] and half-open slot ranges int64[n, 2] that cover exactly these slots."""
    order = np.lexsort((slots, blocks))
    blocks, slots = blocks[order], slots[order]
    new = np.ones(len(slots), bool)
    new[1:] = (np.diff(blocks) != 0) | (np.diff(slots) != 1)
    first = np.flatnonzero(new)
    end = np.append(first[1:], len(slots)) - 1
    return blocks[first], np.stack([slots[first], slots[end] + 1], axis=1)
