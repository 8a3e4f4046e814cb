"""Demands that prove wrong (ours; Justitia sets F once and for all).

A demand is predicted when an application arrives. Three things show later that it is wrong:

- its requests that have ended took more: the demand becomes twice that;
- a stage comes, of known prompts: if what was taken, what the stage is expected to take and what
  earlier applications of the class took after such a stage differ from the demand by more than a
  factor of two, the demand moves up to that factor;
- it ends: what it did not ask for is no longer owed by the fluid system (policy.py).

F is then V(arrival) plus the corrected demand. docs/justitia.md says what follows of it.
"""

from __future__ import annotations

from collections.abc import Callable

AGAIN = 2.0  # times what was taken: after so many doublings no demand is too low
TRUSTED = 2.0  # a demand this near to what a stage shows is left as it is


class Corrections:
    """Of applications by number, demands and costs in token-iterations."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}  # V at arrival
        self.believed: dict[int, float] = {}
        self._spent: dict[int, int] = {}  # by its requests that have ended
        self._expected: dict[int, int] = {}  # row that is here -> its cost, as predicted
        self._here: dict[int, int] = {}  # application -> of its rows here, the sum of that
        self._stages: dict[int, int] = {}  # that have come since the last plan

    def begins(self, number: int, V: float, demand: float) -> None:
        self._begun[number], self.believed[number] = V, demand
        self._spent[number] = self._here[number] = 0

    def comes(self, row: int, number: int, stage: int, expected: int) -> None:
        """A request of a stage; expected: its cost, as predicted."""
        self._expected[row] = expected
        self._here[number] += expected
        self._stages[number] = stage

    def ends(self, row: int, number: int, cost: int) -> None:
        self._here[number] -= self._expected.pop(row, 0)
        self._spent[number] += cost
        if self._spent[number] > self.believed[number]:
            self.believed[number] = AGAIN * self._spent[number]

    def look(self, total: Callable[[int, int], float | None]) -> list[int]:
        """Before a plan: applications of which a stage has come.

        total  (number, stage) -> the cost of a whole application of its class over that up to the
               stage; None: nothing is known
        """
        seen = list(self._stages)
        for number, stage in self._stages.items():
            times = total(number, stage)
            if times is not None:
                shown = times * (self._spent[number] + self._here[number])
                least = max(shown / TRUSTED, self._spent[number])
                self.believed[number] = min(max(self.believed[number], least), shown * TRUSTED)
        self._stages.clear()
        return seen

    def finish(self, number: int) -> float:
        """Its virtual finish time, as is believed now."""
        return self._begun[number] + self.believed[number]

    def forget(self, number: int) -> None:
        for kept in (self._begun, self.believed, self._spent, self._here):
            del kept[number]
        self._stages.pop(number, None)
