"""A server's words as settings, in the command, plans and fleet files."""

import json

import pytest

from tests.commands import refused, status
from tests.sim.test_serve_line import MANIFEST_OF_POOLS
from twinserve.profiles.front_end import FrontEnd, save_front_end
from twinserve.sim.cli.main import main, simulate_main
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
