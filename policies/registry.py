"""Names of policies and KV ledgers. Modules are imported when they are asked for, not before.

Other packages add policies through the entry point group `twinserve.policies` and ledgers through
`twinserve.kv`; an entry point names a class. The names below cannot be taken. A policy without a
package is named by its file, `FILE.py:Class`. Such a file stands alone: its neighbours cannot be
imported, so its content identifies it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from twinserve.own_code import IN_FILE, WITH_OPTIONS, Names, class_in_file
from twinserve.policies.base import EngineLimits, Options, Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.names import parse_options, validated
from twinserve.policies.parts.estimators import BatchEstimator

Asked = Literal["drafts", "remote", "tier"]
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


# what an engine asks, name of a policy -> the class that decides in its place there
_FOR_ENGINES: dict[Asked, dict[str, str]] = {
    "drafts": {"bros": "bros.drafts:BrosDrafts", "vllm": "baselines.vllm_drafts:VllmDrafts"},
    "remote": {"vllm": "baselines.vllm_offloading:VllmDecode"},
    "tier": {"vllm": "baselines.vllm_offloading:VllmOffloading"},
}


def policy_names() -> list[str]:
    """Every policy there is, sorted; nothing is imported."""
    return POLICIES.all()


def ledger_names() -> list[str]:
    """Every KV ledger there is, sorted; nothing is imported."""
    return LEDGERS.all()


def policy_class(name: str) -> type[Policy]:
    """The class behind a policy's name, or `FILE.py:Class`. Raises RegistryError."""
    if (given := IN_FILE.fullmatch(name)) and name not in policy_names():
        return class_in_file(POLICIES, given["file"], given["cls"] or "")
    return POLICIES.find(name)


def ledger_class(name: str) -> type[KvLedger]:
    """The class behind a KV ledger's name. Raises RegistryError."""
    return LEDGERS.find(name)


def policy_for(asked: Asked, policy: type[Policy]) -> type[Policy] | None:
    """Return the class that decides for `policy` on an engine of a kind. "drafts": it speculates;
    "remote": others compute its prompts (`RequestTable.remote_tokens`, `StepPlan.fetched`); "tier":
    it offloads KV blocks to the host (policies/kv/offload). None: the policy does not run there."""
    where = _FOR_ENGINES[asked].get(policy.name)
    if where is not None and policy_class(policy.name) is policy:
        return _found(where)
    return policy if asked == "drafts" and not policy.traits.no_drafts else None


def options_of_release(policy: type[Policy], version: str) -> dict[str, Any]:
    """Options by which the policy decides as that version of vLLM did; most have none."""
    if policy is not policy_class("vllm"):
        return {}
    return {"release": _found("baselines.vllm:rules_of")(version)}


@dataclass(frozen=True)
class PolicySpec:
    """What `name:option=value,...` says.

    name     a registered one, or FILE.py:Class
    options  those given, as the policy's own types
    kv       KV ledger, if the text names one; None: the policy's default
    label    the text, for a policy from a file with its class's name: tells runs of one policy with
             different options apart; `name` without a text
    own      a class without a registered name, as from a notebook or a file; None: the one that
             `name` stands for
    text     as it was given; `label` without one
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
        """A new policy with these options. Raises PolicyError if it cannot serve `limits`."""
        return self.policy(limits, self.given, estimator)


def parse_policy(text: str) -> PolicySpec:
    """Read `bros`, `bros:chunk=2048,kv=paged`, or `FILE.py:Class:option=value`, whose path is
    relative to the working directory; the value `none` is None. Raises RegistryError."""
    text = text.strip()
    name, colon, rest = (part.strip() for part in text.partition(":"))
    in_file = (
        None if name in POLICIES.own or name in policy_names() else WITH_OPTIONS.fullmatch(text)
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
    return _found(where)


def _found(where: str) -> Any:
    module, _, attribute = where.partition(":")
    return getattr(import_module(f"{_HERE}.{module}"), attribute)
