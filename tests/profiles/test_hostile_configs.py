"""A config.json is read as what it says, or refused by name: never as something else."""

import json
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.profiles import configs
from tests.profiles.configs import (
    DEEPSEEK_V3,
    GEMMA_3,
    GPT_OSS,
    LLAMA,
    MAVERICK,
    MINIMAX,
    NEMO,
    PHI_2,
    SCOUT,
)
from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.forms.efficiency import find_efficiency
from twinserve.profiles.forms.kernels import rank_model
from twinserve.profiles.gpus import gpu_for
from twinserve.profiles.models.config import read_config, read_model
from twinserve.profiles.models.quantization import _matrices
from twinserve.profiles.operators.aic import _quantization
from twinserve.profiles.specs import ProfileError

QWEN_25 = configs.config("qwen2.5-14b")
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3_MOE = {
    **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


def _quantised(**given):
    return {**LLAMA, "quantization_config": given}


def _group(weights, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more}
    return _quantised(quant_method="compressed-tensors", config_groups={"group_0": group})


_FP8, _INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # vLLM goes by the class
        ({**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({**LLAMA, "architectures": ["MambaForCausalLM"]}, "only LlamaForCausalLM"),
        ({**GEMMA_3, "architectures": ["Gemma3nForConditionalGeneration"]}, "Gemma3nForCond"),
        # what another architecture would have
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts 8"),
        ({**LLAMA, "kv_lora_rank": 512}, "kv_lora_rank 512"),
        ({**LLAMA, "qk_rope_head_dim": 64}, "qk_rope_head_dim 64"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window 4096"),
        ({**LLAMA, "num_activation_experts": 64}, "num_activation_experts 64"),
        ({**LLAMA, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32, "sliding_window": 64}, "layer_types"),
        # a mixture that has no experts, or not where it says
        ({**QWEN3_MOE, "num_experts": 0, "num_experts_per_tok": 0}, "num_experts 0"),
        ({**QWEN3_MOE, "num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 0]}, "mlp_only_layers [0, 0]"),
        ({**QWEN3_MOE, "mlp_only_layers": [32]}, "mlp_only_layers [32]"),
        ({**DEEPSEEK_V3, "num_experts_per_tok": None}, "num_experts_per_tok"),
        # a window without a size
        ({**QWEN2, "use_sliding_window": True}, "use_sliding_window"),
        # words for truth
        ({**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings false"),
        ({**LLAMA, "attention_bias": 1}, "attention_bias 1"),
        # sizes
        ({**LLAMA, "num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000"),
        ({**LLAMA, "hidden_size": 4097}, "hidden_size 4097"),
        ({**LLAMA, "vocab_size": float("inf")}, "vocab_size inf"),
        ({**GEMMA_3, "text_config": "none"}, "text_config none"),
        # what single checkpoints of a family do not have
        ({**PHI_2, "qk_layernorm": True}, "qk_layernorm True"),
        ({**MINIMAX, "shared_intermediate_size": 1536}, "shared_intermediate_size 1536"),
        ({**MINIMAX, "qk_norm_type": "per_head"}, "qk_norm_type per_head"),
        ({**MINIMAX, "attn_type_list": [0, 1]}, "attn_type_list [0, 1]"),
        ({**NEMO, "attention_multiplier": 0.5}, "attention_multiplier 0.5"),
        # quantisation
        (_quantised(quant_method="mxfp4"), "mxfp4"),
        (_quantised(quant_method="fp8", weight_block_size=[128]), "weight_block_size [128]"),
        (_quantised(quant_method="gptq", bits=4, group_size=-5), "group_size -5"),
        (_quantised(quant_method="awq", bits=4, group_size=0), "group_size 0"),
        (_quantised(bits=4, group_size=128), "quant_algo"),
        (_group(_FP8, _INT8), "inputs of another type"),
        (_group(_INT8, _FP8), "inputs of another type"),
        (_group(_FP8, targets=[]), "all Linear layers"),
        (_group({"num_bits": 4, "type": "float", "group_size": 32}), "weights of 4 bits"),
        # fields that are missing, of another type, or of no model
        ({key: value for key, value in QWEN_25.items() if key != "hidden_size"}, "hidden_size"),
        ({**QWEN_25, "torch_dtype": "int4"}, "int4"),
        ({**QWEN_25, "num_key_value_heads": 7}, "multiple"),
        ({**QWEN_25, "vocab_size": -1}, "vocab"),
        ({**NEMO, "model_type": "mamba2"}, "architecture 'mamba2' is not understood"),
        ({**NEMO, "model_type": None}, "model_type"),
        ({**NEMO, "state_size": 128}, "state_size 128: not understood"),
        ({**NEMO, "quantization_config": {"quant_method": "eetq"}}, "quant_method eetq"),
        ({**NEMO, "architectures": ["MistralForSequenceClassification"]}, "architectures"),
        ({**NEMO, "layer_types": ["linear_attention"] * 40}, "layer_types"),
        ({**NEMO, "hidden_size": "5120"}, "hidden_size '5120' is not a whole number"),
        ({**NEMO, "num_hidden_layers": 0}, "layers"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk 2048"),
        ({**GEMMA_3, "audio_config": {"layers": 2}}, "audio_config"),
        ({**GEMMA_3, "model_type": "gemma9"}, "architecture 'gemma9' is not understood"),
        ({**NEMO, "layer_types": 40}, "layer_types 40: is not a list of names"),
        ({**NEMO, "architectures": "MistralForCausalLM"}, "MistralForCausalLM: is not a list"),
        ({**NEMO, "quantization_config": "fp8"}, "quantization_config fp8: is not an object"),
        ({**DEEPSEEK_V3, "kv_lora_rank": 0}, "kv_rank"),
        (
            {**MAVERICK, "text_config": {**MAVERICK["text_config"], "no_rope_layer_interval": 0}},
            "no_rope_layer_interval 0: is not at least 1",
        ),
        ({**SCOUT, "vision_config": {"patch_size": 0}}, "vision_config: patch_size 0"),
        ({**SCOUT, "vision_config": [1]}, "vision_config [1]: is not an object"),
        (_quantised(quant_method="fp8", ignored_layers=["model.layers.0.mlp.up"]), "mlp.up'"),
        (_quantised(quant_method="gptq", bits=3, group_size=128), "bits 3"),
        # what vLLM 0.32 does not take: quantization/auto_awq.py, auto_gptq.py (TYPE_MAP),
        # utils/gptq_utils.py, utils/marlin_utils.py (MARLIN_SUPPORTED_GROUP_SIZES)
        (_quantised(quant_method="awq", bits=8), "bits 8"),
        (_quantised(quant_method="gptq", bits=4, sym=False), "sym False"),
        (_quantised(quant_method="gptq", bits=4, desc_act=True), "desc_act True"),
        (_quantised(quant_method="gptq", bits=4, group_size=256), "group_size 256"),
        (_quantised(quant_method="gptq", bits=4, dynamic={"-:.*": {}}), "dynamic"),
        (_quantised(quant_method="bitsandbytes"), "quant_method bitsandbytes"),
        (_quantised(quant_algo="W4A8_AWQ"), "quant_algo W4A8_AWQ"),
        (
            _quantised(quant_method="compressed-tensors", config_groups={"a": {}, "b": {}}),
            "several",
        ),
        (_quantised(quant_algo="FP8", kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo NVFP4"),
        (_quantised(quant_method="awq", bits=4, group_size=1), "bits"),
        (_quantised(quant_method="fp8", ignore=["re:("]), "no regular expression"),
        (
            _quantised(quant_method="compressed-tensors", config_groups=[1]),
            "config_groups [1]: is not",
        ),
        (_quantised(quant_method="fp8", ignore=7), "ignore 7: is not a list"),
    ],
)
def test_a_config_that_says_something_else_is_refused_by_name(config, words):
    with pytest.raises(ProfileError) as raised:
        read_config(config)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_what_a_config_need_not_say_changes_nothing():
    plain = read_config(LLAMA)
    harmless = {
        "_name": "x",
        "rope_scaling": {"factor": 8},
        "bos_token_id": 1,
        "rms_norm_eps": 1e-5,
    }
    assert read_config({**LLAMA, **harmless}).parameters == plain.parameters
    # vLLM loads it in 16 bits
    assert read_config({**LLAMA, "torch_dtype": "float32"}).weight_bytes == plain.weight_bytes
    scale = _quantised(quant_method="fp8", weight_block_size=[64, 64])
    assert read_config(scale).weights.bits == 8 + 32 / 64**2


def test_every_kind_of_model_says_its_quantisation_alike():
    """Half of the 16 bits, but for tables, norms and routers."""
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    for config in (LLAMA, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS, SCOUT):
        plain, quantised = read_config(config), read_config({**config, **fp8})
        saved = plain.weight_bytes - quantised.weight_bytes
        assert saved == plain.matrix_parameters - plain.expert_layers * plain.experts * plain.hidden


# Billions of parameters, all and those a token passes, as model cards say; KiB a token of KV.
CARDS = {
    "Qwen--Qwen3-0.6B": (0.6, None, 112),
    "Qwen--Qwen3-1.7B": (1.7, None, 112),
    "Qwen--Qwen3-8B": (8.2, None, 144),
    "Qwen--Qwen3-32B": (32.8, None, 256),
    "Qwen--Qwen3-30B-A3B": (30.5, 3.3, 96),
    "Qwen--Qwen3-235B-A22B": (235, 22, 188),
    "Qwen--Qwen3-235B-A22B-FP8": (235, 22, 188),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480, 35, 248),
    "deepseek-ai--DeepSeek-V3": (671, 37, 68.625),
    "deepseek-ai--DeepSeek-R1": (671, 37, 68.625),
    "moonshotai--Kimi-K2-Instruct": (None, 32, 68.625),
    "meta-llama--Meta-Llama-3.1-8B": (8.0, None, 128),
    "meta-llama--Meta-Llama-3.1-70B": (70.6, None, 320),
    "meta-llama--Meta-Llama-3.1-405B": (406, None, 504),
    "mistralai--Mixtral-8x7B-v0.1": (46.7, 12.9, 128),
    "mistralai--Mixtral-8x22B-v0.1": (141, 39, 224),
    "openai--gpt-oss-20b": (20.9, 3.6, 48),
    "openai--gpt-oss-120b": (116.8, 5.1, 72),
}


def _configs() -> list[Path]:
    pytest.importorskip("aiconfigurator_core")
    folder = resources.files("aiconfigurator_core") / "model_configs"
    found = [Path(str(one)) for one in folder.iterdir() if one.name.endswith("_config.json")]
    return [path for path in found if "hf_quant" not in path.name]


def test_published_configs_have_the_sizes_of_their_model_cards():
    """The files themselves; embeddings of active parameters count once, or not at all."""
    files = {path.name.removesuffix("_config.json"): path for path in _configs()}
    for name, (billions, active, kib) in CARDS.items():
        spec = read_config(files[name])
        if billions is not None:  # of Kimi K2 the card says 1 T
            digits = len(str(billions).partition(".")[2])
            assert round(spec.parameters / 1e9, digits) == billions, name
        assert spec.kv_bytes_per_token == kib * 1024, name
        if active is not None:
            tables = spec.head_parameters
            found = [spec.active_parameters / 1e9, (spec.active_parameters + tables) / 1e9]
            assert found[0] - 0.55 <= active <= found[1] + 0.55, name


def test_other_published_configs_are_refused_by_the_name_of_what_is_strange():
    """State spaces, sparse and linear attention, other vision towers; none ends in a traceback."""
    known = 0
    for path in _configs():
        try:
            known += read_model(path).parameters > 0
        except ProfileError as error:
            line = str(error)
            assert "\n" not in line and ("architecture" in line or "quantization_config" in line)
    assert known >= len(CARDS)


def _without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "field", "taken"),
    [
        (QWEN3, "head_dim", 128),
        (QWEN3_MOE, "num_key_value_heads", 4),
        (MISTRAL, "num_key_value_heads", 8),
        (MISTRAL, "sliding_window", 4096),
        (GPT_OSS, "num_key_value_heads", 8),
        (GPT_OSS, "sliding_window", 128),
        (DEEPSEEK_V3, "first_k_dense_replace", 3),
        (DEEPSEEK_V3, "q_lora_rank", 1536),
        (DEEPSEEK_V3, "n_shared_experts", 1),
    ],
)
def test_a_field_that_is_left_out_is_what_vllm_takes_for_it(config, field, taken):
    """Configuration classes of transformers 5.19; LLaMA's KV heads are as many as its heads."""
    sized = {**config, "num_attention_heads": 64}
    left_out = read_config(_without(sized, field))
    assert left_out == read_config({**sized, field: taken})
    assert left_out != read_config({**sized, field: None}) or field == "head_dim"
    assert read_config(_without(LLAMA, "num_key_value_heads")).kv_heads == 32


def test_a_folder_without_a_config_is_said_to_have_none(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError, match="empty: the folder holds no config.json"):
        find_model("empty")


@pytest.mark.parametrize("name", ["Llama-3.1-8B-Instruct-FP8", "llama_awq", "Llama-3.1-8B.w4a16"])
def test_a_checkpoint_that_is_called_quantised_is_never_read_as_16_bits(name, tmp_path):
    """As where config.json was fetched and the file beside it was not."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ProfileError, match="there is no quantization_config"):
        read_model(tmp_path / name)
    beside = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / name / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_model(tmp_path / name).weights.name == "fp8"


# Families and fields of single checkpoints.
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


def test_phi_2_has_biases_everywhere():
    assert read_config(PHI_2).parameters == 2_779_683_840  # of its files


def test_minimax_has_norms_over_all_heads_and_no_modules_for_vllm():
    spec = read_config(MINIMAX)
    assert spec.other_parameters == 62 * ((48 + 8) * 128 + 256) and spec.mtp_modules == 0


# Matrices that a checkpoint leaves in 16 bits: which ones its names mean, and what they cost.
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
# Of one layer, by the sizes of its config.json: q_a, q_b, kv_a, kv_b.
LATENT_INPUTS = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256
OUTPUT = 128 * 128 * 7168
SHARED = 3 * 7168 * 2048


def _with(config, names, **more):
    return read_config({**config, "quantization_config": {**NVFP4, "ignore": names, **more}})


@pytest.mark.parametrize("config", [NEMO, DEEPSEEK_V3, QWEN3_MOE])
def test_the_matrices_that_have_names_are_all_that_are_counted(config):
    llm = read_config(config)
    named = sum(count for layer in range(llm.layers) for _, count in _matrices(llm, layer))
    routers = llm.expert_layers * llm.experts * llm.hidden
    assert named == llm.matrix_parameters - llm.expert_parameters - routers


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        ([], 0),
        (["lm_head", "model.layers.4.mlp.gate", "model.layers.61*", "mtp*"], 0),
        (["model.layers.7.self_attn.o_proj"], OUTPUT),
        (["model.layers.1.self_attn*"], LATENT_INPUTS + OUTPUT),  # not layer 10
        (["re:.*self_attn.*", "model.layers.5.self_attn.o_proj"], 61 * (LATENT_INPUTS + OUTPUT)),
        (["model.layers.*.self_attn"], 61 * (LATENT_INPUTS + OUTPUT)),
        (["*.mlp.shared_experts.*"], 58 * SHARED),
        ([r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], 3 * 3 * 7168 * 18432),
        (["model.language_model.layers.0*"], LATENT_INPUTS + OUTPUT + 3 * 7168 * 18432),
    ],
)
def test_names_mean_modules_and_what_is_below_them(names, plain):
    llm = _with(DEEPSEEK_V3, names)
    assert llm.weights.plain == plain
    all_of_it = _with(DEEPSEEK_V3, [])
    assert llm.weight_bytes - all_of_it.weight_bytes == pytest.approx(plain * (2 - 4.5 / 8))


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (DEEPSEEK_V3, "model.layers.3*", "routed experts in 16 bits"),
        (DEEPSEEK_V3, "model.layers.0.attention", "names no matrix of the model"),
        (NEMO, "model.layers.0.mlp.shared_experts", "no matrix"),
        ({**QWEN3_MOE, "mlp_only_layers": [5]}, "model.layers.5.mlp", "the dense layers"),
    ],
)
def test_what_a_name_cannot_mean_is_one_clear_line(config, name, words):
    with pytest.raises(ProfileError) as raised:
        _with(config, [name])
    assert words in str(raised.value) and name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_steps_lie_between_those_of_all_and_of_none_and_tables_are_not_asked():
    given = [[], ["model.layers.*.self_attn"], ["re:.*self_attn.*", "re:.*mlp.*_proj"]]
    models = [_with(NEMO, names) for names in given]
    assert [model.plain_share for model in models] == [0, pytest.approx(0.193, abs=0.001), 1]
    gpu = gpu_for(models[0], find_gpu("b200"))  # which multiplies in FP4
    for work in (decode_work(1, 100), prefill_work(8192)):
        seconds = [
            rank_model(model, gpu, 1, find_efficiency(gpu)).step_seconds(work) for model in models
        ]
        assert seconds[0] < seconds[1] < seconds[2]
    assert _quantization(models[0], "b200") is not None
    assert _quantization(models[1], "b200") is None


def test_modelopt_may_leave_out_that_a_group_is_of_all_matrices():
    """As Qwen3-32B-FP8-Static-PerTensor; compressed-tensors must say it."""
    eight = {"num_bits": 8, "type": "float", "dynamic": False}
    groups = {"group_0": {"weights": eight, "input_activations": eight}}
    found = _with(NEMO, ["lm_head"], quant_algo="FP8", config_groups=groups)
    assert (found.weights.name, found.weights.multiplies) == ("fp8", "fp8")
    with pytest.raises(ProfileError, match="only groups of all Linear"):
        _with(NEMO, [], quant_method="compressed-tensors", quant_algo=None, config_groups=groups)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="needs its config files")
def test_nvidias_deepseek_in_nvfp4_as_it_is_published(tmp_path):
    """config.json and hf_quant_config.json of nvidia/DeepSeek-V3.1-NVFP4, as aiconfigurator-core
    has them."""
    folder = resources.files("aiconfigurator_core") / "model_configs"
    for name in ("config.json", "hf_quant_config.json"):
        text = (folder / f"nvidia--DeepSeek-V3.1-NVFP4_{name}").read_text(encoding="utf-8")
        (tmp_path / name).write_text(json.dumps(json.loads(text)))
    llm = read_model(tmp_path)
    assert llm.weights.plain == 61 * LATENT_INPUTS
    assert llm.kv_value_bytes == 1 and 380e9 < llm.weight_bytes < 420e9
