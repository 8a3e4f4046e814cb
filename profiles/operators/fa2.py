"""What FlashAttention-2 does to decodes that tables of separate kernels do not show: transferred
from GPUs where it was measured (RTX 4090 and RTX PRO 6000, vLLM 0.19.0, per-layer tables of
LLMServingSim 2), for GPUs whose tables lack it.

- Beside a chunk, one kernel works on both. Query heads that share a KV head are then no longer
  packed into one tile, and contexts are not split: decodes take 1.3 to 2.7 times as long as alone,
  more so the more there are.
- Once there are SPLIT_LIMIT (request, KV head) pairs for each SM, a context is left to one block of
  threads, and the tail of the longest runs alone, at 30 and 20 ns a token and layer.

GPUs with FlashAttention-3 or TensorRT kernels (Hopper, data-centre Blackwell) schedule their work
dynamically: none of this.
"""

from __future__ import annotations

import numpy as np

from twinserve.profiles.operators.layers import SPLIT_LIMIT

SMS = {"a100-80g": 108, "l40s": 142, "rtxpro6000": 188, "rtx4090": 128}
REQUESTS = (1, 8, 16, 32, 64, 128)
# Time beside a chunk of at most 512 tokens over time alone, contexts of 1024 tokens; both GPUs, by
# REQUESTS.
BESIDE = {
    "rtx4090": (1.58, 1.57, 1.62, 1.72, 1.95, 2.44),
    "rtxpro6000": (0.91, 1.25, 1.36, 1.34, 1.43, 1.71),
}
# seconds a token and layer, one long context among 32 to 64
TAIL_S = {"rtx4090": 30e-9, "rtxpro6000": 20e-9}
LONG_CHUNK = 1.17  # the same for a chunk of 2048, over that of 512
# Share of the lone tail's time that is seen with so many requests: with more waves of blocks,
# others run beside it.
TAIL_SEEN = {4: 1.0, 64: 1.0, 128: 0.68, 256: 0.34}


def transferred(gpu: str, measured: dict) -> np.ndarray:
    """What was measured on this GPU, on one of the same architecture (L40S: the RTX 4090), or the
    mean."""
    kin = {"l40s": "rtx4090"}.get(gpu, gpu)
    return np.array(measured[kin]) if kin in measured else np.mean(list(measured.values()), axis=0)


def fa2_tables(gpu: str, kv_heads: float, layers: int, requests, context, decode_s) -> dict:
    """The beside and skew fields of an OperatorForm, from its decode table. kv_heads: of one
    rank."""
    counts = np.array([n for n in requests if n <= 256], float)
    ratio = np.maximum(np.interp(counts, REQUESTS, transferred(gpu, BESIDE)), 1.0)
    alone = np.array(decode_s)[: len(counts)]
    box = np.array([alone * ratio[:, None], alone * ratio[:, None] * LONG_CHUNK])
    tail = layers * float(transferred(gpu, TAIL_S))
    limit = SPLIT_LIMIT * SMS[gpu] / max(kv_heads, 1)
    points = sorted({4.0, limit - 0.5, limit, 64.0, 128.0, 256.0})
    seen = tail * np.interp(points, list(TAIL_SEEN), list(TAIL_SEEN.values()))
    return {
        "beside_chunk": (512.0, 2048.0),
        "beside_requests": tuple(counts.tolist()),
        "beside_context": tuple(context),
        "beside_s": box,
        "skew_requests": tuple(points),
        "skew_s": np.where(np.array(points) < limit, 0.0, seen),
        "skew_beside_s": seen,
    }
