"""Models from Hugging Face configs: their published sizes, and what is not understood is refused by
name."""

import json

import numpy as np
import pytest
from pydantic import TypeAdapter

from tests.profiles.configs import DEEPSEEK_V3, GEMMA_3, GPT_OSS, MAVERICK, NEMO, SCOUT
from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.composition import StepComposition, decode_work, prefill_work
from twinserve.profiles.forms.efficiency import find_efficiency
from twinserve.profiles.forms.kernels import rank_model
from twinserve.profiles.forms.roofline import RooflineModel, pairs_within
from twinserve.profiles.models.config import read_config, read_model
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.specs import ModelSpec, ProfileError
from twinserve.profiles.step_times import choose
from twinserve.sim.cli.profiles import show
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve_hardware


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        # 12.2 B (model card); what it says of active parameters is of mixtures
        (NEMO, 12.25, None),
        # 671 B, 37 B active with the embeddings (arXiv 2412.19437)
        (DEEPSEEK_V3, 671.03, 36.6),
        # model card, arXiv 2508.10925, table 1: 20.91 B, 3.61 B active
        (GPT_OSS, 20.91, 3.61),
        # keras-hub's and transformers' count with the vision tower
        (GEMMA_3, 27.43, None),
        # 109 B and 400 B (the latter text alone), 17 B active with embeddings: ai.meta.com
        (SCOUT, 108.64, 16.1),
        (MAVERICK, 400.71, 16.1),
    ],
)
def test_a_config_has_the_published_number_of_parameters(config, billions, active):
    spec = read_config(config)
    assert round(spec.parameters / 1e9, 2) == billions
    if active is not None:
        assert spec.active_parameters / 1e9 == pytest.approx(active, abs=0.05)


def test_windows_are_those_of_the_layers_that_have_them():
    gemma, oss, scout = map(read_config, (GEMMA_3, GPT_OSS, SCOUT))
    assert (gemma.window, gemma.window_layers) == (1024, 52)  # five of six
    assert (oss.window, oss.window_layers) == (128, 12)
    assert (scout.window, scout.window_layers, scout.chunked_window) == (8192, 36, True)
    assert read_config({**NEMO, "sliding_window": 4096}).window_layers == 40
    # a window that no context outgrows is none
    assert read_config({**NEMO, "sliding_window": 131072}).window == 0
    assert read_config({**GPT_OSS, "layer_types": ["full_attention"] * 24}).window == 0


def _write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_is_called_after_its_file_folder_or_id(tmp_path, monkeypatch):
    (tmp_path / "cfg").mkdir()
    (tmp_path / "cfg" / "nemo.json").write_text(json.dumps(NEMO))
    folder = _write(tmp_path / "Mistral-Nemo_2407", NEMO)
    cache = tmp_path / "hub" / "models--mistralai--Mistral-Nemo-Base-2407"
    _write(cache / "snapshots" / "abc", NEMO)
    _write(cache / "snapshots" / "old", {**NEMO, "num_hidden_layers": 1})
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    names = {
        "cfg/nemo.json": "nemo",
        str(folder): "mistral-nemo-2407",
        str(folder / "config.json"): "mistral-nemo-2407",
        "mistralai/Mistral-Nemo-Base-2407": "mistral-nemo-base-2407",
    }
    for reference, name in names.items():
        assert read_model(reference) == read_config(NEMO, name)
        profile = load_profile(f"{reference}@H100:tp2")
        assert profile.name == f"{name}@h100:tp2" and profile.llm.layers == 40


def test_a_folder_called_as_a_known_model_does_not_change_it(tmp_path, monkeypatch):
    shipped = load_profile("Qwen3-14B@h100")
    _write(tmp_path / "Qwen3-14B", NEMO)
    monkeypatch.chdir(tmp_path)
    assert load_profile("Qwen3-14B@h100") == shipped
    assert load_profile("./Qwen3-14B@h100").llm.layers == NEMO["num_hidden_layers"]


