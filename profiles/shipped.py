"""The shipped profiles whose step times are the roofline, and how their files are made again:

python -m twinserve.profiles.shipped DIR

Those of operator tables are in `operators/shipped.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, derive_profile, save_profile
from twinserve.profiles.shipped_memory import kept_memory

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
