"""The emulated GPU's settings, a key of vLLM's --additional-config. Imports no vLLM."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinserve.backends.live.versions import LiveEngineError
from twinserve.profiles.composition import StepTimeModel
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Hardware, resolve_hardware

KEY = "emulated"
WORKER = "twinserve.backends.live.emulate.worker.EmulatedWorker"
EXECUTOR = "twinserve.backends.live.emulate.worker.EmulatedExecutor"
# settings of a run that say what its hardware is
_OF_HARDWARE = (
    "profile", "step_times", "host_time", "async_scheduling", "engine_version", "block_tokens",
    "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
    "gpu_memory_utilization", "kv_cache_dtype", "enforce_eager", "cold_start",
)  # fmt: skip


class Emulated(BaseModel):
    """The GPU. hardware: settings of a simulation; kv_bytes_per_token: over all ranks;
    num_blocks: that requests can use; named_tokens: made-up tokens depend on the request's id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hardware: dict[str, Any]
    num_blocks: int = Field(ge=1)
    kv_bytes_per_token: int = Field(ge=2)
    named_tokens: bool = False

    @property
    def config(self) -> SimulationConfig:
        return SimulationConfig(**self.hardware)

    def model(self) -> StepTimeModel:
        """The step-time model, as the simulator has it."""
        return resolve_hardware(self.config).model


def emulated(config: SimulationConfig, hardware: Hardware, named_tokens: bool = False) -> Emulated:
    """Return the GPU of a run's settings. Raises LiveEngineError if one worker cannot be it."""
    profile = hardware.profile
    for name, size in (("pipeline stages", profile.pp), ("data-parallel ranks", profile.dp)):
        if size > 1:
            raise LiveEngineError(
                f"{profile.name}: an emulated GPU has no {name}; name a profile without them"
            )
    if hardware.speculation is not None:
        raise LiveEngineError("--speculate: an emulated GPU makes no drafts; drop it")
    given = {
        name: getattr(config, name)
        for name in _OF_HARDWARE
        if getattr(config, name) != SimulationConfig.model_fields[name].get_default()
    }
    return Emulated(
        hardware=given | {"profile": with_absolute_path(config.profile)},
        num_blocks=hardware.num_blocks,
        kv_bytes_per_token=hardware.limits.kv_bytes_per_token,
        named_tokens=named_tokens,
    )


def with_absolute_path(profile: str) -> str:
    """Return the profile's name with a file's path absolute: the engine runs in another folder."""
    name, at, gpu = profile.partition("@")
    return f"{Path(name).resolve()}{at}{gpu}" if name.lower().endswith(".json") else profile


def read_emulated(additional_config: dict | None) -> Emulated:
    """Return the GPU of the worker's configuration. Raises LiveEngineError if there is none."""
    given = (additional_config or {}).get(KEY)
    try:
        return Emulated.model_validate(given)
    except ValidationError as error:
        raise LiveEngineError(
            f"--additional-config: {KEY}={given!r} is no emulated GPU "
            f"({error.errors()[0]['msg']}); start it with twinserve emulate"
        ) from None
