"""Names of policies and KV ledgers. Modules are imported when they are asked for, not before.

Other packages add policies through the entry point group `twinserve.policies` and ledgers through
`twinserve.kv`; an entry point names a class. The names below cannot be taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from .base import EngineLimits, Options, Policy
from .kv.base import KvLedger

POLICY_GROUP = "twinserve.policies"
LEDGER_GROUP = "twinserve.kv"

_LARGEST = 10**18  # of whole numbers: what is counted with them still fits into 64 bits

_HERE = __name__.rpartition(".")[0]
_POLICIES = {
    "bros": "bros:BrosPolicy",
    "bros-exact": "bros_exact:BrosExactPolicy",
    "conserve": "conserve:ConservePolicy",
    "echo": "echo:EchoPolicy",
    "echo-bs": "echo:EchoBsPolicy",
    "echo-bs-e": "echo:EchoBsEPolicy",
    "echo-bs-e-s": "echo:EchoBsESPolicy",
    "justitia": "justitia:JustitiaPolicy",
    "kv-share": "justitia_share:KvSharePolicy",
    "layerkv": "layerkv:LayerKvPolicy",
    "mlfq": "mlfq:MlfqPolicy",
    "parrot": "parrot:ParrotPolicy",
    "preemptive-wait": "preemptive_wait:PreemptiveWaitPolicy",
    "round-robin": "round_robin:RoundRobinPolicy",
    "sarathi": "sarathi:SarathiPolicy",
    "srjf": "sjf:SrjfPolicy",
    "tgi": "tgi:TgiPolicy",
    "vllm": "vllm:VllmPolicy",
    "vllm-sjf": "sjf:VllmSjfPolicy",
    "vllm-v0": "vllm_v0:VllmV0Policy",
    "vtc": "vtc:VtcPolicy",
}
_LEDGERS = {
    "bidirectional": "kv.bidirectional:BidirectionalLedger",
    "checkpointed": "kv.checkpointed:CheckpointedLedger",
    "layerwise": "kv.layerwise:LayerwiseLedger",
    "paged": "kv.paged:PagedLedger",
    "paged-rc": "kv.task_aware:CountedLedger",
    "task-aware": "kv.task_aware:TaskAwareLedger",
}


class RegistryError(ValueError):
    """A name or an option that does not exist, or a value that does not fit: one line."""


def policy_names() -> list[str]:
    """Every policy there is, sorted; nothing is imported."""
    return _names(_POLICIES, POLICY_GROUP)


def ledger_names() -> list[str]:
    """Every KV ledger there is, sorted; nothing is imported."""
    return _names(_LEDGERS, LEDGER_GROUP)


def policy_class(name: str) -> type[Policy]:
    """The class behind a policy's name. Raises RegistryError."""
    return _find("policy", name, _POLICIES, POLICY_GROUP, Policy)


def ledger_class(name: str) -> type[KvLedger]:
    """The class behind a KV ledger's name. Raises RegistryError."""
    return _find("KV ledger", name, _LEDGERS, LEDGER_GROUP, KvLedger)


@dataclass(frozen=True)
class PolicySpec:
    """What `name:option=value,...` says.

    options  those given, as the policy's own types
    kv       KV ledger, where the text names one; None: the policy's default
    label    the text itself: tells runs of one policy with different options apart; `name` where there is no text
    own      a class without a registered name, as from a notebook; None: the one that `name` stands for
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kv: str | None = None
    label: str = ""
    own: type[Policy] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)

    @property
    def policy(self) -> type[Policy]:
        """The policy's class."""
        return self.own or policy_class(self.name)

    @property
    def uses_estimator(self) -> bool:
        """Whether the policy, with these options, decides with step times."""
        return self.policy.estimates(self.policy.Options(**self.options))

    @property
    def kv_name(self) -> str:
        """The ledger to use."""
        return self.kv or self.policy.default_kv

    def build(self, limits: EngineLimits, estimator=None) -> Policy:
        """A new policy with these options. Raises PolicyError where it cannot serve `limits`."""
        return self.policy(limits, self.policy.Options(**self.options), estimator)


