"""config.json files of published models, as their folders on the hub have them."""

import json
from pathlib import Path


def config(name: str) -> dict:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


DEEPSEEK_V3, GEMMA_3, GPT_OSS = map(config, ("deepseek_v3", "gemma_3", "gpt_oss"))
LLAMA, MINIMAX, NEMO = map(config, ("llama", "minimax", "nemo"))
PHI_2, SCOUT = map(config, ("phi_2", "scout"))
MAVERICK = {
    "model_type": "llama4",
    "text_config": {
        **SCOUT["text_config"],
        "interleave_moe_layer_step": 2,
        "num_local_experts": 128,
        "max_position_embeddings": 1048576,
        "use_qk_norm": False,
    },
}
