"""Quantised weights: the bits a weight of each format, scales included, and the reading of a
config.json's `quantization_config`.

Bits: weights, and the scales of their group (formats' own documents). INT4 of AWQ and GPTQ: 16 bits
of scale and 4 of zero point a group; MXFP4 (OCP): 8 bits for 32; NVFP4: 8 bits for 16; FP8 in
blocks: 32 bits for 128 x 128, else one scale a channel or tensor, which is nothing. Norms,
embeddings, the output projection and routers are left as they are.

Names of modules in 16 bits are read as in vLLM 0.32 (`ModelOptQuantConfigBase.is_layer_excluded`,
`should_ignore_layer` of compressed-tensors). A name means a module and all below it, with `*` for
anything, or a regular expression after `re:`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from twinserve.profiles.models.fields import Fields
from twinserve.profiles.specs import ModelSpec, ProfileError, WeightFormat

KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
# Modules that are never counted as quantised.
_PLAIN = re.compile(
    r"lm_head|embed|norm|router|gate$|mlp\.gate\b|e_score_correction_bias$|vision|visual"
    r"|multi_modal|mm_projector|re:.*(lm_head|gate\$)"
)
_NEXT_TOKENS = re.compile(r"(^|[.*])mtp\b")  # layers that only speculation loads
_LAYER = re.compile(r"layers\.(\d+)(?=\.|\*|$)")
# A language model inside another one.
_INSIDE = re.compile(r"^(model\.)?language_model\.(model\.)?")
_EXPERTS = "mlp.experts"


def leave_out(llm: ModelSpec, config: Fields) -> ModelSpec:
    """`llm`, whose weights know how many parameters keep 16 bits. config: the object that lists
    them. ProfileError for a name that is not understood, or that means routed experts."""
    weights = llm.weights
    if weights is None:
        return llm
    layers = [dict(_matrices(llm, number)) for number in range(llm.layers)]
    plain: set[tuple[int, str]] = set()
    for key in KEYS:
        for name in config.items(key, str):
            found = set(_meant(name, layers, config, key))
            if not found and not _is_harmless(name, llm.layers):
                _refuse(config, key, name, "names no matrix of the model")
            if llm.dense_layers and llm.latent is None and _of_mlps(found):
                _refuse(config, key, name, "the dense layers are unknown here")
            if any(module.startswith(_EXPERTS) for _, module in found):
                _refuse(config, key, name, "routed experts in 16 bits are not understood")
            plain |= found
    if weights.experts_only or not plain:
        return llm
    count = sum(layers[number][module] for number, module in plain)
    return replace(llm, weights=replace(weights, plain=count))


def _refuse(config: Fields, key: str, name: str, why: str) -> None:
    raise ProfileError(f"{config.where}: {key} {name!r}: {why}")


def _of_mlps(found: set[tuple[int, str]]) -> bool:
    return any(not module.startswith("self_attn") for _, module in found)


def _is_harmless(name: str, layers: int) -> bool:
    layer = _LAYER.search(name)
    beyond = layer is not None and int(layer[1]) >= layers
    return bool(beyond or _PLAIN.search(name) or _NEXT_TOKENS.search(name))


def _matrices(llm: ModelSpec, number: int) -> Iterator[tuple[str, int]]:
    """Matrices of a layer as Hugging Face calls them, and their parameters; routed experts, which
    must not be left out, as 0. Dense layers of a mixture come first."""
    hidden, latent, heads = llm.hidden, llm.latent, llm.heads
    if latent is None:
        of_head = hidden * llm.head_dim
        for name, count in (("q", heads), ("k", llm.kv_heads), ("v", llm.kv_heads), ("o", heads)):
            yield f"self_attn.{name}_proj", of_head * count
    else:
        queries = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank:
            yield "self_attn.q_a_proj", hidden * latent.q_rank
            yield "self_attn.q_b_proj", latent.q_rank * queries
        else:
            yield "self_attn.q_proj", hidden * queries
        yield "self_attn.kv_a_proj_with_mqa", hidden * latent.cached
        yield ("self_attn.kv_b_proj", latent.kv_rank * heads * (latent.nope_dim + latent.v_dim))
        yield "self_attn.o_proj", heads * latent.v_dim * hidden
    parts = ("gate_proj", "up_proj", "down_proj") if llm.gated_mlp else ("up_proj", "down_proj")
    if llm.experts and number >= llm.dense_layers:
        yield f"{_EXPERTS}.0.down_proj", 0
        width, where = llm.shared_intermediate, "mlp.shared_experts"
    else:
        width, where = llm.dense_intermediate if llm.experts else llm.intermediate, "mlp"
    if width:
        for part in parts:
            yield f"{where}.{part}", hidden * width


def _meant(
    name: str, layers: list[dict[str, int]], config: Fields, key: str
) -> Iterator[tuple[int, str]]:
    """Layer and matrix of all that a name means."""
    given = _INSIDE.sub("model.", name).replace("shared_expert.", "shared_experts.")
    pattern = None
    if given.startswith("re:"):
        try:
            pattern = re.compile(given.removeprefix("re:"))
        except re.error as error:
            _refuse(config, key, name, f"is no regular expression ({error})")
    said = None if pattern else _LAYER.search(given)
    numbers = [int(said[1])] if said else range(len(layers))
    bare = given.strip("*").strip(".")
    for number in numbers:
        for module in layers[number] if number < len(layers) else ():
            full = f"model.layers.{number}.{module}"
            if pattern:
                meant = pattern.match(full) is not None
            elif "*" in bare:
                meant = fnmatchcase(full, given) or fnmatchcase(full, f"{given.rstrip('.*')}.*")
            else:
                meant = bool(bare) and f".{bare}." in f".{full}."
            if meant:
                yield number, module


FORMATS = {
    "fp8": WeightFormat("fp8", bits=8.0, multiplies="fp8"),
    "int8": WeightFormat("int8", bits=8.0, multiplies="int8"),
    "int4": WeightFormat("int4", bits=4.0 + 20 / 128, group=128),
    "awq": WeightFormat("awq", bits=4.0 + 20 / 128, group=128),
    "gptq": WeightFormat("gptq", bits=4.0 + 20 / 128, group=128),
    "gptq8": WeightFormat("gptq-8bit", bits=8.0 + 24 / 128, group=128),
    "mxfp4": WeightFormat("mxfp4", bits=4.0 + 8 / 32),
    "nvfp4": WeightFormat("nvfp4", bits=4.0 + 8 / 16, multiplies="fp4", group=16),
}
# Widths of MLPs that the published checkpoints of a format have, where they are not the model's:
# Qwen padded 29,568 (231 groups of 128) before it quantised. GPTQ: as the model card of
# Ubuku/Qwen2.5-Math-72B-Instruct-GPTQ-Int4-TP2 reports of Qwen's own; AWQ: taken to be the same.
_PADDED = {("qwen2.5-72b", "awq"): 29696, ("qwen2.5-72b", "gptq"): 29696}
_PADDED["qwen2.5-72b", "gptq8"] = 29696
# What Marlin takes, and vLLM 0.32 gives GPTQ to no other kernel (`AutoGPTQLinearMethod`).
_GPTQ_GROUPS = (0, 32, 64, 128)
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
    width = _PADDED.get((llm.name, name), llm.intermediate)
    padded = replace(llm, intermediate=width) if width != llm.intermediate else llm
    return with_format(padded, FORMATS[name], f"{llm.name}-{name}")


def with_format(llm: ModelSpec, weights: WeightFormat, name: str) -> ModelSpec:
    """`llm` under another name, with these weights."""
    return replace(llm, weights=weights, name=name)


def read_quantization(config: Fields) -> dict[str, Any]:
    """Fields of ModelSpec from a `quantization_config`. ProfileError, which names the field, for
    a format that is not understood. What it leaves in 16 bits: `count_exceptions`."""
    found = _found(config)
    if found is None:
        return {}
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
    for key in KEYS:
        found.get(key)
    changes: dict[str, Any] = {"weights": weights}
    if _kv_is_fp8(found):
        changes["kv_dtype_bytes"] = 1.0
    _check_rest(found)
    return changes


def count_exceptions(llm: ModelSpec, config: Fields) -> ModelSpec:
    """`llm` with the matrices that its `quantization_config` leaves in 16 bits. ProfileError for
    one that is not understood."""
    found = _found(config)
    return llm if found is None else leave_out(llm, found)


def _found(config: Fields) -> Fields | None:
    """The object that says the format, which ModelOpt keeps one deeper; None if there is
    none."""
    whole = config.part("quantization_config")
    if not whole.data:
        whole = config.part("compression_config")
    if not whole.data:
        return None
    inner = whole.get("quantization")
    return Fields(inner, whole.where) if isinstance(inner, dict) else whole


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
    """AWQ and GPTQ: integers in groups, and of these what vLLM takes (`TYPE_MAP` of its
    `AutoAWQConfig` and `AutoGPTQConfig`, `normalize_and_validate_gptq_desc_act`)."""
    bits = config.number("bits", 0) or config.number("w_bit", 4)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        config.refuse("bits", "vLLM takes 4 bits of AWQ, and 4 and 8 of GPTQ")
    group = _group(config, config.number("group_size", config.number("q_group_size", 128)))
    if method == "gptq":
        if not config.flag("sym", True):
            config.refuse("sym", "vLLM takes symmetric weights of GPTQ only")
        if config.flag("desc_act") and group:
            config.refuse("desc_act", "vLLM does not support GPTQ groups in activation order")
        if group not in _GPTQ_GROUPS:
            config.refuse("group_size", "vLLM takes -1, 32, 64 and 128 of GPTQ")
    extra = (16 + bits) / group if group else 0.0
    return WeightFormat(method if bits == 4 else f"{method}-8bit", bits=bits + extra, group=group)


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
    of_modelopt = config.get("quant_algo") is not None  # which may leave out that it means all
    if len(groups.data) != 1:
        config.refuse("config_groups", "several groups are not understood")
    (name,) = groups.data
    group = groups.part(name)
    if {*(group.items("targets", str) or of_modelopt * ["Linear"])} != {"Linear"}:
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
        if inputs and size:
            config.refuse("config_groups", "vLLM takes no INT8 inputs to weights in groups")
        extra = 16 / size if size else 0.0
        return WeightFormat("int8", 8.0 + extra, "int8" if inputs else "bf16", group=size)
    if (bits, kind) == (4, "int") and not inputs:
        return WeightFormat("int4", bits=4.0 + (20 / size if size else 0.0), group=size)
    if (bits, kind) == (4, "float") and size == 16:
        return replace(FORMATS["nvfp4"], multiplies="fp4" if inputs else "bf16")
    config.refuse("config_groups", f"weights of {bits} bits ({kind}, {form}) are not understood")


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
