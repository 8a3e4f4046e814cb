"""Names of routers. Other packages add routers through entry points `twinserve.routers`; one
without a package is named by its file, `FILE.py:Class`."""

from dataclasses import dataclass, field
from typing import Any

from twinserve.own_code import WITH_OPTIONS, Names, class_in_file
from twinserve.policies.names import parse_options, validated
from twinserve.sim.fleet.routers.base import Router

ROUTERS = Names(
    "router",
    __name__.rpartition(".")[0],
    {
        "class-aware": "plain:ClassAware",
        "conductor": "conductor:Conductor",
        "dynamo-kv": "dynamo:DynamoKv",
        "least-requests": "plain:LeastRequests",
        "least-tokens": "plain:LeastTokens",
        "llm-d": "llm_d:LlmD",
        "random": "plain:Random",
        "round-robin": "plain:RoundRobin",
        "session": "plain:Session",
        "sglang": "sglang:SglangCacheAware",
        "spread": "plain:Spread",
        "vllm-dp": "vllm_dp:VllmDp",
    },
    "twinserve.routers",
    Router,
)


@dataclass(frozen=True)
class RouterSpec:
    """What `name:option=value,...` says.

    options  those given, as the router's own types
    own      a class from a file; None: the one that `name` stands for
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    own: type[Router] | None = None

    @property
    def router(self) -> type[Router]:
        """The router's class."""
        return self.own or ROUTERS.find(self.name)

    def build(self) -> Router:
        """A new router with these options."""
        return self.router(self.router.Options(**self.options))


def router_names() -> list[str]:
    """Every router there is, sorted; nothing is imported."""
    return ROUTERS.all()


def parse_router(text: str) -> RouterSpec:
    """Read `least-requests`, `name:option=value,...`, or `FILE.py:Class:option=value`, whose path
    is relative to the working directory. Raises RegistryError."""
    text = text.strip()
    name, colon, rest = (part.strip() for part in text.partition(":"))
    own = None
    known = name in ROUTERS.own or name in router_names()  # own ones: no package is looked at
    if not known and (found := WITH_OPTIONS.fullmatch(text)):
        name, colon, rest = found["name"], found["colon"], found["rest"]
        own = class_in_file(ROUTERS, found["file"], found["cls"] or "")
    kind = own or ROUTERS.find(name)
    what = f"router {name!r}"
    given = parse_options(what, rest, text) if colon else {}
    return RouterSpec(name, validated(what, kind.Options, given), own)
