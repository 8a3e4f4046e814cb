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


def _kimi(positions: int, **more: Any) -> dict[str, Any]:
    return {
        **_DEEPSEEK_V3,
        "model_type": "kimi_k2",
        **_sizes(61, 7168, 64, 64, None, 18432, 163840, positions),
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "num_nextn_predict_layers": 0,
        **more,
    }


def _with_tower(kind: str, text: dict[str, Any], **tower: Any) -> dict[str, Any]:
    """A text model with the vision tower that vLLM loads as well."""
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    text = {key: value for key, value in text.items() if key != "model_type"}
    return {"model_type": kind, "text_config": text, "vision_config": tower, **tied}


def _qwen3_vl(*sizes: int, tower: tuple[int, ...] = (27, 1152, 4304), **more: Any):
    """tower: layers, width and inner width."""
    depth, width, inner = tower
    text = {**_sizes(*sizes, 151936, 262144), **more}
    kind = "qwen3_vl_moe" if "num_experts" in more else "qwen3_vl"
    taps = {"deepstack_visual_indexes": [8, 16, 24]}
    return _with_tower(kind, text, depth=depth, hidden_size=width, intermediate_size=inner, **taps)


def _qwen2_5_vl(inner: int, *sizes: int) -> dict[str, Any]:
    text = {**_sizes(*sizes, 152064, 128000)}
    return _with_tower("qwen2_5_vl", text, hidden_size=1280, intermediate_size=inner)


def _ministral_3(*sizes: int, **more: Any) -> dict[str, Any]:
    layers, hidden, width = sizes
    text = {**_sizes(layers, hidden, 32, 8, 128, width, 131072, 262144), **more}
    return _with_tower("mistral3", text, hidden_size=1024, patch_size=14)


_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"},
        }
    },
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip


def _nvfp4(*plain: str) -> dict[str, Any]:
    """Of ModelOpt, with a KV cache in FP8. plain: what has 16 bits."""
    found = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    return {**found, "exclude_modules": ["lm_head", *plain]}


_KIMI_TOWER = {"vt_hidden_size": 1152}
_KIMI_K2_5 = _kimi(262144, quantization_config=_INT4)
_MOE_235B = {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
_MOE_30B = {**_MOE_235B, "moe_intermediate_size": 768}
_GLM_4_5 = {
    **_dense("glm4_moe", 92, 5120, 96, 8, 128, 12288, 151552, 131072),
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
_GLM_4_5_AIR = {
    **_GLM_4_5,
    **_sizes(46, 4096, 96, 8, 128, 10944, 151552, 131072),
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
_GLM_4_5V = {**_GLM_4_5_AIR, "max_position_embeddings": 65536, "num_nextn_predict_layers": 0}
_ERNIE_21B = {
    **_dense("ernie4_5_moe", 28, 2560, 20, 4, 128, 12288, 103424, 131072),
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
}
_HUNYUAN = {
    **_dense("hunyuan_v1_moe", 32, 4096, 32, 8, 128, 3072, 128167, 32768, **_TIED),
    "use_qk_norm": True,
    "num_experts": 64,
    "moe_topk": 8,
    "num_shared_expert": 1,
    "moe_intermediate_size": 3072,
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
    "llama-3.2-1b": _dense("llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, **_TIED),
    "llama-3.2-3b": _dense("llama", 28, 3072, 24, 8, 128, 8192, 128256, 131072, **_TIED),
    "qwen3-4b-2507": _dense("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 262144, **_TIED),
    "qwen3-235b-a22b-2507": {**_QWEN3_235B, "max_position_embeddings": 262144},
    "qwen3-coder-480b-a35b": {
        **_dense("qwen3_moe", 62, 6144, 96, 8, 128, 8192, 151936, 262144),
        **{"moe_intermediate_size": 2560, "num_experts": 160, "num_experts_per_tok": 8},
    },
    "deepseek-r1-0528-qwen3-8b": _dense("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 131072),
    "kimi-k2": _kimi(131072),
    "kimi-k2-0905": _kimi(262144),
    "kimi-k2-thinking": _KIMI_K2_5,
    "kimi-k2.5": _with_tower("kimi_k25", _KIMI_K2_5, **_KIMI_TOWER),
    "kimi-k2.5-nvfp4": _with_tower(
        "kimi_k25", _kimi(262144, quantization_config=_nvfp4("self_attn")), **_KIMI_TOWER
    ),
    "kimi-k2.6-nvfp4": _with_tower(
        "kimi_k25",
        _kimi(262144, quantization_config=_nvfp4("self_attn", "mlp.shared_experts", "layers.0")),
        **_KIMI_TOWER,
    ),
    "qwen3-vl-2b": _qwen3_vl(28, 2048, 16, 8, 128, 6144, tower=(24, 1024, 4096), **_TIED),
    "qwen3-vl-4b": _qwen3_vl(36, 2560, 32, 8, 128, 9728, tower=(24, 1024, 4096), **_TIED),
    "qwen3-vl-8b": _qwen3_vl(36, 4096, 32, 8, 128, 12288),
    "qwen3-vl-32b": _qwen3_vl(64, 5120, 64, 8, 128, 25600),
    "qwen3-vl-30b-a3b": _qwen3_vl(48, 2048, 32, 4, 128, 6144, **_MOE_30B),
    "qwen3-vl-235b-a22b": _qwen3_vl(94, 4096, 64, 4, 128, 12288, **_MOE_235B),
    "qwen2.5-vl-7b": _qwen2_5_vl(3420, 28, 3584, 28, 4, 128, 18944),
    "qwen2.5-vl-72b": _qwen2_5_vl(3456, 80, 8192, 64, 8, 128, 29568),
    "glm-4.5": _GLM_4_5,
    "glm-4.5-air": _GLM_4_5_AIR,
    "glm-4.6": {**_GLM_4_5, "max_position_embeddings": 202752},
    "glm-4.5v": _with_tower("glm4v_moe", _GLM_4_5V, hidden_size=1536),
    "glm-4.6v": _with_tower(
        "glm4v_moe", {**_GLM_4_5V, "max_position_embeddings": 131072}, hidden_size=1536
    ),
    "glm-4-9b": _dense("glm", 40, 4096, 32, 2, 128, 13696, 151552, 8192, attention_bias=True),
    "ernie-4.5-21b-a3b": _ERNIE_21B,
    "seed-oss-36b": _dense(
        "seed_oss", 64, 5120, 80, 8, 128, 27648, 155136, 524288, attention_bias=True
    ),
    "hunyuan-a13b": _HUNYUAN,
    "ministral-3-3b": _ministral_3(26, 3072, 9216, **_TIED),
    "ministral-3-8b": _ministral_3(34, 4096, 14336),
    "ministral-3-14b": _ministral_3(40, 5120, 16384),
    "internvl3.5-8b": _with_tower(
        "internvl", _sizes(36, 4096, 32, 8, 128, 12288, *_QWEN), hidden_size=1024
    ),
    "intern-s1": _with_tower(
        "interns1",
        {**_QWEN3_235B, "vocab_size": 153216},
        hidden_size=3200,
        num_hidden_layers=45,
        intermediate_size=12800,
    ),
}
MORE_MODELS: tuple[ModelSpec, ...] = tuple(
    read_config(config, name) for name, config in _CONFIGS.items()
)