def test_an_id_that_was_not_fetched_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ProfileError, match="hf download mistralai/Nemo config.json"):
        load_profile("mistralai/Nemo@h100")
    with pytest.raises(ProfileError, match=r"nowhere/x\.json: cannot be read"):
        load_profile("nowhere/x.json@h100")


def test_a_config_without_a_gpu_is_no_profile(tmp_path):
    path = _write(tmp_path, NEMO) / "config.json"
    with pytest.raises(ProfileError, match="name its GPU as well"):
        load_profile(path)


def test_a_config_with_a_known_name_has_none_of_its_marks(tmp_path):
    """Measured were the catalogue's models, not whatever a file is called after."""
    path = tmp_path / "llama-3.1-8b.json"
    path.write_text(json.dumps(NEMO))
    assert "marks" not in choose(f"{path}@h100").why
    assert "marks" in choose("llama-3.1-8b@h100").why


def _model(config, tp=8) -> RooflineModel:
    gpu = find_gpu("h200")
    return rank_model(read_config(config), gpu, tp, find_efficiency(gpu))


@pytest.mark.parametrize("config", [NEMO, DEEPSEEK_V3, GPT_OSS, GEMMA_3, SCOUT])
def test_a_run_of_decodes_is_its_steps_to_the_bit(config):
    """Also where contexts outgrow a window within the run."""
    model, n, context, steps = _model(config), 7, 7 * 100, 60
    run = model.decode_run_seconds(n, context, 120, steps)
    single = [
        model.step_seconds(StepComposition(n, context + i * n, 120 + i)) for i in range(steps)
    ]
    assert run.tolist() == single
    assert sum(model.terms(decode_work(n, 100)).values()) == pytest.approx(
        model.step_seconds(decode_work(n, 100))
    )


def test_layers_with_a_window_stop_growing():
    """Twelve of 24 layers: beyond the window a token of context costs half of what it costs in
    all layers."""
    windowed, full = _model(GPT_OSS), _model({**GPT_OSS, "layer_types": ["full_attention"] * 24})
    grows = [
        model.step_seconds(decode_work(8, 8000)) - model.step_seconds(decode_work(8, 4000))
        for model in (windowed, full)
    ]
    assert grows[0] == pytest.approx(grows[1] / 2)
    assert windowed.step_seconds(decode_work(8, 100)) == full.step_seconds(decode_work(8, 100))
    assert windowed.step_seconds(prefill_work(100)) == full.step_seconds(prefill_work(100))
    assert windowed.step_seconds(prefill_work(9000)) < full.step_seconds(prefill_work(9000))


def test_a_windowed_prompt_sees_each_token_once():
    """Pairs of a prompt in chunks are those of the prompt at once, counted by hand."""
    for new, resident in ((5, 0), (1, 9), (7, 2), (3, 3), (100, 50)):
        work = StepComposition(prefill_new=np.array([new]), prefill_resident=np.array([resident]))
        pairs, attended = pairs_within(work, 4)
        assert pairs == sum(min(resident + i + 1, 4) for i in range(new))
        assert attended == min(resident + new, new + 3)


def test_a_mixture_reads_all_its_experts_only_for_many_tokens():
    profile = derive_profile("mixtral-8x7b", "h200", 2)
    terms = [profile.model().terms(decode_work(n, 10))["gemm"] for n in (1, 4, 64, 65)]
    assert terms[0] < terms[1] < terms[2] < terms[3] * 1.02
    all_read = profile.llm.matrix_parameters / 2 * 2 / profile.gpu.memory_bytes_per_s
    assert all_read < terms[2] < 1.3 * all_read
    assert terms[0] < 0.4 * all_read


def test_latent_decodes_multiply_where_that_takes_longer():
    """128 heads on one latent vector of 576: 242 FLOPs a byte, more than an H200 has of both
    at the shares that its kernels reach."""
    model = _model(DEEPSEEK_V3, tp=1)
    llm, gpu, e = model.llm, model.gpu, model.efficiency
    flops = 2 * 61 * 128 * (576 + 512)
    expected = 1000 * flops / (gpu.peak_flops * e.attention_mfu)
    found = model.step_seconds(decode_work(1, 2000)) - model.step_seconds(decode_work(1, 1000))
    assert found == pytest.approx(expected)
    assert found > 1000 * llm.kv_bytes_per_token / gpu.memory_bytes_per_s


