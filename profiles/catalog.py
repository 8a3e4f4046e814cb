"""The models and GPUs known by name.

Models: the config.json files on Hugging Face (checked by parameter count in the tests;
`models/known.py` has more of them, `models/published.py` their sources). GPUs: `gpus.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from twinserve.profiles.gpu_labels import gpu_of_label
from twinserve.profiles.gpus import ALIASES, GPUS
from twinserve.profiles.models.config import HUB_ID, is_cached, is_reference, read_model
from twinserve.profiles.models.hub_ids import catalogue_name
from twinserve.profiles.models.known import MORE_MODELS
from twinserve.profiles.models.quantization import FORMATS, quantized
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError


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
        *MORE_MODELS,
    )
}


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: x` or nothing, for the end of an error line."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.45)
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
    cache (models/config.py). A format after a name, llama-3.1-70b-fp8, quantises its weights
    (models/quantization.py). ProfileError with the nearest name otherwise."""
    if name.lower() not in MODELS and is_reference(name):
        known = known_id(name)
        return find_model(known) if known else read_model(name)
    spec = MODELS.get(name.lower())
    base, _, suffix = name.lower().rpartition("-")
    if spec is None and suffix in FORMATS and base in MODELS:
        return quantized(MODELS[base], suffix)
    if spec is None and Path(name).is_dir():
        raise ProfileError(f"{name}: the folder holds no config.json, and no model is called so")
    if spec is None:
        known = nearest(name.lower(), MODELS) or f"; there are {', '.join(MODELS)}"
        raise ProfileError(f"unknown model {name!r}{known}")
    return spec


def known_id(name: str) -> str | None:
    """The catalogue's name of a Hugging Face id, where no file of that name says more."""
    if not HUB_ID.fullmatch(name) or Path(name).exists() or is_cached(name):
        return None
    return catalogue_name(name)


def gpu_name(name: str) -> str:
    """The catalogue's name of an alias or of a label that means a GPU; else the name, small."""
    key = ALIASES.get(name.lower(), name.lower())
    return key if key in GPUS else gpu_of_label(name) or key


def find_gpu(name: str) -> GpuSpec:
    """The GPU of that name, alias (`a100` is the 80 GB one) or label (`gpu_labels.py`), in any
    case; ProfileError otherwise."""
    key = name.lower()
    spec = GPUS.get(gpu_name(name))
    if spec is None:
        known = nearest(key, [*GPUS, *ALIASES]) or f"; there are {', '.join(GPUS)}"
        raise ProfileError(f"unknown GPU {name!r}{known}")
    return spec
