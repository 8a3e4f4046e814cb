"""--from-vllm: command lines and files of servers, and what is made of them."""

import csv
import json
import os
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.parameters import mostly_nightly_pairs
from tests.truth import truth
from twinserve.sim.serve_line.argv import options, read_argv
from twinserve.sim.serve_line.read import read_servers
from twinserve.sim.serve_line.shell import read_shell
from twinserve.sim.serve_line.words import ServeLineError, human_integer, plain

# -- cases of other people, which are not kept here ------------------------------------------------
_FOLDERS = filter(None, os.environ.get("TWINSERVE_TRUTH", "").split(os.pathsep))
_BESIDE = (Path(folder).parent / "cases" / "serve_lines" for folder in _FOLDERS)
_CASES = next(filter(Path.exists, _BESIDE), None)
_NAMES = sorted(path.parent.name for path in _CASES.glob("*/expect.json")) if _CASES else []
_TEXTS = ("kind", "gpu_from")
# Words of an address that only a cluster knows stay as the file has them.
_FILLED_IN = ("kv-events-config", "$(")


@cache
def _case(name: str) -> tuple[Path, dict]:
    assert _CASES is not None
    expected = json.loads((_CASES / name / "expect.json").read_text(encoding="utf-8"))
    return _CASES / name / expected["input"], expected


@pytest.mark.parametrize("name", _NAMES or [None])
def test_a_file_is_read_as_what_follows_from_it(name):
    if name is None:
        pytest.skip("no serve_lines/; set TWINSERVE_TRUTH to the folder beside which it lies")
    path, expected = _case(name)
    if "refuse" in expected:
        refused = expected["refuse"]
        with pytest.raises(ServeLineError) as error:
            read_servers(str(path))
        assert str(error.value).startswith(f"{refused['file']}:{refused['line']}: ")
        assert refused["reason"].split()[-1].strip("}") in str(error.value)
        return
    servers = read_servers(str(path))
    pools = expected.get("pools", [expected])
    assert len(servers) == len(pools)
    for server, pool in zip(servers, pools, strict=True):
        for field in set(pool) - {"argv", "parser_0_32", "passed_over", "warn", "input", "pools"}:
            assert getattr(server, field) == pool[field], field
        unlike = [
            (said, right)
            for said, right in zip(server.argv, pool["argv"], strict=True)
            if said != right and "$(" not in said
        ]
        assert unlike == []
        for field in ("passed_over", "warn"):
            said, right = set(getattr(server, field)), set(pool[field])
            assert right <= said
            assert {n for n in said if n.startswith("--")} == {
                n for n in right if n.startswith("--")
            }


def test_the_options_are_those_of_a_list_made_by_others():
    words = {"same": "taken", "matters": "warned", "irrelevant": "passed", "refuse": "refused"}
    with truth("vllm_options.csv").open(encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file) if row["class"]}
    ours = options()
    assert set(rows) - set(ours) == {
        "model_tag",
        "--enable-chunked-prefill[=False| False]",  # read_argv has its rule
    }
    assert set(ours) <= set(rows)
    for name, option in ours.items():
        assert option.treated == words[rows[name]["class"]], name
        assert bool(option.gone) == bool(rows[name]["gone_by"]), name
        assert bool(option.why) == (option.treated in ("warned", "refused")), name


# -- words and options -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "number"),
    [("32k", 32_000), ("32K", 32_768), ("1.5m", 1_500_000), ("2G", 2**31), ("25.6k", 25_600),
     ("4096", 4096), ("1T", 2**40)],
)  # fmt: skip
def test_human_integers_are_vllms(text, number):
    assert human_integer(text) == number


@pytest.mark.parametrize("text", ["1.5M", "32kb", "1Ki", "ten", "", "1 k"])
def test_other_numbers_are_refused(text):
    with pytest.raises(ValueError):
        human_integer(text)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("m -tp 4 -pp=2", {"--tensor-parallel-size": 4, "--pipeline-parallel-size": 2}),
        ("m --max-num-seq 7", {"--max-num-seqs": 7}),
        ("m --max_model_len=32k", {"--max-model-len": 32_000}),
        ("m --max-model-len auto", {"--max-model-len": -1}),
        ("m --seed 1 --max-num-seqs 3 --max-num-seqs 5", {"--seed": 1, "--max-num-seqs": 5}),
        ("""m --kv-transfer-config '{"a": 80m, "b": "3k"}'""",
         {"--kv-transfer-config": {"a": 80_000_000, "b": "3k"}}),
        ("m -O3", {"--optimization-level": "3"}),
        ("m --no-enable-prefix-caching", {"--enable-prefix-caching": False}),
        ("--host h m -q awq", {"--host": "h", "--quantization": "awq"}),
        (
            'm --speculative-config.method eagle -sc.num_speculative_tokens=3',
            {"--speculative-config": {"method": "eagle", "num_speculative_tokens": 3}},
        ),
        (
            "m --kv-transfer-config '{\"kv_connector\": \"X\"}'",
            {"--kv-transfer-config": {"kv_connector": "X"}},
        ),
        ("m --enable-chunked-prefill False", {"--enable-chunked-prefill": False}),
        ("m --swap-space 4 --disable-log-requests", {"--swap-space": "4",
                                                     "--disable-log-requests": True}),
    ],
)  # fmt: skip
def test_options_are_read_as_vllm_reads_them(line, values):
    (command,) = read_shell(line, {})
    given = read_argv(command.words)
    assert given.model == "m"
    assert given.values == values


