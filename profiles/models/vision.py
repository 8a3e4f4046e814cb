"""Parameters of vision towers: they lie in memory beside a text model, and do nothing for text."""

from __future__ import annotations

from twinserve.profiles.models.fields import Fields
from twinserve.profiles.specs import ProfileError


def vision_parameters(kind: str, vision: Fields, hidden: int) -> int:
    """Of the tower and its projection to `hidden`, for a model of type `kind`. ProfileError for a
    tower that is not understood."""
    known = {"gemma3": _siglip, "llama4": _llama4}
    if kind not in known:
        raise ProfileError(
            f"{vision.where}: the vision tower of {kind!r} is not understood, so its memory is not "
            "known; give the config.json of the text model"
        )
    return known[kind](vision, hidden)


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


def _llama4(vision: Fields, hidden: int) -> int:
    width, patch = vision.need("hidden_size", 1408), vision.divisor("patch_size", 14)
    inner = vision.need("intermediate_size", 5632)
    places = (vision.need("image_size", 336) // patch) ** 2 + 1
    into, out = vision.need("projector_input_dim", 4096), vision.need("projector_output_dim", 4096)
    found = _encoder(vision, vision.need("num_hidden_layers", 34), width, inner)
    found += 3 * patch * patch * width + (1 + places) * width + 4 * width
    return found + inner * into + out * out + vision.need("vision_output_dim", 4096) * hidden
