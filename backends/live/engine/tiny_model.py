"""Small Llamas with seeded weights, as folders that vLLM loads like any other.

`tiny` (0.4 M parameters) runs anywhere, and a step of it is hardly more than the engine's own work.
`deep` (1.4 M) is a tiny one of eight layers, for moves of single layers.
`small` (18 M) is bound by reading its weights, as real models are on GPUs: for step times that mean
something on a CPU.

vLLM's own dummy weights will not do: every tensor is drawn with one seed and tiny amplitude. So the
embedding equals the output head, all logits tie and the model echoes. These weights are drawn
apart, and large enough for sharp attention. An answer depends on the whole text, so a wrong KV
block shows in it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB = 512


@dataclass(frozen=True)
class Shape:
    """Of the model: widths in numbers, layers and heads."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "tiny": Shape(128, 256, 2, 4, 2, 32),
    "deep": Shape(128, 256, 8, 4, 2, 32),
    "small": Shape(512, 1024, 8, 8, 4, 64),
}

# Gains over 1/sqrt(fan in): queries and keys make attention peaked, values and outputs make it
# matter beside the residual stream, the head sets tokens apart by far more than float32 rounding.
SHARPNESS = 1.6
ATTENTION = 2.0
HEAD = 2.0


def config(name: str = "tiny") -> dict:
    """config.json of a model of MODELS."""
    shape = MODELS[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def write_model(folder: Path, name: str = "tiny") -> Path:
    """Write config.json and model.safetensors of a model of MODELS into `folder`, with the same
    weights each time. Returns the folder."""
    from safetensors.numpy import save_file

    shape = MODELS[name]
    hidden, queries, keys = (
        shape.hidden,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, gain=hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCAB, hidden, gain=HEAD),
    }
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": matrix(queries, hidden, SHARPNESS),
            f"{layer}.self_attn.k_proj.weight": matrix(keys, hidden, SHARPNESS),
            f"{layer}.self_attn.v_proj.weight": matrix(keys, hidden, ATTENTION),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries, ATTENTION),
            f"{layer}.mlp.gate_proj.weight": matrix(shape.mlp, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(shape.mlp, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, shape.mlp),
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.post_attention_layernorm.weight": ones,
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(name)))
    return folder


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> Path:
    """Write a word-level tokenizer of `vocab` tokens into `folder`: token 17 is the word w17, and
    the last one ends a text. Returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "eos_token": f"w{vocab - 1}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
