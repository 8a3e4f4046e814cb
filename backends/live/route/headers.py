"""Headers of requests for workers, and of answers for clients.

A proxy passes on what is about the message, and keeps what is about one connection (RFC 9110,
7.6.1). That is also whatever `Connection` names.
"""

from __future__ import annotations

from multidict import CIMultiDict, MultiMapping

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
