"""A server's words as settings, in the command, plans and fleet files."""

import json

import pytest

from tests.commands import refused, status
from tests.parameters import each
from tests.sim.test_serve_line import MANIFEST_OF_POOLS
from tests.truth import truth
from twinserve.profiles.catalog import find_model
from twinserve.profiles.front_end import FrontEnd, save_front_end
from twinserve.profiles.gpu_labels import gpu_of_label, machine_of_label
from twinserve.profiles.gpus import GPUS
from twinserve.profiles.models.hub_ids import PUBLISHED, catalogue_name, longest_request
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import main, simulate_main
from twinserve.sim.serve_line.read import read_servers
from twinserve.sim.serve_line.settings import from_vllm, stated
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.fleet_file import read_fleet

_LINE = "vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2 --max-model-len 32k"


@pytest.mark.parametrize(
    ("more", "gpu", "release", "expected"),
    [
        ("", "h100", None, (8192, 1024, 0.92, True)),
        ("", "a100-80g", None, (2048, 256, 0.92, True)),
        ("", "l4", "0.19", (2048, 256, 0.9, True)),
        ("", "h100", "0.13.0", (8192, 1024, 0.9, False)),
        ("", "h100", "0.14.0", (8192, 1024, 0.9, True)),
        ("--max-num-batched-tokens 512", "h100", "0.19", (512, 512, 0.9, True)),
        ("--no-enable-chunked-prefill", "h100", "0.19", (32_000, 1024, 0.9, True)),
    ],
)
def test_defaults_go_by_release_and_card(more, gpu, release, expected):
    config = SimulationConfig(from_vllm=f"{_LINE} {more}", gpu=gpu, engine_version=release)
    said = (config.max_num_batched_tokens, config.max_num_seqs, config.gpu_memory_utilization)
    assert (*said, config.async_scheduling) == expected
    named = {"profile": f"qwen3-8b@{gpu}", "engine_version": release}
    assert SimulationConfig(**named).async_scheduling == config.async_scheduling
    assert SimulationConfig(**named, async_scheduling=True).async_scheduling


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("VLLM_USE_V1=0 vllm serve Qwen/Qwen3-8B", {"policy": ("vllm-v0",),
                                                    "prefix_caching": False}),
        ("vllm serve Qwen/Qwen3-30B-A3B -dp 2 -ep", {"profile": "qwen3-30b-a3b@h100:dp2:ep",
                                                     "replicas": 2, "max_model_len": 40960}),
        ("vllm serve Qwen/Qwen3-8B -dp 2", {"profile": "qwen3-8b@h100", "replicas": 2}),
        ("vllm serve Qwen/Qwen3-8B -q fp8", {"profile": "qwen3-8b-fp8@h100"}),
        ("vllm serve Qwen/Qwen3-8B-AWQ --quantization awq_marlin",
         {"profile": "qwen3-8b-awq@h100"}),
        ("vllm serve Qwen/Qwen3-8B --scheduling-policy priority --watermark 0.1",
         {"policy": ("vllm:scheduling=priority,watermark=0.1",)}),
        ("vllm serve Qwen/Qwen3-8B --num-gpu-blocks-override 101", {"num_blocks": 100}),
        ("vllm serve Qwen/Qwen3-8B --kv-cache-dtype fp8_e5m2 --block-size 32 --enforce-eager",
         {"kv_cache_dtype": "fp8", "block_tokens": 32, "enforce_eager": True}),
        ("vllm serve Qwen/Qwen3-8B --kv-offloading-size 8", {"kv_offloading_size": 8.0}),
        ("Qwen/Qwen3-8B --max-num-seqs 3", {"max_num_seqs": 3}),
    ],
)  # fmt: skip
def test_options_become_settings(line, expected):
    config = SimulationConfig(from_vllm=line, gpu="NVIDIA-H100-80GB-HBM3")
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"from_vllm": _LINE}, "the GPU is not named; give --gpu"),
        ({"from_vllm": "vllm serve /m/Qwen3-8B", "gpu": "h100"}, "give --as-model qwen3-8b"),
        ({"from_vllm": "vllm serve /m/x", "gpu": "h100"}, "say which it is, as --as-model"),
        ({"from_vllm": "vllm serve a/b", "gpu": "h100"}, "name a catalogue model with --as-model"),
        ({"from_vllm": "vllm serve Qwen/Qwen3-8B --spec-method ngram --spec-tokens 3",
          "gpu": "h100"}, "--speculate k=3,method=ngram,acceptance=0.7"),
        ({"gpu": "h100"}, "--gpu goes with --from-vllm"),
        ({"from_vllm": "missing.yaml"}, "there is no such file"),
    ],
)  # fmt: skip
def test_what_a_line_leaves_open_is_asked_for(given, said):
    with pytest.raises(SettingsError, match=said):
        SimulationConfig(**given)


