"""Catalogue models by their ids on Hugging Face, with the variants that share their sizes: tuned
for instructions, of another date, or with quantised weights.

An id is understood if, without such words, it is that of a catalogue model. A model trained further
keeps its sizes; if the id does not show the base model, `tuned.csv` does (from the model cards).

The publication of each catalogue model, the source of its config.json, and its stated parameters.

The counts check ours (tests/profiles/test_catalogue.py), and so does each config.json that
aiconfigurator-core ships. Round numbers of a card stay round.
"""

import re
from dataclasses import dataclass
from functools import cache

from twinserve.formats import shipped_rows
from twinserve.profiles.models.quantization import FORMATS


@dataclass(frozen=True)
class Published:
    """hub: the id on Hugging Face of the config.json. billions: of parameters, as in `source`.
    seen: source of the fields of its config.json. shipped: the id under which aiconfigurator-core
    has that file."""

    hub: str
    billions: str
    source: str
    seen: str
    shipped: str


# What `seen` means. Fields that a list leaves out are what the configuration classes of
# transformers 5.19 have for the family. The parameter counts bear out widths, biases and tables.
SEEN = {
    "package": "aiconfigurator-core 0.12.0, model_configs",
    "litgpt": "litgpt 0.5.13, litgpt/config.py",
    "mlc": "github.com/mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py",
    "thunder": "github.com/kevinstephano/thunder_model_blocks, mistral/mistral_config.py",
    "paper": "sizes in the paper or model card, the rest from transformers' class of the family",
    "quoted": "the hub's config.json as tests in public source code quote it",
    "class": "transformers 5.19: the defaults of the configuration class, which name the model",
    "card": "sizes in the model card, the rest as the hub's config.json of the family",
    "slime": "github.com/THUDM/slime, scripts/models",
    "easydel": "EasyDeL 0.0.8, modules/opt: the hub's config.json",
}


PUBLISHED = {
    row.pop("name"): Published(**row) for row in shipped_rows(__package__, "published.csv")
}
"By the catalogue's name."


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
_TUNED: dict[str, tuple[str, int | None]] = {
    row["id"]: (row["model"], int(row["longest"]) if row["longest"] else None)
    for row in shipped_rows(__package__, "tuned.csv")
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
    """Return an id's positions if they differ from its catalogue model's."""
    key, _ = _key(model)
    if key in _TUNED:
        return _TUNED[key][1]
    word = model.rpartition("/")[2].lower()
    if key in _QWEN2_5 and "-instruct" in word:
        return 32768
    return 40960 if key == "qwen3-30b-a3b" and "-2507" not in word and "/" in model else None
