"""Matrices that a quantised checkpoint leaves in 16 bits, from the names that its config lists.

Names mean what vLLM 0.32 takes them for (`ModelOptQuantConfigBase.is_layer_excluded`,
`should_ignore_layer` of compressed-tensors): a module and all below it, with `*` for anything, or a
regular expression behind `re:`. Part of a name, as in `layers.1` of `layers.10`, is not meant here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from twinserve.profiles.models.fields import Fields
from twinserve.profiles.specs import ModelSpec, ProfileError

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
                _refuse(config, key, name, "no matrix that is counted is called so")
            if llm.dense_layers and llm.latent is None and _of_mlps(found):
                _refuse(config, key, name, "which layers are dense is not known here")
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
