"""Single runs of the sensitivity experiment: a setting, a part of its profile that is off, a seed -> a row for each policy.

The request list, its objectives and arrivals are those of the profile as it is: only what the engine takes for them changes,
and with it what policies believe, since they are fitted to the profile. `belief` is the other way round: the engine is the
profile's, and what policies believe was fitted to one whose steps are off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..policies.base import Policy
from ..policies.estimators import BatchEstimator
from ..profiles.profile import Profile
from ..sim.config import SimulationConfig
from ..sim.inputs import Hardware, Inputs, make_estimator, resolve
from ..sim.presets import with_defaults
from ..sim.run import run_each

PARTS = ("step", "prefill", "decode", "host", "pcie", "kv", "belief")


@dataclass(frozen=True)
class Metric:
    """`path` in the summary. better: high or low; share: a share of requests, compared in percentage points."""

    name: str
    path: tuple[str, ...]
    better: str
    share: bool = False

    def of(self, summary: Mapping) -> float:
        found: Any = summary
        for key in self.path:
            found = found[key]
        return float("nan") if found is None else float(found)


_RT, _BE = ("classes", "rt"), ("classes", "be")
KEPT = Metric("objectives kept", (*_RT, "slo_attainment"), "high", share=True)
TTFT = Metric("TTFT mean, ms", (*_RT, "mean_ttft_ms"), "low")
TTFT99 = Metric("TTFT p99, ms", (*_RT, "p99_ttft_ms"), "low")
TPOT = Metric("TPOT mean, ms", (*_RT, "mean_tpot_ms"), "low")
NORMALIZED = Metric("normalized latency, ms", (*_RT, "normalized_latency_ms"), "low")
OFFLINE = Metric("best-effort tok/s", (*_BE, "window_total_token_throughput"), "high")
TOKENS = Metric("all tok/s", ("total_token_throughput",), "high")
ONLINE_AND_OFFLINE = (KEPT, TTFT, TTFT99, TPOT, NORMALIZED, OFFLINE, TOKENS)


@dataclass(frozen=True)
class Setting:
    """policies compared on one workload. config: of a seed, quick or not."""

    title: str
    policies: tuple[str, ...]
    metrics: tuple[Metric, ...]
    config: Callable[[int, bool], SimulationConfig]
    parts: tuple[str, ...] = PARTS


def _hybrid(seed: int, quick: bool) -> SimulationConfig:
    config = SimulationConfig(seed=seed, duration=20.0 if quick else 100.0, policy=SETTINGS["hybrid"].policies)
    return with_defaults(config, "bros-hybrid")


def _mooncake(seed: int, quick: bool) -> SimulationConfig:
    """Another part of the trace for each seed."""
    start = 300.0 * (1 + seed % 11)
    return SimulationConfig(
        policy=SETTINGS["mooncake"].policies,
        trace="mooncake",
        offline=True,
        window=(start, start + (20.0 if quick else 120.0)),
        rate_scale=1.0,
        pool=16,
        seed=seed,
    )


def _memory(seed: int, quick: bool) -> SimulationConfig:
    return SimulationConfig(
        policy=SETTINGS["memory"].policies,
        trace="sharegpt",
        profile="llama-2-7b@l20",
        rate=8.5,
        requests=60 if quick else 600,
        cap_length=2300,
        slo="ttft=3,tpot=0.2",
        seed=seed,
    )


def _apps(seed: int, quick: bool) -> SimulationConfig:
    return SimulationConfig(policy=SETTINGS["apps"].policies, trace="apps", profile="llama-7b@a100-pcie-40g", seed=seed)


SETTINGS: dict[str, Setting] = {
    "hybrid": Setting(
        "ShareGPT lengths at 10 requests/s, best-effort batches of 128, Qwen2.5-14B on 2 x A100-40G (bros-hybrid, 100 s)",
        ("vllm", "vllm-v0", "round-robin", "bros"),
        ONLINE_AND_OFFLINE,
        _hybrid,
    ),
    "mooncake": Setting(
        "Mooncake conversations, windows of 120 s as recorded, best-effort batches of 16, Llama-3.1-8B on 4 x H100",
        ("vllm", "vllm-v0", "round-robin:chunk=2048", "bros:chunk=2048"),
        ONLINE_AND_OFFLINE,
        _mooncake,
    ),
    "memory": Setting(
        "ShareGPT lengths at 8.5 requests/s, 600 requests, Llama-2-7B on one L20: memory binds",
        ("vllm", "vllm-v0", "layerkv:savable_only=true"),
        (KEPT, TTFT, TTFT99, TPOT, NORMALIZED, TOKENS),
        _memory,
    ),
    "apps": Setting(
        "300 applications in 9 minutes (apps:2x), Llama-7B on one A100-PCIe",
        ("parrot", "vtc", "justitia:predictor=class-mean"),
        (
            Metric("completion mean, s", ("applications", "mean_jct_s"), "low"),
            Metric("completion p90, s", ("applications", "p90_jct_s"), "low"),
            TOKENS,
        ),
        _apps,
        tuple(part for part in PARTS if part != "belief"),  # nobody here estimates step times
    ),
}


@dataclass(frozen=True)
class BelievingInputs(Inputs):
    """Inputs of runs whose policies know another profile than the engine's: `believed`."""

    believed: Hardware = field(kw_only=True)

    @cached_property
    def estimator(self) -> BatchEstimator:
        return make_estimator(self.config, self.believed)

    def estimator_for(self, policy: type[Policy]):
        return make_estimator(self.config, self.believed, policy)


def hardware_with(hardware: Hardware, profile: Profile) -> Hardware:
    """The same replica with another profile of the same engine; its KV room follows."""
    blocks = profile.num_gpu_blocks * profile.block_tokens // hardware.block_tokens
    limits = replace(hardware.limits, max_model_len=min(hardware.limits.max_model_len, blocks * hardware.block_tokens))
    model = profile.model(limits.max_num_seqs)
    return replace(hardware, profile=profile, model=model, limits=limits, num_blocks=blocks)


def perturbed(inputs: Inputs, part: str, factor: float) -> Inputs:
    """`inputs` with `part` (one of PARTS) of the profile multiplied by `factor`."""
    if factor == 1.0:
        return inputs
    profile = inputs.hardware.profile
    if part != "belief":
        return replace(inputs, hardware=hardware_with(inputs.hardware, profile.scaled(**{part: factor})))
    believed = hardware_with(inputs.hardware, profile.scaled(step=factor))
    return BelievingInputs(inputs.config, inputs.workload, inputs.hardware, inputs.policies, inputs.notices, believed=believed)


def run_point(setting: str, part: str, factor: float, seed: int, quick: bool) -> list[dict]:
    """A row for each policy of the setting: its metrics by name."""
    chosen = SETTINGS[setting]
    inputs = perturbed(resolve(chosen.config(seed, quick)), part, factor)
    rows = []
    for spec, result in run_each(inputs):
        rows.append({"policy": spec.label, **{metric.name: metric.of(result.summary) for metric in chosen.metrics}})
    return rows
