"""What each architecture adds to a plain decoder: experts, windows, norms, biases, latent
attention. A family is known by the `model_type` of its config.json; one that is not here is
refused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from twinserve.profiles.models.fields import Fields
from twinserve.profiles.specs import LatentAttention

Changes = dict[str, Any]  # fields of ModelSpec


@dataclass(frozen=True)
class Family:
    """read: what it adds. classes: the `architectures` that its config.json may name. defaults: of
    fields that it may leave out, or say to be null. width: the field with the width of the MLP, or
    of one expert. absent: defaults of fields whose null means something else, as in transformers
    5.19 and so vLLM."""

    read: Callable[[Fields], Changes]
    classes: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    width: str = "intermediate_size"
    absent: dict[str, Any] = field(default_factory=dict)


def _plain(config: Fields) -> Changes:
    return {}


def _llama(config: Fields) -> Changes:
    if not config.flag("mlp_bias"):
        return {}
    widths = 2 * config.need("intermediate_size") + config.need("hidden_size")
    return {"other_parameters": config.need("num_hidden_layers") * widths}


def _granite(config: Fields) -> Changes:
    """Llama's, with factors on embeddings, scores, residuals and logits, which cost nothing."""
    for what in ("embedding_multiplier", "attention_multiplier", "residual_multiplier"):
        config.get(what)
    config.get("logits_scaling")
    return _llama(config)


def _phi(config: Fields) -> Changes:
    """Phi-2: attention and MLP behind one LayerNorm, with biases everywhere."""
    if config.flag("qk_layernorm"):
        config.refuse("qk_layernorm", "only false is understood")
    layers, hidden = config.need("num_hidden_layers"), config.need("hidden_size")
    # of a layer: biases of the MLP and of attention's output; its norm's shift is where others
    # have the scale of a second one. Beside the layers: the last shift, and the output's biases.
    of_layer = config.need("intermediate_size") + 2 * hidden
    beside = hidden + config.need("vocab_size")
    return {"gated_mlp": False, "biases": "qkv", "other_parameters": layers * of_layer + beside}


def _all_windowed(config: Fields) -> Changes:
    """Mistral, Phi-3: a window applies to every layer."""
    return window(config, config.number("sliding_window"), config.need("num_hidden_layers"))


def _qwen_window(config: Fields) -> Changes:
    """Layers from `max_window_layers` on, where `use_sliding_window` says so."""
    size, first = config.number("sliding_window"), config.number("max_window_layers")
    if not config.flag("use_sliding_window"):
        return {}
    if not size or config.get("max_window_layers") is None:
        config.refuse("use_sliding_window", "there is no sliding_window, or no max_window_layers")
    return window(config, size, max(config.need("num_hidden_layers") - first, 0))


def _qwen2(config: Fields) -> Changes:
    return {"biases": "qkv", **_qwen_window(config)}


def _qwen3(config: Fields) -> Changes:
    config.get("use_qk_norm")  # always
    return {"qk_norm": True, **_qwen_window(config)}


def _qwen3_moe(config: Fields) -> Changes:
    if config.number("decoder_sparse_step", 1) != 1:
        config.refuse("decoder_sparse_step", "only mixtures in every layer are understood")
    dense = len(_some_layers(config, "mlp_only_layers"))
    found = {**_qwen3(config), **experts(config, "num_experts")}
    return {**found, **_dense_layers(dense, config.number("intermediate_size"))}


def _qwen2_moe(config: Fields) -> Changes:
    if config.number("decoder_sparse_step", 1) != 1:
        config.refuse("decoder_sparse_step", "only mixtures in every layer are understood")
    dense = len(_some_layers(config, "mlp_only_layers"))
    layers = config.need("num_hidden_layers")
    return {
        **_qwen2(config),
        **experts(config, "num_experts"),
        **_dense_layers(dense, config.number("intermediate_size")),
        "shared_intermediate": config.need("shared_expert_intermediate_size"),
        # the gate of the shared expert
        "other_parameters": (layers - dense) * config.need("hidden_size"),
    }


def _mixtral(config: Fields) -> Changes:
    return {**_all_windowed(config), **experts(config, "num_local_experts")}


def _opt(config: Fields) -> Changes:
    if config.number("word_embed_proj_dim", config.need("hidden_size")) != config.need(
        "hidden_size"
    ):
        config.refuse("word_embed_proj_dim", "embeddings narrower than the model are not known")
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if config.get(key, True) is not True:
            config.refuse(key, "only true is understood")
    # OPT's table has two rows before position 0.
    positions = config.need("max_position_embeddings") + 2
    return {"gated_mlp": False, "biases": "all", "learned_positions": positions}


