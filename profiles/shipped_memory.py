"""KV memory of the shipped profiles, as their files have it.

Studies, tables and examples were made with these files. So their KV blocks are data, and do not
move with the derivation (`kv_memory/derive.py`): a flag of memory on top of one derives them anew.
"""

from __future__ import annotations

from typing import Any

UTILIZATION = 0.9
# (model, GPU, tp) -> KV blocks of 16 tokens, from weights, a full step and a constant of 0.7 GB
KEPT_BLOCKS: dict[tuple[str, str, int], int] = {
    ("llama-13b", "v100-16g", 4): 2398,
    ("llama-2-70b", "a100-80g", 4): 31352,
    ("llama-2-7b", "a100-80g", 1): 7403,
    ("llama-2-7b", "a100-pcie-40g", 1): 2829,
    ("llama-2-7b", "l20", 1): 3406,
    ("llama-3-70b", "a100-80g", 8): 88181,
    ("llama-3.1-70b", "a100-80g", 4): 30600,
    ("llama-3.1-70b", "b200", 2): 38360,
    ("llama-3.1-70b", "h100", 4): 29566,
    ("llama-3.1-70b", "h200", 4): 74245,
    ("llama-3.1-70b", "l20", 4): 5016,
    ("llama-3.1-70b", "l40s", 8): 37014,
    ("llama-3.1-8b", "a100-80g", 1): 28270,
    ("llama-3.1-8b", "a100-pcie-40g", 1): 9971,
    ("llama-3.1-8b", "b200", 1): 73958,
    ("llama-3.1-8b", "h100", 1): 27570,
    ("llama-3.1-8b", "h100", 4): 134264,
    ("llama-3.1-8b", "h200", 1): 55494,
    ("llama-3.1-8b", "l40s", 1): 12280,
    ("llama-3.1-8b", "rtxpro6000", 1): 35823,
    ("llama-7b", "a100-pcie-40g", 1): 2829,
    ("mixtral-8x7b", "h100", 2): 26669,
    ("opt-13b", "a100-40g", 2): 3716,
    ("opt-30b", "a100-40g", 4): 4037,
    ("qwen2.5-14b", "a100-40g", 2): 14135,
    ("qwen2.5-14b", "h100", 1): 14025,
    ("qwen2.5-14b", "h200", 1): 32641,
    ("qwen2.5-14b", "rtxpro6000", 1): 19580,
    ("qwen2.5-32b", "a100-40g", 4): 19665,
    ("qwen2.5-32b", "h100", 2): 19500,
    ("qwen2.5-7b", "a100-80g", 1): 65413,
    ("qwen2.5-7b", "b200", 1): 169843,
    ("qwen2.5-7b", "h100", 1): 63489,
    ("qwen2.5-7b", "h200", 1): 127317,
    ("qwen2.5-7b", "l40s", 1): 28865,
    ("qwen2.5-7b", "rtxpro6000", 1): 82678,
    ("qwen3-14b", "h100", 1): 16764,
    ("qwen3-14b", "rtxpro6000", 1): 23480,
    ("qwen3-30b-a3b", "a100-80g", 1): 9129,
    ("qwen3-30b-a3b", "h100", 1): 8344,
    ("qwen3-30b-a3b", "h200", 1): 45577,
    ("qwen3-30b-a3b", "rtxpro6000", 1): 37641,
    ("qwen3-32b", "h100", 2): 19525,
    ("qwen3-32b", "h200", 1): 15764,
    ("qwen3-32b", "rtxpro6000", 1): 6071,
    ("qwen3-32b", "rtxpro6000", 2): 27839,
    ("qwen3-8b", "a100-80g", 1): 24983,
    ("qwen3-8b", "b200", 1): 65594,
    ("qwen3-8b", "h100", 1): 24331,
    ("qwen3-8b", "h200", 1): 49153,
    ("qwen3-8b", "l40s", 1): 10769,
    ("qwen3-8b", "rtxpro6000", 1): 31697,
    ("yi-34b-200k", "l20", 2): 3850,
}


def kept_memory(key: tuple[str, str, int]) -> dict[str, Any]:
    """Settings of `derive_profile` for the file of this engine."""
    large = key[1] in ("h100", "h200")
    kept: dict[str, Any] = {
        "utilization": UTILIZATION,
        "max_num_batched_tokens": 8192 if large else 2048,
        "max_num_seqs": 1024 if large else 256,
    }
    if key in KEPT_BLOCKS:
        kept |= {"num_gpu_blocks": KEPT_BLOCKS[key], "num_gpu_blocks_source": "derived"}
    return kept
