"""What goes between clients, the front and workers: errors of the front's own in the form that
OpenAI's API gives them, headers, and server-sent events.

A proxy passes on headers about the message, and keeps those about one connection (RFC 9110, 7.6.1).
That is also whatever `Connection` names. Events end with an empty line; lines may end with CR LF,
LF or CR, data may have several lines, and what begins with a colon is a comment (WHATWG HTML, 9.2).
"""

import json
from typing import Any

from multidict import CIMultiDict, MultiMapping

_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class RefusedError(Exception):
    """A request that gets an error of the front's own.

    kind      one word, for clients that ask for a code, and for the metrics
    retry_s   when to come again (seconds); None: never like this
    allow     the method that there is, where another one was asked for
    """

    def __init__(
        self, status: int, kind: str, said: str, retry_s: int | None = None, allow: str = ""
    ) -> None:
        super().__init__(said)
        self.status, self.kind, self.said, self.retry_s = status, kind, said, retry_s
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        return found | ({"Allow": self.allow} if self.allow else {})

    @property
    def body(self) -> bytes:
        return error_body(self.status, self.kind, self.said)


def error_body(status: int, kind: str, said: str) -> bytes:
    """Return an error as one JSON object, on one line."""
    error = {
        "message": " ".join(said.split()),
        "type": _TYPES.get(status, "server_error"),
        "param": None,
        "code": kind,
    }
    return json.dumps({"error": error}).encode()


def error_event(status: int, kind: str, said: str) -> bytes:
    """Return the last event of a stream that cannot continue."""
    return b"data: " + error_body(status, kind, said) + b"\n\n"


# about one connection
_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "proxy-authorization", "proxy-authenticate"),
}
# the front reads the body itself, and sends one of its own
_OF_REQUESTS = _HOP | {
    *("host", "content-length", "expect", "accept-encoding", "content-encoding", "x-request-id")
}
# what the front's own HTTP writes; a cookie of a worker would be one of a fleet
_OF_ANSWERS = _HOP | {"content-length", "date", "server", "set-cookie"}


def for_worker(given: MultiMapping[str], name: str = "") -> CIMultiDict[str]:
    """name: of the request; empty: none. The type of the body is the client's word: workers take
    JSON alone, so that no page of another site can send a request from a browser."""
    found = _without(given, _OF_REQUESTS)
    if name:
        found["X-Request-Id"] = name
    return found


def for_client(given: MultiMapping[str]) -> CIMultiDict[str]:
    return _without(given, _OF_ANSWERS)


def _without(given: MultiMapping[str], dropped: set[str]) -> CIMultiDict[str]:
    """What is said twice stays so: two keys may belong to no client."""
    named = {
        one.strip().lower() for line in given.getall("Connection", []) for one in line.split(",")
    }
    return CIMultiDict(
        (name, value)
        for name, value in given.items()
        if name.lower() not in dropped and name.lower() not in named
    )


DONE = b"data: [DONE]\n\n"
_MOST_BYTES = 16 * 2**20


class EventTooLongError(Exception):
    """An event of a worker is too long."""


class Events:
    """Cuts what comes in pieces of any size into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that are complete now, each with its empty line; lines end with LF."""
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
    """Return the data of an event; empty for a comment."""
    lines = event.split(b"\n") if event.find(b"\n") < len(event) - 2 else [event.rstrip(b"\n")]
    found = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(found)


def data_of(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an event, or None for comments and [DONE]."""
    try:
        found = json.loads(payload_of(event) or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_done(event: bytes) -> bool:
    return b"[DONE]" in event and payload_of(event).strip() == b"[DONE]"


def is_error(event: bytes) -> bool:
    """Return whether the event says that the worker cannot continue. Few events are parsed for
    this, since a quote within a text follows a backslash."""
    return b'"error"' in event and bool((data_of(event) or {}).get("error"))


def event_of(data: dict[str, Any]) -> bytes:
    try:
        said = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON has it as an escape alone
        said = json.dumps(data, separators=(",", ":")).encode()
    return b"data: " + said + b"\n\n"