def test_prefill_and_decode_become_a_fleet(tmp_path):
    path = tmp_path / "pd.yaml"
    path.write_text(MANIFEST_OF_POOLS, encoding="utf-8")
    config = SimulationConfig(from_vllm=str(path))
    pools = read_fleet(config.fleet or "").settings.pools
    assert [(pool.role, pool.replicas, pool.profile) for pool in pools] == [
        ("prefill", 1, "qwen3-8b@h100"),
        ("decode", 2, "qwen3-8b@h100:tp2"),
    ]


def test_a_pool_of_a_fleet_file_can_be_a_server():
    pool = {"from_vllm": f"{_LINE} --max-num-seqs 64", "gpu": "h100", "replicas": 2}
    (found,) = read_fleet(json.dumps({"pools": [pool]})).settings.pools
    assert (found.profile, found.max_num_seqs, found.replicas) == ("llama-3.1-8b@h100:tp2", 64, 2)


def test_the_account_names_what_was_taken_passed_over_and_left(capsys):
    assert not status(
        simulate_main,
        ["--from-vllm", f"{_LINE} --port 80 --enable-lora", "--gpu", "h100"]
        + "-t fixed:64,4 --rate 1 --requests 2 --slo none".split(),
    )
    printed = capsys.readouterr()
    said = " ".join(f"{printed.err} {printed.out}".split())
    assert "one server of 2 x h100, vLLM 0.32 (not said: --engine-version)" in said
    assert "taken: meta-llama/Llama-3.1-8B-Instruct as llama-3.1-8b, --tensor-parallel" in said
    assert "passed over: --port" in said
    assert "--enable-lora is not simulated (adapters change memory and kernels)" in said


def test_a_plan_takes_what_a_server_states():
    line = f"{_LINE} --max-num-seqs 64 --kv-cache-dtype fp8 --enable-lora"
    model, settings, lines = stated(line, None, {})
    assert model == "llama-3.1-8b"
    assert settings == {"max_model_len": 32_000, "max_num_seqs": 64, "kv_cache_dtype": "fp8"}
    assert "--enable-lora is not simulated" in lines[1]


