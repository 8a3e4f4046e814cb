"""The folder that vLLM takes for the emulated model: a config.json with the profile's sizes, and a
tokenizer where none is named. There are no weights."""

import json
import re
from pathlib import Path

from twinserve.profiles.specs import ModelSpec

VOCAB = 8192
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(
    folder: Path, model: ModelSpec, max_model_len: int, vocab: int | None = None
) -> Path:
    """Write config.json and, unless `vocab` says that there is a tokenizer elsewhere, a tokenizer
    into `folder`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if vocab is None:
        vocab = write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],  # any that vLLM knows: the model is never built
        "model_type": "llama",
        "hidden_size": 128 * model.heads,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> int:
    """Write a byte-pair tokenizer of English, made of the help texts that come with Python: any
    text goes through it, a word is a token or two. Returns the size of its vocabulary."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (re.sub(r"[^\w\s.,;:'()-]+", " ", topics[name]) for name in sorted(topics))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def one_token_words(folder: Path) -> list[str]:
    """Return words that, with a space before, are one token each, also within such a text."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    found = (re.fullmatch("\u0120([a-z]+)", token) for token in sorted(tokenizer["model"]["vocab"]))
    return [f" {word[1]}" for word in found if word]  # a byte-level tokenizer writes a space so
