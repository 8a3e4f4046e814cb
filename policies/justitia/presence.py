"""Which applications have requests here, so that what is kept for one can go with its last one."""

from __future__ import annotations


class Presence:
    """Counts the requests of each application (or client) that are here, waiting or not.

    An application has ended when none is here and none will come; which of the two is said first
    does not matter.
    """

    def __init__(self) -> None:
        self._here: dict[int, int] = {}
        self._closed: set[int] = set()  # of these, to which no request will come; only asked

    def comes(self, number: int) -> None:
        self._here[number] = self._here.get(number, 0) + 1

    def goes(self, number: int) -> bool:
        """A request left. Returns whether its application has ended with it."""
        self._here[number] -= 1
        if self._here[number]:
            return False
        del self._here[number]
        if number not in self._closed:
            return number < 0  # a request that is an application by itself
        self._closed.remove(number)
        return True

    def closes(self, number: int) -> bool:
        """No request will come. Returns whether the application has ended."""
        if number in self._here:
            self._closed.add(number)
            return False
        return True

    def count(self, number: int) -> int:
        return self._here.get(number, 0)

    def __len__(self) -> int:
        """Applications with requests here."""
        return len(self._here)
