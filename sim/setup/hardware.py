"""The hardware of a replica: profile, step-time model, limits and KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinserve.policies.base import EngineLimits
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.host import NO_HOST_TIME, HostTime, host_time
from twinserve.profiles.memory import (
    EXACT,
    least_kv_tokens,
    with_blocks_of_log,
    with_fp8_kv,
    with_kv_bytes,
    with_max_model_len,
    with_server_flags,
)
from twinserve.profiles.profile import Profile
from twinserve.profiles.step_times import Choice, StepTimes, choose
from twinserve.sim.results.steps import Steps
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.traces.load import load_trace
from twinserve.traces.workload import Workload

if TYPE_CHECKING:
    from twinserve.sim.setup.speculation import Speculation


@dataclass(frozen=True)
class Sources:
    """Read what the settings name. Many runs in one process can share what was read."""

    trace: Callable[..., Workload] = load_trace
    profile: Callable[[str, StepTimes], Choice] = choose

    def recorded(self, config: SimulationConfig, progress=None) -> Workload:
        """Return the whole recorded trace of a run, unscaled. The trace is kept, so that a second
        call with the same settings reads no file."""
        return self.trace(
            config.trace,
            seed=config.seed,
            offline=config.offline,
            format=config.format,
            columns=config.columns,
            raw_arrivals=config.raw_arrivals,
            rate=config.rate,
            progress=progress,
        )


READ = Sources()


@dataclass(frozen=True)
class Hardware:
    """A replica's profile, the step-time model that is the simulator's truth, and its limits. why:
    the reason for this form of step times. speculation: None without drafts. notices: on KV memory.
    """

    profile: Profile
    model: StepTimeModel
    limits: EngineLimits
    num_blocks: int
    host_blocks: int
    block_tokens: int
    why: str = "as given"
    speculation: Speculation | None = None
    notices: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def least_kv_tokens(self) -> int:
        """The lower end of derived KV memory, with which a server surely starts."""
        if self.num_blocks != self.profile.kv_capacity_tokens // self.block_tokens:
            return self.kv_tokens
        return min(least_kv_tokens(self.profile), self.kv_tokens)

    def describe(self) -> str:
        """Return one line for a run's banner, with the KV blocks."""
        whole = self.profile.kv_capacity_tokens // self.block_tokens
        source = self.profile.num_gpu_blocks_source if self.num_blocks == whole else "in force"
        blocks = {"num_gpu_blocks": self.num_blocks, "block_tokens": self.block_tokens}
        blocks |= {"num_gpu_blocks_source": source}
        if source == "in force" or self.block_tokens != self.profile.block_tokens:
            blocks["num_gpu_blocks_range"] = None  # of other blocks
        return self.profile.model_copy(update=blocks).describe(step_times=False)


