"""A Llama of 0.4 M parameters with seeded weights, as a folder that vLLM loads like any other.

vLLM's own dummy weights will not do: every tensor is drawn with one seed and tiny amplitude, so the
embedding equals the output head, all logits tie and the model echoes. These weights are drawn
apart, and large enough for attention to be sharp: what a request is told depends on its whole
text, so a wrong KV block shows in its output.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

VOCAB = 512
HIDDEN = 128
MLP = 256
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32

# Gains over 1/sqrt(fan in): queries and keys make attention peaked, values and outputs make it
# matter beside the residual stream, the head sets tokens apart by far more than float32 rounding.
SHARPNESS = 1.6
ATTENTION = 2.0
HEAD = 2.0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors into `folder`; the same seed gives the same weights.
    Returns the folder."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCAB, HIDDEN, gain=HEAD),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, SHARPNESS),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, ATTENTION),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, ATTENTION),
            f"{layer}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.post_attention_layernorm.weight": ones,
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
