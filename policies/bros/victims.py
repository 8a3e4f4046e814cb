"""Rows to drop for a request that needs memory (Wan et al., IEEE version, Sec. V-B): in the order
that the paper gives, but no row without which it would have been enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from twinserve.policies.bros.parts import PlanInProgress
from twinserve.policies.plan import Preemption

_T = TypeVar("_T")


class Search:
    """For a set of `rivals` (int64[n], the first to be dropped first) that is enough for `granted`,
    which tries to take the memory and undoes nothing itself. No member can be spared.

    lack, gains  KvLedger.relief
    """

    def __init__(
        self,
        step: PlanInProgress,
        rivals: np.ndarray,
        lack: int,
        gains: np.ndarray,
        granted: Callable[[], bool],
    ) -> None:
        self._step = step
        self._rivals = rivals
        self._lack = lack
        self._gains = gains
        self._granted = granted

    def drop(self) -> list[tuple[int, Preemption]] | None:
        """Those that were dropped, and how, in order; None, and nothing changed, where no row's
        memory helps."""
        if not len(self._rivals) or self._gains.sum() < self._lack:
            return None
        if self._lack > 0:
            # All that are left out of these could not do without any of them: if these are enough,
            # the ledger's bound has proved each of them necessary.
            chosen = self._rivals[enough(self._gains, self._lack)].tolist()
            if (dropped := self._dropping(chosen)) is not None:
                return dropped
        # The ledger promised too much: parts that find no place, shared blocks, a full host.
        gaining = self._gains > 0
        order = np.concatenate([self._rivals[gaining], self._rivals[~gaining]]).tolist()
        found = self._sufficient(order)
        return None if found is None else self._dropping(self._needed(found))

    def _dropping(self, rows: list[int]) -> list[tuple[int, Preemption]] | None:
        ledger = self._step.ledger
        mark = ledger.mark()
        dropped = [(row, self._drop(row)) for row in rows]
        if self._granted():
            ledger.commit(mark)
            return dropped
        ledger.rollback(mark)
        return None

    def _drop(self, row: int) -> Preemption:
        if self._step.swap and self._step.ledger.swap_out(row):
            return Preemption.SWAP
        self._step.ledger.drop(row)
        return Preemption.RECOMPUTE

    def _tried(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns; all that it changes in the ledger is undone."""
        mark = self._step.ledger.mark()
        result = attempt()
        self._step.ledger.rollback(mark)
        return result

    def _without(self, rows: list[int], attempt: Callable[[], _T]) -> _T:
        def both() -> _T:
            for row in rows:
                self._drop(row)
            return attempt()

        return self._tried(both)

    def _sufficient(self, order: list[int]) -> list[int] | None:
        """The first 1, 2, 4, .. of `order`, as soon as they are enough."""

        def attempt() -> list[int] | None:
            done = 0
            while done < len(order):
                reach = max(2 * done, 1)
                for row in order[done:reach]:
                    self._drop(row)
                done = min(reach, len(order))
                if self._tried(self._granted):
                    return order[:done]
            return None

        return self._tried(attempt)

    def _needed(self, rows: list[int], others_dropped: bool = False) -> list[int]:
        """Those of `rows`, which are enough, that cannot be spared, as few of the last ones as can
        be: n log n drops and, where m are needed, some m log n trials.

        Source: Junker, "QuickXplain: Preferred Explanations and Relaxations for Over-Constrained
        Problems" (AAAI 2004).
        """
        if others_dropped and self._tried(self._granted):
            return []
        if len(rows) == 1:
            return rows
        first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        late = self._without(first, lambda: self._needed(second, True))
        early = self._without(late, lambda: self._needed(first, bool(late)))
        return early + late


def enough(gains: np.ndarray, lack: int) -> np.ndarray:
    """Indices, in order, of a set whose gains (int64[n]) reach `lack` > 0 and would not without any
    one of them: of the first ones that do, the later are spared first."""
    sums = gains.cumsum()
    reach = int(np.searchsorted(sums, lack)) + 1
    surplus = int(sums[reach - 1]) - lack
    chosen = np.ones(reach, bool)
    for i in np.flatnonzero(gains[:reach] <= surplus)[::-1].tolist():
        if gains[i] <= surplus:
            surplus -= int(gains[i])
            chosen[i] = False
    return np.flatnonzero(chosen)
