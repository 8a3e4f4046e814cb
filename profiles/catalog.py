"""The models and GPUs known by name.

Models: `models/models.json` has what matters of their config.json files on Hugging Face (checked by
parameter count in the tests; `models/published.csv` has the sources). What is left out of one is
documentation, sampling or positions (`models/fields.py`). `"sliding_window": null` says that there
is no window: without the field Mistral has one of 4,096. A vision tower is there where vLLM loads
it as well. GPUs: `gpus.csv`.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from twinserve.formats import shipped_json
from twinserve.profiles.gpu_labels import gpu_of_label
from twinserve.profiles.gpus import ALIASES, GPUS
from twinserve.profiles.models.config import (
    HUB_ID,
    is_cached,
    is_reference,
    read_config,
    read_model,
)
from twinserve.profiles.models.hub_ids import catalogue_name
from twinserve.profiles.models.quantization import FORMATS, quantized
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError


class _Catalogue(Mapping[str, ModelSpec]):
    """The models that ship. Each is read when it is asked for, because a run needs one at most."""

    def __init__(self) -> None:
        self._configs = shipped_json("twinserve.profiles.models", "models.json")
        self._read: dict[str, ModelSpec] = {}

    def __getitem__(self, name: str) -> ModelSpec:
        if name not in self._read:
            self._read[name] = read_config(self._configs[name], name)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._configs

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)


MODELS: Mapping[str, ModelSpec] = _Catalogue()


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: x` or nothing, for the end of an error line."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.45)
    return f"; nearest: {found[0]}" if found else ""


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
    """Return the catalogue's name of a Hugging Face id, if no file of that name says more."""
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
