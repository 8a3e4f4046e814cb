"""What scripts, and files that name other servers, start."""

import pytest

from twinserve.sim.serve_line.read import read_servers

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
