"""Sessions that the front knows, and when it forgets them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

SESSIONS = 2**17  # at once; routers remember a number or two of each


class Sessions:
    """A number for each session, that its name gives: the same in every front, and after a restart.

    room        sessions at once; beyond that, those that were silent the longest are forgotten
    expiry_s    a session that was silent for longer is forgotten
    forgotten   called with a session's number when it is
    """

    def __init__(
        self, expiry_s: float, forgotten: Callable[[int], None], room: int = SESSIONS
    ) -> None:
        self._expiry_s, self._forgotten, self._room = expiry_s, forgotten, room
        self._seen_s: OrderedDict[int, float] = OrderedDict()  # the silent ones first

    def __len__(self) -> int:
        return len(self._seen_s)

    def __contains__(self, number: int) -> bool:
        return number in self._seen_s

    def of(self, name: bytes, now: float) -> int:
        """Of a session that has sent a request. now: seconds, never less than before."""
        number = int.from_bytes(blake2b(name, digest_size=7).digest())
        self._seen_s[number] = now
        self._seen_s.move_to_end(number)
        while len(self._seen_s) > self._room or self._oldest_s() < now - self._expiry_s:
            gone, _ = self._seen_s.popitem(last=False)
            self._forgotten(gone)
        return number

    def _oldest_s(self) -> float:
        return next(iter(self._seen_s.values()))
