"""Catalogue models by their ids on Hugging Face, with the variants that share their sizes: tuned
for instructions, of another date, or with quantised weights.

An id is understood if, without such words, it is that of a catalogue model. What was trained on
from one keeps its sizes; where the id does not show which, `_TUNED` says so (the model cards).
"""

from __future__ import annotations

import re
from functools import cache

from twinserve.profiles.models.published import PUBLISHED
from twinserve.profiles.models.quantization import FORMATS

# Words of an id that change no size.
_SAME = re.compile(
    r"-(?:instruct|chat|it|hf|base|thinking|reasoning|latest|preview|v0\.3|2512|2507|2503|2501|2407"
    r"|0905|0528|0324|pt|dynamic|block|kv|mlperf|original)(?=-|$)"
)
# Words for quantised weights, and the format that they mean.
_FORMATS: tuple[tuple[str, str], ...] = (
    (r"-awq(?:-int4|-4bit|-marlin)?", "awq"),
    (r"-gptq-(?:int8|8bit)", "gptq8"),
    (r"-gptq(?:-int4|-4bit)?", "gptq"),
    (r"[-.](?:quantized\.)?w8a8(?:-int8)?|-int8", "int8"),
    (r"[-.](?:quantized\.)?w4a16|-int4", "int4"),
    (r"-nvfp4|-fp4", "nvfp4"),
    (r"-mxfp4", "mxfp4"),
    (r"-fp8(?=-|$)", "fp8"),
)
# Weights that ids of these models mean without a word.
_NATIVE = {
    "deepseek-v3": "fp8",
    "gpt-oss-20b": "mxfp4",
    "gpt-oss-120b": "mxfp4",
    "kimi-k2": "fp8",
    "kimi-k2-0905": "fp8",
    "kimi-k2-thinking": "int4",
    "kimi-k2.5": "int4",
    "kimi-k2.5-nvfp4": "nvfp4",
    "kimi-k2.6-nvfp4": "nvfp4",
}
# Models that were trained on from one of the catalogue, and their longest request where it differs.
_TUNED: dict[str, tuple[str, int | None]] = {
    "deepseek-r1": ("deepseek-v3", None),
    "deepseek-v3.1": ("deepseek-v3", None),
    "deepseek-v3.1-terminus": ("deepseek-v3", None),
    "deepseek-r1-distill-llama-8b": ("llama-3.1-8b", None),
    "deepseek-r1-distill-llama-70b": ("llama-3.3-70b", None),
    "deepseek-r1-distill-qwen-7b": ("qwen2.5-7b", None),
    "deepseek-r1-distill-qwen-14b": ("qwen2.5-14b", None),
    "deepseek-r1-distill-qwen-32b": ("qwen2.5-32b", None),
    "deepseek-r1-qwen3-8b": ("deepseek-r1-0528-qwen3-8b", None),
    "glm-4.7": ("glm-4.6", None),
    "internvl3-5-8b": ("internvl3.5-8b", None),
    "kimi-k2.6": ("kimi-k2.5", None),
    "kimi-k2.7-code": ("kimi-k2.5", None),
    "qwq-32b": ("qwen2.5-32b", 40960),
    "llama-3-8b": ("llama-3.1-8b", 8192),
    "minimax-m2": ("minimax-m2.5-fp8", None),
    "minimax-m2.1": ("minimax-m2.5-fp8", None),
    "minimax-m2.5": ("minimax-m2.5-fp8", None),
    "minimax-m2.7": ("minimax-m2.5-fp8", None),
    "qwen3-coder-30b-a3b": ("qwen3-30b-a3b", None),
    "granite-3.2-2b": ("granite-3.1-2b", None),
    "granite-3.2-8b": ("granite-3.1-8b", None),
    **{f"qwen2.5-coder-{size}": (f"qwen2.5-{size}", 32768) for size in ("7b", "14b", "32b")},
    **{f"qwen3guard-gen-{size}": (f"qwen3-{size}", 32768) for size in ("0.6b", "4b", "8b")},
}
_QWEN2_5 = tuple(f"qwen2.5-{size}" for size in ("1.5b", "7b", "14b", "32b", "72b"))

