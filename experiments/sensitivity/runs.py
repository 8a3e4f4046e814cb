"""Single runs of the sensitivity experiment: a setting, a part of its profile that is off, a seed
-> a row for each policy.

The request list, its objectives and arrivals are those of the profile as it is: only what the
engine takes for them changes, and with it what policies believe, since they are fitted to the
profile. `belief` is the other way round: the engine is the profile's, and what policies believe was
fitted to one whose steps are off; who predicts what applications need, and no step times, predicts
that much more. `demand` is of such policies only: half of the applications are believed to need
that much more, and the other half that much less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinserve.experiments.study.off import PARTS, perturbed
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import with_defaults
from twinserve.sim.setup.run import run_each
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.transform import merge
from twinserve.traces.workload import Workload


@dataclass(frozen=True)
class Metric:
    """`path` in the summary. better: high or low; share: a share of requests, compared in
    percentage points."""

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
COMPLETION = Metric("completion mean, s", ("applications", "mean_jct_s"), "low")
ONLINE_AND_OFFLINE = (KEPT, TTFT, TTFT99, TPOT, NORMALIZED, OFFLINE, TOKENS)


@dataclass(frozen=True)
class Setting:
    """policies compared on one workload. config: of a seed, quick or not. beside: requests that
    come on top, of the same."""

    title: str
    policies: tuple[str, ...]
    metrics: tuple[Metric, ...]
    config: Callable[[int, bool], SimulationConfig]
    parts: tuple[str, ...] = PARTS
    beside: Callable[[int, bool], Workload] | None = None


def _hybrid(seed: int, quick: bool) -> SimulationConfig:
    config = SimulationConfig(
        seed=seed, duration=20.0 if quick else 100.0, policy=SETTINGS["hybrid"].policies
    )
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
        **PAPERS_ENGINE,
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
        **PAPERS_ENGINE,
    )


def _apps(seed: int, quick: bool) -> SimulationConfig:
    return SimulationConfig(
        policy=SETTINGS["apps"].policies,
        trace="apps",
        profile="llama-7b@a100-pcie-40g",
        seed=seed,
        **PAPERS_ENGINE,
    )


def _echo(estimator: str) -> Callable[[int, bool], SimulationConfig]:
    """Memory of about an A100-40G, the GPU of the paper."""

    def config(seed: int, quick: bool) -> SimulationConfig:
        return SimulationConfig(
            policy=ECHO,
            trace="sharegpt",
            profile="llama-3.1-8b@a100-80g",
            rate=4.0,
            duration=10.0 if quick else 60.0,
            num_blocks=10_000,
            slo="ttft=1,tpot=0.05",
            estimator=estimator,
            seed=seed,
            **PAPERS_ENGINE,
        )

    return config


def _documents(seed: int, quick: bool) -> Workload:
    """Some questions are left when the last online request arrives."""
    return longdoc("toolbench", requests=300 if quick else 1000, seed=seed)


ECHO = ("vllm", "echo-bs", "echo-bs-e:slo=gap", "echo:slo=gap")
SETTINGS: dict[str, Setting] = {
    "hybrid": Setting(
        "ShareGPT lengths at 10 requests/s, best-effort batches of 128, Qwen2.5-14B on 2 x "
        "A100-40G (bros-hybrid, 100 s)",
        ("vllm", "vllm-v0", "round-robin", "bros"),
        ONLINE_AND_OFFLINE,
        _hybrid,
    ),
    "mooncake": Setting(
        "Mooncake conversations, windows of 120 s as recorded, best-effort batches of 16, "
        "Llama-3.1-8B on 4 x H100",
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
        (COMPLETION, Metric("completion p90, s", ("applications", "p90_jct_s"), "low"), TOKENS),
        _apps,
        (*PARTS, "demand"),
    ),
    "echo": Setting(
        "ShareGPT lengths at 4 requests/s, 60 s, beside 1,000 questions on documents "
        "(longdoc:toolbench), Llama-3.1-8B on one"
        " A100 with 160,000 tokens of KV; Echo believes its own form (eqs. 6-8)",
        ECHO,
        ONLINE_AND_OFFLINE,
        _echo("paper"),
        beside=_documents,
    ),
    "echo-exact": Setting(
        "the same, but Echo believes exact step times, and then these 10 % off",
        ECHO,
        ONLINE_AND_OFFLINE,
        _echo("perfect"),
        ("belief",),
        _documents,
    ),
}


def inputs_of(setting: str, seed: int, quick: bool) -> Inputs:
    """With the profile as it is."""
    chosen = SETTINGS[setting]
    inputs = resolve(chosen.config(seed, quick))
    return (
        replace(inputs, workload=merge(inputs.workload, chosen.beside(seed, quick)))
        if chosen.beside
        else inputs
    )


def run_point(setting: str, part: str, factor: float, seed: int, quick: bool) -> list[dict]:
    """A row for each policy of the setting: its metrics by name."""
    chosen = SETTINGS[setting]
    inputs = perturbed(inputs_of(setting, seed, quick), part, factor)
    rows = []
    for spec, result in run_each(inputs):
        rows.append(
            {
                "policy": spec.label,
                **{metric.name: metric.of(result.summary) for metric in chosen.metrics},
            }
        )
    return rows
