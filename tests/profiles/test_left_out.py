"""Matrices that a checkpoint leaves in 16 bits: which ones its names mean, and what they cost."""

import json
from importlib import resources
from importlib.util import find_spec

import pytest

from tests.profiles.configs import DEEPSEEK_V3, NEMO
from tests.profiles.test_hostile_configs import QWEN3_MOE
from twinserve.profiles.catalog import find_gpu
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.forms.efficiency import find_efficiency
from twinserve.profiles.forms.kernels import rank_model
from twinserve.profiles.gpus import gpu_for
from twinserve.profiles.models.config import read_config, read_model
from twinserve.profiles.models.quantization import _matrices
from twinserve.profiles.operators.aic import _quantization
from twinserve.profiles.specs import ProfileError

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
