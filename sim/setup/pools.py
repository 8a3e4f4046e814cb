"""The pools of a fleet file with all that their replicas need: settings, hardware, policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from twinserve.policies.files import file_sha256
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import PolicySpec, ledger_class, parse_policy
from twinserve.profiles.specs import ProfileError
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import READ, Hardware, Sources, resolve_hardware
from twinserve.traces.workload import Workload

if TYPE_CHECKING:
    from twinserve.sim.setup.fleet_file import FleetFile, PortSettings


@dataclass(frozen=True)
class Pool:
    """config  the settings of the run, with the pool's own in their place
    spec    the pool's policy; None: the one that is being run
    where   as errors have it: file and place in it
    """

    name: str
    role: str
    config: SimulationConfig
    hardware: Hardware
    spec: PolicySpec | None
    where: str

    @property
    def replicas(self) -> int:
        return self.config.replicas

    def policy(self, spec: PolicySpec) -> PolicySpec:
        """Of its replicas, where `spec` is being run."""
        return self.spec or spec

    def described(self, spec: PolicySpec) -> dict[str, Any]:
        """For run.json."""
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
        }


def resolve_pools(
    file: FleetFile, config: SimulationConfig, sources: Sources = READ
) -> tuple[Pool, ...]:
    """Raises SettingsError with file and pool: settings that contradict each other, names that do
    not exist, hardware that cannot hold its model."""
    pools = []
    for i, settings in enumerate(file.settings.pools):
        name = file.settings.name_of(i)
        where = f"{file.where}: pools[{i}] ({name})"
        try:
            spec = None if settings.policy is None else parse_policy(settings.policy)
            own = {"fleet": None, "replicas": settings.replicas, **settings.flags}
            if spec is not None:
                own["policy"] = (spec.text,)
            mine = SimulationConfig(**{**config.model_dump(), **own})
            if mine.kv is not None:
                ledger_class(mine.kv)
            hardware = _with_ports(resolve_hardware(mine, sources), settings.ports)
        except (SettingsError, RegistryError, ProfileError) as error:
            raise SettingsError(f"{where}: {error}") from None
        pools.append(Pool(name, settings.role, mine, hardware, spec, where))
    return tuple(pools)


def _with_ports(hardware: Hardware, ports: PortSettings | None) -> Hardware:
    if ports is None:
        return hardware
    changed = {"pcie_bytes_per_s": ports.pcie_gb_per_s * 1e9}
    return replace(hardware, profile=hardware.profile.model_copy(update=changed))


def check_longest(pools: tuple[Pool, ...], workload: Workload) -> None:
    """Raises SettingsError where a request is longer than one of a pool's replicas can hold."""
    for pool in pools:
        most = pool.hardware.limits.max_model_len
        if workload.longest > most:
            held = min(pool.hardware.kv_tokens, most)
            raise SettingsError(
                f"{pool.where}: a replica holds requests of {held:,} tokens at most, and the "
                f"longest has {workload.longest:,}; give the pool more memory, or cut requests "
                f"with --cap-length {most}"
            )
