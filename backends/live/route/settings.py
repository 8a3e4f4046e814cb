"""The settings of `twinserve route`, and a check of its libraries."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from twinserve.backends.live.versions import LiveEngineError
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.step_times import choose
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.setup.config import SettingsError

LIBRARIES = ("aiohttp", "prometheus_client")
OF_EVENTS = ("zmq", "msgspec")  # for KV events alone
# names without an empty part, and IPv6 addresses
_HOST = re.compile(r"[\w-]+(\.[\w-]+)*\.?|[0-9a-f:.]*:[0-9a-f:.%\w]*")
_Seconds = Annotated[float, Field(gt=0, le=86400)]


class KvEndpoints(NamedTuple):
    """Of a worker, as its `--kv-events-config` has them. replay: empty: it has none."""

    events: str
    replay: str = ""


class RouteSettings(BaseModel):
    """All times in seconds. A field is the flag of `twinserve route` of its name, or of its alias
    (`sim/cli/route.py` says what each means). kv_events: see `endpoints`."""

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
    back_off_s: _Seconds = Field(60.0, alias="back_off")
    retries: int = Field(2, ge=0, le=100)
    migrate: bool = True
    max_in_flight: int = Field(1024, ge=1)
    queue: int = Field(1024, ge=0)
    connections: int = Field(4096, ge=1)
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
    kv_events: list[str] = Field(default=[], max_length=1000)
    profile: str | None = None
    record: Path | None = None

    @field_validator("host")
    @classmethod
    def _an_address(cls, given: str) -> str:
        if not _is_host(given.lower()):  # an empty one would be every address
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

    @model_validator(mode="after")
    def _of_each_worker(self) -> RouteSettings:
        _ = self.endpoints
        return self

    @property
    def endpoints(self) -> list[KvEndpoints]:
        """Of each worker; empty if they publish nothing. One with the host * is of all."""
        given = self.kv_events
        if not given:
            return []
        if len(given) == 1 and "//*:" in given[0]:
            hosts = [urlsplit(url).hostname or "" for url in self.workers]
            hosts = [f"[{host}]" if ":" in host else host for host in hosts]
            given = [given[0].replace("//*:", f"//{host}:") for host in hosts]
        if len(given) != len(self.workers):
            raise ValueError(
                f"kv-events: {len(given)} for {len(self.workers)} workers; name one for each, in "
                "their order, or tcp://*:PORT for all"
            )
        found = [_endpoints(one) for one in given]
        every = [address for one in found for address in one if address]
        twice = [address for i, address in enumerate(every) if address in every[:i]]
        if twice:  # what one of them has cached would count for both
            raise ValueError(
                f"kv-events: {twice[0]} is named twice; each worker publishes, and replays, at an "
                "address of its own"
            )
        return found


def _endpoints(text: str) -> KvEndpoints:
    events, _, replay = text.partition(",")
    for one in (events, replay) if replay else (events,):
        try:
            parts = urlsplit(one)
            well = parts.scheme == "tcp" and bool(parts.port)
            well &= not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
            well &= bool(_HOST.fullmatch(parts.hostname or ""))
        except ValueError:
            well = False
        if not well:
            raise ValueError(
                f"kv-events: {one!r} is no endpoint; write tcp://HOST:PORT, or "
                "tcp://HOST:PORT,tcp://HOST:PORT with the one for replays"
            )
    return KvEndpoints(events, replay)


def _lower(url: str) -> str:
    """Capitals of scheme and host say nothing."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme.lower()}{mark}{host.lower()}{slash}{path}"


def _is_host(name: str) -> bool:
    try:
        name.encode("idna")  # as sockets do: parts of up to 63 characters
    except UnicodeError:
        return False
    return _HOST.fullmatch(name) is not None


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and _is_host(parts.hostname or "")
            and parts.port != 0
            and parts.path == parts.query == parts.fragment == ""
            and "@" not in parts.netloc
        )
    except ValueError:  # a port that is no number
        return False


def require_libraries(events: bool = False) -> None:
    """Raises LiveEngineError, one line, if a library is missing. events: KV events are used too."""
    wanted = LIBRARIES + OF_EVENTS if events else LIBRARIES
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise LiveEngineError(
            f"route needs a library that is not installed, {' and '.join(missing)}: "
            "pip install 'twinserve[route]'"
        )


def router_of(text: str, kv_events: bool = False, profile: str | None = None) -> Router:
    """A new router that can decide by what the front knows. kv_events: workers publish them.
    profile: see `RouteSettings`. Raises SettingsError if it needs more than that, or signals
    that are lost on purpose; RegistryError if there is none."""
    spec = parse_router(text)
    router = spec.build()
    if router.hears_kv_events() and not kv_events:
        more = f", or give {spec.name}:index=approximate" if _may_guess(spec.router) else ""
        raise SettingsError(
            f"router {text!r} decides by KV events of the workers: name their addresses, "
            f"--kv-events tcp://HOST:PORT for each{more}"
        )
    if router.predicts_times and profile is None:
        raise SettingsError(
            f"router {text!r} predicts step times of the workers: name their --profile"
        )
    for option in ("age", "lost", "events_age", "events_lost"):
        if option in spec.options:
            raise SettingsError(
                f"router {text!r}: {option} is for simulated routers, and a live one measures its "
                f"servers itself: drop {option}"
            )
    return router


def model_of(profile: str | None) -> StepTimeModel | None:
    """Return the step times of the workers. Raises ProfileError if there is no such profile."""
    if profile is None:
        return None
    found = choose(profile).profile.scheduled(asynchronous=True)  # a server's default
    return found.model(found.max_num_seqs)


def _may_guess(kind: type[Router]) -> bool:
    index: Any = kind.Options.model_fields.get("index")
    return index is not None
