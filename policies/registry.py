"""Names of policies and KV ledgers. Modules are imported when they are asked for, not before.

Other packages add policies through the entry point group `twinserve.policies` and ledgers through
`twinserve.kv`; an entry point names a class. The names below cannot be taken. A policy without a
package is named by its file, `FILE.py:Class`. Such a file stands alone: nothing beside it can be
imported, so its content is all there is to know of it.
"""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twinserve.policies.base import EngineLimits, Options, Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.estimators import BatchEstimator

POLICY_GROUP = "twinserve.policies"
LEDGER_GROUP = "twinserve.kv"

_LARGEST = 10**18  # of whole numbers: what is counted with them still fits into 64 bits

_HERE = __name__.rpartition(".")[0]
_POLICIES = {
    "bros": "bros.policy:BrosPolicy",
    "bros-exact": "bros.exact:BrosExactPolicy",
    "conserve": "baselines.conserve:ConservePolicy",
    "echo": "echo.policy:EchoPolicy",
    "echo-bs": "echo.policy:EchoBsPolicy",
    "echo-bs-e": "echo.policy:EchoBsEPolicy",
    "echo-bs-e-s": "echo.policy:EchoBsESPolicy",
    "justitia": "justitia.policy:JustitiaPolicy",
    "kv-share": "justitia.kv_share:KvSharePolicy",
    "layerkv": "layerkv.policy:LayerKvPolicy",
    "mlfq": "baselines.mlfq:MlfqPolicy",
    "parrot": "justitia.parrot:ParrotPolicy",
    "preemptive-wait": "baselines.preemptive_wait:PreemptiveWaitPolicy",
    "round-robin": "baselines.round_robin:RoundRobinPolicy",
    "sarathi": "baselines.sarathi:SarathiPolicy",
    "srjf": "justitia.sjf:SrjfPolicy",
    "tgi": "baselines.tgi:TgiPolicy",
    "vllm": "baselines.vllm:VllmPolicy",
    "vllm-sjf": "justitia.sjf:VllmSjfPolicy",
    "vllm-v0": "baselines.vllm_v0:VllmV0Policy",
    "vtc": "justitia.vtc:VtcPolicy",
}
_LEDGERS = {
    "bidirectional": "kv.bidirectional.ledger:BidirectionalLedger",
    "checkpointed": "kv.paged.checkpointed:CheckpointedLedger",
    "layerwise": "kv.layerwise.ledger:LayerwiseLedger",
    "paged": "kv.paged.ledger:PagedLedger",
    "paged-rc": "kv.task_aware.ledger:CountedLedger",
    "task-aware": "kv.task_aware.ledger:TaskAwareLedger",
}


# a file's name may have colons: it ends where `.py` does
_IN_FILE = re.compile(r"(?P<file>.+?\.py)(?::(?P<cls>[^:]*))?")
_WITH_OPTIONS = re.compile(rf"(?P<name>{_IN_FILE.pattern})(?P<colon>:(?P<rest>.*))?", re.DOTALL)


class RegistryError(ValueError):
    """A name or an option that does not exist, or a value that does not fit: one line."""


def policy_names() -> list[str]:
    """Every policy there is, sorted; nothing is imported."""
    return _names(_POLICIES, POLICY_GROUP)


def ledger_names() -> list[str]:
    """Every KV ledger there is, sorted; nothing is imported."""
    return _names(_LEDGERS, LEDGER_GROUP)


def policy_class(name: str) -> type[Policy]:
    """The class behind a policy's name, or `FILE.py:Class`. Raises RegistryError."""
    if (given := _IN_FILE.fullmatch(name)) and name not in policy_names():
        return _in_file(given["file"], given["cls"] or "")
    return _find("policy", name, _POLICIES, POLICY_GROUP, Policy)


def ledger_class(name: str) -> type[KvLedger]:
    """The class behind a KV ledger's name. Raises RegistryError."""
    return _find("KV ledger", name, _LEDGERS, LEDGER_GROUP, KvLedger)


