"""Parameters of vision towers: they lie in memory beside a text model, and do nothing for text."""

from __future__ import annotations

from collections.abc import Callable

from twinserve.profiles.models.fields import Fields
from twinserve.profiles.specs import ProfileError


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
