"""Quantised weights: how many bits a format keeps of one, scales included, and how the
`quantization_config` of a config.json says which it is.

Bits: weights, and the scales of their group (formats' own documents). INT4 of AWQ and GPTQ: 16 bits
of scale and 4 of zero point a group; MXFP4 (OCP): 8 bits for 32; NVFP4: 8 bits for 16; FP8 in
blocks: 32 bits for 128 x 128, else one scale a channel or tensor, which is nothing. Norms,
embeddings, the output projection and routers are left as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

from twinserve.profiles.models.fields import Fields
from twinserve.profiles.specs import ModelSpec, ProfileError, WeightFormat

FORMATS = {
    "fp8": WeightFormat("fp8", bits=8.0, multiplies="fp8"),
    "int8": WeightFormat("int8", bits=8.0, multiplies="int8"),
    "int4": WeightFormat("int4", bits=4.0 + 20 / 128),
    "awq": WeightFormat("awq", bits=4.0 + 20 / 128),
    "gptq": WeightFormat("gptq", bits=4.0 + 20 / 128),
    "mxfp4": WeightFormat("mxfp4", bits=4.0 + 8 / 32),
    "nvfp4": WeightFormat("nvfp4", bits=4.0 + 8 / 16, multiplies="fp4"),
}
# Modules that are never counted as quantised.
_PLAIN = re.compile(
    r"lm_head|embed|norm|router|gate$|mlp\.gate\b|vision|visual|multi_modal|re:.*(lm_head|gate\$)"
)
_HARMLESS = {
    "quant_method", "fmt", "activation_scheme", "version", "desc_act", "static_groups",
    "damp_percent", "true_sequential", "model_name_or_path", "model_file_base_name",
    "checkpoint_format",
    "meta", "quantizer", "producer", "zero_point", "sym", "is_marlin_format", "backend", "do_fuse",
    "exllama", "exllama_config", "quantization_status", "global_compression_ratio", "pack_dtype",
    "quantization", "scale_fmt",
}  # fmt: skip


def quantized(llm: ModelSpec, name: str) -> ModelSpec:
    """`llm` with weights of a format of FORMATS. ProfileError for a model that has one already."""
    if llm.weights is not None:
        raise ProfileError(f"{llm.name}: its weights are {llm.weights.name} already")
    return with_format(llm, FORMATS[name], f"{llm.name}-{name}")


def with_format(llm: ModelSpec, weights: WeightFormat, name: str) -> ModelSpec:
    """`llm` under another name, with these weights."""
    return replace(llm, weights=weights, name=name)


def read_quantization(config: Fields) -> dict[str, Any]:
    """Fields of ModelSpec from a `quantization_config`. ProfileError, which names the field, for
    a format or an exception that is not understood."""
    whole = config.part("quantization_config")
    if not whole.data:
        whole = config.part("compression_config")
    if not whole.data:
        return {}
    inner = whole.get("quantization")
    found = Fields(inner, whole.where) if isinstance(inner, dict) else whole
    method = str(found.get("quant_method", "modelopt")).lower()
    readers = {
        "fp8": _fp8,
        "awq": _packed,
        "gptq": _packed,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "compressed-tensors": _compressed,
    }
    if method not in readers:
        found.refuse("quant_method", f"only {', '.join(sorted(readers))} are understood")
    reader = _compressed if found.get("config_groups") else readers[method]
    weights = reader(found, method)
    _check_exceptions(found, weights)
    changes: dict[str, Any] = {"weights": weights}
    if _kv_is_fp8(found):
        changes["kv_dtype_bytes"] = 1.0
    _check_rest(found)
    return changes


def _fp8(config: Fields, method: str) -> WeightFormat:
    block = config.items("weight_block_size", int)
    if block and (len(block) != 2 or min(block) < 1):
        config.refuse("weight_block_size", "is not two sizes of at least 1")
    return _fp8_in(block, "fp8")


def _fp8_in(block: list[int], multiplies: Literal["fp8", "bf16"]) -> WeightFormat:
    """With a scale for each block, or for each tensor or channel, which is nothing."""
    if not block:
        return WeightFormat("fp8", 8.0, multiplies)
    return WeightFormat("fp8", 8.0 + 32 / (block[0] * block[1]), multiplies, block=max(block))


def _packed(config: Fields, method: str) -> WeightFormat:
    """AWQ and GPTQ: integers in groups."""
    bits = config.number("bits", 0) or config.number("w_bit", 4)
    if bits not in (4, 8):
        config.refuse("bits", "only 4 and 8 are understood")
    group = config.number("group_size", config.number("q_group_size", 128))
    extra = (16 + bits) / group if _group(config, group) else 0.0
    return WeightFormat(method if bits == 4 else f"{method}-8bit", bits=bits + extra)


def _group(config: Fields, size: int) -> int:
    """Weights that share a scale; 0, in files -1: those of a channel."""
    if size < 1 and size != -1:
        config.refuse("group_size", "is neither -1 (a scale a channel) nor at least 1")
    return max(size, 0)


def _mxfp4(config: Fields, method: str) -> WeightFormat:
    return WeightFormat("mxfp4", FORMATS["mxfp4"].bits, experts_only=True)


def _modelopt(config: Fields, method: str) -> WeightFormat:
    algo = str(config.get("quant_algo", "")).upper()
    if algo == "FP8":
        return FORMATS["fp8"]
    if algo == "NVFP4":
        if config.number("group_size", 16) != 16:
            config.refuse("group_size", "NVFP4 has groups of 16")
        return FORMATS["nvfp4"]
    config.refuse("quant_algo", "only FP8 and NVFP4 are understood")


def _compressed(config: Fields, method: str) -> WeightFormat:
    """compressed-tensors: one group of all matrices."""
    groups, form = config.part("config_groups"), config.get("format")
    config.get("quant_algo")
    if len(groups.data) != 1:
        config.refuse("config_groups", "several groups are not understood")
    (name,) = groups.data
    group = groups.part(name)
    if {*group.items("targets", str)} != {"Linear"}:
        config.refuse("config_groups", "only groups of all Linear layers are understood")
    weights, inputs = group.part("weights"), group.part("input_activations").data
    bits, kind = weights.get("num_bits"), weights.get("type")
    size = _group(weights, weights.number("group_size", -1))
    if inputs and (inputs.get("num_bits"), inputs.get("type")) != (bits, kind):
        config.refuse("config_groups", "inputs of another type than the weights are not understood")
    if (bits, kind) == (8, "float"):
        block = weights.items("block_structure", int)
        if weights.get("strategy") == "block" and len(block) != 2:
            config.refuse("config_groups", "blocks without a block_structure of two sizes")
        return _fp8_in(block, "fp8" if inputs else "bf16")
    if (bits, kind) == (8, "int"):
        return WeightFormat(
            "int8", bits=8.0 + (16 / size if size else 0.0), multiplies="int8" if inputs else "bf16"
        )
    if (bits, kind) == (4, "int") and not inputs:
        return WeightFormat("int4", bits=4.0 + (20 / size if size else 0.0))
    if (bits, kind) == (4, "float") and size == 16:
        return WeightFormat("nvfp4", FORMATS["nvfp4"].bits, "fp4" if inputs else "bf16")
    config.refuse("config_groups", f"weights of {bits} bits ({kind}, {form}) are not understood")


def _check_exceptions(config: Fields, weights: WeightFormat) -> None:
    """What is left unquantised must be what is counted so."""
    for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
        for module in config.items(key, str):
            if _PLAIN.search(module) or (weights.experts_only and "self_attn" in module):
                continue
            raise ProfileError(
                f"{config.where}: {key} {module!r}: matrices that are left unquantised are not "
                "understood, beside routers, embeddings, the output projection and vision towers"
            )


def _kv_is_fp8(config: Fields) -> bool:
    """What vLLM's `--kv-cache-dtype auto` takes from a checkpoint."""
    scheme, algo = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        if (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
            config.refuse("kv_cache_scheme", "only FP8 is understood")
        return True
    for key, value in (("kv_cache_scheme", scheme), ("kv_cache_quant_algo", algo)):
        if value is not None and str(value).upper() != "FP8":
            config.refuse(key, "only FP8 is understood")
    return bool(scheme or algo)


def _check_rest(config: Fields) -> None:
    for key in _HARMLESS:
        config.get(key)
    config.check_rest()