@dataclass(frozen=True)
class PolicySpec:
    """What `name:option=value,...` says.

    name     a registered one, or FILE.py:Class
    options  those given, as the policy's own types
    kv       KV ledger, where the text names one; None: the policy's default
    label    the text, for a policy from a file with its class's name: tells runs of one policy with
             different options apart; `name` where there is no text
    own      a class without a registered name, as from a notebook or a file; None: the one that
             `name` stands for
    text     as it was given; `label` where there is none
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kv: str | None = None
    label: str = ""
    own: type[Policy] | None = None
    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)
        object.__setattr__(self, "text", self.text or self.label)

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

    def build(self, limits: EngineLimits, estimator: BatchEstimator | None = None) -> Policy:
        """A new policy with these options. Raises PolicyError where it cannot serve `limits`."""
        return self.policy(limits, self.policy.Options(**self.options), estimator)


def parse_policy(text: str) -> PolicySpec:
    """Read `bros`, `bros:chunk=2048,kv=paged`, or `FILE.py:Class:option=value`, whose path is
    relative to the working directory; the value `none` is None. Raises RegistryError."""
    text = text.strip()
    name, colon, rest = (part.strip() for part in text.partition(":"))
    in_file = None if name in _POLICIES or name in policy_names() else _WITH_OPTIONS.fullmatch(text)
    if in_file:
        name, colon, rest = in_file["name"], in_file["colon"], in_file["rest"]
    policy = policy_class(name)
    given: dict[str, str | None] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not option or not value:
            raise RegistryError(
                f"policy {name!r}: expected option=value, not {part.strip()!r} (in {text!r})"
            )
        if option in given:
            raise RegistryError(f"policy {name!r}: option {option!r} is given twice")
        given[option] = None if value.lower() == "none" else value
    kv = given.pop("kv", None)
    if kv is not None:
        ledger_class(kv)
    options = _validated(name, policy.Options, given)
    if not in_file:
        return PolicySpec(name, options, kv, text)
    return PolicySpec(name, options, kv, policy.name + text[len(name) :], policy, text)


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
        where = str(first["loc"][0]) if first["loc"] else "options"
        raise RegistryError(
            f"policy {name!r}, option {where}={first['input']}: {_wrong(model, where, first)}"
        ) from None
    found = options.model_dump(exclude_unset=True)
    for option, value in found.items():
        if isinstance(value, int) and value > _LARGEST:
            raise RegistryError(
                f"policy {name!r}, option {option}={value}: should be less than or equal to "
                f"{_LARGEST:.0e}"
            )
    return found


def _wrong(model: type[Options], option: str, error: ErrorDetails) -> str:
    """What is wrong with an option's value; of a number out of range, the whole range."""
    said, kind = _plain(error["msg"]), error["type"]
    if kind != "finite_number" and not kind.startswith(("greater_than", "less_than")):
        return said
    bounds = [
        f"{words} {getattr(bound, name):.15g}"
        for name, words in (
            ("ge", "at least"),
            ("gt", "more than"),
            ("le", "at most"),
            ("lt", "less than"),
        )
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
    _check_class(f"{where}: {point.value}", found, base)
    if getattr(found, "name", None) != point.name:
        given = getattr(found, "name", None)
        raise RegistryError(f"{where}: {point.value} says name = {given!r}; call both the same")
    return found


def _check_class(where: str, found: Any, base: type) -> None:
    fits = isinstance(found, type) and issubclass(found, base)
    if not fits:
        raise RegistryError(f"{where} is not a {base.__name__}")
    if lacks := sorted(found.__abstractmethods__):
        raise RegistryError(f"{where} lacks {', '.join(lacks)}")


# -- policies from files ---------------------------------------------------------------------------
def _in_file(file: str, wanted: str) -> type[Policy]:
    module = _module(file)
    if not hasattr(module, wanted):
        known = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, Policy)
            and value.__module__ == module.__name__
        ]
        lacks = f"has no {wanted!r}{_hint(wanted, known)}" if wanted else "needs a class"
        there = f"write {file}:{' or '.join(known)}" if known else "it has no subclass of Policy"
        raise RegistryError(f"policy file {file} {lacks}; {there}")
    found, where = getattr(module, wanted), f"policy file {file}: {wanted}"
    _check_class(where, found, Policy)
    name = getattr(found, "name", None)
    if not (isinstance(name, str) and name):
        raise RegistryError(f"{where} lacks a name; give it one, as name = {wanted.lower()!r}")
    if name in policy_names():
        raise RegistryError(f"{where} says name = {name!r}, which another policy has; choose one")
    return found


def _module(file: str) -> ModuleType:
    """What is in `file`, run once in this process as long as it stays as it is."""
    path = Path(file).expanduser().absolute()
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise RegistryError(f"policy file {file}: there is no such file; check the path") from None
    except OSError as error:
        raise RegistryError(f"policy file {file}: cannot be read ({error.strerror})") from None
    digest = sha256(source).hexdigest()
    name = f"{path.stem}_{sha256(f'{path} {digest}'.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(__file__=str(path), __sha256__=digest)
        try:
            exec(compile(source, path, "exec"), vars(module))
        except (Exception, SystemExit) as error:  # whatever the file's own code does
            del sys.modules[name]
            raise RegistryError(f"policy file {file}{_said(error, str(path))}") from error
    return sys.modules[name]


def _said(error: BaseException, path: str) -> str:
    """`, line 3: NameError: name 'x' is not defined`; the last line of the file that led there."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename == path:
        lines, message = [error.lineno], error.msg
    line = f", line {lines[-1]}" if lines else ""
    return " ".join(f"{line}: {type(error).__name__}: {message}".split())


def file_sha256(policy: type[Policy]) -> str | None:
    """Of the file whose class it is, as it was when it was read; None for one from a package."""
    return getattr(sys.modules.get(policy.__module__), "__sha256__", None)