@pytest.mark.parametrize(
    ("line", "release", "said"),
    [
        ("m -tp4", None, "-tp4"),
        ("m --max-num-seqs 1k", None, "--max-num-seqs"),
        ("m --max-model-len 1.5M", None, "--max-model-len"),
        ("m --enable-prefix-caching=True", None, "--enable-prefix-caching"),
        ("m --max-num", None, "could match"),
        ("m --made-up 3", None, "no such option"),
        ("m --swap-space 4", (0, 32, 0), "has removed it"),
        ("m --watermark 0.1", (0, 9, 0), "does not have it yet"),
        ("m --model n", None, "both name the model"),
        ("m --kv-transfer-config {x", None, "not JSON"),
        ("m --enable-chunked-prefill False", (0, 9, 2), "False"),
    ],
)
def test_what_vllm_refuses_is_refused(line, release, said):
    (command,) = read_shell(line, {})
    with pytest.raises(ServeLineError, match=said):
        read_argv(command.words, release)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("vllm serve ${M:-q/a} --port $((2 * N + 1))", ["q/a", "--port", "9"]),
        ("A=(q/a --seed 3)\nvllm serve \"${A[@]}\"", ["q/a", "--seed", "3"]),
        ("A=(q/a)\nA+=(--seed 3)\nexec vllm serve ${A[@]} &", ["q/a", "--seed", "3"]),
        ("if [ -n \"$X\" ]; then\n  vllm serve q/a\nfi", ["q/a"]),
        ("cd /x && nohup vllm serve q/a > log 2>&1 &", ["q/a"]),
        ("vllm serve q/a \\\n  # no\n", ["q/a"]),
        ("E='--seed 3'\nvllm serve q/a $E", ["q/a", "--seed", "3"]),
        ("bash -lc 'vllm serve q/a --seed 3'", ["q/a", "--seed", "3"]),
        ("podman run --rm --device nvidia.com/gpu=0 -p 1:1 docker.io/vllm/vllm-openai q/a",
         ["q/a"]),
        ("docker run --gpus all --entrypoint vllm img serve q/a", ["q/a"]),
        ("srun -N1 python3 -m vllm.entrypoints.openai.api_server --model q/a", ["--model", "q/a"]),
    ],
)  # fmt: skip
def test_scripts_are_read_and_not_run(script, words, tmp_path):
    path = tmp_path / "start.sh"
    path.write_text("N=4\n" + script, encoding="utf-8")
    (server,) = read_servers(str(path))
    assert server.argv == words


# -- files -----------------------------------------------------------------------------------------
_POD = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: served}
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {karpenter.k8s.aws/instance-gpu-name: l40s}
      initContainers: [{name: get, image: vllm/vllm-openai:v0.10.0, args: [--model, x/y]}]
      containers:
      - {name: proxy, image: envoy, args: [--port, "80"]}
      - name: vllm
        image: vllm/vllm-openai:v0.11.0
        envFrom: [{configMapRef: {name: words}}]
        args: [--model, $(MODEL), --config, /etc/vllm/more.yaml]
        resources: {limits: {nvidia.com/gpu: 2}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: words}
data:
  MODEL: Qwen/Qwen3-8B
  more.yaml: |
    tensor-parallel-size: 2
    enable-prefix-caching: false
"""
_COMPOSE = """
services:
  llm:
    image: vllm/vllm-openai:${TAG}
    entrypoint: ["vllm", "serve"]
    command: ["${MODEL}", "--tensor-parallel-size", "2"]
    environment: {VLLM_USE_V1: "0", VLLM_ATTENTION_BACKEND: FLASHINFER}
    gpus: 2
  web: {image: web}
