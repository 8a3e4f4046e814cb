"""What `vllm serve --additional-config '{...}'` tells our scheduler, and what is built from it:
policy, ledger, core.

Nothing here needs vLLM: what the engine is like comes in as EngineFacts.
"""

import logging
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinserve.backends.live.serving.applications import IDLE_S, RequestRules
from twinserve.backends.live.serving.clients import Clients, read_clients
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.base import EngineLimits, Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import PolicySpec, ledger_class, parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.profiles.profile import ProfileError
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.setup.config import SettingsError, SimulationConfig

_log = logging.getLogger(__name__)
_WHERE = "--additional-config"
# Keys that vLLM itself puts there, for options of its own, and those of an emulated GPU.
_OF_OTHERS = {
    "gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend", "emulated", "stamps_path",
}  # fmt: skip


class ServingOptions(BaseModel):
    """Keys of --additional-config. Sizes left out are the engine's.

    policy      as on the command line: bros, bros:chunk=512,kv=paged, vllm
    kv          KV ledger; see `served_ledger` for the default
    num_blocks  KV blocks that the policy has; see `ledger_blocks` for the default
    host_blocks  blocks of host memory for swapped KV; needs the KV connector (TwinserveConnector)
    prefix_caching  instead of what the policy's system does
    profile     shipped profile, MODEL@GPU[:tpN] or file: what an estimating policy believes a step
                takes
    estimator   as --estimator of the simulator
    max_num_batched_tokens  new tokens a step that the policy plans with
    slo_ttft_s, slo_tpot_s  seconds; objectives of real-time requests that bring none
    clients     file that names the clients and says which of their claims are believed, or
                `trusted`: all clients, everything
    app_idle_s  seconds after which an application without requests has ended
    strict      stop the server at the first step that differs from its plan
    stats_path  JSON file with counts and decision times, rewritten while the server runs
    log_every   steps between two log lines
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: str
    kv: str | None = None
    num_blocks: int | None = Field(None, ge=1)
    host_blocks: int | None = Field(None, ge=0)
    prefix_caching: bool | None = None
    profile: str | None = None
    estimator: str = "paper"
    max_num_batched_tokens: int | None = Field(None, ge=1)
    slo_ttft_s: float | None = Field(None, gt=0)
    slo_tpot_s: float | None = Field(None, gt=0)
    clients: str | None = None
    app_idle_s: float = Field(IDLE_S, gt=0)
    strict: bool = False
    stats_path: Path | None = None
    log_every: int = Field(1000, ge=1)


@dataclass(frozen=True)
class EngineFacts:
    """The engine that executes the plans. num_blocks: KV blocks of its pool. host_blocks: room for
    swapped KV, 0 without a connector. max_step_tokens: new tokens that it can compute in one step.
    kv_bytes_per_token: over all ranks."""

    num_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    kv_bytes_per_token: int
    prefix_caching: bool
    host_blocks: int = 0


def read_options(given: dict[str, Any]) -> ServingOptions:
    """Raises LiveEngineError with one line for unknown keys and wrong values."""
    given = {key: value for key, value in given.items() if key not in _OF_OTHERS}
    for key in given:
        if key not in ServingOptions.model_fields:
            close = get_close_matches(key, ServingOptions.model_fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise LiveEngineError(
                f"{_WHERE}: no key {key!r}{hint} (there are "
                f"{', '.join(ServingOptions.model_fields)})"
            )
    if "policy" not in given:
        raise LiveEngineError(f'{_WHERE}: name a policy, e.g. \'{{"policy": "bros"}}\'')
    try:
        options = ServingOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise LiveEngineError(f"{_WHERE}: {first['loc'][0]}={first['input']!r}: {said}") from None
    if options.stats_path is not None and not options.stats_path.absolute().parent.is_dir():
        raise LiveEngineError(
            f"{_WHERE}: stats_path={str(options.stats_path)!r}: there is no such folder; make it "
            "first"
        )
    return options


def build_core(
    options: ServingOptions, facts: EngineFacts, asynchronous: bool = False
) -> EngineCore:
    """Request table, policy and ledger as `options` say. Raises LiveEngineError with one line."""
    try:
        spec = parse_policy(options.policy)
        if options.kv is not None and spec.kv is not None and options.kv != spec.kv:
            raise SettingsError(
                f"kv={options.kv!r} and kv={spec.kv} in the policy; give one of them"
            )
        ledger = _ledger_maker(options, facts, spec)
        limits = EngineLimits(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=_batched_tokens(options, facts),
            max_model_len=facts.max_model_len,
            kv_bytes_per_token=facts.kv_bytes_per_token,
        )
        policy = spec.build(limits, _estimator(options, spec, facts, asynchronous))
        # of a policy that computes whole prompts only
        longest, setting = policy.traits.prompt_limit or (facts.max_model_len, "")
        if longest < facts.max_model_len:
            raise SettingsError(
                f"policy {spec.label}: a step has {longest} tokens, a request up to "
                f"{facts.max_model_len}; set {setting} higher or --max-model-len lower"
            )
        if asynchronous and not policy.asynchronous:
            raise SettingsError(
                f"policy {spec.label} plans with the last step's tokens; use PolicyScheduler, "
                "--no-async-scheduling"
            )
        if not policy.withdraws():
            raise SettingsError(
                f"policy {spec.label} has no on_withdraw, and clients of a server may leave at "
                "any time; add that method to it"
            )
        if policy.predictor is not None and policy.predictor.needs_truth:
            raise SettingsError(
                f"policy {spec.label}: a server does not know what requests will need; "
                "change predictor"
            )
        for said in _unsaid(spec):
            _log.warning("policy %s: %s", spec.label, said)
        policy.prepare(RequestRules.of(type(policy), policy.options).classes or ())
        requests = RequestTable()
        return EngineCore(requests, policy, ledger(requests), asynchronous)
    except (RegistryError, SettingsError, ProfileError) as error:
        raise LiveEngineError(f"{_WHERE}: {error}") from None
    except ValueError as error:  # a policy that cannot serve these limits
        raise LiveEngineError(f"{_WHERE}: {error}") from None


def clients_of(options: ServingOptions, policy: Policy) -> Clients:
    """Return the server's clients. Raises LiveEngineError, also if the policy cannot serve one."""
    try:
        clients = read_clients(options.clients, options.slo_ttft_s, options.slo_tpot_s)
    except SettingsError as error:
        raise LiveEngineError(f"{_WHERE}: {error}") from None
    best_effort = policy.options.serves_best_effort
    for client in clients.all:
        if client.beliefs.service_class == "be" and not best_effort:
            raise LiveEngineError(
                f"{_WHERE}: clients {options.clients}: {client.name!r} is best-effort, which "
                f"policy {options.policy} does not serve; write class: rt, or change the policy"
            )
    believed = any(one.beliefs.applications for one in clients.all)
    if policy.traits.orders_applications and not believed:
        _log.warning(
            "policy %s: no client may name applications, so requests count one by one, or for "
            'their client; list trusted clients ("clients", docs/serving.md)',
            options.policy,
        )
    return clients


def _unsaid(spec: PolicySpec) -> list[str]:
    """What the user should know about what its predictor is on a server."""
    untrained = "its predictor of output lengths learns from requests that end, none before them"
    return [*filter(None, [spec.given.notice]), *([untrained] if spec.given.wants_sample else [])]


def served_ledger(options: ServingOptions, spec: PolicySpec) -> str:
    """Return the name of the KV ledger: the given one, or else the policy's own. If that one has a
    layout that vLLM's pool lacks (`bidirectional` puts two requests into one block), `paged`. The
    other would have half of the pool and gain nothing."""
    asked = options.kv or spec.kv
    if asked is not None:
        return asked
    own = spec.kv_name
    return own if ledger_class(own).whole_blocks(1, 0) == 1 else "paged"


def ledger_blocks(
    options: ServingOptions,
    facts: EngineFacts,
    spec: PolicySpec,
    kind: type[KvLedger],
    host_blocks: int = 0,
    caching: bool = False,
) -> int:
    """KV blocks of the ledger, a `kind`, with so much host memory, and with cached prefixes or not.

    Policy vllm is vLLM's own, so its pool is the engine's to the block. Other policies take memory
    in another order, so vLLM's cache would not keep their prefixes. Some ledgers have a layout that
    vLLM lacks (two requests in one block, layers on the host). In both cases the engine's pool must
    never bind, so they get half of it, less a block a seat. All others get all of it.
    """
    if spec.name == "vllm":
        if options.num_blocks not in (None, facts.num_blocks):
            raise SettingsError(
                f"num_blocks={options.num_blocks}: policy vllm has the engine's own "
                f"{facts.num_blocks} blocks; "
                "leave it out, or set --num-gpu-blocks-override to one more than you want"
            )
        return facts.num_blocks
    alike = kind.whole_blocks(facts.num_blocks, host_blocks) == facts.num_blocks
    if alike and not caching:
        most, why = facts.num_blocks, "as the engine has"
    else:
        most = (facts.num_blocks - facts.max_num_seqs) // 2
        why = f"so that the engine's own {facts.num_blocks} never bind"
    if most < 1:
        raise SettingsError(
            f"{facts.num_blocks} KV blocks of the engine are too few for {facts.max_num_seqs} "
            "seats; "
            "lower --max-num-seqs"
        )
    if options.num_blocks is not None and options.num_blocks > most:
        raise SettingsError(f"num_blocks={options.num_blocks}: at most {most}, {why}")
    return options.num_blocks or most


