"""KV blocks that vLLM would find room for, from memory sizes alone: derived, not measured.

Per rank: total memory x utilisation, less the rank's weights, the peak of activations in vLLM's
profiling step, the logits it samples from, and a constant for the CUDA context, NCCL and captured
graphs. The engine's own number (its `num_gpu_blocks`) is always better where there is one.
"""

from __future__ import annotations

from twinserve.profiles.ranks import check_ranks, check_stages, rank_weight_bytes
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError
from twinserve.profiles.stages import stage_models, without_embeddings

BLOCK_TOKENS = 16
UTILIZATION = 0.9
# CUDA context, NCCL buffers, captured graphs: fitted to five measured engines (docs/profiles.md).
FIXED_BYTES = 0.7e9


def activation_bytes(
    llm: ModelSpec, tp: int, max_num_batched_tokens: int, max_num_seqs: int, dp: int = 1
) -> float:
    """Peak bytes beside weights in a step of `max_num_batched_tokens` tokens of `max_num_seqs`
    requests, per rank.

    Residual stream, two hidden states and the MLP's widest point are alive together; logits in fp32
    with a copy. Of data-parallel ranks, each has the others' tokens before its experts.
    """
    # a token passes the MLP once for each of its experts
    passes = max(llm.experts_per_token, 1)
    width = (2 + dp) * llm.hidden + (3 if llm.gated_mlp else 2) * passes * llm.intermediate / tp
    logits = 2 * max_num_seqs * llm.vocab * 4
    return max_num_batched_tokens * width * llm.dtype_bytes + logits


def derive_num_gpu_blocks(
    llm: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    dp: int = 1,
    ep: bool = False,
    *,
    pp: int = 1,
    utilization: float = UTILIZATION,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> int:
    """Blocks of BLOCK_TOKENS tokens of one engine; ProfileError if the model leaves no room, with
    the tp that would. dp, ep, pp: as in `ranks.py`."""
    check_ranks(llm, gpu.name, tp, dp, ep)
    check_stages(llm, gpu.name, tp, pp, dp)

    def blocks(ranks: int) -> int:
        if pp > 1:
            room = gpu.memory_bytes * utilization
            return _least_blocks(llm, ranks, pp, ep, room, (max_num_batched_tokens, max_num_seqs))
        free = gpu.memory_bytes * utilization - rank_weight_bytes(llm, ranks, dp, ep) - FIXED_BYTES
        free -= activation_bytes(llm, ranks, max_num_batched_tokens, max_num_seqs, dp)
        return int(free // (BLOCK_TOKENS * llm.rank_kv_bytes_per_token(ranks)))

    found = blocks(tp)
    if found > 0:
        return found
    fits = [r for r in (2, 4, 8) if r > tp and llm.heads % r == 0 and blocks(r) > 0]
    advice = f"use tp={fits[0]}" if fits else "no tp up to 8 is enough"
    raise ProfileError(
        f"{llm.name} ({llm.weight_bytes / 1e9:.1f} GB of weights) leaves no KV memory on"
        f" {tp * pp} x {gpu.name} ({gpu.memory_bytes / 1e9:.1f} GB each); {advice}"
    )


def _least_blocks(
    llm: ModelSpec, tp: int, pp: int, ep: bool, room: float, step: tuple[int, int]
) -> int:
    """Blocks of the pipeline stage that has fewest, which all have then, as in vLLM
    (`get_kv_cache_configs`). room: bytes a rank; step: tokens and requests of a full one.

    Logits are the last stage's; all but the first keep a buffer for activations that they receive.
    """
    tokens, requests = step
    found = []
    for i, part in enumerate(stage_models(llm, pp)):
        weights = rank_weight_bytes(part, tp, 1, ep) - without_embeddings(llm, i, pp) / tp
        beside = activation_bytes(llm, tp, tokens, requests if i == pp - 1 else 0)
        received = 2 * tokens * llm.hidden * llm.dtype_bytes if i else 0.0
        free = room - weights - FIXED_BYTES - beside - received
        found.append(int(free // (BLOCK_TOKENS * part.rank_kv_bytes_per_token(tp))))
    return min(found)