"""
MANIFEST_OF_POOLS = """
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {llm-d.ai/role: prefill}}
spec:
  nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
  containers:
  - command: [vllm, serve, Qwen/Qwen3-8B, --kv-transfer-config,
      '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
    resources: {limits: {nvidia.com/gpu: 1}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: d, labels: {llm-d.ai/role: decode}}
spec:
  replicas: 2
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      containers:
      - command: [vllm, serve, Qwen/Qwen3-8B, -tp, "2", --kv-transfer-config,
          '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
        resources: {limits: {nvidia.com/gpu: 2}}
"""
_QUADLET = """
[Container]
Image=docker.io/vllm/vllm-openai:v0.19.0
Environment=M=Qwen/Qwen3-8B
Exec=--model ${M} \\
  --max-num-seqs 32
"""
_DOCKERFILE = """
ARG V=v0.15.1
FROM vllm/vllm-openai:${V}
CMD ["--model", "Qwen/Qwen3-8B"]
"""
_RAY = """
apiVersion: ray.io/v1
kind: RayService
metadata: {name: r}
spec:
  serveConfigV2: |
    applications:
    - name: llm
      args:
        llm_configs:
        - model_loading_config: {model_id: Qwen/Qwen3-8B}
          accelerator_type: L4
          engine_kwargs: {tensor_parallel_size: 2, enable_prefix_caching: false}
          deployment_config: {num_replicas: 3}
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("s.yaml", _POD, {"model": "Qwen/Qwen3-8B", "tp": 2, "replicas": 3, "gpu": "l40s",
                          "release": "0.11.0", "enable_prefix_caching": None}),
        ("compose.yml", _COMPOSE, {"model": "Qwen/Qwen3-8B", "tp": 2, "v0": True,
                                   "release": "0.9.1", "warn": ["env VLLM_ATTENTION_BACKEND"]}),
        ("x.container", _QUADLET, {"model": "Qwen/Qwen3-8B", "max_num_seqs": 32,
                                   "release": "0.19.0", "kind": "systemd unit"}),
        ("ray.yaml", _RAY, {"model": "Qwen/Qwen3-8B", "tp": 2, "gpu": "l4", "replicas": 3,
                            "enable_prefix_caching": False}),
        ("config.yaml", "model: Qwen/Qwen3-8B\nmax-model-len: 8k\nenable-prefix-caching: false\n",
         {"model": "Qwen/Qwen3-8B", "max_model_len": 8000, "enable_prefix_caching": False}),
        ("Dockerfile", _DOCKERFILE,
         {"model": "Qwen/Qwen3-8B", "release": "0.15.1"}),
    ],
)  # fmt: skip
def test_files_of_each_kind(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".env").write_text("TAG=v0.9.1\nMODEL='Qwen/Qwen3-8B' # it\n", encoding="utf-8")
    (server,) = read_servers(str(tmp_path / name))
    assert {field: getattr(server, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai\n"
         "    args: [--model, '{{ .Values.model }}']\n", "a.yaml:6: {{ .Values.model }}"),
        ("a.yaml", "kind: Pod\n{{- if .x }}\na: 1\n{{- end }}\n", "a.yaml:2: {{- if .x }}"),
        ("a.sh", "vllm serve $MODEL", "a.sh:1: $MODEL has no value"),
        ("a.sh", "vllm serve q/a -tp $(nvidia-smi -L | wc -l)", "nothing is run"),
        ("a.sh", "export CUDA_VISIBLE_DEVICES=0\n\nvllm serve q/a -tp 2", "names 1"),
        ("a.sh", "vllm serve q/a\nvllm serve q/b", "a.sh:2: 2 servers"),
        ("a.sh", "vllm serve q/a --headless", "give the line of its head"),
        ("a.sh", "vllm serve q/a --runner pooling", "a pooling model"),
        ("a.sh", "echo vllm serve q/a", "starts no vLLM server"),
        ("a.sh", "docker run --gpus 1 vllm/vllm-openai:v0.20.0 --model q/a -tp 2", "gives 1"),
        ("a.sh", "docker run vllm/vllm-openai:v0.28.0 --model q/a --swap-space 1", "removed"),
        ("a.sh", "vllm serve --port 80", "names no model"),
        ("a.sh", "vllm serve q/a --config more.yaml", "more.yaml: there is no such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_one_server_is_refused_in_one_line(name, text, said, tmp_path):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ServeLineError) as error:
        read_servers(str(path))
    assert said in str(error.value)
    assert str(error.value).startswith(name)
    assert "\n" not in plain(str(error.value))


@pytest.mark.parametrize(
    ("text", "value"),
    mostly_nightly_pairs(
        product(
            [_POD, _COMPOSE, MANIFEST_OF_POOLS, _QUADLET, _RAY],
            ["", "null", "[1]", "{a: b}", "'x'", "{{ .v }}", "$(x)"],
        )
    ),
)
def test_a_damaged_file_is_read_or_refused(text, value, tmp_path):
    """Each line in turn has another value: what is wrong is one line, and no defect of ours."""
    lines = text.splitlines()
    refused = 0
    for i, line in enumerate(lines):
        path = tmp_path / ("a.container" if text is _QUADLET else "a.yaml")
        changed = f"{line.partition(':')[0]}: {value}"
        path.write_text("\n".join([*lines[:i], changed, *lines[i + 1 :]]), encoding="utf-8")
        try:
            read_servers(str(path))
        except ServeLineError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 0


def test_one_of_several_services_can_be_named(tmp_path):
    path = tmp_path / "compose.yaml"
    services = {n: {"image": "vllm/vllm-openai", "command": f"--model q/{n}"} for n in "ab"}
    path.write_text(json.dumps({"services": services}), encoding="utf-8")
    assert read_servers(f"{path}#b")[0].model == "q/b"
    with pytest.raises(ServeLineError, match="no service 'c' runs vLLM; there are a, b"):
        read_servers(f"{path}#c")
