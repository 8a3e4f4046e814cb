"""The shipped profiles whose step times are the roofline, and how their files are made again:

python -m twinserve.profiles.shipped DIR

Those of operator tables are in `operators/shipped.py`.

Studies, tables and examples were made with their files. So their KV blocks are data, and do not
move with the derivation (`kv_memory/derive.py`): a flag of memory on top of one derives them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, derive_profile, save_profile

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


# (model, GPU, tp) -> what is known beyond the specs: KV blocks that a vLLM of that version was seen
# to allocate (at utilisation 0.9), and the settings it ran with.
SHIPPED: dict[tuple[str, str, int], dict[str, int | str]] = {
    # BROS, both versions of the paper
    ("qwen2.5-14b", "a100-40g", 2): {},
    ("qwen2.5-32b", "a100-40g", 4): {},
    ("opt-13b", "a100-40g", 2): {},
    ("opt-30b", "a100-40g", 4): {},
    ("llama-3-70b", "a100-80g", 8): {},
    # Echo
    ("llama-3.1-8b", "a100-pcie-40g", 1): {},
    # LayerKV
    ("llama-2-7b", "l20", 1): {},
    ("yi-34b-200k", "l20", 2): {},
    ("llama-3.1-70b", "l20", 4): {},
    # Justitia
    ("llama-7b", "a100-pcie-40g", 1): {},
    ("llama-2-7b", "a100-pcie-40g", 1): {},
    ("llama-13b", "v100-16g", 4): {},
    # current GPUs
    ("llama-3.1-8b", "a100-80g", 1): {},
    ("llama-2-7b", "a100-80g", 1): {},
    ("llama-3.1-8b", "h100", 1): {},
    ("llama-3.1-8b", "h100", 4): {},
    ("llama-3.1-8b", "h200", 1): {},
    ("llama-3.1-8b", "l40s", 1): {},
    ("llama-3.1-70b", "h100", 4): {},
    ("llama-3.1-70b", "h200", 4): {},
    ("qwen2.5-14b", "h200", 1): {},
    ("qwen3-14b", "h100", 1): {},
    ("llama-2-70b", "a100-80g", 4): {},
    ("llama-3.1-8b", "rtx4090", 1): {"num_gpu_blocks": 2588, "engine_version": "0.19.0"},
    ("llama-2-70b", "h100", 4): {
        "num_gpu_blocks": 31356,
        "engine_version": "0.15.1",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 128,
    },
    ("codellama-34b", "h100", 2): {
        "num_gpu_blocks": 26602,
        "engine_version": "0.15.1",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 128,
    },
}

# Entries whose file holds operator tables instead: these meet the decode marks, or a measured run,
# better.
REPLACED = {
    ("codellama-34b", "h100", 2),
    ("qwen3-14b", "h100", 1),
    ("llama-3.1-8b", "a100-80g", 1),
    ("llama-3.1-8b", "rtx4090", 1),
}


def shipped_profile(model: str, gpu: str, tp: int) -> Profile:
    """The roofline profile of one entry of SHIPPED, computed."""
    return derive_profile(model, gpu, tp, **engine_settings((model, gpu, tp)))


def engine_settings(key: tuple[str, str, int]) -> dict[str, Any]:
    """Settings of `derive_profile` for a shipped file: KV memory, and what is known beyond that."""
    return kept_memory(key) | SHIPPED.get(key, {})


def write_shipped(folder: Path) -> list[Path]:
    """Write every file of SHIPPED that is not REPLACED; returns the paths."""
    paths = []
    for key in SHIPPED:
        if key in REPLACED:
            continue
        paths.append(folder / ProfileName(*key).file_name)
        save_profile(shipped_profile(*key), paths[-1])
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m twinserve.profiles.shipped DIR")
    print(f"{len(write_shipped(Path(sys.argv[1])))} profiles written")
