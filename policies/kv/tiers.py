"""Tiers: memory beyond the device's that ledgers borrow, today the host's.

A tier owns its room: how much there is, how much is free, and through `Holdings`, one a ledger, how
much each row holds. Several ledgers may borrow from one tier; none of them can take what another
one's rows hold. Which tokens a row's units are is the ledger's business.

Changes join the undo log of the ledger that makes them. A try must end before another ledger on the
tier changes anything: what a try gives back can be taken at once, and a rollback takes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twinserve.policies.kv.base import LedgerError


class Tier:
    """`capacity` units, of which `free` are not held.

    unit  what is counted, as "blocks of 16 tokens": ledgers that share a tier count the same
    """

    def __init__(self, capacity: int, unit: str) -> None:
        if capacity < 0:
            raise ValueError(f"a tier of {capacity} {unit}")
        self.capacity = capacity
        self.unit = unit
        self.free = capacity
        self.holdings: list[Holdings] = []

    def check(self) -> None:
        """Recount; raises LedgerError where held + free is not the capacity."""
        held = sum(sum(holdings.by_row().values()) for holdings in self.holdings)
        if self.free < 0 or held + self.free != self.capacity:
            raise LedgerError(
                f"{held} held and {self.free} free are not the tier's {self.capacity} {self.unit}"
            )


class Holdings:
    """What the rows of one ledger hold of a tier; `used` units together.

    undo  called with what takes back a change, right after each
    """

    def __init__(self, tier: Tier, undo: Callable[[Callable[[], object]], None]) -> None:
        self.tier = tier
        self.used = 0
        self._undo = undo
        self._held: dict[int, int] = {}
        tier.holdings.append(self)

    @property
    def free(self) -> int:
        """Units that any ledger on the tier could reserve now."""
        return self.tier.free

    def held_by(self, row: int) -> int:
        return self._held.get(row, 0)

    def by_row(self) -> dict[int, int]:
        """Row -> units, of rows that hold any."""
        return dict(self._held)

    def reserve(self, row: int, units: int) -> None:
        """The row holds `units` more. The caller has asked whether so many are `free`; raises
        LedgerError where they are not."""
        if not 0 <= units <= self.tier.free:
            raise LedgerError(
                f"row {row} takes {units} {self.tier.unit} of a tier that has {self.tier.free} free"
            )
        self._change(row, units)

    def release(self, row: int, units: int) -> None:
        """The row gives back `units`; raises LedgerError where it holds fewer."""
        if not 0 <= units <= self.held_by(row):
            raise LedgerError(
                f"row {row} gives back {units} {self.tier.unit} and holds {self.held_by(row)}"
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
        self.used += units
        self.tier.free -= units

    def move_to(self, tier: Tier) -> None:
        """Hold units of `tier` from now on. Raises LedgerError while rows hold any of the old one,
        and where `tier` counts something else."""
        if self.used:
            raise LedgerError(f"rows hold {self.used} {self.tier.unit} of the tier to be left")
        if tier.unit != self.tier.unit:
            raise LedgerError(f"a tier of {tier.unit} for a ledger that counts {self.tier.unit}")
        self.tier.holdings.remove(self)
        tier.holdings.append(self)
        self.tier = tier

    def differing(self, expected: Mapping[int, int]) -> list[str]:
        """A line for each row that does not hold what it is `expected` to; nothing is held by rows
        that are not there."""
        rows = sorted({row for row, units in expected.items() if units} | self._held.keys())
        return [
            f"row {row} holds {self.held_by(row)} {self.tier.unit}, not {expected.get(row, 0)}"
            for row in rows
            if self.held_by(row) != expected.get(row, 0)
        ]
