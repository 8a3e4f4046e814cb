"""What a call in Python may set, and how it becomes the settings of a run."""

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast

import numpy as np

from twinserve.errors import TwinserveError
from twinserve.policies.names import hint
from twinserve.sim.results.metrics_objectives import parse_goodput
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.setup.config import EstimatorName, SettingsError, SimulationConfig, StepTimesName
from twinserve.sim.setup.objectives import metrics_options
from twinserve.sim.setup.presets import with_defaults

Call = TypeVar("Call", bound=Callable[..., Any])


def in_pythons_words(call: Call) -> Call:
    """Errors of `call` name arguments as a caller writes them: rate_scale, not --rate-scale."""

    @functools.wraps(call)
    def worded(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except TwinserveError as error:
            said = re.sub(r"--no-([a-z][a-z0-9-]*)", r"--\1=False", str(error))
            said = re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), said)
            error.args = (said,)
            raise

    return cast(Call, worded)


class EngineSettings(TypedDict, total=False):
    """Settings that a plan takes, too: how its traces are read, and what every engine gets."""

    format: str | None
    columns: str | None
    step_times: StepTimesName
    front_end: str
    kv_cache_dtype: Literal["auto", "fp8"]
    gpu_memory_utilization: float | None
    engine_version: str | None
    enforce_eager: bool
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    async_scheduling: bool


class Settings(EngineSettings, total=False):
    """Settings of a run, without its policy and its trace: the flags of `simulate`, by their names
    with underscores. `SimulationConfig` says what each of them means."""

    seed: int
    raw_arrivals: bool
    offline: bool
    rate: float | None
    duration: float | None
    requests: int | None
    rate_scale: float | None
    load: float | None
    window: tuple[float, float] | None
    cap_length: int | None
    pool: int
    client_timeout: float | None
    slo: str | None
    from_vllm: str | None
    as_model: str | None
    gpu: str | None
    profile: str
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    enable_expert_parallel: bool | None
    shared_prefix: bool
    replicas: int
    router: str
    fleet: str | None
    failures: str | None
    mttf: float | None
    mttr: float | None
    on_failure: Literal["error", "retry", "migrate"]
    retries: int
    detection: float
    autoscale: str | None
    min_replicas: int
    max_replicas: int
    grace: float | None
    start_up: float
    block_tokens: int
    num_blocks: int | None
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    kv_from_log: str | None
    host_blocks: int | None
    kv_offloading_size: float | None
    kv_offloading_backend: Literal["native", "lmcache"]
    kv_offloading_options: str | None
    kv: str | None
    prefix_caching: bool | None
    estimator: EstimatorName
    pcie_contention: bool
    speculate: str | None
    cold_start: float
    decision_time: Literal["none", "measured", "profile"]
    host_time: str
    exact: bool


def config_of(
    preset: str | None, config: str | os.PathLike | None, settings: Mapping[str, Any]
) -> SimulationConfig:
    """Return given settings over those of a run.json, over those of a preset. Raises
    SettingsError."""
    check_names(settings)
    given = SimulationConfig(**{name: _plain(value) for name, value in settings.items()})
    return with_defaults(given, preset, None if config is None else Path(config))


def check_names(
    settings: Mapping[str, Any], known: Collection[str] = SimulationConfig.model_fields
) -> None:
    """Raises SettingsError for a name that is not among `known`, the settings."""
    for name in settings:
        if name not in known:
            raise SettingsError(
                f"there is no setting {name!r}{hint(name, list(known))}; there are "
                f"{', '.join(sorted(known))}"
            )


def _plain(value: Any) -> Any:
    """Paths as the texts that flags would have."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def several(value: Any) -> list[Any]:
    """One or many: a text is one, an array many."""
    many = isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)
    return list(value) if many else [value]


def measured_with(
    goodput: Mapping[str, float] | Sequence[str] | None = None,
    warmup: str | int | None = None,
    every_s: float | None = None,
    percentiles: Sequence[float] | str | None = None,
) -> MetricsOptions:
    """What is asked of the metrics of a run. Raises GoodputError, SettingsError."""
    if isinstance(goodput, Mapping):
        goodput = [f"{name}:{value}" for name, value in goodput.items()]
    return metrics_options(
        None if goodput is None else parse_goodput(several(goodput)),
        None if warmup is None else str(warmup),
        every_s,
        None if percentiles is None else ",".join(map(str, several(percentiles))),
    )
