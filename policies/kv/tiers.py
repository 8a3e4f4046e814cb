"""Room behind the device's memory, today the host's: how much there is, how much is free and how
much each row holds. Which tokens a row's units are is the ledger's business.

Changes join the undo log of the ledger.
"""

from collections.abc import Callable, Mapping

from twinserve.policies.kv.base import LedgerError


class Tier:
    """`capacity` units, of which `used` are held and `free` are not.

    unit  what is counted, as "blocks of 16 tokens"
    undo  called with what takes back a change, right after each
    """

    def __init__(
        self, capacity: int, unit: str, undo: Callable[[Callable[[], object]], None]
    ) -> None:
        if capacity < 0:
            raise ValueError(f"a tier of {capacity} {unit} is impossible: give 0 or more")
        self.capacity = self.free = capacity
        self.unit = unit
        self._undo = undo
        self._held: dict[int, int] = {}

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def held_by(self, row: int) -> int:
        return self._held.get(row, 0)

    def by_row(self) -> dict[int, int]:
        """Row -> units, of rows that hold any."""
        return dict(self._held)

    def reserve(self, row: int, units: int) -> None:
        """The row holds `units` more. The caller has asked whether so many are `free`; raises
        LedgerError if they are not."""
        if not 0 <= units <= self.free:
            raise LedgerError(
                f"row {row} takes {units} {self.unit} of a tier that has {self.free} free"
            )
        self._change(row, units)

    def release(self, row: int, units: int) -> None:
        """The row gives back `units`; raises LedgerError if it holds fewer."""
        if not 0 <= units <= self.held_by(row):
            raise LedgerError(
                f"row {row} gives back {units} {self.unit} and holds {self.held_by(row)}"
            )
        self._change(row, -units)

    def _change(self, row: int, units: int) -> None:
        if units:
            self._add(row, units)
            self._undo(lambda: self._add(row, -units))

    def _add(self, row: int, units: int) -> None:
        held = self._held.get(row, 0) + units
        if held:
            self._held[row] = held
        else:
            del self._held[row]
        self.free -= units

    def problems(self, expected: Mapping[int, int]) -> list[str]:
        """A line for each row that does not hold what it is `expected` to (row -> units), and one
        where held and free units are not the capacity."""
        rows = sorted({row for row, units in expected.items() if units} | self._held.keys())
        wrong = [
            f"row {row} holds {self.held_by(row)} {self.unit}, not {expected.get(row, 0)}"
            for row in rows
            if self.held_by(row) != expected.get(row, 0)
        ]
        held = sum(self._held.values())
        if self.free < 0 or held != self.used:
            wrong.append(
                f"{held} held and {self.free} free are not the tier's {self.capacity} {self.unit}"
            )
        return wrong
