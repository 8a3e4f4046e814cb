"""Server-sent events, as vLLM and OpenAI stream them: pieces that end with an empty line."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
_MOST_BYTES = 16 * 2**20


class EventTooLongError(Exception):
    """A worker's event has no end."""


class Events:
    """Cuts what comes in pieces of any size into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Events that are complete now, each with its empty line."""
        self._rest = (self._rest + piece).replace(b"\r\n", b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise EventTooLongError
        *whole, self._rest = self._rest.split(b"\n\n")
        return [event + b"\n\n" for event in whole]


def data_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None where there is none, as in comments and [DONE]."""
    if not event.startswith(b"data:"):
        return None
    try:
        found = json.loads(event[5:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def event_of(data: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )
