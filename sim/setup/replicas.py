"""Build a replica from a description: policy, ledger, backend, engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from twinserve.backends.base import Backend
from twinserve.backends.links import PcieLink, allreduces_of, evenly
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.base import Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.registry import PolicySpec, ledger_class, options_of_release, policy_for
from twinserve.policies.requests import RequestTable
from twinserve.profiles.profile import Profile
from twinserve.sim.engine.clock import Clock
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.engine.loop import Engine
from twinserve.sim.fleet.prefix_index import shared_contents
from twinserve.sim.fleet.replica import Network, Replica, Role
from twinserve.sim.results.recorder import StepRecorder
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.offloading import HostStores, check_offloading
from twinserve.sim.setup.pools import Pool

if TYPE_CHECKING:
    from twinserve.backends.lockstep import RankGroup
    from twinserve.sim.setup.speculation import Speculation

# What few runs have (drafts, stages, ranks that share experts, host tiers) is imported where it is
# made: half a second of a short run went into imports.


@dataclass(frozen=True)
class Description:
    """The parts of a replica.

    spec    policy, its options and its ledger
    config  its settings, if they differ from the run's
    pool    of a fleet file; "": none
    network  bytes/s of its ports, and seconds of a transfer's latency; None: no network
    """

    hardware: Hardware
    spec: PolicySpec
    role: Role = Role.SERVE
    config: SimulationConfig | None = None
    pool: str = ""
    network: tuple[float, float] | None = None

    def inputs(self, inputs: Inputs) -> Inputs:
        """Return the inputs of a run for a replica of this kind."""
        config = self.config or inputs.config
        if self.hardware is inputs.hardware and config is inputs.config:
            return inputs
        return replace(inputs, hardware=self.hardware, config=config)


def kinds(inputs: Inputs, spec: PolicySpec) -> list[tuple[Description, int]]:
    """Return the descriptions of the replicas in a run of `spec`, with the number of each."""
    if not inputs.pools:
        return [(Description(inputs.hardware, spec), inputs.config.replicas)]
    return [(_of_pool(pool, spec), pool.replicas) for pool in inputs.pools]


_ROLES = {role.value: role for role in (Role.PREFILL, Role.DECODE)}


def _of_pool(pool: Pool, spec: PolicySpec) -> Description:
    role = _ROLES.get(pool.role, Role.SERVE)
    return Description(pool.hardware, pool.policy(spec), role, pool.config, pool.name, pool.network)


# Of a replica that is being composed: the run's inputs with its hardware, its policy's
# specification, the policy, and the ledger, which has the table of its requests.
BackendOf = Callable[[Inputs, PolicySpec, Policy, KvLedger], Backend]


def compose(
    inputs: Inputs,
    description: Description,
    index: int,
    clock: Clock,
    *,
    backend: BackendOf,
    decisions: bool = False,
    timed: bool = False,
    stores: HostStores | None = None,
    engine_of: type[Engine] = Engine,
) -> Replica:
    """Build replica number `index` of a fleet. inputs: for this `description`. decisions: keep the
    plans. timed: also keep the time of each gap between tokens. stores: host tiers of the fleet.
    engine_of: engine class without pipeline stages.

    Raises PolicyError or SettingsError if the parts do not fit together.
    """
    config, spec = inputs.config, description.spec
    spec = replace(spec, kv=spec.kv or config.kv)
    requests = RequestTable()
    policy = make_policy(inputs, spec, description.role)
    ledger = make_ledger(inputs, spec, policy, requests)
    profile = description.hardware.profile
    executes = backend(inputs, spec, policy, ledger)
    core: EngineCore
    if profile.pp > 1:
        from twinserve.sim.engine.pipeline import PipelinedCore, PipelinedEngine

        _check_stages(profile, description.role, executes, decisions)
        core = PipelinedCore(requests, policy, ledger, profile.pp, config.async_scheduling)
        engine_of = PipelinedEngine
    else:
        core = make_core(description.hardware, policy, ledger, config.async_scheduling)
    engine = engine_of(
        clock,
        core,
        executes,
        make_recorder(executes, index, timed, decisions, description.hardware.speculation),
        decision_overhead=_decision_overhead(config.decision_time, profile),
    )
    if config.kv_offloading_size is not None:
        if decisions:
            raise SettingsError(
                "--decisions: transfers to and from a host tier cannot be replayed; drop it, or "
                "--kv-offloading-size"
            )
        (stores or HostStores()).put_behind(engine, ledger, config, description.hardware, index)
    made_of = {"policy": spec.label, "profile": profile.name}
    if description.pool:
        made_of["pool"] = description.pool
    network = None if description.network is None else Network.of(index, *description.network)
    model = description.hardware.model
    return Replica(engine, description.role, made_of, model, network=network)


def _decision_overhead(decision_time: str, profile: Profile) -> float | None:
    """Return seconds before each step; None: the time of our own planning. Raises SettingsError if
    the profile lacks these times."""
    if decision_time != "profile":
        return 0.0 if decision_time == "none" else None
    if not profile.loop_s:
        raise SettingsError(
            f"--decision-time profile: {profile.name} lacks the times around an engine; choose a "
            "profile that twinserve calibrate wrote, or --decision-time none"
        )
    return profile.loop_s


def make_core(
    hardware: Hardware, policy: Policy, ledger: KvLedger, asynchronous: bool
) -> EngineCore:
    if hardware.speculation is None:
        return EngineCore(ledger.table, policy, ledger, asynchronous)
    from twinserve.sim.engine.drafting import DraftingCore

    return DraftingCore(ledger.table, policy, ledger, hardware.speculation.drafting, asynchronous)


def make_recorder(
    backend: Backend, index: int, timed: bool, decisions: bool, speculation: Speculation | None
) -> StepRecorder:
    if speculation is None and not decisions:
        return StepRecorder(index, timed)
    from twinserve.sim.results.decisions import DecisionRecorder
    from twinserve.sim.results.drafts import DraftDecisionRecorder, DraftRecorder

    if speculation is None:
        return DecisionRecorder(index, timed)
    if decisions and backend.draws_drafts:
        raise SettingsError(
            "--decisions: --speculate draws at random which drafts are right, and no engine would "
            "find the same; drop one of them, or record drafts with replay --mode free --decisions"
        )
    return (DraftDecisionRecorder if decisions else DraftRecorder)(index, timed)


def _check_stages(profile: Profile, role: Role, backend: Backend, decisions: bool) -> None:
    """Raise SettingsError for settings that exclude pipeline stages."""
    from twinserve.backends.pipeline import PipelineBackend

    if not isinstance(backend, PipelineBackend):
        raise SettingsError(f"{profile.name}: no live engine has its pipeline stages; drop :ppN")
    if role is not Role.SERVE:
        raise SettingsError(
            f"{profile.name}: replicas of the role {role.value} with pipeline stages are not "
            "simulated; drop :ppN, or the role"
        )
    if decisions:
        raise SettingsError(
            f"--decisions: {profile.name} plans a batch while others are under way, so that the "
            "log cannot be replayed; drop it, or :ppN"
        )


def simulated_backend(
    inputs: Inputs, spec: PolicySpec, policy: Policy, ledger: KvLedger
) -> SimulatedBackend:
    """Return the simulated hardware of `inputs`."""
    hardware, config = inputs.hardware, inputs.config
    made = partial(SimulatedBackend, ledger.table, hardware.model)
    if (speculation := hardware.speculation) is not None:
        from twinserve.backends.speculating import SpeculatingBackend
        from twinserve.profiles.forms.speculative import SpeculativeModel

        drafter = speculation.drafter(hardware.profile, hardware.limits)
        made = partial(
            SpeculatingBackend,
            speculation.acceptance_of(config.seed),
            speculation.drafting,
            ledger.table,
            SpeculativeModel(hardware.model, drafter),
        )
    if config.shared_prefix:
        from twinserve.backends.shared_prefix import SharedPrefixBackend
        from twinserve.profiles.forms.shared_prefix import SharedPrefixModel

        made = partial(SharedPrefixBackend, ledger, SharedPrefixModel(hardware.model))
    if hardware.profile.pp > 1:
        from twinserve.backends.pipeline import PipelineBackend

        made = partial(PipelineBackend, ledger.table, hardware.model)
    if hardware.profile.dp > 1:
        from twinserve.backends.lockstep import LockstepBackend, SharedExperts

        made = partial(LockstepBackend, ledger.table, SharedExperts(hardware.model))
    return made(
        PcieLink(hardware.profile.pcie_bytes_per_s, sharing=policy.traits.link_sharing or evenly),
        hardware.limits,
        layers=hardware.profile.llm.layers,
        fast=not config.exact and hardware.profile.dp == 1,
        allreduces=allreduces_of(hardware.profile.gpu, hardware.model)
        if config.pcie_contention and hardware.profile.pp == 1  # their policies move no KV
        else None,
        layered=ledger_class(spec.kv_name).knows_layers,
        cold_start_s=config.cold_start,
    )


class SimulatedBackends:
    """Make the backends of one simulation. Successive data-parallel ranks on equal hardware form a
    group that steps together, of the size in their profile."""

    def __init__(self) -> None:
        self._groups: dict[tuple, RankGroup] = {}  # the latest one of each kind of hardware

    def __call__(
        self, inputs: Inputs, spec: PolicySpec, policy: Policy, ledger: KvLedger
    ) -> SimulatedBackend:
        backend = simulated_backend(inputs, spec, policy, ledger)
        if inputs.hardware.profile.dp == 1:
            return backend
        from twinserve.backends.lockstep import LockstepBackend, RankGroup

        if isinstance(backend, LockstepBackend):
            profile, kind = inputs.hardware.profile, _kind(inputs.hardware)
            group = self._groups.get(kind)
            if group is None or len(group.steps) == profile.dp:
                group = self._groups[kind] = RankGroup(profile.name)
            backend.join(group)
        return backend


def _kind(hardware: Hardware) -> tuple:
    """Return a key that is equal for equal hardware, whichever resolver made it."""
    sizes = hardware.num_blocks, hardware.host_blocks, hardware.block_tokens
    return hardware.profile.model_dump_json(), hardware.limits, *sizes


def make_ledger(
    inputs: Inputs, spec: PolicySpec, policy: Policy, requests: RequestTable
) -> KvLedger:
    """Return the ledger of `spec` with the hardware's memory. Raises SettingsError if the ledger
    lacks what the settings ask for."""
    config, hardware = inputs.config, inputs.hardware
    kv = spec.kv_name
    kind = ledger_class(kv)
    if hardware.speculation is not None:
        from twinserve.policies.kv.paged.drafted import DraftedLedger

        kind = DraftedLedger
    if config.kv_offloading_size is not None:
        from twinserve.policies.kv.offload.ledger import TieredLedger

        kind = TieredLedger
    wanted = policy.prefix_caching if config.prefix_caching is None else config.prefix_caching
    caching = wanted and policy.uses_prefix_cache
    options = {"layers": hardware.profile.llm.layers} if kind.knows_layers else {}
    if kind.caches_prefixes:
        options |= {
            "prefix_caching": caching,
            "shared_contents": shared_contents(inputs.workload, hardware.block_tokens)
            if caching
            else 0,
        }
    elif config.prefix_caching and caching:
        raise SettingsError(
            f"--prefix-caching: the {kv} ledger of policy {spec.label} has none; add kv=paged to it"
        )
    ledger = kind(
        requests, hardware.num_blocks, hardware.block_tokens, hardware.host_blocks, **options
    )
    if hardware.speculation is not None and isinstance(ledger, DraftedLedger):
        ledger.look_ahead(hardware.speculation.drafting, hardware.limits.max_model_len)
    return ledger


def _for_decode(spec: PolicySpec) -> type[Policy]:
    kind = policy_for("remote", spec.policy)
    if kind is None:
        raise SettingsError(
            f"policy {spec.label} has no decode side: it cannot wait for KV "
            "that other replicas compute; use vllm in pools with the role decode"
        )
    return kind


def _of_release(spec: PolicySpec, version: str | None) -> PolicySpec:
    """Return `spec` with that vLLM version's rules, if the policy has some and no option sets
    them."""
    ruled = {} if version is None else options_of_release(spec.policy, version)
    return replace(spec, options=ruled | spec.options) if ruled else spec


def make_policy(inputs: Inputs, spec: PolicySpec, role: Role = Role.SERVE) -> Policy:
    """Return a new policy for the requests of `inputs`, on a replica of this role. Raises
    PolicyError or SettingsError if the policy cannot serve them."""
    hardware, longest = inputs.hardware, inputs.workload.longest
    spec = _of_release(spec, inputs.config.engine_version)
    if role is Role.DECODE and inputs.config.kv_offloading_size is None:
        spec = replace(spec, own=_for_decode(spec))
    if inputs.config.kv_offloading_size is not None:
        check_offloading(spec, hardware, role is Role.SERVE)
        spec = replace(spec, own=policy_for("tier", spec.policy))
    if hardware.speculation is not None:
        spec = replace(spec, own=policy_for("drafts", spec.policy))
    policy = spec.build(
        hardware.limits, inputs.estimator_for(spec.policy) if spec.uses_estimator else None
    )
    budget, setting = policy.traits.prompt_limit or (longest, "")
    if budget < longest:
        raise SettingsError(
            f"policy {spec.label} computes a prompt in one step of at most {budget} tokens, after "
            f"a preemption with its output, and the longest request has {longest}; set {setting} "
            f"to {longest} or more, or cut requests with --cap-length {budget}"
        )
    if policy.predictor is not None and policy.predictor.needs_truth:
        from twinserve.traces.apps.truth import TrueDemand

        policy.predictor.truth = TrueDemand(inputs.workload)
    if inputs.earlier is not None and policy.predictor is not None and spec.given.wants_sample:
        policy.predictor.learn(inputs.earlier.prompt_tokens, inputs.earlier.output_tokens)
    policy.prepare({info.kind for info in inputs.workload.applications.values()})
    return policy
