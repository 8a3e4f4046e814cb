"""Server-sent events, as vLLM and OpenAI stream them: pieces that end with an empty line.

Lines may end with CR LF, LF or CR, data may have several lines, and what begins with a colon is a
comment (WHATWG HTML, 9.2).
"""

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
        """Events that are complete now, each with its empty line; lines end with LF."""
        rest = self._rest + piece
        half = b""
        if b"\r" in rest:
            if rest.endswith(b"\r"):  # its LF may come with the next piece
                rest, half = rest[:-1], b"\r"
            rest = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if len(rest) > _MOST_BYTES:
            raise EventTooLongError
        *whole, rest = rest.split(b"\n\n")
        self._rest = rest + half
        return [event + b"\n\n" for event in whole]


def payload_of(event: bytes) -> bytes:
    """Its data; empty where there are none, as in comments."""
    lines = event.split(b"\n") if event.find(b"\n") < len(event) - 2 else [event.rstrip(b"\n")]
    found = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(found)


def data_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None where there is none, as in comments and [DONE]."""
    try:
        found = json.loads(payload_of(event) or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_done(event: bytes) -> bool:
    return b"[DONE]" in event and payload_of(event).strip() == b"[DONE]"


def is_error(event: bytes) -> bool:
    """Whether a worker says that it cannot go on. A quote within a text has a backslash before it,
    so few events are parsed for this."""
    return b'"error"' in event and bool((data_of(event) or {}).get("error"))


def event_of(data: dict[str, Any]) -> bytes:
    try:
        said = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON has it as an escape alone
        said = json.dumps(data, separators=(",", ":")).encode()
    return b"data: " + said + b"\n\n"
