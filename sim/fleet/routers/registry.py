"""Names of routers. Other packages add routers through entry points `twinserve.routers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinserve.policies.names import Names, parse_options, validated
from twinserve.sim.fleet.routers.base import Router

ROUTERS = Names(
    "router",
    __name__.rpartition(".")[0],
    {"least-requests": "least_requests:LeastRequests", "spread": "spread:Spread"},
    "twinserve.routers",
    Router,
)


@dataclass(frozen=True)
class RouterSpec:
    """What `name:option=value,...` says. options: those given, as the router's own types."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Router:
        """A new router with these options."""
        kind = ROUTERS.find(self.name)
        return kind(kind.Options(**self.options))


def router_names() -> list[str]:
    """Every router there is, sorted; nothing is imported."""
    return ROUTERS.all()


def parse_router(text: str) -> RouterSpec:
    """Read `least-requests`, or `name:option=value,...`. Raises RegistryError."""
    name, colon, rest = (part.strip() for part in text.strip().partition(":"))
    what, kind = f"router {name!r}", ROUTERS.find(name)
    given = parse_options(what, rest, text) if colon else {}
    return RouterSpec(name, validated(what, kind.Options, given))
