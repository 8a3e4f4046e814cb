"""What the changes of one step mean for data: transfers to and from the host, one a row each, and
moves on the device.

An executor applies, in this order: all transfers to the host, the relocations one after another,
all transfers to the device. Then every slot of a row that runs holds its own token.
"""

from dataclasses import dataclass

import numpy as np

from twinserve.policies.kv.bidirectional.state import SlotState
from twinserve.policies.plan import DEVICE, HOST, Hold, KvMove, Place


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
        # row -> pieces (tokens, blocks, slots) that leave for the host
        self.leaving: dict[int, tuple] = {}
        # row -> pieces (tokens,) that come back; where to is looked up last
        self.arriving: dict[int, tuple] = {}
        self.relocations: tuple[Relocation, ...] = ()

    def clear(self) -> None:
        journal = self._state.journal
        if self.leaving:
            journal.put(self, "leaving", None, {})
        if self.arriving:
            journal.put(self, "arriving", None, {})
        if self.relocations:
            journal.put(self, "relocations", None, ())

    def to_host(self, row: int, tokens: np.ndarray) -> None:
        """Copy from their present slots."""
        self.to_host_from(row, tokens, *self._places(row, tokens))

    def to_host_from(
        self, row: int, tokens: np.ndarray, blocks: np.ndarray, slots: np.ndarray
    ) -> None:
        """Copied from these places."""
        self._add("leaving", row, (tokens, blocks, slots))

    def to_device(self, row: int, tokens: np.ndarray) -> None:
        """Write to their slots at the start of the step."""
        self._add("arriving", row, (tokens,))

    def _add(self, name: str, row: int, piece: tuple[np.ndarray, ...]) -> None:
        if len(piece[0]):
            pieces = getattr(self, name).get(row, ())
            self._state.journal.put(self, name, row, (*pieces, piece))

    def relocate(
        self, row: int, sources: list[int], targets: list[int], resident: list[int]
    ) -> None:
        """The first `resident` slots of each cell of `sources`, counted from its end of the block,
        go to that of `targets`.
        """
        blocks = self._state.num_blocks
        records = tuple(
            Relocation(row, old % blocks, self._range(old, n), new % blocks, self._range(new, n))
            for old, new, n in zip(sources, targets, resident, strict=True)
            if n
        )
        if records:
            self._state.journal.put(self, "relocations", None, (*self.relocations, *records))

    def forget(self, row: int) -> None:
        """The row is gone: its data need not go anywhere."""
        for name in ("leaving", "arriving"):
            self._state.journal.remove(self, name, row)
        if any(record.row == row for record in self.relocations):
            kept = tuple(record for record in self.relocations if record.row != row)
            self._state.journal.put(self, "relocations", None, kept)

    def landing(self, row: int) -> bool:
        """Data of the row reaches a new place in this step."""
        return row in self.arriving or any(record.row == row for record in self.relocations)

    def take(self) -> list[KvMove]:
        """One KvMove per row and target: first those to the host, then those to the device, by row.

        The relocations stay readable until the next step.
        """
        if not self.leaving and not self.arriving:
            return []
        leaving = [
            (
                row,
                np.concatenate([blocks for _, blocks, _ in pieces]),
                np.concatenate([slots for _, _, slots in pieces]),
            )
            for row, pieces in sorted(self.leaving.items())
        ]
        arriving = [
            (row, *self._places(row, np.concatenate([piece[0] for piece in pieces])))
            for row, pieces in sorted(self.arriving.items())
        ]
        for name in ("leaving", "arriving"):
            self._state.journal.put(self, name, None, {})
        return _moves(DEVICE, HOST, leaving) + _moves(HOST, DEVICE, arriving)

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


def _moves(
    source: Place, target: Place, found: list[tuple[int, np.ndarray, np.ndarray]]
) -> list[KvMove]:
    """A KvMove of each (row, block of each token, slot of each): blocks, and the half-open slot
    ranges that cover exactly these slots."""
    if not found:
        return []
    counts = [len(blocks) for _, blocks, _ in found]
    nth = np.arange(len(found)).repeat(counts)
    blocks, slots = (np.concatenate([each[i] for each in found]) for i in (1, 2))
    order = np.lexsort((slots, blocks, nth))
    nth, blocks, slots = nth[order], blocks[order], slots[order]
    new = np.ones(len(slots), bool)
    new[1:] = (blocks[1:] != blocks[:-1]) | (slots[1:] != slots[:-1] + 1) | (nth[1:] != nth[:-1])
    first = new.nonzero()[0]
    last = np.append(first[1:], len(slots)) - 1
    blocks, ranges = blocks[first], np.stack([slots[first], slots[last] + 1], axis=1)
    ends = np.bincount(nth[first]).cumsum().tolist()
    begins = [0, *ends[:-1]]
    return [
        KvMove(row, source, target, tokens, Hold.STEP, blocks[begin:end], ranges[begin:end])
        for (row, *_), tokens, begin, end in zip(found, counts, begins, ends, strict=True)
    ]
