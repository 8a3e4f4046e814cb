"""A model from a Hugging Face config.json: a file, a folder, or an id in the local hub cache.

Nothing is fetched. What is not understood is refused by name: an architecture (`families.py`), a
quantisation, a field that may change memory or compute (`fields.py`).
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from twinserve.profiles.models.families import FAMILIES
from twinserve.profiles.models.fields import Fields
from twinserve.profiles.models.hub_ids import why_not
from twinserve.profiles.models.quantization import count_exceptions, read_quantization
from twinserve.profiles.specs import ModelSpec, ProfileError, one_line, read_json


def vision_parameters(kind: str, vision: Fields, hidden: int) -> int:
    """Of the tower and its projection to `hidden`, for a model of type `kind`. ProfileError for a
    tower that is not understood."""
    if kind not in TOWERS:
        raise ProfileError(
            f"{vision.where}: the vision tower of {kind!r} is not understood, so its memory is not "
            "known; give the config.json of the text model"
        )
    return TOWERS[kind](vision, hidden)


def _encoder(vision: Fields, layers: int, width: int, inner: int) -> int:
    """Transformer layers with biases and LayerNorms."""
    attention = 4 * (width * width + width)
    return layers * (attention + 2 * width * inner + inner + width + 4 * width)


def _siglip(vision: Fields, hidden: int) -> int:
    """Gemma 3's: a SigLIP with a norm and a matrix to the text model."""
    width, patch = vision.need("hidden_size", 1152), vision.divisor("patch_size", 14)
    places = (vision.need("image_size", 896) // patch) ** 2
    found = _encoder(
        vision, vision.need("num_hidden_layers", 27), width, vision.need("intermediate_size", 4304)
    )
    found += 3 * patch * patch * width + width + places * width + 2 * width
    return found + width * hidden + width


def _merger(width: int, out: int) -> int:
    """Four patches in a row through two matrices with biases."""
    return (4 * width) ** 2 + 4 * width + 4 * width * out + out


def _qwen3_vl(vision: Fields, hidden: int) -> int:
    """Some layers' patches go to the text model as well (`deepstack`)."""
    width, patch = vision.need("hidden_size", 1152), vision.divisor("patch_size", 16)
    deep = len(vision.items("deepstack_visual_indexes", int))
    found = _encoder(vision, vision.need("depth", 27), width, vision.need("intermediate_size"))
    found += 3 * vision.need("temporal_patch_size", 2) * patch * patch * width + width
    found += vision.need("num_position_embeddings", 2304) * width + 2 * width
    return found + (1 + deep) * _merger(width, hidden) + deep * 8 * width


def _qwen2_5_vl(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("hidden_size", 1280), vision.divisor("patch_size", 14)
    inner = vision.need("intermediate_size", 3420)
    layer = 4 * (width * width + width) + 3 * width * inner + 2 * inner + 3 * width
    found = vision.need("depth", 32) * layer + width
    return found + 3 * 2 * patch * patch * width + _merger(width, hidden)


def _kimi(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("vt_hidden_size", 1152), vision.divisor("patch_size", 14)
    places = vision.need("init_pos_emb_height", 64) * vision.need("init_pos_emb_width", 64)
    layers = vision.need("vt_num_hidden_layers", 27)
    found = _encoder(vision, layers, width, vision.need("vt_intermediate_size", 4304))
    found += 3 * patch * patch * width + width + places * width + 4 * width
    return found + _merger(width, hidden)


def _pixtral(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("hidden_size", 1024), vision.divisor("patch_size", 16)
    layer = 4 * width * width + 3 * width * vision.need("intermediate_size", 4096) + 2 * width
    found = vision.need("num_hidden_layers", 24) * layer + 3 * patch * patch * width + 2 * width
    return found + 4 * width * width + width * hidden + hidden * hidden


def _internvit(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("hidden_size", 1024), 14
    layers, inner = vision.need("num_hidden_layers", 24), vision.need("intermediate_size", 4096)
    found = _encoder(vision, layers, width, inner) + layers * 2 * width
    found += 3 * patch * patch * width + ((448 // patch) ** 2 + 3) * width
    return found + 8 * width + 4 * width * hidden + hidden + hidden * hidden + hidden


def _glm4v(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("hidden_size", 1536), vision.divisor("patch_size", 14)
    places = (vision.need("image_size", 336) // patch) ** 2
    layer = 4 * width * width + 3 * width * hidden + 2 * width
    found = vision.need("depth", 24) * layer + 3 * 2 * patch * patch * width + places * width
    found += 4 * width * hidden + hidden * hidden
    return found + 3 * hidden * vision.need("intermediate_size", 13696)


def _llama4(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("hidden_size", 1408), vision.divisor("patch_size", 14)
    inner = vision.need("intermediate_size", 5632)
    places = (vision.need("image_size", 336) // patch) ** 2 + 1
    into, out = vision.need("projector_input_dim", 4096), vision.need("projector_output_dim", 4096)
    found = _encoder(vision, vision.need("num_hidden_layers", 34), width, inner)
    found += 3 * patch * patch * width + (1 + places) * width + 4 * width
    return found + inner * into + out * out + vision.need("vision_output_dim", 4096) * hidden


TOWERS: dict[str, Callable[[Fields, int], int]] = {
    "gemma3": _siglip,
    "llama4": _llama4,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "kimi_k25": _kimi,
    "mistral3": _pixtral,
    "internvl": _internvit,
    "interns1": _internvit,
    "glm4v_moe": _glm4v,
}


# Bytes of a weight; vLLM (`--dtype auto`) keeps those of float32 in 16 bits.
SIZES = {"float32": 2, "bfloat16": 2, "float16": 2}
# Model types that hold a text model's config as `text_config`, and how that calls itself.
NESTED = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "kimi_k25": "kimi_k2",
    "mistral3": "ministral3",
    "internvl": "qwen3",
    "interns1": "qwen3_moe",
    "glm4v_moe": "glm4_moe",
}
# What vLLM goes by, beside the model type: the class that a config.json names.
NESTED_CLASSES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "interns1": "InternS1ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Quantised checkpoints are called so; their config.json may leave it to a file beside it.
_CALLED = re.compile(
    r"(?:^|[-.])(fp8|nvfp4|mxfp4|fp4|awq|gptq|int8|int4|w4a16|w8a16|w8a8|w4a4)(?=[-.]|$)"
)


def is_reference(name: str) -> bool:
    """Whether a model's name means a config.json (a path or a hub id) and none of the catalogue."""
    return "/" in name or name.lower().endswith(".json") or Path(name, "config.json").is_file()


def read_model(reference: str | Path) -> ModelSpec:
    """The model of a config.json, of a folder that holds one, or of an id in the local hub cache.
    Its name is the file's or, for config.json, the folder's or id."""
    path = Path(reference)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file() and HUB_ID.fullmatch(str(reference)) and path.suffix != ".json":
        path, name = cached_config(str(reference)), model_name(str(reference))
    else:
        name = model_name(path.resolve().parent.name if path.name == "config.json" else path.stem)
    found = read_config(path, name)
    called = _CALLED.search(name)
    if called and found.weights is None:
        raise ProfileError(
            f"{path}: {name} is called {called[1]}, and there is no quantization_config; put the "
            "checkpoint's hf_quant_config.json into its folder, or rename a model of 16 bits"
        )
    return found


def model_name(text: str) -> str:
    """A name that can stand in MODEL@GPU: the last part of an id or path, in small letters."""
    last = text.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9.-]+", "-", last).strip("-") or "model"


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps downloads, by the rules of its
    documentation."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    found = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(found or os.path.join(home, "hub")).expanduser()


def is_cached(model: str) -> bool:
    """Whether the local hub cache has a config.json of an id."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    return any(folder.glob("snapshots/*/config.json"))


def cached_config(model: str) -> Path:
    """The config.json of an id in the local hub cache: of its main revision, else the last one that
    was fetched. ProfileError if there is none."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        path = folder / "snapshots" / main.read_text(encoding="utf-8").strip() / "config.json"
        if path.is_file():
            return path
    found = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found and (why := why_not(model)) is not None:
        raise ProfileError(f"{model}: {why}; name a model of `twinserve models` that is like it")
    if not found:
        raise ProfileError(
            f"{model}: no config.json at that path, and none in the Hugging Face cache "
            f"({hub_cache()}); fetch it with `hf download {model} config.json`, or give a path"
        )
    return found[-1]


def read_config(config: dict | str | Path, name: str | None = None) -> ModelSpec:
    """From a config.json (a path or its dict). ProfileError names the field that is missing, unfit
    or not understood."""
    where = "config.json"
    if not isinstance(config, dict):
        path, where = Path(config), str(config)
        config = _with_beside(read_json(path), path)
    whole = Fields(config, where)
    if whole.part("text_config").data or whole.get("model_type") in [*NESTED]:
        return _nested(whole, name)
    return _text_model(whole, name, {})


def _with_beside(config: dict, path: Path) -> dict:
    """With the quantisation that NVIDIA's ModelOpt writes into a file of its own."""
    beside = path.with_name("hf_quant_config.json")
    if config.get("quantization_config") or path.name != "config.json" or not beside.is_file():
        return config
    return {**config, "quantization_config": read_json(beside)}


def _nested(whole: Fields, name: str | None) -> ModelSpec:
    """A text model inside another one, whose vision tower lies in memory too."""
    kind = str(whole.get("model_type", ""))
    if kind not in NESTED:
        _unknown(whole, kind, NESTED)
    _check_classes(whole, kind, (NESTED_CLASSES[kind],))
    inside = whole.part("text_config")
    text = Fields({"model_type": NESTED[kind], **inside.data}, inside.where)
    inherited = {
        key: whole.get(key)
        for key in ("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
        if whole.get(key) is not None and text.data.get(key) is None
    }
    text = Fields({**inherited, **text.data}, text.where)
    tower = whole.part("vision_config")
    more = {}
    if tower.data:
        more["other_parameters"] = vision_parameters(kind, tower, text.need("hidden_size"))
    whole.check_rest()
    return _text_model(text, name or _own_name(whole, kind), more)


def _text_model(config: Fields, name: str | None, more: dict[str, int]) -> ModelSpec:
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        _unknown(config, kind, {**FAMILIES, **NESTED})
    family = FAMILIES[kind]
    _check_classes(config, kind, family.classes)
    said = {k: v for k, v in config.data.items() if v is not None}
    absent = {k: v for k, v in family.absent.items() if k not in config.data}
    fields = Fields({**family.defaults, **absent, **said}, config.where)
    try:
        found = _common(fields, family.width) | read_quantization(fields)
        changes = family.read(fields)
        found["other_parameters"] = (
            found["other_parameters"]
            + changes.pop("other_parameters", 0)
            + more.get("other_parameters", 0)
        )
        if not fields.asked("layer_types"):
            _all_full(fields)
        fields.get("model_type")
        fields.check_rest()
        spec = ModelSpec(name=name or _own_name(config, kind), **{**found, **changes})
        return count_exceptions(spec, fields)
    except ValidationError as error:
        raise ProfileError(f"{config.where}: {one_line(error)}") from None


def _common(config: Fields, width: str) -> dict[str, Any]:
    """What all decoders have."""
    layers, hidden = config.need("num_hidden_layers"), config.need("hidden_size")
    heads = config.need("num_attention_heads")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    config.get("dtype")
    if dtype not in SIZES:
        raise ProfileError(
            f"{config.where}: torch_dtype {dtype!r} is not one of {', '.join(SIZES)}"
        )
    if config.get("head_dim") is None and hidden % max(heads, 1):
        config.refuse("hidden_size", f"is no multiple of {heads} heads, and there is no head_dim")
    biased = config.flag("attention_bias")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads),
        "head_dim": config.number("head_dim", hidden // max(heads, 1)),
        "intermediate": config.need(width),
        "vocab": config.need("vocab_size"),
        "max_positions": config.need("max_position_embeddings"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        **({} if SIZES[dtype] == 2 else {"dtype_bytes": SIZES[dtype]}),  # as ModelSpec's default
        "biases": "qkv" if biased else None,
        "other_parameters": layers * hidden if biased else 0,  # that of the output projection
    }


def _all_full(config: Fields) -> None:
    """Layers of a kind that the family does not have are refused."""
    kinds = config.items("layer_types", str)
    if {*kinds} - {"full_attention"}:
        config.refuse("layer_types", "layers of these kinds are not understood")
    if kinds and len(kinds) != config.need("num_hidden_layers"):
        config.refuse("layer_types", "is not one a layer")


def _check_classes(config: Fields, kind: str, classes: tuple[str, ...]) -> None:
    for one in config.items("architectures", str):
        if not one.endswith(("ForCausalLM", "ForConditionalGeneration")):
            config.refuse("architectures", "does not generate text")
        if one not in classes:
            config.refuse(
                "architectures", f"with model_type {kind} only {' or '.join(classes)} is understood"
            )


def _own_name(config: Fields, kind: str) -> str:
    return model_name(str(config.data.get("_name_or_path") or kind or "model"))


def _unknown(config: Fields, kind: str, known) -> None:
    if not kind:
        raise ProfileError(
            f"{config.where}: no field 'model_type'; give a Hugging Face config.json"
        )
    raise ProfileError(
        f"{config.where}: architecture {kind!r} is not understood; those are: "
        f"{', '.join(sorted(known))}"
    )
