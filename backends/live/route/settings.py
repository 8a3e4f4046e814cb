"""What `twinserve route` is told, and whether its libraries are there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from twinserve.backends.live.versions import LiveEngineError
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.setup.config import SettingsError

LIBRARIES = ("aiohttp", "prometheus_client")
# names without an empty part, and IPv6 addresses
_HOST = re.compile(r"[\w-]+(\.[\w-]+)*\.?|[0-9a-f:.]*:[0-9a-f:.%\w]*")
_Seconds = Annotated[float, Field(gt=0, le=86400)]


class RouteSettings(BaseModel):
    """All times in seconds. Aliases are the names of the command's flags, for errors that name one.

    workers          URLs of `vllm serve`, without /v1
    poll_s           between two polls of a worker's /metrics; None: the router's own `interval`, or
                     half a second
    health_s, health_timeout_s, misses  between two health checks; how long one may take; failed
                     ones in a row after which a worker is down
    retries          how often a request is sent again after a worker lost it
    migrate          streamed answers that were begun go on elsewhere
    max_in_flight    requests at workers at once; more of them wait
    queue, queue_timeout_s  requests that may wait, and for how long
    body_bytes, header_bytes  of a request
    body_timeout_s   until a request's body is complete
    idle_timeout_s   a connection without a complete request's head
    write_timeout_s  a client that reads nothing of its answer
    drain_s          how long requests may take to end after SIGTERM
    session_header   requests with the same value of it are one session
    session_s        how long a session is remembered that sends nothing
    clients          the file of clients that the servers have (docs/serving.md); None: none
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )

    workers: list[str] = Field(min_length=1, max_length=1000, alias="worker")
    router: str = "least-requests"
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    poll_s: _Seconds | None = Field(None, alias="poll")
    health_s: _Seconds = Field(1.0, alias="health_interval")
    health_timeout_s: _Seconds = Field(2.0, alias="health_timeout")
    misses: int = Field(3, ge=1)
    retries: int = Field(2, ge=0, le=100)
    migrate: bool = True
    max_in_flight: int = Field(1024, ge=1)
    queue: int = Field(1024, ge=0)
    queue_timeout_s: _Seconds = Field(30.0, alias="queue_timeout")
    body_bytes: int = Field(8 * 2**20, ge=1024, le=2**32)
    header_bytes: int = Field(8190, ge=256, le=2**20)
    body_timeout_s: _Seconds = Field(30.0, alias="body_timeout")
    idle_timeout_s: _Seconds = Field(75.0, alias="idle_timeout")
    write_timeout_s: _Seconds = Field(60.0, alias="write_timeout")
    drain_s: _Seconds = Field(60.0, alias="drain")
    session_header: str = Field("X-Session-Id", pattern="^[A-Za-z0-9-]{1,60}$")
    session_s: _Seconds = Field(3600.0, alias="session_expiry")
    clients: str | None = None

    @field_validator("host")
    @classmethod
    def _an_address(cls, given: str) -> str:
        if not _HOST.fullmatch(given.lower()):  # an empty one would be every address
            raise ValueError("write an address of this machine, or 0.0.0.0 for all of them")
        return given

    @field_validator("workers")
    @classmethod
    def _urls(cls, given: list[str]) -> list[str]:
        urls = [_lower(one.strip().rstrip("/")) for one in given]
        for url in urls:
            if not _is_server(url):
                raise ValueError(f"{url!r} is no server; write http://HOST:PORT")
        twice = [url for i, url in enumerate(urls) if url in urls[:i]]
        if twice:
            raise ValueError(f"{twice[0]} is named twice; name each worker once")
        return urls


def _lower(url: str) -> str:
    """Capitals of scheme and host say nothing."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme.lower()}{mark}{host.lower()}{slash}{path}"


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(_HOST.fullmatch(parts.hostname or ""))
            and parts.port != 0
            and parts.path == parts.query == parts.fragment == ""
            and "@" not in parts.netloc
        )
    except ValueError:  # a port that is no number
        return False


def require_libraries() -> None:
    """Raises LiveEngineError, one line, where one is missing."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise LiveEngineError(
            f"route needs a library that is not installed, {' and '.join(missing)}: "
            "pip install 'twinserve[route]'"
        )


def router_of(text: str) -> Router:
    """A new router that can decide by what the front knows. Raises SettingsError where it needs
    KV events, or signals that are lost on purpose; RegistryError where there is none."""
    spec = parse_router(text)
    router = spec.build()
    if router.hears_kv_events():
        more = (
            f"; give {spec.name}:index=approximate" if _may_guess(spec.router) else "; take another"
        )
        raise SettingsError(
            f"router {text!r} decides by KV events of the workers, which route does not hear{more}"
        )
    if router.signals.lost or "age" in spec.options:
        raise SettingsError(
            f"router {text!r}: age and lost say what a simulated router hears; a live one hears "
            "what it hears: drop them"
        )
    return router


def _may_guess(kind: type[Router]) -> bool:
    index: Any = kind.Options.model_fields.get("index")
    return index is not None