def test_models_of_before_are_written_as_before():
    """Files of older models keep their bits; those of newer kinds come back as they were."""
    adapter = TypeAdapter(ModelSpec)
    assert "latent" not in adapter.dump_python(find_model("llama-3.1-8b"))
    for config in (NEMO, DEEPSEEK_V3, SCOUT):
        spec = read_config(config)
        assert adapter.validate_json(adapter.dump_json(spec)) == spec


@pytest.mark.parametrize(
    ("name", "step_times"),
    [
        ("nemo.json@h100", "auto"),
        ("nemo.json@h100", "measured"),
        ("nemo.json@rtx4090:tp3", "auto"),
        ("mixtral-8x7b@a100:tp2", "auto"),
        ("mixtral-8x7b@a100:tp2", "roofline"),
        ("mixtral-8x7b@l20", "auto"),
        ("odd.json@h100", "auto"),
    ],
)
def test_show_and_simulate_accept_and_refuse_the_same(
    name, step_times, tmp_path, monkeypatch, capsys
):
    (tmp_path / "nemo.json").write_text(json.dumps(NEMO))
    (tmp_path / "odd.json").write_text(json.dumps({**NEMO, "state_size": 9}))
    monkeypatch.chdir(tmp_path)

    def said(what):
        try:
            what()
        except ProfileError as error:
            return str(error)
        return None

    config = SimulationConfig(profile=name, step_times=step_times, async_scheduling=True)
    shown = said(lambda: show(name, step_times=step_times))
    assert shown == said(lambda: resolve_hardware(config))
    assert bool(capsys.readouterr().out) == (shown is None)


def _compressed(inputs=None, form: str = "", **weights) -> dict:
    group = {"targets": ["Linear"], "input_activations": inputs, "weights": weights}
    more = {"format": form, "ignore": ["lm_head"]} if form else {}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_INT8 = {"num_bits": 8, "type": "int"}
_OF_8 = _compressed(_INT8, "int-quantized", **_INT8, strategy="channel")
_OF_4 = _compressed(form="pack-quantized", num_bits=4, type="int", group_size=128)
_MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16},
}


@pytest.mark.parametrize(
    ("given", "name", "bits", "multiplies"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", 8.0, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8 + 1 / 512, "fp8"),
        (_AWQ, "awq", 4 + 20 / 128, "bf16"),
        (_GPTQ, "gptq", 4 + 20 / 32, "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq-8bit", 8.0, "bf16"),
        (_OF_8, "int8", 8.0, "int8"),
        (_OF_4, "int4", 4 + 20 / 128, "bf16"),
        (_compressed(num_bits=4, type="int", group_size=-1), "int4", 4.0, "bf16"),
        (_MODELOPT, "nvfp4", 4.5, "fp4"),
    ],
)
def test_each_way_to_say_a_quantisation(given, name, bits, multiplies):
    weights = read_config({**NEMO, "quantization_config": given}).weights
    assert (weights.name, weights.multiplies) == (name, multiplies)
    assert weights.bits == pytest.approx(bits)


def test_mxfp4_of_gpt_oss_is_of_its_experts():
    given = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    spec = read_config({**GPT_OSS, "quantization_config": given})
    assert spec.weights.experts_only
    saved = 2 * spec.parameters - spec.weight_bytes
    assert saved == pytest.approx(24 * 32 * 3 * 2880 * 2880 * (2 - 4.25 / 8))


def test_modelopts_file_beside_the_config_counts(tmp_path):
    """With its FP8 KV cache, as vLLM's `--kv-cache-dtype auto` has it."""
    folder = _write(tmp_path / "nemo-fp8", NEMO)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    spec, plain = read_model(folder), read_config(NEMO)
    assert spec.weights.name == "fp8" and spec.weight_bytes < 0.6 * plain.weight_bytes
    assert spec.kv_bytes_per_token == plain.kv_bytes_per_token / 2
