"""KV offloaded to the host (`--kv-offloading-size`): settings and refused combinations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinserve.backends.links import HostTransfers
from twinserve.backends.simulated import SimulatedBackend
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.names import hint
from twinserve.policies.registry import PolicySpec, policy_for
from twinserve.sim.engine.loop import Engine
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Hardware

if TYPE_CHECKING:
    from twinserve.policies.kv.offload.store import HostStore

PAGE = 4096  # bytes: vLLM has whole pages for a chunk (`SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT`)
GIB = 2**30
SIZE, OPTIONS = "--kv-offloading-size", "--kv-offloading-options"


class OffloadingOptions(BaseModel):
    """Options with the names of vLLM's `kv_connector_extra_config`.

    shared  all replicas with the option share one store of this size; not an option of vLLM
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    eviction_policy: Literal["lru", "arc"] = "lru"
    store_threshold: int = Field(0, ge=0, le=10**6)
    blocks_per_chunk: int = Field(1, ge=1, le=10**6)
    offload_prompt_only: bool = True
    shared: bool = False


def parse_offloading(text: str | None) -> OffloadingOptions:
    """Read `eviction_policy=arc,store_threshold=2`. Raises SettingsError."""
    given: dict[str, str] = {}
    known = list(OffloadingOptions.model_fields)
    for part in (text or "").split(",") if text else ():
        name, equals, value = part.partition("=")
        if name not in known:
            raise SettingsError(
                f"{OPTIONS} {text!r}: there is no option {name!r}{hint(name, known)}; there are "
                f"{', '.join(known)}"
            )
        if not equals or name in given:
            raise SettingsError(f"{OPTIONS} {text!r}: write {name}= once, with a value")
        given[name] = value
    try:
        return OffloadingOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].lower()
        raise SettingsError(f"{OPTIONS} {text!r}: {first['loc'][0]}: {said}") from None


def chunks_of(config: SimulationConfig, hardware: Hardware, options: OffloadingOptions) -> int:
    """Return the chunks that fit into `--kv-offloading-size`. Raises SettingsError if none fits."""
    assert config.kv_offloading_size is not None
    per_block = hardware.limits.kv_bytes_per_token * hardware.block_tokens
    chunk = -(-per_block * options.blocks_per_chunk // PAGE) * PAGE
    chunks = int(config.kv_offloading_size * GIB) // chunk
    if not chunks:
        raise SettingsError(
            f"{SIZE} {config.kv_offloading_size:g}: less than one chunk, which takes "
            f"{chunk / GIB:.3g} GiB; give more"
        )
    return chunks


def check_offloading(spec: PolicySpec, hardware: Hardware, serves: bool) -> None:
    """Raise SettingsError if offloading is excluded. serves: replicas with whole requests."""
    profile = hardware.profile
    if policy_for("tier", spec.policy) is None:
        raise SettingsError(
            f"{SIZE}: policy {spec.label} asks no host tier for KV blocks; use vllm, or drop it"
        )
    if spec.kv_name != "paged":
        raise SettingsError(
            f"{SIZE}: the {spec.kv_name} ledger has no host tier of KV blocks; use kv=paged, or "
            "drop it"
        )
    if hardware.speculation is not None:
        raise SettingsError(f"{SIZE}: offloading with drafts is not simulated; drop --speculate")
    if not serves:
        raise SettingsError(
            f"{SIZE}: replicas of the role prefill or decode with a host tier are not simulated; "
            "drop it, or the roles"
        )
    for what, ranks in (("pp", profile.pp), ("dp", profile.dp)):
        if ranks > 1:
            raise SettingsError(
                f"{SIZE}: {profile.name} with {what}{ranks} and a host tier is not simulated; "
                f"drop :{what}{ranks}"
            )


class HostStores:
    """The host tiers of one simulation; replicas with a shared tier get the same store."""

    def __init__(self) -> None:
        self._shared: dict[tuple, HostStore] = {}

    def put_behind(
        self,
        engine: Engine,
        ledger: KvLedger,
        config: SimulationConfig,
        hardware: Hardware,
        index: int,
    ) -> None:
        """Put a tier behind the ledger of replica number `index`. Raises SettingsError."""
        from twinserve.policies.kv.offload.ledger import TieredLedger
        from twinserve.sim.engine.host_tier import HostTier

        if not isinstance(engine.backend, SimulatedBackend):
            raise SettingsError(f"{SIZE}: live engines have no host tier of ours; drop it")
        if not isinstance(ledger, TieredLedger) or not ledger.prefix_caching:
            raise SettingsError(
                f"{SIZE}: blocks on the host are found by their text; drop --no-prefix-caching"
            )
        options = parse_offloading(config.kv_offloading_options)
        store, names = self._store(config, hardware, options), 0
        if options.shared:
            names = (index + 1) << 40  # beyond all names of one replica's own text
        ledger.put_behind(store, options.blocks_per_chunk, options.offload_prompt_only, names)
        link = engine.backend.link
        transfers = HostTransfers(link.to_host, link.to_device, hardware.limits.kv_bytes_per_token)
        engine.tier = HostTier(engine, ledger.offload, transfers)

    def _store(
        self, config: SimulationConfig, hardware: Hardware, options: OffloadingOptions
    ) -> HostStore:
        from twinserve.policies.kv.offload.store import HostStore

        chunks = chunks_of(config, hardware, options)
        kind = options.eviction_policy, options.store_threshold
        if not options.shared:
            return HostStore(chunks, *kind)
        limits, model = hardware.limits, hardware.profile.llm.name
        key = (model, limits.kv_bytes_per_token, hardware.block_tokens, chunks, options)
        if key not in self._shared:
            self._shared[key] = HostStore(chunks, *kind)
        return self._shared[key]