def _gemma(config: Fields, qk_norm: bool, every: int) -> Changes:
    """Norms also behind attention and MLP; each `every`-th layer sees everything."""
    layers, hidden = config.need("num_hidden_layers"), config.need("hidden_size")
    every = config.divisor("sliding_window_pattern", every)
    size = config.number("sliding_window", 4096)
    found = window(config, size, layers - layers // every)
    if config.get("use_bidirectional_attention") is True:
        config.refuse("use_bidirectional_attention", "an encoder generates no text")
    return {"qk_norm": qk_norm, "other_parameters": 2 * layers * hidden, **found}


def _gemma2(config: Fields) -> Changes:
    return _gemma(config, qk_norm=False, every=2)


def _gemma3(config: Fields) -> Changes:
    return _gemma(config, qk_norm=True, every=6)


def _deepseek(config: Fields) -> Changes:
    """DeepSeek-V2 and V3, Kimi K2: latent attention, shared experts, some dense layers first."""
    if config.number("moe_layer_freq", 1) != 1:
        config.refuse("moe_layer_freq", "only mixtures in every layer are understood")
    latent = LatentAttention(
        kv_rank=config.need("kv_lora_rank"),
        q_rank=config.number("q_lora_rank"),
        nope_dim=config.need("qk_nope_head_dim"),
        rope_dim=config.need("qk_rope_head_dim"),
        v_dim=config.need("v_head_dim"),
    )
    layers, dense = config.need("num_hidden_layers"), config.number("first_k_dense_replace")
    found = experts(config, "n_routed_experts")
    norms = layers * (latent.kv_rank + latent.q_rank)
    # what balances the load without a loss: a bias an expert
    biased = config.get("topk_method") == "noaux_tc"
    config.get("num_key_value_heads")  # one vector is cached for all heads
    return {
        "latent": latent,
        "kv_heads": 1,
        "head_dim": latent.nope_dim + latent.rope_dim,
        **found,
        **_dense_layers(dense, config.need("intermediate_size")),
        "shared_intermediate": config.number("n_shared_experts")
        * config.need("moe_intermediate_size"),
        "other_parameters": norms + (layers - dense) * found["experts"] * biased,
        "mtp_modules": config.number("num_nextn_predict_layers"),
    }


def _gpt_oss(config: Fields) -> Changes:
    """Biases everywhere, a sink a head; every other layer has a window."""
    layers, hidden = config.need("num_hidden_layers"), config.need("hidden_size")
    found = experts(config, "num_local_experts")
    config.get("experts_per_token")  # the same under another name
    count, width = found["experts"], config.need("intermediate_size")
    of_experts = count * (2 * width + hidden) + count  # and the router's
    return {
        **found,
        **window(config, config.number("sliding_window"), layers - layers // 2),
        "other_parameters": layers * (of_experts + config.need("num_attention_heads")),
    }


def _minimax_m2(config: Fields) -> Changes:
    """Norms over all heads of q, and of k; a bias an expert balances the load. What the file says
    of MTP modules counts for nothing: vLLM 0.32 passes their weights over (`minimax_m2.py`)."""
    for key in ("use_mtp", "mtp_transformer_layers", "num_mtp_modules", "rotary_dim"):
        config.get(key)
    config.get("use_qk_norm")  # always
    if config.get("qk_norm_type", "per_layer") != "per_layer":
        config.refuse("qk_norm_type", "only per_layer is understood")
    if config.number("shared_intermediate_size"):
        config.refuse("shared_intermediate_size", "shared experts are not understood")
    if {*config.items("attn_type_list", int)} - {1}:
        config.refuse("attn_type_list", "only full attention (1) is understood")
    found, layers = experts(config, "num_local_experts"), config.need("num_hidden_layers")
    heads = config.need("num_attention_heads") + config.need("num_key_value_heads")
    biases = found["experts"] * config.flag("use_routing_bias")
    found["norms_over_heads"] = True
    return {**found, "other_parameters": layers * (heads * config.need("head_dim") + biases)}


def _llama4(config: Fields) -> Changes:
    """A shared expert and routed ones; three of four layers attend within chunks."""
    layers, step = config.need("num_hidden_layers"), config.divisor("interleave_moe_layer_step", 1)
    moe = _some_layers(config, "moe_layers")
    dense = layers - (len(moe) if moe else layers // step)
    config.get("no_rope_layers")
    every = config.divisor("no_rope_layer_interval", 4)
    config.get("use_qk_norm")  # a norm without weights
    size = config.number("attention_chunk_size")
    found = window(config, size, layers - layers // every)
    if found:
        found["chunked_window"] = True
    return {
        **experts(config, "num_local_experts"),
        **found,
        **_dense_layers(dense, config.need("intermediate_size_mlp")),
        "shared_intermediate": config.need("intermediate_size"),
    }


def _no_output_bias(config: Fields) -> int:
    """The output bias that other families count under `attention_bias`."""
    biased = config.flag("attention_bias")
    return -biased * config.need("num_hidden_layers") * config.need("hidden_size")


def _seed_oss(config: Fields) -> Changes:
    if config.flag("attention_out_bias") or config.flag("mlp_bias"):
        config.refuse("attention_out_bias", "only biases of q, k and v are understood")
    return {"other_parameters": _no_output_bias(config)}


def _glm(config: Fields) -> Changes:
    return {"other_parameters": _no_output_bias(config)}


def _glm4_moe(config: Fields) -> Changes:
    """GLM-4.5 to 4.7: some dense layers first, a shared expert, a bias a routed one."""
    layers, dense = config.need("num_hidden_layers"), config.number("first_k_dense_replace", 1)
    found = experts(config, "n_routed_experts")
    width = config.need("moe_intermediate_size")
    return {
        **found,
        **_dense_layers(dense, config.need("intermediate_size")),
        "qk_norm": config.flag("use_qk_norm"),
        "shared_intermediate": config.number("n_shared_experts", 1) * width,
        "other_parameters": _no_output_bias(config) + (layers - dense) * found["experts"],
        "mtp_modules": config.number("num_nextn_predict_layers"),
    }


def _ernie4_5_moe(config: Fields) -> Changes:
    """Some dense layers first, shared experts, a bias a routed one."""
    layers, dense = config.need("num_hidden_layers"), config.number("moe_layer_start_index", 1)
    if config.number("moe_layer_interval", 1) != 1:
        config.refuse("moe_layer_interval", "only mixtures in every layer are understood")
    if config.number("moe_layer_end_index", -1) not in (-1, layers - 1):
        config.refuse("moe_layer_end_index", "only mixtures up to the last layer are understood")
    if config.flag("use_bias"):
        config.refuse("use_bias", "only false is understood")
    found = experts(config, "moe_num_experts", "moe_k")
    width = config.need("moe_intermediate_size")
    return {
        **found,
        **_dense_layers(dense, config.need("intermediate_size")),
        "shared_intermediate": config.number("moe_num_shared_experts", 2) * width,
        "other_parameters": (layers - dense) * found["experts"],
    }


def _hunyuan_moe(config: Fields) -> Changes:
    """Every layer a mixture with shared experts."""
    config.get("intermediate_size")  # of layers that are no mixture
    width = config.need("moe_intermediate_size")
    return {
        **experts(config, "num_experts", "moe_topk"),
        "qk_norm": config.flag("use_qk_norm"),
        "shared_intermediate": config.number("num_shared_expert") * width,
    }


def experts(config: Fields, key: str, chosen: str = "num_experts_per_tok") -> Changes:
    """Return the number of routed experts, and the number that a token passes."""
    found = {"experts": config.need(key), "experts_per_token": config.need(chosen)}
    for key_of, name in ((key, "experts"), (chosen, "experts_per_token")):
        if found[name] < 1:
            config.refuse(key_of, "a mixture of experts has at least one")
    return found


def _some_layers(config: Fields, key: str) -> list[int]:
    """Numbers of layers, each once; empty if the field is missing."""
    found, layers = config.items(key, int), config.need("num_hidden_layers")
    if len({*found}) != len(found) or any(not 0 <= one < layers for one in found):
        config.refuse(key, f"is not a list of different layers from 0 to {layers - 1}")
    return found


def _dense_layers(dense: int, width: int) -> Changes:
    return {"dense_layers": dense, "dense_intermediate": width} if dense else {}


def window(config: Fields, size: int, layers: int) -> Changes:
    """`layers` that attend to `size` tokens; as many as `layer_types` has, if given."""
    if config.get("layer_types") is not None:
        kinds = config.items("layer_types", str)
        strange = {*kinds} - {"full_attention", "sliding_attention", "chunked_attention"}
        if strange or len(kinds) != config.need("num_hidden_layers"):
            config.refuse(
                "layer_types",
                "only full_attention, sliding_attention and chunked_attention are understood, one "
                "a layer",
            )
        layers = sum(kind != "full_attention" for kind in kinds)
    if not size or not layers or size >= config.need("max_position_embeddings", 2**62):
        return {}
    return {"window": size, "window_layers": layers}


_GEMMA3 = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}

_MOE_WIDTH = "moe_intermediate_size"
_DEEPSEEK_V2 = {"q_lora_rank": 1536, "n_shared_experts": 2, "first_k_dense_replace": 0}
_DEEPSEEK_V3 = {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3}


def _kv_heads(count: int) -> dict[str, Any]:
    return {"num_key_value_heads": count}


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, ("LlamaForCausalLM", "LLaMAForCausalLM")),
    "granite": Family(_granite, ("GraniteForCausalLM",)),
    "mistral": Family(
        _all_windowed, ("MistralForCausalLM",), absent={**_kv_heads(8), "sliding_window": 4096}
    ),
    "mixtral": Family(_mixtral, ("MixtralForCausalLM",), absent=_kv_heads(8)),
    "qwen2": Family(_qwen2, ("Qwen2ForCausalLM",), absent=_kv_heads(32)),
    "qwen2_moe": Family(
        _qwen2_moe, ("Qwen2MoeForCausalLM",), width=_MOE_WIDTH, absent=_kv_heads(16)
    ),
    "qwen3": Family(_qwen3, ("Qwen3ForCausalLM",), absent={**_kv_heads(32), "head_dim": 128}),
    "qwen3_moe": Family(
        _qwen3_moe, ("Qwen3MoeForCausalLM",), width=_MOE_WIDTH, absent=_kv_heads(4)
    ),
    "opt": Family(_opt, ("OPTForCausalLM",), {"tie_word_embeddings": True}, width="ffn_dim"),
    "phi3": Family(_all_windowed, ("Phi3ForCausalLM",)),
    "phi": Family(_phi, ("PhiForCausalLM",)),
    "gemma": Family(
        _plain,
        ("GemmaForCausalLM",),
        {"tie_word_embeddings": True, "head_dim": 256},
        absent=_kv_heads(16),
    ),
    "gemma2": Family(
        _gemma2,
        ("Gemma2ForCausalLM",),
        {"tie_word_embeddings": True, "head_dim": 256},
        absent=_kv_heads(4),
    ),
    "gemma3_text": Family(
        _gemma3, ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _GEMMA3
    ),
    "deepseek_v2": Family(
        _deepseek, ("DeepseekV2ForCausalLM",), width=_MOE_WIDTH, absent=_DEEPSEEK_V2
    ),
    "deepseek_v3": Family(
        _deepseek, ("DeepseekV3ForCausalLM",), width=_MOE_WIDTH, absent=_DEEPSEEK_V3
    ),
    "kimi_k2": Family(_deepseek, ("DeepseekV3ForCausalLM",), width=_MOE_WIDTH, absent=_DEEPSEEK_V3),
    "gpt_oss": Family(
        _gpt_oss,
        ("GptOssForCausalLM",),
        {"head_dim": 64},
        absent={**_kv_heads(8), "sliding_window": 128, "attention_bias": True},
    ),
    "minimax_m2": Family(
        _minimax_m2, ("MiniMaxM2ForCausalLM",), absent={**_kv_heads(8), "head_dim": 128}
    ),
    "ministral3": Family(_all_windowed, ("Ministral3ForCausalLM", "MistralForCausalLM")),
    "seed_oss": Family(_seed_oss, ("SeedOssForCausalLM",)),
    "glm": Family(_glm, ("GlmForCausalLM",)),
    "glm4_moe": Family(_glm4_moe, ("Glm4MoeForCausalLM",), width=_MOE_WIDTH),
    "ernie4_5_moe": Family(
        _ernie4_5_moe, ("Ernie4_5_MoeForCausalLM",), {"tie_word_embeddings": True}, _MOE_WIDTH
    ),
    "hunyuan_v1_moe": Family(_hunyuan_moe, ("HunYuanMoEV1ForCausalLM",), width=_MOE_WIDTH),
    "qwen3_vl_text": Family(_qwen3, ("Qwen3VLForConditionalGeneration",)),
    "qwen3_vl_moe_text": Family(
        _qwen3_moe, ("Qwen3VLMoeForConditionalGeneration",), width=_MOE_WIDTH
    ),
    "qwen2_5_vl_text": Family(_qwen2, ("Qwen2_5_VLForConditionalGeneration",)),
    "llama4_text": Family(
        _llama4,
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        absent={**_kv_heads(8), "head_dim": 128, "attention_chunk_size": 8192},
    ),
}