def resolve_hardware(config: SimulationConfig, sources: Sources = READ) -> Hardware:
    chosen = sources.profile(config.profile, config.step_times)
    _check_groups(chosen.profile, config.replicas)
    if config.shared_prefix:
        chosen.profile.check_shared_prefix()
    profile, notices = _with_memory(chosen.profile, config)
    profile = profile.with_host_time(host_of(profile, config)).scheduled(config.async_scheduling)
    speculation = None if config.speculate is None else _speculation(profile, config.speculate)
    per_block = profile.kv_bytes_per_token * config.block_tokens
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = profile.kv_capacity_tokens // config.block_tokens
        if not num_blocks:
            capacity = f"the KV memory of {profile.name} holds {profile.kv_capacity_tokens} tokens"
            raise SettingsError(
                f"--block-tokens {config.block_tokens}: {capacity}, less than one block; choose "
                "smaller ones"
            )
        if speculation is not None:
            num_blocks = speculation.num_blocks(profile, num_blocks, config.block_tokens)
    host_blocks = config.host_blocks
    if host_blocks is None:
        host_blocks = int(profile.host_swap_bytes // per_block)
    limits = EngineLimits(
        max_num_seqs=config.max_num_seqs or profile.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or profile.max_num_batched_tokens,
        max_model_len=min(profile.max_model_len, num_blocks * config.block_tokens),
        kv_bytes_per_token=int(profile.kv_bytes_per_token),
    )
    if speculation is not None:
        from twinserve.sim.setup.speculation import limits_with_drafts

        limits = limits_with_drafts(limits, speculation)
    return Hardware(
        profile,
        profile.model(limits.max_num_seqs),
        limits,
        num_blocks,
        host_blocks,
        config.block_tokens,
        chosen.why,
        speculation,
        notices,
    )


def _speculation(profile: Profile, text: str) -> Speculation:
    from twinserve.sim.setup.speculation import check_profile, parse_speculation

    speculation = parse_speculation(text)
    check_profile(profile, speculation)
    return speculation


def _check_groups(profile: Profile, replicas: int) -> None:
    """Raise SettingsError if data-parallel ranks do not fill their groups."""
    if replicas % profile.dp:
        raise SettingsError(
            f"--replicas {replicas}: {profile.name} is one of {profile.dp} data-parallel ranks that"
            f" step together, and each is a replica; give --replicas {profile.dp}, or a multiple"
        )


# Settings of a server that its profile has, too, and that move its KV memory.
_SERVER_FLAGS = ("engine_version", "max_num_batched_tokens", "max_num_seqs", "enforce_eager")


def _with_memory(profile: Profile, config: SimulationConfig) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile with the settings' KV memory, and notices. Raises ProfileError."""
    notices: tuple[str, ...] = ()
    if config.kv_cache_dtype == "fp8":
        profile = with_fp8_kv(profile)
    if config.kv_from_log is not None:
        given = {name: getattr(config, name) for name in _SERVER_FLAGS}
        profile = profile.model_copy(update={k: v for k, v in given.items() if v})
        share = config.gpu_memory_utilization
        profile, notices = with_blocks_of_log(profile, Path(config.kv_from_log), share)
    elif config.kv_cache_memory_bytes is not None:
        profile = with_kv_bytes(profile, config.kv_cache_memory_bytes, config.engine_version)
    elif config.num_blocks is None:
        profile = with_server_flags(
            profile,
            engine_version=config.engine_version,
            utilization=config.gpu_memory_utilization,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=config.enforce_eager,
        )
        if profile.num_gpu_blocks_range is not None:
            low, high = (
                end * profile.block_tokens // config.block_tokens
                for end in profile.num_gpu_blocks_range
            )
            notices = (f"{profile.name}: {low:,} to {high:,} KV blocks are derived; {EXACT}",)
    if config.max_model_len is None:
        return profile, notices
    blocks = config.num_blocks
    if blocks is None:
        blocks = profile.kv_capacity_tokens // config.block_tokens
    else:  # these hold the request then, and not the profile's
        held = blocks * config.block_tokens // profile.block_tokens
        profile = profile.model_copy(update={"num_gpu_blocks": max(held, 1)})
    longest = with_max_model_len(profile, config.max_model_len, blocks, config.block_tokens)
    return longest, notices


def host_of(profile: Profile, config: SimulationConfig) -> HostTime:
    """Return the host time to add to the steps of `profile`. A profile measured step by step
    already has host time, unless the settings name another."""
    if config.host_time == "auto" and not profile.knows_host_time:
        return NO_HOST_TIME
    return host_time(config.host_time, config.async_scheduling)


def most_decodes(steps: Steps) -> int:
    """Return the most decodes in one step."""
    return int(steps.first("decode_requests").max()) if len(steps) else 0


def outside(profile: Profile, steps: Steps) -> list[str]:
    """Return a notice if a run had more requests at once than the profile's measurement."""
    most, known = most_decodes(steps), profile.most_requests
    if known is None or most <= known:
        return []
    seconds, decodes = steps.seconds(), steps.first("decode_requests").repeat(steps.lengths)
    share = seconds[decodes > known].sum() / seconds.sum()
    error = expected_errors(profile, decodes=most).decode
    return [
        f"profile {profile.name} was measured with up to {known:,} requests at once; here up to "
        f"{most:,} decode, and more than {known:,} in {share:.0%} of the time: expected error of "
        f"decodes {error.error:.0%}, not {expected_errors(profile).decode.error:.0%}"
    ]
