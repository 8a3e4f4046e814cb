"""The `vllm serve` command lines of a plan, one for each replica."""

from __future__ import annotations

import json

from twinserve.policies.registry import parse_policy
from twinserve.profiles.models.published import PUBLISHED
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.setup.serving import scheduler_class

FIRST_PORT = 8000


def serve_arguments(
    candidate: Candidate, index: int, slo: tuple[float | None, float | None], longest: int
) -> list[str]:
    """Return the words of replica `index`. slo: (TTFT, TPOT) seconds, for policies that use
    deadlines. longest: tokens of the longest request, which the server must accept."""
    hardware, config = candidate.hardware, candidate.config
    profile, limits = hardware.profile, hardware.limits
    words = ["vllm", "serve", hub_id(profile.llm.name), "--port", str(FIRST_PORT + index)]
    words += ["--tensor-parallel-size", str(candidate.tp)]
    surely = min(limits.max_model_len, hardware.least_kv_tokens)
    words += ["--max-model-len", str(max(surely, longest))]
    words += ["--max-num-seqs", str(limits.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    words += ["--block-size", str(hardware.block_tokens)]
    if config.gpu_memory_utilization is not None:
        words += ["--gpu-memory-utilization", f"{config.gpu_memory_utilization:g}"]
    if config.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", config.kv_cache_dtype]
    words += ["--enforce-eager"] * config.enforce_eager
    words += ["--async-scheduling" if config.async_scheduling else "--no-async-scheduling"]
    return words + _policy(candidate, slo)


def hub_id(model: str) -> str:
    """Return the Hugging Face id of a catalogue model; for another name, the name itself."""
    known = PUBLISHED.get(model.lower())
    return model if known is None else known.hub


def deadlines_told(candidate: Candidate) -> bool:
    """Return whether its servers get objectives. vLLM's own scheduler uses none."""
    return parse_policy(candidate.policy).text != "vllm"


def _policy(candidate: Candidate, slo: tuple[float | None, float | None]) -> list[str]:
    """vLLM's own scheduler needs no word; any other policy decides inside of it."""
    if not deadlines_told(candidate):
        return []
    told: dict[str, object] = {"policy": candidate.policy, "profile": candidate.config.profile}
    told |= {
        name: value
        for name, value in zip(("slo_ttft_s", "slo_tpot_s"), slo, strict=True)
        if value is not None
    }
    scheduler = scheduler_class(candidate.config.async_scheduling)
    return ["--scheduler-cls", scheduler, "--additional-config", json.dumps(told)]
