"""Undoing changes exactly: the values that a try has overwritten, newest last."""

from collections.abc import Callable
from typing import Any

import numpy as np

from twinserve.policies.kv.base import LedgerError

_ABSENT = object()


class Journal:
    """Overwritten values while a try is `open`, so that it can be undone exactly; nothing is kept
    otherwise.
    """

    def __init__(self) -> None:
        self.open = False
        self._log: list[tuple[Any, str, Any, Any] | Callable[[], object]] = []
        self._marks: list[int] = []

    def put(self, obj: Any, name: str, key: Any, value: Any) -> None:
        """obj.name[key] = value, for an array (key: number or array) or a dict; obj.name = value
        where key is None.
        """
        if not self.open:
            _assign(obj, name, key, value)
        elif key is None or isinstance(holder := getattr(obj, name), dict):
            self._log.append((obj, name, key, _current(obj, name, key)))
            _assign(obj, name, key, value)
        else:
            kept = key.copy() if isinstance(key, np.ndarray) else key  # the caller may reuse it
            self._log.append((obj, name, kept, holder[key]))  # a number, or a copy
            holder[key] = value

    def remove(self, obj: Any, name: str, key: Any) -> None:
        """del obj.name[key], if it is there."""
        if key in getattr(obj, name):
            self.put(obj, name, key, _ABSENT)

    def note(self, undo: Callable[[], object]) -> None:
        """`undo` takes back a change that was just made elsewhere."""
        if self.open:
            self._log.append(undo)

    def mark(self) -> int:
        self.open = True
        self._marks.append(len(self._log))
        return len(self._marks) - 1

    def rollback(self, mark: int) -> None:
        self._need(mark)
        while len(self._log) > self._marks[mark]:
            last = self._log.pop()
            if callable(last):
                last()
            else:
                _assign(*last)
        self._end(mark)

    def commit(self, mark: int) -> None:
        self._need(mark)
        self._end(mark)

    def _need(self, mark: int) -> None:
        if not 0 <= mark < len(self._marks):
            raise LedgerError("this try has ended already")

    def _end(self, mark: int) -> None:
        del self._marks[mark:]
        if not self._marks:
            self.open = False
            self._log.clear()


def _current(obj: Any, name: str, key: Any) -> Any:
    holder = getattr(obj, name)
    return holder if key is None else holder.get(key, _ABSENT)


def _assign(obj: Any, name: str, key: Any, value: Any) -> None:
    if key is None:
        setattr(obj, name, value)
    elif value is _ABSENT:
        del getattr(obj, name)[key]
    else:
        getattr(obj, name)[key] = value
