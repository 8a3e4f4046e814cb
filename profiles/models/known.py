"""Models of the catalogue whose facts are kept as their config.json has them: what is left out of
one here is documentation, sampling or positions (`fields.py`). Sources: `published.py`."""

from __future__ import annotations

from typing import Any

from twinserve.profiles.models.config import read_config
from twinserve.profiles.specs import ModelSpec

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def _sizes(layers, hidden, heads, kv_heads, head_dim, width, vocab, positions) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _dense(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **_sizes(*sizes), **more}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        **_sizes(layers, 2880, 64, 8, 64, 2880, 201088, 131072),
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "quantization_config": _MXFP4,
    }


def _llama_4(experts: int, step: int, positions: int) -> dict[str, Any]:
    """With the vision tower, which vLLM loads as well."""
    return {
        "model_type": "llama4",
        "text_config": {
            **_sizes(48, 5120, 40, 8, 128, 8192, 202048, positions),
            "intermediate_size_mlp": 16384,
            "attention_chunk_size": 8192,
            "interleave_moe_layer_step": step,
            "num_local_experts": experts,
            "num_experts_per_tok": 1,
        },
        "vision_config": {"hidden_size": 1408},
    }


def _gemma_3(*sizes: int) -> dict[str, Any]:
    """With the vision tower, which vLLM loads as well."""
    text = {**_sizes(*sizes, 262208, 131072), "sliding_window": 1024}
    return {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}


def _gemma_2(*sizes: int) -> dict[str, Any]:
    return _dense("gemma2", *sizes, 256000, 8192, sliding_window=4096)


_QWEN, _TIED = (151936, 40960), {"tie_word_embeddings": True}
_NO_WINDOW = {"sliding_window": None}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    **_sizes(61, 7168, 128, 128, None, 18432, 129280, 163840),
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "quantization_config": _FP8,
}
_QWEN3_235B = {
    "model_type": "qwen3_moe",
    **_sizes(94, 4096, 64, 4, 128, 12288, *_QWEN),
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_MIXTRAL_8X22B = {
    **_dense("mixtral", 56, 6144, 48, 8, 128, 16384, 32768, 65536),
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

_MINIMAX_M2_5 = {
    "model_type": "minimax_m2",
    **_sizes(62, 3072, 48, 8, 128, 1536, 200064, 196608),
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "use_routing_bias": True,
}
_MINIMAX_FP8 = {**_FP8, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
# its experts, and a KV cache in FP8
_MINIMAX_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head", "model.layers.*.gate", "model.layers.*.self_attn*"],
}
_QWEN1_5_MOE = {
    "model_type": "qwen2_moe",
    **_sizes(24, 2048, 16, 16, 128, 5632, 151936, 32768),
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    **_sizes(27, 2048, 16, 16, None, 10944, 102400, 163840),
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-405b": _dense("llama", 126, 16384, 128, 8, 128, 53248, 128256, 131072),
    "llama-3.3-70b": _dense("llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "llama-4-scout": _llama_4(16, 1, 10485760),
    "llama-4-maverick": _llama_4(128, 2, 1048576),
    "qwen2.5-0.5b": _dense("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _dense("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 131072, **_TIED),
    "qwen2.5-3b": _dense("qwen2", 36, 2048, 16, 2, 128, 11008, 151936, 32768, **_TIED),
    "qwen2.5-72b": _dense("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, 131072),
    "qwen3-0.6b": _dense("qwen3", 28, 1024, 16, 8, 128, 3072, *_QWEN, **_TIED),
    "qwen3-1.7b": _dense("qwen3", 28, 2048, 16, 8, 128, 6144, *_QWEN, **_TIED),
    "qwen3-4b": _dense("qwen3", 36, 2560, 32, 8, 128, 9728, *_QWEN, **_TIED),
    "qwen3-235b-a22b": _QWEN3_235B,
    # null is said, and means that there is no window: without the field there is one of 4,096
    "mistral-7b": _dense("mistral", 32, 4096, 32, 8, 128, 14336, 32768, 32768, **_NO_WINDOW),
    "mistral-nemo": _dense("mistral", 40, 5120, 32, 8, 128, 14336, 131072, 128000, **_NO_WINDOW),
    "mixtral-8x22b": _MIXTRAL_8X22B,
    "yi-6b": _dense("llama", 32, 4096, 32, 4, 128, 11008, 64000, 4096),
    "yi-34b": _dense("llama", 60, 7168, 56, 8, 128, 20480, 64000, 4096),
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma-3-1b": _dense(
        "gemma3_text", 26, 1152, 4, 1, 256, 6912, 262144, 32768, sliding_window=512
    ),
    "gemma-3-4b": _gemma_3(34, 2560, 8, 4, 256, 10240),
    "gemma-3-12b": _gemma_3(48, 3840, 16, 8, 256, 15360),
    "gemma-3-27b": _gemma_3(62, 5376, 32, 16, 128, 21504),
    "gemma-7b": _dense("gemma", 28, 3072, 16, 16, 256, 24576, 256000, 8192),
    "gemma-2-2b": _gemma_2(26, 2304, 8, 4, 256, 9216),
    "gemma-2-9b": _gemma_2(42, 3584, 16, 8, 256, 14336),
    "gemma-2-27b": _gemma_2(46, 4608, 32, 16, 128, 36864),
    "codellama-7b": _dense("llama", 32, 4096, 32, 32, 128, 11008, 32016, 16384),
    "granite-3.1-2b": _dense("granite", 40, 2048, 32, 8, 64, 8192, 49155, 131072, **_TIED),
    "granite-3.1-8b": _dense("granite", 40, 4096, 32, 8, 128, 12800, 49152, 131072, **_TIED),
    "granite-3.3-8b": _dense("granite", 40, 4096, 32, 8, 128, 12800, 49159, 131072, **_TIED),
    "minimax-m2.5-fp8": {**_MINIMAX_M2_5, "quantization_config": _MINIMAX_FP8},
    "minimax-m2.5-nvfp4": {**_MINIMAX_M2_5, "quantization_config": _MINIMAX_NVFP4},
    "qwen1.5-moe-a2.7b": _QWEN1_5_MOE,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "phi-2": _dense("phi", 32, 2560, 32, 32, 80, 10240, 51200, 2048),
    "phi-4-mini": _dense("phi3", 32, 3072, 24, 8, 128, 8192, 200064, 131072, **_TIED),
    "phi-4": _dense("phi3", 40, 5120, 40, 10, 128, 17920, 100352, 16384),
}
MORE_MODELS: tuple[ModelSpec, ...] = tuple(
    read_config(config, name) for name, config in _CONFIGS.items()
)
