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
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from twinserve.policies.base import EngineLimits, Options, Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.names import (
    Names,
    RegistryError,
    check_class,
    hint,
    parse_options,
    validated,
)
from twinserve.policies.parts.estimators import BatchEstimator

_HERE = __name__.rpartition(".")[0]
_OWN = {
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
_OWN_LEDGERS = {
    "bidirectional": "kv.bidirectional.ledger:BidirectionalLedger",
    "checkpointed": "kv.paged.checkpointed:CheckpointedLedger",
    "layerwise": "kv.layerwise.ledger:LayerwiseLedger",
    "paged": "kv.paged.ledger:PagedLedger",
    "paged-rc": "kv.task_aware.ledger:CountedLedger",
    "task-aware": "kv.task_aware.ledger:TaskAwareLedger",
}
POLICIES = Names("policy", _HERE, _OWN, "twinserve.policies", Policy)
LEDGERS = Names("KV ledger", _HERE, _OWN_LEDGERS, "twinserve.kv", KvLedger)


# name -> option, value, and the class that decides in its place where the option has that value
_VARIANTS = {"bros": ("chunk", "fit", "bros.fit:BrosFitPolicy")}

# a file's name may have colons: it ends where `.py` does
_IN_FILE = re.compile(r"(?P<file>.+?\.py)(?::(?P<cls>[^:]*))?")
_WITH_OPTIONS = re.compile(rf"(?P<name>{_IN_FILE.pattern})(?P<colon>:(?P<rest>.*))?", re.DOTALL)


def policy_names() -> list[str]:
    """Every policy there is, sorted; nothing is imported."""
    return POLICIES.all()


def ledger_names() -> list[str]:
    """Every KV ledger there is, sorted; nothing is imported."""
    return LEDGERS.all()


def policy_class(name: str) -> type[Policy]:
    """The class behind a policy's name, or `FILE.py:Class`. Raises RegistryError."""
    if (given := _IN_FILE.fullmatch(name)) and name not in policy_names():
        return _in_file(given["file"], given["cls"] or "")
    return POLICIES.find(name)


def ledger_class(name: str) -> type[KvLedger]:
    """The class behind a KV ledger's name. Raises RegistryError."""
    return LEDGERS.find(name)


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
        return self.own or _variant(self.name, self.options) or policy_class(self.name)

    @property
    def uses_estimator(self) -> bool:
        """Whether the policy, with these options, decides with step times."""
        return self.policy.estimates(self.given)

    @property
    def given(self) -> Options:
        """The policy's options, with its defaults for what is not given."""
        return self.policy.Options(**self.options)

    @property
    def kv_name(self) -> str:
        """The ledger to use."""
        return self.kv or self.policy.default_kv

    def build(self, limits: EngineLimits, estimator: BatchEstimator | None = None) -> Policy:
        """A new policy with these options. Raises PolicyError where it cannot serve `limits`."""
        return self.policy(limits, self.given, estimator)


def parse_policy(text: str) -> PolicySpec:
    """Read `bros`, `bros:chunk=2048,kv=paged`, or `FILE.py:Class:option=value`, whose path is
    relative to the working directory; the value `none` is None. Raises RegistryError."""
    text = text.strip()
    name, colon, rest = (part.strip() for part in text.partition(":"))
    in_file = (
        None if name in POLICIES.own or name in policy_names() else _WITH_OPTIONS.fullmatch(text)
    )
    if in_file:
        name, colon, rest = in_file["name"], in_file["colon"], in_file["rest"]
    policy = policy_class(name)
    what = f"policy {name!r}"
    given = parse_options(what, rest, text) if colon else {}
    kv = given.pop("kv", None)
    if kv is not None:
        ledger_class(kv)
    options = validated(what, (_variant(name, given) or policy).Options, given, ("kv",))
    if not in_file:
        return PolicySpec(name, options, kv, text)
    return PolicySpec(name, options, kv, policy.name + text[len(name) :], policy, text)


def _variant(name: str, given: Mapping[str, Any]) -> type[Policy] | None:
    """The class of its own that a policy has for one of the options given."""
    option, value, where = _VARIANTS.get(name, (None, None, ""))
    if option is None or given.get(option) != value:
        return None
    module, _, attribute = where.partition(":")
    return getattr(import_module(f"{_HERE}.{module}"), attribute)


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
        lacks = f"has no {wanted!r}{hint(wanted, known)}" if wanted else "needs a class"
        there = f"write {file}:{' or '.join(known)}" if known else "it has no subclass of Policy"
        raise RegistryError(f"policy file {file} {lacks}; {there}")
    found, where = getattr(module, wanted), f"policy file {file}: {wanted}"
    check_class(where, found, Policy)
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
