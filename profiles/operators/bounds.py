"""Kernel-table entries that no kernel of a running engine reaches, and their replacements.

Each rule reads its constants from the tables themselves; none is fitted to a measured step.

- Attention of decodes works on (request, KV head) pairs. Tables end at PAIR_HEADS KV heads a rank;
  their library multiplies the last time, as if the heads were computed one group after the other.
  `pair_groups` gives the place of the same pairs in the table.
- A benchmark repeats one kernel, so what it reads stays in the last-level cache if it fits. A step
  reads all weights and all other layers' KV in between. `read_from_memory` bounds such entries.
- Experts: a table of uneven draws holds one draw for each number of tokens. `off_the_halves` finds
  tables whose draws stand out, `read_then_multiply` bounds them.

Tables of separate kernels do not show two effects of FlashAttention-2 on decodes. They are
transferred from measured GPUs (RTX 4090 and RTX PRO 6000, vLLM 0.19.0, per-layer tables of
LLMServingSim 2) to GPUs whose tables lack them.

- With a chunk, one kernel works on both. Query heads that share a KV head are then no longer
  packed into one tile, and contexts are not split. Decodes then take 1.3 to 2.7 times as long as
  alone, more so the more there are.
- Once there are SPLIT_LIMIT (request, KV head) pairs for each SM, a context has one block of
  threads. The tail of the longest runs alone, at 30 and 20 ns a token and layer.

GPUs with FlashAttention-3 or TensorRT kernels (Hopper, data-centre Blackwell) schedule their work
dynamically: none of this.
"""

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
    """The `beside` and `skew` fields of an OperatorForm, from its decode table. kv_heads: of one
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


PAIR_HEADS = 8
# Last-level caches in bytes, of the GPUs whose tables show reads out of them: some entries that fit
# reach a larger share of the memory's rate than any that do not fit. On the other GPUs none does.
CACHE_BYTES = {"l40s": 96 * 2**20, "rtxpro6000": 128 * 2**20}
# Measured sizes are powers of two: an entry of less than twice the cache may be interpolated from
# one that fits.
CLEAR_OF_CACHE = 2
# What one draw scatters about another: what stands out by no more is left alone.
DRAW_SCATTER = 0.05
# Even draws leave out this share of the experts, where all of them are said to be chosen.
LEFT_OUT = 0.01


def pair_groups(kv_heads: int) -> int:
    """Return the groups of tabulated size that `kv_heads` of a rank make: n requests have the pairs
    of n times so many requests on one group's KV heads."""
    if kv_heads <= PAIR_HEADS:
        return 1
    return kv_heads // next(k for k in (PAIR_HEADS, 4, 2, 1) if kv_heads % k == 0)


def read_from_memory(
    seconds: np.ndarray,
    requests: np.ndarray,
    contexts: np.ndarray,
    bytes_per_token: float,
    cache_bytes: float,
) -> np.ndarray:
    """Bound decode attention, float64[requests][contexts]. KV of up to CLEAR_OF_CACHE times the
    cache is read at most at the rate of the same requests' shortest contexts with more KV. If none
    has more, the next number of requests counts.

    bytes_per_token: K and V of one token in one layer, on this rank.
    """
    found = np.array(seconds, np.float64)
    token_s = 0.0
    for row, n in zip(found[::-1], requests[::-1], strict=True):
        tokens = n * np.asarray(contexts, np.float64)
        fits = int(np.sum(tokens * bytes_per_token <= CLEAR_OF_CACHE * cache_bytes))
        if fits < len(tokens):
            token_s = row[fits] / tokens[fits]
        row[:fits] = np.maximum(row[:fits], token_s * tokens[:fits])
    return found


def all_chosen(experts: int, per_token: int) -> float:
    """Tokens from which even draws choose all experts but LEFT_OUT of them, on average."""
    return float(np.log(LEFT_OUT) / np.log(1 - per_token / experts)) if per_token < experts else 1.0


def off_the_halves(seconds: np.ndarray, half_seconds: np.ndarray) -> bool:
    """Return whether an entry of a table of experts is off the table of ranks with half of each
    expert's columns. A rank could compute its columns as two such halves in turn."""
    return bool(np.any(seconds > 2 * (1 + DRAW_SCATTER) * half_seconds))


def read_then_multiply(tokens: np.ndarray, seconds: np.ndarray, chosen_from: float) -> np.ndarray:
    """Return the seconds of the experts by tokens, bounded by reading all experts and multiplying
    afterwards.

    Reading: the least time of any entry from `chosen_from` tokens on. Multiplying: by the tokens,
    at the rate between the last two entries. Few tokens, which choose some of the experts, take no
    longer than those that choose all.
    """
    tokens, seconds = np.asarray(tokens, np.float64), np.asarray(seconds, np.float64)
    rate = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
    bound = seconds[tokens >= chosen_from].min() + rate * np.maximum(tokens, chosen_from)
    return np.minimum(seconds, bound)