def parse_policy(text: str) -> PolicySpec:
    """Read `bros` or `bros:chunk=2048,kv=paged`; the value `none` is None. Raises RegistryError."""
    name, colon, rest = (part.strip() for part in text.strip().partition(":"))
    policy = policy_class(name)
    given: dict[str, str | None] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not value:
            raise RegistryError(
                f"policy {name!r}: expected option=value, not {part.strip()!r} (in {text.strip()!r})"
            )
        if option in given:
            raise RegistryError(f"policy {name!r}: option {option!r} is given twice")
        given[option] = None if value.lower() == "none" else value
    kv = given.pop("kv", None)
    if kv is not None:
        ledger_class(kv)
    return PolicySpec(name, _validated(name, policy.Options, given), kv, text.strip())


def _validated(name: str, model: type[Options], given: dict[str, str | None]) -> dict[str, Any]:
    for option in given:
        if option not in model.model_fields:
            known = [*model.model_fields, "kv"]
            hint = _hint(option, known)
            raise RegistryError(
                f"policy {name!r} has no option {option!r}{hint}; it has {', '.join(known)}"
            )
    try:
        options = model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = first["loc"][0] if first["loc"] else "options"
        raise RegistryError(
            f"policy {name!r}, option {where}={first['input']}: {_wrong(model, where, first)}"
        ) from None
    found = options.model_dump(exclude_unset=True)
    for option, value in found.items():
        if isinstance(value, int) and value > _LARGEST:
            raise RegistryError(f"policy {name!r}, option {option}={value}: should be less than or equal to {_LARGEST:.0e}")
    return found


def _wrong(model: type[Options], option: str, error: dict) -> str:
    """What is wrong with an option's value; of a number out of range, the whole range."""
    said, kind = _plain(error["msg"]), error["type"]
    if kind != "finite_number" and not kind.startswith(("greater_than", "less_than")):
        return said
    bounds = [
        f"{words} {getattr(bound, name):.15g}"
        for name, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
        for bound in model.model_fields[option].metadata
        if hasattr(bound, name)
    ]
    if len(bounds) < (1 if kind == "finite_number" else 2):
        return said
    return f"should be {'a finite number, ' * (kind == 'finite_number')}{' and '.join(bounds)}"


def _plain(message: str) -> str:
    """Pydantic's sentence as a part of ours."""
    return message.removeprefix("Input ").removeprefix("Value error, ").replace("\n", " ")


def _hint(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _names(own: dict[str, str], group: str) -> list[str]:
    return sorted({*own, *(point.name for point in entry_points(group=group))})


def _find(kind: str, name: str, own: dict[str, str], group: str, base: type) -> type:
    if name in own:
        module, _, attribute = own[name].partition(":")
        return getattr(import_module(f"{_HERE}.{module}"), attribute)
    for point in entry_points(group=group):
        if point.name == name:
            return _loaded(kind, point, base)
    known = _names(own, group)
    raise RegistryError(f"no {kind} {name!r}{_hint(name, known)}; there are {', '.join(known)}")


def _loaded(kind: str, point: EntryPoint, base: type) -> type:
    where = f"{kind} {point.name!r} of another package"
    try:
        found = point.load()
    except Exception as error:  # whatever that package's own code does when it is imported
        said = " ".join(str(error).split()) or type(error).__name__
        raise RegistryError(f"{where} cannot be loaded from {point.value}: {said}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RegistryError(f"{where}: {point.value} is not a {base.__name__}")
    lacks = sorted(found.__abstractmethods__)
    if lacks:
        raise RegistryError(f"{where}: {point.value} lacks {', '.join(lacks)}")
    if getattr(found, "name", None) != point.name:
        given = getattr(found, "name", None)
        raise RegistryError(f"{where}: {point.value} says name = {given!r}; call both the same")
    return found