# Ids of models that no ModelSpec stands for, and why: their config.json in aiconfigurator-core, or
# the class that vLLM 0.32 has for them.
_OTHERS: tuple[tuple[str, str], ...] = (
    (
        r"tts|asr|ocr|whisper|voxtral|voxcpm|moss-|higgs-audio|cosmos|glm-(?:image|ga)|diariz|s2-pro"
        r"|jina|embed|rerank|bert|stable-diffusion|flux",
        "it makes or reads speech, pictures or vectors, and is not simulated",
    ),
    (
        r"qwen3[.-](?:5|6|next)|kimi-linear|lfm2|nemotron-(?:3|nano|h)|plamo|granite-4|jamba|mamba"
        r"|falcon-h1|ling-3|ring-2\.6|minimax-(?:text|m1)",
        "layers with a fixed state in place of KV (Mamba, linear attention) are not simulated",
    ),
    (
        r"deepseek-v(?:3\.2|4)|glm-5|minimax-m3",
        "sparse attention, which reads a chosen part of the KV, is not simulated",
    ),
    (
        r"gemma-4|mimo-v2|step-3",
        "layers whose KV differs in heads or head size from the others' are not simulated",
    ),
)


@cache
def _by_key() -> dict[str, str]:
    found = {}
    for name, published in PUBLISHED.items():
        for text in (name, published.hub, published.shipped):
            found.setdefault(_key(text)[0], name)
    return found


def _key(text: str) -> tuple[str, str | None]:
    """An id without its owner and without what changes no size, and the format of its weights."""
    word = text.rpartition("/")[2].lower().replace("_", "-").strip("-").removeprefix("meta-")
    form = None
    for pattern, name in _FORMATS:
        found = re.search(pattern, word)
        if found is not None:
            word, form = word[: found.start()] + word[found.end() :], name
            break
    return _SAME.sub("", word).strip("-"), form


def catalogue_name(model: str) -> str | None:
    """The catalogue's name of a Hugging Face id, `qwen2.5-72b-gptq` of
    Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4; None: it is none of the catalogue's."""
    word = model.rpartition("/")[2].lower()
    if word in PUBLISHED:
        return word
    key, form = _key(model)
    if re.fullmatch(r".*/ministral-3-\w+-instruct-2512", model.lower()):
        form = "fp8"  # others of these have 16 bits
    date = next((d for d in ("-2507", "-0905") if d in word and key + d in PUBLISHED), "")
    if (key, form) == ("kimi-k2.7-code", "nvfp4"):
        return "kimi-k2.6-nvfp4"
    name = _TUNED[key][0] if key in _TUNED else _by_key().get(key)
    name = key + date if date else name
    if name is None or re.search(r"-v0\.[12](?=-|$)", model.lower()) and name == "mistral-7b":
        return None
    with_format = f"{name}-{form}"
    if form in (None, _NATIVE.get(name)) or name.endswith(f"-{form}"):
        return name
    if name.endswith("-fp8"):  # of a model whose own weights are that
        sibling = f"{name.removesuffix('-fp8')}-{form}"
        return sibling if sibling in PUBLISHED else None
    return with_format if form in FORMATS and name not in _NATIVE else None


def why_not(model: str) -> str | None:
    """Why a model of which only the id is known cannot be simulated; None: it does not say."""
    word = model.rpartition("/")[2].lower().replace("_", "-")
    return next((why for pattern, why in _OTHERS if re.search(pattern, word)), None)


def longest_request(model: str) -> int | None:
    """Positions of an id where they are not those of its catalogue model."""
    key, _ = _key(model)
    if key in _TUNED:
        return _TUNED[key][1]
    word = model.rpartition("/")[2].lower()
    if key in _QWEN2_5 and "-instruct" in word:
        return 32768
    return 40960 if key == "qwen3-30b-a3b" and "-2507" not in word and "/" in model else None
