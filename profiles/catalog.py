"""The models and GPUs known by name.

Models: the config.json files on Hugging Face (checked by parameter count in the tests). GPUs:
NVIDIA data sheets; memory is what CUDA reports as the device's total where a report was at hand
(A100-40G, RTX 4090), else a total that agrees with KV pools seen on it (H100, H200) or with its
siblings. PCIe is the lane rate of 16 lanes in one direction (gen 3, 4, 5: 16, 32, 64 GB/s), NVLink
half the data sheet's bidirectional figure. The V100 is the PCIe card.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from twinserve.profiles.models.config import is_reference, read_model
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError

GIB = 2**30


def _llama(name, layers, hidden, heads, kv_heads, intermediate, vocab, max_positions, **more):
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=more.pop("head_dim", hidden // heads),
        intermediate=intermediate,
        vocab=vocab,
        max_positions=max_positions,
        **more,
    )


def _opt(name, layers, hidden, heads):
    return _llama(
        name,
        layers,
        hidden,
        heads,
        heads,
        4 * hidden,
        50272,
        2048,
        tied_embeddings=True,
        gated_mlp=False,
        biases="all",
        learned_positions=2050,
    )


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("codellama-34b", 48, 8192, 64, 8, 22016, 32000, 16384),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072),
        _llama("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 131072, biases="qkv"),
        _llama("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, 131072, biases="qkv"),
        _llama("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, 131072, biases="qkv"),
        _llama("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128, qk_norm=True),
        _llama("qwen3-14b", 40, 5120, 40, 8, 17408, 151936, 40960, head_dim=128, qk_norm=True),
        _llama("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, 40960, head_dim=128, qk_norm=True),
        _llama(
            "qwen3-30b-a3b",
            48,
            2048,
            32,
            4,
            768,
            151936,
            262144,
            head_dim=128,
            qk_norm=True,
            experts=128,
            experts_per_token=8,
        ),
        _llama(
            "mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 32768, experts=8, experts_per_token=2
        ),
        _llama("yi-34b-200k", 60, 7168, 56, 8, 20480, 64000, 200000),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-30b", 48, 7168, 56),
    )
}

GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        GpuSpec("v100-16g", "volta", 112e12, 900e9, 15.77 * GIB, 16e9),
        GpuSpec("a100-40g", "ampere", 312e12, 1555e9, 39.49 * GIB, 32e9, 300e9),
        GpuSpec("a100-pcie-40g", "ampere", 312e12, 1555e9, 39.49 * GIB, 32e9),
        GpuSpec("a100-80g", "ampere", 312e12, 2039e9, 79.2 * GIB, 32e9, 300e9),
        GpuSpec("h100", "hopper", 989e12, 3350e9, 79.2 * GIB, 64e9, 450e9),
        GpuSpec("h200", "hopper", 989e12, 4800e9, 139.8 * GIB, 64e9, 450e9),
        GpuSpec("l20", "ada-capped", 119.5e12, 864e9, 44.5 * GIB, 32e9),
        GpuSpec("l40s", "ada", 362e12, 864e9, 44.5 * GIB, 32e9),
        GpuSpec("b200", "blackwell", 2250e12, 7700e9, 178.35 * GIB, 64e9, 900e9),
        GpuSpec("rtxpro6000", "blackwell-workstation", 503.8e12, 1597e9, 97887 * 2**20, 64e9),
        GpuSpec("rtx4090", "ada-geforce", 165.2e12, 1008e9, 25250627584, 32e9),
    )
}

ALIASES = {
    "a100": "a100-80g",
    "a100-40g-pcie": "a100-pcie-40g",
    "v100": "v100-16g",
    "rtx-pro-6000": "rtxpro6000",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: x` or nothing, for the end of an error line."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; nearest: {found[0]}" if found else ""


# GPUs with operator tables in aiconfigurator-core, and what these are called there.
SYSTEMS = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "a100-80g": "a100_sxm",
    "l40s": "l40s",
    "b200": "b200_sxm",
    "rtxpro6000": "rtx_pro_6000_server",
}


def find_model(name: str) -> ModelSpec:
    """The model of that name, in any case, or of a config.json: a path, or an id in the local hub
    cache (models/config.py). ProfileError with the nearest name otherwise."""
    if name.lower() not in MODELS and is_reference(name):
        return read_model(name)
    spec = MODELS.get(name.lower())
    if spec is None:
        known = nearest(name.lower(), MODELS) or f"; there are {', '.join(MODELS)}"
        raise ProfileError(f"unknown model {name!r}{known}")
    return spec


def find_gpu(name: str) -> GpuSpec:
    """The GPU of that name or alias (`a100` is the 80 GB one), in any case; ProfileError
    otherwise."""
    key = name.lower()
    spec = GPUS.get(ALIASES.get(key, key))
    if spec is None:
        known = nearest(key, [*GPUS, *ALIASES]) or f"; there are {', '.join(GPUS)}"
        raise ProfileError(f"unknown GPU {name!r}{known}")
    return spec
