"""What the front itself says to clients: errors in the form that OpenAI's API gives them."""

from __future__ import annotations

import json

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
    """One JSON object, on one line."""
    error = {
        "message": " ".join(said.split()),
        "type": _TYPES.get(status, "server_error"),
        "param": None,
        "code": kind,
    }
    return json.dumps({"error": error}).encode()


def error_event(status: int, kind: str, said: str) -> bytes:
    """The last event of a stream that cannot go on."""
    return b"data: " + error_body(status, kind, said) + b"\n\n"
