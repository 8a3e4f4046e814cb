"""The pools of a fleet file, resolved: settings, hardware and policy of their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from twinserve.own_code import file_sha256
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import PolicySpec, ledger_class, parse_policy
from twinserve.profiles.specs import ProfileError
from twinserve.sim.engine.clock import Clock
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import READ, Hardware, Sources, resolve_hardware
from twinserve.traces.workload import Workload

if TYPE_CHECKING:
    from twinserve.sim.fleet.connector import Connector
    from twinserve.sim.fleet.disaggregated import Disaggregated
    from twinserve.sim.setup.fleet_file import FleetFile, PortSettings


NIC_GB_PER_S = 50.0  # 400 Gbit/s, of each GPU
DEFAULT_LATENCY_US = 10.0


@dataclass(frozen=True)
class Pool:
    """config  the settings of the run, overridden by the pool's own
    spec    the pool's policy; None: the policy of the run
    where   name for errors: file and place in it
    network  bytes/s of a replica's ports, and seconds of a transfer's latency; None: no network"""

    name: str
    role: str
    config: SimulationConfig
    hardware: Hardware
    spec: PolicySpec | None
    where: str
    network: tuple[float, float] | None = None

    @property
    def replicas(self) -> int:
        return self.config.replicas

    def policy(self, spec: PolicySpec) -> PolicySpec:
        """Return the pool's policy in a run of `spec`."""
        return self.spec or spec

    def described(self, spec: PolicySpec) -> dict[str, Any]:
        """Return the pool for run.json."""
        policy, hardware = self.policy(spec), self.hardware
        digest = file_sha256(self.spec.policy) if self.spec else None  # else the run's own has it
        return {
            "name": self.name,
            "replicas": self.replicas,
            "role": self.role,
            "policy": policy.text,
            **({"policy_file_sha256": digest} if digest else {}),
            "ledger": policy.kv or self.config.kv or policy.kv_name,
            "num_blocks": hardware.num_blocks,
            "block_tokens": hardware.block_tokens,
            "host_blocks": hardware.host_blocks,
            "limits": asdict(hardware.limits),
            "profile": hardware.profile.model_dump(mode="json"),
            **({} if self.config.speculate is None else {"speculate": self.config.speculate}),
            **({} if self.network is None else {"network": _described(self.network)}),
        }


def _described(network: tuple[float, float]) -> dict[str, float]:
    return {"bytes_per_s": network[0], "latency_s": network[1]}


def resolve_pools(
    file: FleetFile, config: SimulationConfig, sources: Sources = READ
) -> tuple[Pool, ...]:
    """Resolve all pools. Raises SettingsError with file and pool: contradictory settings, unknown
    names, or hardware that cannot hold its model."""
    pools = []
    for i, settings in enumerate(file.settings.pools):
        name = file.settings.name_of(i)
        where = f"{file.where}: pools[{i}] ({name})"
        try:
            spec = None if settings.policy is None else parse_policy(settings.policy)
            own = {"fleet": None, "replicas": settings.replicas, **settings.flags}
            if spec is not None:
                own["policy"] = (spec.text,)
            shared = config.model_dump()
            if "async_scheduling" not in config.model_fields_set:
                del shared["async_scheduling"]  # of the pool's own release
            mine = SimulationConfig(**shared | own)
            if mine.kv is not None:
                ledger_class(mine.kv)
            hardware = _with_ports(resolve_hardware(mine, sources), settings.ports)
        except (SettingsError, RegistryError, ProfileError) as error:
            raise SettingsError(f"{where}: {error}") from None
        network = _network(hardware, settings.ports) if file.settings.apart else None
        pools.append(Pool(name, settings.role, mine, hardware, spec, where, network))
    if file.settings.apart:
        _check_one_model(pools)
    return tuple(pools)


def _network(hardware: Hardware, ports: PortSettings | None) -> tuple[float, float]:
    rate = None if ports is None else ports.network_gb_per_s
    latency_us = DEFAULT_LATENCY_US if ports is None else ports.network_latency_us
    gb_per_s = NIC_GB_PER_S * hardware.profile.tp if rate is None else rate
    return gb_per_s * 1e9, latency_us * 1e-6


def _check_one_model(pools: Sequence[Pool]) -> None:
    """Raise SettingsError if pools cannot use each other's KV."""
    first = pools[0]
    for pool in pools[1:]:
        for what, mine, other in (
            ("model", pool.hardware.profile.llm.name, first.hardware.profile.llm.name),
            ("block_tokens", pool.hardware.block_tokens, first.hardware.block_tokens),
            (
                "KV bytes a token",
                pool.hardware.limits.kv_bytes_per_token,
                first.hardware.limits.kv_bytes_per_token,
            ),
        ):
            if mine != other:
                raise SettingsError(
                    f"{pool.where}: {what}: {mine}, and {other} in {first.name}; KV that is handed "
                    "over must be of one kind; give both pools the same"
                )


def _with_ports(hardware: Hardware, ports: PortSettings | None) -> Hardware:
    if ports is None or ports.pcie_gb_per_s is None:
        return hardware
    changed = {"pcie_bytes_per_s": ports.pcie_gb_per_s * 1e9}
    return replace(hardware, profile=hardware.profile.model_copy(update=changed))


@dataclass(frozen=True)
class HandOver:
    """router  of prefill replicas, with options"""

    connector: Connector
    router: str

    def fleet(self, clock: Clock, router: Router, migrates: bool) -> Disaggregated:
        """Return a new fleet without replicas. router: of decode replicas."""
        from twinserve.sim.fleet.disaggregated import Disaggregated

        prefill = parse_router(self.router).build()
        return Disaggregated(clock, router, prefill, self.connector, migrates)


def resolve_hand_over(file: FleetFile, config: SimulationConfig) -> HandOver | None:
    """Return how KV is handed over; None: all serve whole requests. Raises SettingsError."""
    settings = file.settings
    if not settings.apart:
        return None
    from twinserve.sim.fleet.connector import Connector, Push, parse_rule

    if config.load is not None:
        raise SettingsError(
            f"{file.where}: --load {config.load:g}: the capacity of separate prefill and decode "
            "pools is not known in advance; give --rate or --rate-scale"
        )
    router, given = settings.prefill_router or config.router, settings.connector
    try:
        where = "prefill_router"
        parse_router(router)
        where = "local_prefill"
        rule = parse_rule(settings.local_prefill or "none")
    except RegistryError as error:
        raise SettingsError(f"{file.where}: {where}: {error}") from None
    if given is None:
        return HandOver(Connector(rule=rule), router)
    push = Push(given.push_poll_ms * 1e-3, given.push_timeout_s)
    connector = Connector(
        given.lease_s,
        given.load_failures == "recompute",
        rule,
        push if given.transfer == "push" else None,
    )
    return HandOver(connector, router)


def check_longest(pools: tuple[Pool, ...], workload: Workload) -> None:
    """Raise SettingsError if a request is longer than some pool's replica can hold."""
    for pool in pools:
        most = pool.hardware.limits.max_model_len
        longest = workload.longest
        if pool.role == Role.PREFILL:  # outputs are computed elsewhere
            longest = int(workload.prompt_tokens.max(initial=0)) + 1
        if longest > most:
            held = min(pool.hardware.kv_tokens, most)
            raise SettingsError(
                f"{pool.where}: a replica holds requests of {held:,} tokens at most, and the "
                f"longest has {longest:,}; give the pool more memory, or cut requests "
                f"with --cap-length {most}"
            )
