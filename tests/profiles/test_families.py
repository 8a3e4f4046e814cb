"""Families and fields of single checkpoints: Mistral, Phi-2, MiniMax-M2, Granite."""

import pytest

from tests.profiles.test_model_configs import NEMO
from twinserve.profiles.models.config import read_config
from twinserve.profiles.specs import ProfileError


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window_size", 4096), ("full_attn_mod", 1), ("is_llama_config", True)],
)
def test_fields_that_neither_transformers_nor_vllm_reads_are_passed_over(key, value):
    """Of the files of Gemma 2, Phi-4-mini and SmolLM2."""
    assert read_config({**NEMO, key: value}) == read_config(NEMO)


def test_a_mistral_without_a_word_of_windows_has_one():
    """As transformers 5.19, and so vLLM; null means that there is none."""
    silent = {key: value for key, value in NEMO.items() if key != "sliding_window"}
    assert read_config(silent).window == 4096 and read_config(NEMO).window == 0


PHI_2 = {
    "model_type": "phi",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "partial_rotary_factor": 0.4,
    "vocab_size": 51200,
}
MINIMAX = {
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "rotary_dim": 64,
    "use_mtp": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_phi_2_has_biases_everywhere():
    assert read_config(PHI_2).parameters == 2_779_683_840  # of its files


def test_minimax_has_norms_over_all_heads_and_no_modules_for_vllm():
    spec = read_config(MINIMAX)
    assert spec.other_parameters == 62 * ((48 + 8) * 128 + 256) and spec.mtp_modules == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**PHI_2, "qk_layernorm": True}, "qk_layernorm True"),
        ({**MINIMAX, "shared_intermediate_size": 1536}, "shared_intermediate_size 1536"),
        ({**MINIMAX, "qk_norm_type": "per_head"}, "qk_norm_type per_head"),
        ({**MINIMAX, "attn_type_list": [0, 1]}, "attn_type_list [0, 1]"),
        ({**NEMO, "attention_multiplier": 0.5}, "attention_multiplier 0.5"),
    ],
)
def test_what_these_do_not_have_is_refused_by_name(config, words):
    with pytest.raises(ProfileError, match=words.replace("[", r"\[")):
        read_config(config)
