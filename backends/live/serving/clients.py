"""A server's clients, and how far their claims about requests are believed
(docs/serving.md). Needs no vLLM.

A claim that costs only the client's own requests (a later deadline, best effort, a larger priority)
is believed from every client. One that takes from others is believed as far as the server's file
says, and by default no further than what a request without any claim gets.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from twinserve.backends.live.serving.attributes import (
    LEAST_S,
    MOST,
    MOST_S,
    STAMP,
    RequestAttributes,
)
from twinserve.policies.names import hint
from twinserve.policies.requests import RequestClass
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.yaml_text import parse_yaml, text_of

TRUSTED = "trusted"  # instead of a file: all clients, with every claim
OTHERS = "default"  # the client for all that the file does not name
_NAME = re.compile(r"[\w.-]{1,60}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,60}")
_WHERE = "clients"


class Beliefs(BaseModel):
    """The furthest that a client's claims are believed.

    class       the most urgent class; be: all its requests are best-effort
    priority    the smallest
    slo_ttft_s, slo_tpot_s  the tightest objectives, seconds; none: the server's own
    applications  whether it may group its requests into applications, and say what they are
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    service_class: Literal["rt", "be"] = Field("rt", alias="class")
    priority: int = Field(0, ge=-MOST, le=MOST)
    slo_ttft_s: float | None = Field(None, ge=LEAST_S, le=MOST_S)
    slo_tpot_s: float | None = Field(None, ge=LEAST_S, le=MOST_S)
    applications: bool = False


class ClientSettings(Beliefs):
    """A client of the file. What it does not name is as `default` of the file has it.

    key_sha256  of its API keys, in hex: `printf %s KEY | sha256sum`
    header      values of the header that the file names
    """

    key_sha256: list[str] = []
    header: list[str] = []

    @field_validator("key_sha256")
    @classmethod
    def _hashes(cls, given: list[str]) -> list[str]:
        for one in given:
            if not re.fullmatch("[0-9a-f]{64}", one):
                raise ValueError("write the SHA-256 of a key, 64 digits of 0-9 and a-f")
        return given


class ClientsSettings(BaseModel):
    """The file. header: set by a proxy that no client gets around, and names the client."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    header: str | None = None
    default: Beliefs = Beliefs()
    clients: dict[str, ClientSettings] = {}

    @field_validator("header")
    @classmethod
    def _a_header(cls, given: str | None) -> str | None:
        if given is not None and not _HEADER.fullmatch(given):
            raise ValueError("write the name of an HTTP header, such as X-Client")
        return given


@dataclass(frozen=True)
class Client:
    """named: its requests without an application count as one owner of a fair share. Otherwise each
    of them is its own, as in a simulation."""

    name: str
    beliefs: Beliefs
    named: bool = True


@dataclass(frozen=True)
class Clients:
    """All clients of a server. stamped: they have names, which CheckAttributes adds to each request
    (`STAMP`). slo_ttft_s, slo_tpot_s: the server's own objectives, seconds, or None."""

    default: Client
    listed: Mapping[str, Client] = field(default_factory=dict)
    stamped: bool = False
    header: bytes = b""  # lower case
    by_header: Mapping[str, str] = field(default_factory=dict)
    by_key: Mapping[str, str] = field(default_factory=dict)
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    def refusal(self, name: str | None) -> str:
        """Why a request with this stamp is not served, in one line; empty if it is."""
        if not self.stamped or name == OTHERS or name in self.listed:
            return ""
        return (
            "this request names no client; to tell clients apart, vllm serve needs "
            "--middleware twinserve.backends.live.serving.attributes.CheckAttributes, and takes "
            "completions and chats only"
        )

    def of(self, name: str | None) -> Client:
        return self.listed.get(name or "", self.default) if self.stamped else self.default

    @property
    def all(self) -> tuple[Client, ...]:
        return (self.default, *self.listed.values())

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The stamp of a request with these headers, names in lower case. A listed value of the
        header counts before the key; a request with one of them twice belongs to no client in
        particular."""
        said: dict[bytes, list[str]] = {self.header: [], b"authorization": []}
        for name, value in headers:
            if name in said:
                said[name].append(value.decode("latin-1"))
        if self.header and len(said[self.header]) == 1:
            found = self.by_header.get(said[self.header][0].strip())
            if found is not None:
                return found
        if len(said[b"authorization"]) == 1:
            scheme, _, key = said[b"authorization"][0].partition(" ")
            if scheme.lower() == "bearer":
                return self.by_key.get(sha256(key.encode("latin-1")).hexdigest(), OTHERS)
        return OTHERS

    def believed(self, given: RequestAttributes, priority: int = 0) -> RequestAttributes:
        """Return a request's attributes that count, always with a priority. priority: its own."""
        beliefs = self.of(given.client).beliefs
        asked = priority if given.priority is None else given.priority
        least = RequestClass.BEST_EFFORT if beliefs.service_class == "be" else given.service_class
        believed = replace(
            given,
            service_class=max(given.service_class, least),
            priority=min(max(asked, beliefs.priority), MOST),
            slo_ttft_s=_no_tighter(given.slo_ttft_s, beliefs.slo_ttft_s, self.slo_ttft_s),
            slo_tpot_s=_no_tighter(given.slo_tpot_s, beliefs.slo_tpot_s, self.slo_tpot_s),
        )
        if beliefs.applications:
            return believed
        return replace(
            believed, app=None, app_class=None, app_text=None, app_requests=None, stage=0
        )


