"""Tries of a ledger whose pool collects, while one is open, what would undo each change."""

from collections.abc import Callable
from typing import Protocol

from twinserve.policies.kv.base import KvLedger, LedgerError


class UndoPool(Protocol):
    """undo: calls that take changes back, the oldest first; None while nothing is tried."""

    undo: list[Callable[[], object]] | None


class UndoLedger(KvLedger):
    pool: UndoPool

    def mark(self) -> int:
        if self.pool.undo is None:
            self.pool.undo = []
        moves = len(self._moves)
        self._undo(lambda: self._moves.__delitem__(slice(moves, None)))
        return len(self.pool.undo) - 1

    def rollback(self, mark: int) -> None:
        undo = self._tried(mark)
        self.pool.undo = None  # taking back is not itself recorded
        while len(undo) > mark:
            undo.pop()()
        self.pool.undo = undo if mark else None

    def commit(self, mark: int) -> None:
        self._tried(mark)
        if mark == 0:
            self.pool.undo = None

    def _tried(self, mark: int) -> list[Callable[[], object]]:
        if self.pool.undo is None or mark >= len(self.pool.undo):
            raise LedgerError("this try has ended already")
        return self.pool.undo

    def _undo(self, step: Callable[[], object]) -> None:
        """`step` takes back the change just made, if it is part of a try."""
        if self.pool.undo is not None:
            self.pool.undo.append(step)
