"""Bytes that the profiling step of a vLLM server holds beside the weights.

`GPUModelRunner.profile_run` computes a full step of dummy tokens, then samples for a full batch of
dummy requests. vLLM prints the larger of the two peaks as activation memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinserve.profiles.kv_memory.cards import Card
from twinserve.profiles.kv_memory.releases import V1_ENGINE, Release, masks_in_blocks, sampler_bytes
from twinserve.profiles.specs import ModelSpec


@dataclass(frozen=True)
class Step:
    """The profiling step of one rank: its tokens and requests. samples: it is of the last pipeline
    stage; receives: of no first one; dp: data-parallel ranks whose tokens meet at the experts."""

    tokens: int
    requests: int
    tp: int = 1
    dp: int = 1
    ep: bool = False
    samples: bool = True
    receives: bool = False


def activation_peak(llm: ModelSpec, card: Card, release: Release, step: Step, v2: bool) -> float:
    """Bytes of activations at the peak of the profiling step, cuBLAS's workspace included.

    The workspaces of mixtures stay allocated beside it from 0.12 on (`v1/worker/workspace.py`).
    """
    sampler = _sampler(llm, card, release, step, v2) if step.samples else 0.0
    forward, experts = _forward(llm, release, step, v2), _experts(llm, step)
    if release >= (0, 12, 0):
        peak = max(sampler, forward) + experts
    else:
        peak = max(sampler, forward + experts)
    received = 2 * step.tokens * llm.hidden * llm.dtype_bytes if step.receives else 0.0
    return peak + received + card.cublas_bytes


def _sampler(llm: ModelSpec, card: Card, release: Release, step: Step, v2: bool) -> float:
    """`_dummy_sampler_run`: logits and what sorts them, beside the hidden states of the step and
    those of the last tokens."""
    requests = min(step.requests, step.tokens)
    each = sampler_bytes(release, requests, v2, llm.dtype_bytes)
    hidden = (step.tokens + 2 * requests) * llm.hidden * llm.dtype_bytes
    mask = min(card.multiprocessors, requests) * llm.vocab * 4
    return requests * llm.vocab * each + hidden + (mask if masks_in_blocks(release, v2) else 0)


def _forward(llm: ModelSpec, release: Release, step: Step, v2: bool) -> float:
    """The widest point of a layer: gate and up projections and their product, beside hidden states
    and residual. 3.75 hidden states are what the peaks of logs show of V1's runner, 3 of V0's and
    V2's."""
    width = max(llm.shared_intermediate, llm.dense_intermediate) if llm.experts else 0
    width = width or (0 if llm.experts else llm.intermediate)
    states = 3.0 if v2 or release < V1_ENGINE else 3.75
    wide = (3 if llm.gated_mlp else 2) * width / step.tp
    return step.tokens * (wide + states * llm.hidden) * llm.dtype_bytes


def _experts(llm: ModelSpec, step: Step) -> float:
    """The two workspaces of `FusedMoEKernel` (`fused_moe/modular_kernel.py`, and `fused_moe.py`
    before): each token once for each of its experts. Kernels of MXFP4 have none."""
    if not llm.experts or (llm.weights is not None and llm.weights.name == "mxfp4"):
        return 0.0
    width = llm.intermediate if step.ep else llm.intermediate // (step.tp * step.dp)
    passes = step.tokens * step.dp * llm.experts_per_token
    return passes * (max(width, llm.hidden) + max(2 * width, llm.hidden)) * llm.dtype_bytes