def _no_tighter(claimed: float, bound: float | None, own: float | None) -> float:
    """Seconds; NaN: none. Where neither file nor server names an objective, none is believed."""
    bounds = [one for one in (bound, own) if one is not None]
    return max(claimed, min(bounds)) if bounds and not math.isnan(claimed) else math.nan


_EVERYTHING = Beliefs.model_validate(
    {"priority": -MOST, "slo_ttft_s": LEAST_S, "slo_tpot_s": LEAST_S, "applications": True}
)
ALL_TRUSTED = Clients(Client(TRUSTED, _EVERYTHING, named=False))


def read_clients(
    given: str | None, slo_ttft_s: float | None = None, slo_tpot_s: float | None = None
) -> Clients:
    """given: a file's path, `trusted`, or None: clients are not distinguished, and nothing
    believed that takes from others. slo_ttft_s, slo_tpot_s: the server's own objectives. Raises
    SettingsError with one line."""
    if given == TRUSTED:
        return ALL_TRUSTED
    if given is None:
        return Clients(Client(OTHERS, Beliefs()), slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)
    where = f"{_WHERE} {given}"
    content = parse_yaml(where, text_of(where, given))
    if not isinstance(content, dict):
        raise SettingsError(f"{where}: holds no settings; write them as docs/serving.md has it")
    try:
        settings = ClientsSettings.model_validate(content)
    except ValidationError as error:
        raise SettingsError(f"{where}: {_said(error)}") from None
    listed = {
        name: Client(name, _completed(one, settings.default))
        for name, one in settings.clients.items()
    }
    return Clients(
        Client(OTHERS, settings.default),
        listed,
        True,
        (settings.header or "").lower().encode(),
        *_found_by(where, settings),
        slo_ttft_s,
        slo_tpot_s,
    )


def _completed(one: ClientSettings, default: Beliefs) -> Beliefs:
    named = {name: getattr(one, name) for name in one.model_fields_set & set(Beliefs.model_fields)}
    return default.model_copy(update=named)


def _found_by(where: str, settings: ClientsSettings) -> tuple[dict[str, str], dict[str, str]]:
    """Value of the header -> client, hash of a key -> client."""
    found: dict[str, dict[str, str]] = {"header": {}, "key_sha256": {}}
    for name, one in settings.clients.items():
        path = f"{where}: clients.{name}"
        if name == OTHERS or not _NAME.fullmatch(name):
            raise SettingsError(
                f"{path}: a client's name has 1 to 60 letters, digits and any of _.-, and is not "
                f"{OTHERS!r}; choose another"
            )
        if not one.header and not one.key_sha256:
            raise SettingsError(
                f"{path}: no field says which requests belong to it; give key_sha256 or header"
            )
        if one.header and settings.header is None:
            raise SettingsError(
                f"{path}.header: the file names no header; write header: at its top"
            )
        for kind, clients in found.items():
            for value in getattr(one, kind):
                if value in clients:
                    raise SettingsError(
                        f"{path}.{kind}: {value!r} is that of {clients[value]!r} too; drop one"
                    )
                clients[value] = name
    return found["header"], found["key_sha256"]


def _said(error: ValidationError) -> str:
    """Return the first error, unknown names before others: field, what, and what to do."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    loc, given = first["loc"], first.get("input")
    path, said = ".".join(map(str, loc)), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = _fields_at(loc)
        return (
            f"{path}: there is no such field{hint(str(loc[-1]), known)}; there are "
            f"{', '.join(known)}"
        )
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, type(None))) else ""
    return f"{path}: {said[0].lower()}{said[1:]}{shown}"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """Names that the last part of `loc` could be."""
    parts: dict[int, type[BaseModel]] = {1: ClientsSettings, 2: Beliefs, 3: ClientSettings}
    fields = parts[min(len(loc), 3)].model_fields
    return sorted(value.alias or name for name, value in fields.items())


def stamped(given: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Attributes of a request with the stamp of its client."""
    return {**(given or {}), STAMP: name}
