"""The catalogue: published sizes, what quantised weights take, and what each verb says."""

import csv
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tests.commands import status
from tests.parameters import each
from twinserve.policies.overview import KNOWN, policy_rows
from twinserve.policies.registry import policy_names
from twinserve.profiles.catalog import GPUS, MODELS, find_model
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.forms.efficiency import FAMILIES
from twinserve.profiles.gpus import FEW_BITS
from twinserve.profiles.models.config import read_config
from twinserve.profiles.models.hub_ids import PUBLISHED, SEEN
from twinserve.profiles.operators.shipped import operator_profile
from twinserve.profiles.overview import gpu_rows, model_rows
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.specs import ModelSpec, ProfileError
from twinserve.sim.cli.main import main


def test_every_model_has_the_kv_bytes_of_its_published_layers_and_heads():
    """As model cards and config.json files say; arXiv 2505.09343, table 1, has the bytes of
    DeepSeek-V3, Qwen2.5-72B and LLaMA-3.1-405B. DeepSeek-V3: 512 + 64 values a layer for
    keys and values together."""
    with open(Path(__file__).with_name("kv_shapes.csv"), encoding="utf-8") as file:
        shapes = {row["model"]: row for row in csv.DictReader(file)}
    assert shapes.keys() == MODELS.keys()
    for name, row in shapes.items():
        layer = int(row["kv_heads"]) * int(row["head_size"])
        assert MODELS[name].kv_bytes_per_token == 2 * int(row["layers"]) * layer * 2, name


@each("name", PUBLISHED)
def test_every_model_has_its_published_size(name):
    said = PUBLISHED[name].billions
    digits = len(said.partition(".")[2])
    assert f"{MODELS[name].parameters / 1e9:.{digits}f}" == said


# What the shipped file of the same architecture says otherwise than the model's own: the first
# release of Qwen3-30B-A3B, and Mixtral-8x22B before its vocabulary grew.
_OTHERWISE = {"qwen3-30b-a3b": {"max_positions": 40960}, "mixtral-8x22b": {"vocab": 32000}}


@pytest.mark.parametrize("name", [n for n, said in PUBLISHED.items() if said.shipped])
def test_models_are_as_the_config_json_that_is_shipped_of_them(name):
    """Field by field, with windows, limits and formats. Vision towers are not in those files."""
    package = pytest.importorskip("aiconfigurator_core")
    path = Path(package.__file__).parent / "model_configs"
    file = path / f"{PUBLISHED[name].shipped.replace('/', '--')}_config.json"
    ours = TypeAdapter(ModelSpec).dump_python(MODELS[name])
    theirs = TypeAdapter(ModelSpec).dump_python(read_config(file, name))
    if name.startswith("llama-4"):
        assert ours.pop("other_parameters") > theirs.pop("other_parameters", 0)
    assert ours == theirs | {key: ours[key] for key in _OTHERWISE.get(name, {})}
    assert _OTHERWISE.get(name, {}).items() <= theirs.items()


# Tokens that layers attend to at most, and how many layers: models whose layers see all are left
# out. Mistral's checkpoints say `sliding_window: null` since v0.2.
WINDOWS = {
    "gemma-2-2b": (4096, 13), "gemma-2-9b": (4096, 21), "gemma-2-27b": (4096, 23),
    "gemma-3-1b": (512, 22), "gemma-3-4b": (1024, 29), "gemma-3-12b": (1024, 40),
    "gemma-3-27b": (1024, 52), "gpt-oss-20b": (128, 12), "gpt-oss-120b": (128, 18),
    "llama-4-scout": (8192, 36), "llama-4-maverick": (8192, 36),
}  # fmt: skip


def test_windows_are_published_ones():
    assert {
        name: (spec.window, spec.window_layers) for name, spec in MODELS.items() if spec.window
    } == WINDOWS


def test_a_mistral_reads_all_of_a_long_context():
    """16 decodes of 30,000 tokens: at least what reading their KV takes."""
    profile = derive_profile("mistral-7b", "h100")
    read = 16 * 30_000 * profile.kv_bytes_per_token / profile.gpu.memory_bytes_per_s
    assert profile.model().step_seconds(decode_work(16, 30_000)) > read


def test_the_catalogue_is_whole():
    assert {said.seen for said in PUBLISHED.values()} == SEEN.keys()
    assert all((said.seen == "package") <= bool(said.shipped) for said in PUBLISHED.values())
    assert PUBLISHED.keys() == MODELS.keys() and FEW_BITS.keys() == GPUS.keys()
    assert {*KNOWN} <= {*policy_names()}


@pytest.mark.parametrize(
    ("name", "gigabytes", "tolerance"),
    [
        ("gpt-oss-120b", 60.8 * 1.0737, 0.005),  # checkpoint, GiB: arXiv 2508.10925, table 1
        ("gpt-oss-20b", 12.8 * 1.0737, 0.005),
        ("llama-3.1-70b-fp8", 72.66, 0.001),  # 68.5 B of one byte, tables of two
    ],
)
def test_quantised_weights_take_what_their_files_take(name, gigabytes, tolerance):
    assert find_model(name).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=tolerance)