@pytest.mark.parametrize(
    ("more", "front_end", "becomes", "warned"),
    [
        ("--api-server-count 4", "vllm", "vllm:api_server_count=4", 0),
        ("-dp 2 -asc 4 --stream-interval 5", "vllm:chat=yes",
         "vllm:chat=yes,stream_interval=5,api_server_count=2", 0),
        ("--stream-interval 5", "vllm:stream_interval=2", "vllm:stream_interval=2", 0),
        ("-dp 2 --api-server-count 3", "vllm", "vllm", 1),
        ("--api-server-count 4", "none", "none", 1),
        ("--api-server-count 4", "old.json", "old.json", 1),
    ],
)  # fmt: skip
def test_api_servers_and_messages_are_of_the_front_end(
    more, front_end, becomes, warned, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save_front_end(FrontEnd("old", 0.01, 0.0, 0.01), "old.json")
    config = SimulationConfig(
        from_vllm=f"vllm serve Qwen/Qwen3-8B {more}", gpu="h100", front_end=front_end
    )
    assert config.front_end == becomes
    found = from_vllm(str(config.from_vllm), vars(config))
    assert len(found.warnings) == warned and found.front_end == (None if warned else becomes)
    assert all("give --front-end vllm" in line for line in found.warnings)


def test_what_is_said_beside_a_server_wins():
    own = {"max_num_seqs": 1, "engine_version": "0.19"}
    model, settings, _ = stated(f"{_LINE} --max-num-seqs 64", "qwen3-8b", own)
    assert (model, settings) == ("qwen3-8b", {"max_model_len": 32_000, **own})


def test_a_plan_without_a_model_asks_for_one(capsys):
    said = refused(capsys, main, ["plan", "-t", "azure-2023:conv", "--slo", "ttft p90 < 1 s"])
    assert "give --model, or a server's command line" in said


def test_a_file_that_changes_is_read_again(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("vllm serve Qwen/Qwen3-8B", encoding="utf-8")
    first = from_vllm(str(path), {"gpu": "h100"}).settings["profile"]
    path.write_text("vllm serve Qwen/Qwen3-14B", encoding="utf-8")
    assert (first, from_vllm(str(path), {"gpu": "h100"}).settings["profile"]) == (
        "qwen3-8b@h100",
        "qwen3-14b@h100",
    )


# -- what scripts, and files that name other servers, start ----------------------------------------
_SCRIPTS: dict[str, tuple[str, dict]] = {
    "a function with arguments": (
        'run() {\n  local model="$1" tp=$2\n  shift 2\n  vllm serve "$model" -tp=$tp "$@" &\n}\n'
        "run Qwen/Qwen3-32B 4 --max-model-len 16k\n",
        {"model": "Qwen/Qwen3-32B", "tp": 4, "max_model_len": 16_000},
    ),
    "a config that the script writes": (
        "cat > /tmp/c.yaml <<EOF\nmodel: Qwen/Qwen3-8B\nmax-num-seqs: 64\nEOF\n"
        "vllm serve --config /tmp/c.yaml\n",
        {"model": "Qwen/Qwen3-8B", "max_num_seqs": 64},
    ),
    "a value that := gives": (
        ': "${MODEL:=Qwen/Qwen3-8B}"\nvllm serve $MODEL `# here` --max-num-seqs 8\n',
        {"model": "Qwen/Qwen3-8B", "max_num_seqs": 8, "warn": ["${MODEL}: defaults taken"]},
    ),
    "a text for another shell": (
        "tmux new -d -s v 'CUDA_VISIBLE_DEVICES=0,1 uv run vllm serve Qwen/Qwen3-8B -tp 2'\n",
        {"model": "Qwen/Qwen3-8B", "tp": 2},
    ),
    "an assignment behind a test": (
        'O="--max-num-seqs 8"\n[ -n "$X" ] && O="$O $X"\neval "vllm serve Qwen/Qwen3-8B $O"\n',
        {"model": "Qwen/Qwen3-8B", "max_num_seqs": 8},
    ),
    "tests of values that are known": (
        "TP=1\nE=\n"
        'if [ "${MODE:-fast}" = fast ]; then TP=2; E="--max-num-seqs 32"\n'
        'elif [ "$MODE" = slow ]; then TP=4; else TP=8; fi\n'
        'if [[ -n "$QUANT" ]]; then E="$E --quantization $QUANT"; fi\n'
        '[ $TP -eq 2 ] && E="$E --block-size 32"\n[ -z "$NO" ] || E="$E --enforce-eager"\n'
        "[ $TP -ge 3 ] && vllm serve Qwen/Qwen3-14B\nvllm serve Qwen/Qwen3-8B -tp $TP $E\n",
        {
            "model": "Qwen/Qwen3-8B", "tp": 2, "max_num_seqs": 32, "block_size": 32,
            "quantization": None, "warn": ["${MODE}: defaults taken"],
        },
    ),
    "tests of what is not known": (
        "if [ -d /m ]; then M=Qwen/Qwen3-8B; else M=Qwen/Qwen3-14B; fi\nvllm serve $M\n",
        {"model": "Qwen/Qwen3-8B", "warn": ["${M}: of several branches the first is taken"]},
    ),
    "a job of Slurm": (
        "#SBATCH --gres=gpu:h100:4\n"
        "apptainer exec --nv v.sif vllm serve Qwen/Qwen3-32B -tp $SLURM_GPUS_ON_NODE\n",
        {"tp": 4, "gpu": "h100", "gpu_from": "--gres: h100"},
    ),
    "a loop": (
        "for i in 0 1; do vllm serve Qwen/Qwen3-8B --port 800$i & done\n",
        {"model": "Qwen/Qwen3-8B", "warn": ["a loop: one of the servers that it starts"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", _SCRIPTS)
def test_what_scripts_do(what, tmp_path):
    text, wanted = _SCRIPTS[what]
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    (server,) = read_servers(str(tmp_path / "run.sh"))
    assert {name: getattr(server, name) for name in wanted} == wanted


def test_a_producer_and_a_consumer_of_a_script_are_a_fleet(tmp_path):
    line = """vllm serve Qwen/Qwen3-8B --kv-transfer-config '{"kv_connector":"NixlConnector","""
    roles = "".join(f'{line}"kv_role":"kv_{role}"}}\' &\n' for role in ("consumer", "producer"))
    (tmp_path / "run.sh").write_text(roles, encoding="utf-8")
    assert [one.role for one in read_servers(str(tmp_path / "run.sh"))] == ["prefill", "decode"]


def test_a_sign_in_an_array_is_no_end_of_time(tmp_path):
    (tmp_path / "run.sh").write_text("A=(a; b | (c)\nvllm serve Qwen/Qwen3-8B\n")
    assert read_servers(str(tmp_path / "run.sh"))[0].model == "Qwen/Qwen3-8B"


def test_values_of_vllms_own_chart_and_of_a_helm_release(tmp_path):
    chart = (
        'image:\n  repository: vllm/vllm-openai\n  tag: v0.10.0\n  command: ["vllm", "serve", '
        '"Qwen/Qwen3-8B", "--max-num-seqs", "7"]\ngpuModels: [NVIDIA-L40S]\nreplicaCount: 2\n'
        "resources: {limits: {nvidia.com/gpu: 1}}\n"
    )
    inside = "".join(f"    {line}\n" for line in chart.splitlines())
    for text in (chart, f"kind: HelmRelease\nspec:\n  values:\n{inside}"):
        (tmp_path / "values.yaml").write_text(text, encoding="utf-8")
        (one,) = read_servers(str(tmp_path / "values.yaml"))
        assert (one.model, one.max_num_seqs, one.gpu) == ("Qwen/Qwen3-8B", 7, "l40s")
        assert (one.replicas, one.release) == (2, "0.10.0")


def test_a_service_has_what_it_extends(tmp_path):
    path = tmp_path / "compose.yml"
    path.write_text(
        "services:\n  base:\n    image: vllm/vllm-openai:v0.9.0\n    command: sleep inf\n"
        "  b:\n    extends: {service: base}\n    command: --model Qwen/Qwen3-32B -tp=2\n",
        encoding="utf-8",
    )
    server = read_servers(f"{path}#b")[0]
    assert (server.model, server.tp, server.release) == ("Qwen/Qwen3-32B", 2, "0.9.0")


# -- names of models and GPUs as servers, nodes and clouds have them -------------------------------
@each("name", PUBLISHED)
def test_every_catalogue_model_is_known_by_its_id(name):
    published = PUBLISHED[name]
    assert {catalogue_name(published.hub), catalogue_name(published.shipped or published.hub)} == {
        name
    }


@pytest.mark.parametrize(
    ("model", "name", "longest"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("meta-llama/meta-llama-3-8b-instruct", "llama-3.1-8b", 8192),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic", "llama-3.1-70b-fp8", None),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b-int4", None),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b-gptq8", 32768),
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", "qwen2.5-14b-awq", 32768),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b", None),
        ("mistralai/Mistral-7B-Instruct-v0.1", None, None),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", None),
        ("nvidia/DeepSeek-R1-FP4", None, None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "deepseek-r1-0528-qwen3-8b", None),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3-235b-a22b-2507-fp8", None),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2-0905", None),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2-thinking", None),
        ("nvidia/Kimi-K2.7-Code-NVFP4", "kimi-k2.6-nvfp4", None),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral-3-8b-fp8", None),
        ("mistralai/Ministral-3-8B-Reasoning-2512", "ministral-3-8b", None),
        ("zai-org/GLM-4.7-FP8", "glm-4.6-fp8", None),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama-3.2-3b", None),
        ("openai/gpt-oss-120b", "gpt-oss-120b", None),
        ("Qwen/Qwen3-32B-Tuned", None, None),
    ],
)
def test_variants_are_their_catalogue_models(model, name, longest):
    assert (catalogue_name(model), longest_request(model)) == (name, longest)


def test_ids_of_public_recipes_are_understood():
    ids = truth("recipe_ids.txt").read_text(encoding="utf-8").split()
    assert sum(catalogue_name(model) is not None for model in ids) >= 64


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("Qwen/Qwen3.5-27B", "fixed state"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "fixed state"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "fixed state"),
        ("deepseek-ai/DeepSeek-V3.2", "sparse attention"),
        ("zai-org/GLM-5.1-FP8", "sparse attention"),
        ("google/gemma-4-31B-it", "heads or head size"),
        ("openai/whisper-large-v3", "speech, pictures or vectors"),
    ],
)
def test_a_model_of_another_kind_is_refused_for_what_it_is(model, why):
    with pytest.raises(ProfileError, match=why) as error:
        find_model(model)
    assert "hf download" not in str(error.value) and catalogue_name(model) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("H200", "h200"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-5e1)", "h200"), ("nvidia-l4", "l4"), ("Tesla-T4", "t4"),
        ("A100-SXM4-40GB", "a100-40g"), ("NVIDIA-A100-SXM4-80GB", "a100-80g"),
        ("nvidia-tesla-a100", "a100-40g"), ("NVIDIA-GeForce-RTX-4090", "rtx4090"),
        ("AMD_Instinct_MI300X_OAM", "mi300x"), ("p4d.24xlarge", "a100-40g"),
        ("a3-highgpu-8g", "h100"), ("Standard_ND96isr_H100_v5", "h100"), ("ND H100 v5", "h100"),
        ("NVIDIA-A100-80GB-PCIe", "a100-pcie-80g"), ("m8g.large", None),
        ("NVIDIA-H100-NVL", "h100-nvl"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80g"),
        ("Standard_NC40ads_H100_v5", "h100-nvl"), ("BM.GPU.H100.8", "h100"),
        ("gpu_8x_h100_sxm5", "h100"), ("g7e.2xlarge", "rtxpro6000"), ("VM.GPU.A10.2", "a10"),
    ],
)  # fmt: skip
def test_labels_and_instance_types_name_gpus(text, name):
    assert gpu_of_label(text) == name


def test_instance_types_have_a_number_of_gpus():
    said = {
        text: machine_of_label(text)
        for text in (
            "p5.48xlarge", "g5.12xlarge", "g2-standard-24", "VM.GPU.A10.2", "a2-highgpu-4g",
        )
    }  # fmt: skip
    assert said == {
        "p5.48xlarge": ("h100", 8), "g5.12xlarge": ("a10g", 4), "g2-standard-24": ("l4", 2),
        "VM.GPU.A10.2": ("a10", 2), "a2-highgpu-4g": ("a100-40g", 4),
    }  # fmt: skip
    assert all(gpu_of_label(name) in (name, None) for name in GPUS)
