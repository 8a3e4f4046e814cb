"""Numbers for KV blocks, equal for equal text up to the block's end, and for sessions.

A block's key is made of the key of the block before it and of its own tokens, as engines chain
their hashes. Prompts that come and KV events of workers are named alike, so that what a worker
says it stored is found in prompts, whichever way the worker hashes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np

NAMES = 2**19  # contents that have names at once; about 100 MB when all are taken


class Numbers:
    """Small numbers for distinct keys: `room` of them, and those that are held. Of the others, the
    least recently used one loses its number to a new one."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._count = 0  # numbers that there are
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._held: dict[bytes, list[int]] = {}  # key -> number, how many hold it

    def __len__(self) -> int:
        return len(self._numbers) + len(self._held)

    def of(self, key: bytes) -> int:
        held = self._held.get(key)
        if held is not None:
            return held[0]
        number = self._numbers.get(key)
        if number is not None:
            self._numbers.move_to_end(key)
            return number
        if len(self._numbers) < self._room:
            number = self._count
            self._count += 1
        else:
            _, number = self._numbers.popitem(last=False)
        self._numbers[key] = number
        return number

    def hold(self, key: bytes) -> int:
        """Keep the number with its key until it is released as often as it was held."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = [self.of(key), 0]
            del self._numbers[key]
        held[1] += 1
        return held[0]

    def release(self, key: bytes) -> int:
        """Raises KeyError if no client holds it."""
        held = self._held[key]
        held[1] -= 1
        if not held[1]:
            del self._held[key]
            self._numbers[key] = held[0]
        return held[0]


def first_key(block_tokens: int, text: bool = False, adapter: str = "") -> bytes:
    """What the first block's key is made with. text: blocks are cut from bytes of a text, not from
    token ids. adapter: a LoRA adapter, whose KV is its own."""
    own = adapter.encode(errors="replace")
    return b"%d/%d/%s" % (block_tokens, text, own) if own else b"%d/%d" % (block_tokens, text)


def next_key(before: bytes, block: bytes, more: bytes = b"") -> bytes:
    """Return the key of the block after key `before`. more: what else distinguishes it."""
    return digest(before + block + more)


def bytes_of(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, np.int64).tobytes()


def salt_of(parts: Iterable[object]) -> bytes:
    """What else tells a block apart, of its cache salt, or of pictures in it."""
    return "\0".join(map(repr, parts)).encode(errors="replace")


def digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


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