def test_a_quantised_model_reads_less_and_multiplies_faster():
    plain, fp8, awq = (
        derive_profile(f"llama-3.1-70b{suffix}", "h100", 4) for suffix in ("", "-fp8", "-awq")
    )
    assert plain.num_gpu_blocks < fp8.num_gpu_blocks < awq.num_gpu_blocks
    few, many = decode_work(1, 100), prefill_work(8192)

    def gemm(profile, work):
        return profile.model().terms(work)["gemm"]

    # kernels of eight bits keep 0.89 of the memory's rate, those of four bits 0.72
    reads = FAMILIES["hopper"].gemm_mbu
    assert gemm(plain, few) / gemm(fp8, few) * reads / 0.89 == pytest.approx(2.0, rel=0.01)
    slower = reads / 0.72
    assert gemm(plain, few) / gemm(awq, few) * slower == pytest.approx(16 / 4.15625, rel=0.01)
    assert 1.5 < gemm(plain, many) / gemm(fp8, many) < 1979 / 989
    assert gemm(awq, many) == pytest.approx(gemm(plain, many), rel=0.2)  # multiplied in 16 bits
    assert expected_errors(fp8).decode.known and not expected_errors(awq).decode.known


def test_a_gpu_without_fp8_multiplies_in_16_bits():
    plain, fp8 = (derive_profile(f"llama-3.1-8b{suffix}", "a100") for suffix in ("", "-fp8"))
    assert fp8.gpu.fp8_flops is None and fp8.gpu.int8_flops == 624e12
    gemms = [one.model().terms(prefill_work(8192))["gemm"] for one in (plain, fp8)]
    assert gemms[1] == pytest.approx(gemms[0], rel=0.02)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-2-7b-awq@v100", "compute capability 7.5"),
        ("gpt-oss-20b@t4", "compute capability 8.0"),
        ("llama-3.1-8b-nvfp4@mi300x", "NVIDIA's GPUs only"),
        ("gpt-oss-20b-fp8@h100", "are mxfp4 already"),
        ("llama-3.1-8b-fp7@h100", "unknown model"),
    ],
)
def test_formats_that_vllm_would_not_run_are_refused(name, words):
    with pytest.raises(ProfileError, match=words):
        load_profile(name)


@each("name", MODELS)
def test_every_model_runs_somewhere_without_an_extra(name):
    """The smallest of one to eight H200 or B200 that holds it, by the roofline."""
    for gpu, tp in (("h200", 1), ("h200", 2), ("h200", 4), ("b200", 4), ("h200", 8), ("b200", 8)):
        try:
            profile = derive_profile(name, gpu, tp)
        except ProfileError:
            continue
        assert 1e-3 < profile.model().step_seconds(decode_work(8, 500)) < 0.1
        return
    pytest.fail(f"{name} fits nowhere")


@each("gpu", GPUS)
def test_every_gpu_runs_a_small_model(gpu):
    profile = derive_profile("qwen3-1.7b", gpu)
    assert 5e-4 < profile.model().step_seconds(decode_work(8, 500)) < 0.1


def test_accuracy_is_that_of_the_evidence():
    models = {row["name"]: row for row in model_rows()}
    gpus = {row["name"]: row for row in gpu_rows()}
    assert models["llama-3.1-8b"]["accuracy"] == "measured"
    assert "h100" in models["llama-3.1-8b"]["measured_on"]
    assert models["qwen3-8b"]["accuracy"] == "table"
    assert models["deepseek-v3"]["accuracy"] == "derived"
    assert gpus["h100"]["accuracy"] == "measured" and gpus["h100"]["constants"] == "fitted"
    assert gpus["b200"]["accuracy"] == "table"
    assert gpus["mi300x"]["accuracy"] == "derived" and gpus["mi300x"]["constants"] == "borrowed"
    assert {row["name"]: row["accuracy"] for row in policy_rows()}["vllm"] == "identical"
    assert all(len(row["summary"]) > 20 for row in policy_rows())


@pytest.mark.parametrize(
    ("verb", "row"), [("models", "gpt-oss-120b"), ("gpus", "mi300x"), ("policies", "bros")]
)
def test_each_verb_prints_a_table_and_json(verb, row, capsys):
    assert not status(main, [verb]) and row in capsys.readouterr().out
    status(main, [verb, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert row in {one["name"] for one in rows}
    assert all(one["source" if "source" in one else "hub"] and one["accuracy"] for one in rows)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "rtxpro6000"])
def test_fp8_weights_have_tables_where_the_gpu_multiplies_in_fp8(gpu):
    """Neither faster than the data sheet nor slower than 16 bits, and with the attention of a KV
    cache in 16 bits."""
    pytest.importorskip("aiconfigurator_core")
    plain, fp8 = (operator_profile(f"qwen3-8b{suffix}", gpu) for suffix in ("", "-fp8"))
    assert fp8.fit_error is None and "no mark is of quantised weights" in fp8.notes
    assert fp8.step_model.decode_s == plain.step_model.decode_s
    for work in (decode_work(1, 100), decode_work(64, 100), prefill_work(4096)):
        ours, sixteen = (one.model().terms(work)["tokens"] for one in (fp8, plain))
        tokens = work.new_tokens
        read = fp8.llm.matrix_parameters / fp8.gpu.memory_bytes_per_s
        multiplied = 2 * tokens * fp8.llm.matrix_parameters / fp8.gpu.fp8_flops
        assert max(read, multiplied) < ours < sixteen
    with pytest.raises(ProfileError, match="quantised weights"):
        operator_profile("qwen3-8b-awq", gpu)


def test_fp8_weights_have_no_tables_on_a_gpu_without_fp8():
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(ProfileError, match="quantised weights"):
        operator_profile("qwen3-8b-fp8", "a100")