def _ledger_maker(options: ServingOptions, facts: EngineFacts, spec: PolicySpec):
    name = served_ledger(options, spec)
    kind = ledger_class(name)
    host = options.host_blocks if options.host_blocks is not None else facts.host_blocks
    if host > facts.host_blocks:
        raise SettingsError(
            f"host_blocks={host}: the engine has room for {facts.host_blocks}; "
            "start it with the TwinserveConnector (--kv-transfer-config) and as many host_blocks"
        )
    wanted = options.prefix_caching
    caches = kind.caches_prefixes
    if wanted and not caches:
        raise SettingsError(f"prefix_caching: the {name} ledger has none; add kv=paged")
    if wanted and not spec.policy.uses_prefix_cache:
        raise SettingsError(f"prefix_caching: policy {spec.label} looks no prefixes up; drop it")
    if wanted and not facts.prefix_caching:
        raise SettingsError(
            "prefix_caching: the engine runs with --no-enable-prefix-caching; drop one of them"
        )
    caching = caches and facts.prefix_caching
    caching = caching and (spec.policy.prefix_caching if wanted is None else wanted)
    if spec.name == "vllm" and caches and caching != facts.prefix_caching:
        raise SettingsError(
            "prefix_caching: policy vllm has the engine's; use --enable-prefix-caching, or "
            "--no-enable-prefix-caching"
        )
    blocks = ledger_blocks(options, facts, spec, kind, host, caching)
    if blocks * facts.block_tokens < facts.max_model_len:
        raise SettingsError(
            f"the policy's {blocks} KV blocks of {facts.block_tokens} tokens do not hold one "
            "request of "
            f"--max-model-len {facts.max_model_len}; lower it, or give the engine more memory"
        )
    extra = {"prefix_caching": caching} if caches else {}

    def make(requests: RequestTable) -> KvLedger:
        return kind(requests, blocks, facts.block_tokens, host, **extra)

    return make


def _batched_tokens(options: ServingOptions, facts: EngineFacts) -> int:
    tokens = options.max_num_batched_tokens
    if tokens is not None and tokens > facts.max_step_tokens:
        raise SettingsError(
            f"max_num_batched_tokens={tokens}: the engine can do {facts.max_step_tokens} in a "
            "step; raise its "
            "--max-num-batched-tokens"
        )
    return tokens or facts.max_step_tokens


def _estimator(options: ServingOptions, spec: PolicySpec, facts: EngineFacts, asynchronous: bool):
    """Return an estimator fitted to the profile's steps on this engine. The host's part of a step
    depends on asynchronous planning, the sizes of CUDA graphs on the seats."""
    if not spec.uses_estimator:
        return None
    if options.profile is None:
        raise SettingsError(
            f'policy {spec.name} plans with step times; give them as "profile", e.g. '
            '"llama-3.1-8b@h100" '
            "or a file of `twinserve calibrate`"
        )
    # Only here: pandas and SimPy come along.
    from twinserve.sim.setup.hardware import resolve_hardware
    from twinserve.sim.setup.inputs import make_estimator

    try:
        config = SimulationConfig(
            profile=options.profile,
            estimator=options.estimator,
            async_scheduling=asynchronous,
            max_num_seqs=facts.max_num_seqs,
            num_blocks=facts.num_blocks,
            block_tokens=facts.block_tokens,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(
            f"{first['loc'][0]}={first['input']!r}: {first['msg'].removeprefix('Input ')}"
        ) from None
    return make_estimator(config, resolve_hardware(config), spec.policy)
