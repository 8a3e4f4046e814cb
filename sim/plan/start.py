"""How to start a plan: its servers' command lines, a script with the router, other tools' files."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from twinserve.policies.registry import parse_policy
from twinserve.profiles.kv_memory.releases import LATEST_NAME
from twinserve.profiles.models.hub_ids import PUBLISHED
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.decision import decide
from twinserve.sim.plan.planner import Plan, Row
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.serving import scheduler_class

FIRST_PORT = 8000


def serve_arguments(
    candidate: Candidate, index: int, slo: tuple[float | None, float | None], longest: int
) -> list[str]:
    """Return the words of replica `index`. slo: (TTFT, TPOT) seconds, for policies that use
    deadlines. longest: tokens of the longest request, which the server must accept."""
    hardware, config = candidate.hardware, candidate.config
    profile, limits = hardware.profile, hardware.limits
    words = ["vllm", "serve", hub_id(profile.llm.name), "--port", str(FIRST_PORT + index)]
    words += ["--tensor-parallel-size", str(candidate.tp)]
    surely = min(limits.max_model_len, hardware.least_kv_tokens)
    words += ["--max-model-len", str(max(surely, longest))]
    words += ["--max-num-seqs", str(limits.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    words += ["--block-size", str(hardware.block_tokens)]
    if config.gpu_memory_utilization is not None:
        words += ["--gpu-memory-utilization", f"{config.gpu_memory_utilization:g}"]
    if config.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", config.kv_cache_dtype]
    words += ["--enforce-eager"] * config.enforce_eager
    words += ["--async-scheduling" if config.async_scheduling else "--no-async-scheduling"]
    return words + _policy(candidate, slo)


def hub_id(model: str) -> str:
    """Return the Hugging Face id of a catalogue model; for another name, the name itself."""
    known = PUBLISHED.get(model.lower())
    return model if known is None else known.hub


def deadlines_told(candidate: Candidate) -> bool:
    """Return whether its servers get objectives. vLLM's own scheduler uses none."""
    return parse_policy(candidate.policy).text != "vllm"


def _policy(candidate: Candidate, slo: tuple[float | None, float | None]) -> list[str]:
    """vLLM's own scheduler needs no word; any other policy decides inside of it."""
    if not deadlines_told(candidate):
        return []
    told: dict[str, object] = {"policy": candidate.policy, "profile": candidate.config.profile}
    told |= {
        name: value
        for name, value in zip(("slo_ttft_s", "slo_tpot_s"), slo, strict=True)
        if value is not None
    }
    scheduler = scheduler_class(candidate.config.async_scheduling)
    return ["--scheduler-cls", scheduler, "--additional-config", json.dumps(told)]


# Of nodes with the driver's labels (nvidia.com/gpu.product); others are left to the user.
LABELS = {
    "h100": "NVIDIA-H100-80GB-HBM3",
    "h100-nvl": "NVIDIA-H100-NVL",
    "a100-pcie-80g": "NVIDIA-A100-80GB-PCIe",
    "h100-pcie": "NVIDIA-H100-PCIe",
    "h200": "NVIDIA-H200",
    "h20": "NVIDIA-H20",
    "a100-80g": "NVIDIA-A100-SXM4-80GB",
    "a100-40g": "NVIDIA-A100-SXM4-40GB",
    "a100-pcie-40g": "NVIDIA-A100-PCIE-40GB",
    "l40s": "NVIDIA-L40S",
    "l4": "NVIDIA-L4",
    "l20": "NVIDIA-L20",
    "a10": "NVIDIA-A10",
    "a10g": "NVIDIA-A10G",
    "a40": "NVIDIA-A40",
    "a6000": "NVIDIA-RTX-A6000",
    "t4": "Tesla-T4",
    "b200": "NVIDIA-B200",
}
FILES = {
    "vllm": "serve.sh",
    "kubernetes": "kubernetes.yaml",
    "compose": "compose.yaml",
    "llm-d": "values.yaml",
}
_PRODUCT = "nvidia.com/gpu.product"


def emitted(kind: str, candidate: Candidate, replicas: int, words: Sequence[str]) -> str:
    """Return the file of `kind` (FILES). words: of one replica on FIRST_PORT
    (`serve_arguments`)."""
    many = f"{replicas} x {candidate.label}"
    words = list(words)
    if "--gpu-memory-utilization" not in words:  # releases differ, and so do profiles
        share = candidate.hardware.profile.gpu_memory_utilization
        words += ["--gpu-memory-utilization", f"{share:g}"]
    if kind == "vllm":
        note = f"one replica of {many}: start it {replicas} times, each on GPUs of its own"
        lines = ["#!/bin/sh", f"# {note} (CUDA_VISIBLE_DEVICES) and a port of its own"]
        return "\n".join([*lines, f"exec {shlex.join(words)}", ""])
    import yaml  # for those that need it

    made = {"kubernetes": _kubernetes, "compose": _compose, "llm-d": _llm_d}[kind]
    documents = made(candidate, replicas, words)
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return f"# {many}\n{text}"


def _image(candidate: Candidate) -> str:
    said = candidate.config.engine_version or LATEST_NAME
    release = said.removeprefix("v")
    return f"vllm/vllm-openai:v{release}" + ".0" * (release.count(".") == 1)


def _name(candidate: Candidate) -> str:
    model = hub_id(candidate.hardware.profile.llm.name).rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", f"vllm-{model}".lower()).strip("-")[:50]


def _nodes(candidate: Candidate) -> dict[str, Any]:
    label = LABELS.get(candidate.gpu)
    return {"nodeSelector": {_PRODUCT: label}} if label else {}


def _gpus(candidate: Candidate) -> Mapping[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(candidate.tp)}}


def _kubernetes(candidate: Candidate, replicas: int, words: list[str]) -> list[dict]:
    name = _name(candidate)
    labels = {"app": name}
    container = {
        "name": "vllm",
        "image": _image(candidate),
        "command": words[:2],
        "args": words[2:],
        "ports": [{"containerPort": FIRST_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": FIRST_PORT}},
        "resources": _gpus(candidate),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # ranks talk through it
    pod = {**_nodes(candidate), "containers": [container], "volumes": [memory]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels.copy()},
            "template": {"metadata": {"labels": labels.copy()}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels.copy(), "ports": [{"port": FIRST_PORT}]},
    }
    return [deployment, service]


def _compose(candidate: Candidate, replicas: int, words: list[str]) -> list[dict]:
    last = FIRST_PORT + replicas - 1
    ports = f"{FIRST_PORT}-{last}:{FIRST_PORT}" if replicas > 1 else f"{FIRST_PORT}:{FIRST_PORT}"
    device = {"driver": "nvidia", "count": candidate.tp, "capabilities": ["gpu"]}
    service = {
        "image": _image(candidate),
        "entrypoint": words[:2],
        "command": words[2:],
        "ports": [ports],
        "ipc": "host",
        "deploy": {"replicas": replicas, "resources": {"reservations": {"devices": [device]}}},
    }
    return [{"services": {_name(candidate): service}}]


def _llm_d(candidate: Candidate, replicas: int, words: list[str]) -> list[dict]:
    """The chart itself adds model, port and tensor parallelism."""
    hub, args = words[2], words[3:]
    for option in ("--port", "--tensor-parallel-size"):
        at = args.index(option)
        del args[at : at + 2]
    container = {
        "name": "vllm",
        "image": _image(candidate),
        "modelCommand": "vllmServe",
        "args": args,
        "resources": _gpus(candidate),
    }
    decode = {
        "create": True,
        "replicas": replicas,
        "parallelism": {"tensor": candidate.tp},
        **_nodes(candidate),
        "containers": [container],
    }
    artifacts = {"name": hub, "uri": f"hf://{hub}"}
    return [{"modelArtifacts": artifacts, "decode": decode, "prefill": {"create": False}}]


GPUS_OF_A_HOST = 8  # as an HGX board has


def placed(commands: Sequence[str], tp: int) -> list[tuple[int, str]]:
    """Return (host, command with its GPUs) by replica. A host takes as many as its GPUs allow."""
    each = max(GPUS_OF_A_HOST // tp, 1)
    found = []
    for i, line in enumerate(commands):
        first = i % each * tp
        gpus = ",".join(str(gpu) for gpu in range(first, first + tp))
        found.append((i // each, f"CUDA_VISIBLE_DEVICES={gpus} {line}"))
    return found


def start_script(commands: Sequence[str], tp: int, router: str) -> str:
    """Return the script: `sh start.sh N` on host N, `sh start.sh router HOST ...` for the
    router."""
    servers = placed(commands, tp)
    hosts = servers[-1][0] + 1
    lines = [
        "#!/bin/sh",
        f"# The servers of a plan: {len(servers)} on {hosts} host(s) of {GPUS_OF_A_HOST} GPUs.",
        "#   sh start.sh 0               the servers of host 0; of host 1, ...",
        "#   sh start.sh router HOST...  the router that the plan assumes, with the hosts in order",
        "set -e",
        'case "${1:-0}" in',
    ]
    for host in range(hosts):
        lines += [f"{host})", *(f"  {line} &" for at, line in servers if at == host), "  wait ;;"]
    words = ["twinserve", "route", "--router", router]
    lines += ["router)", "  shift"]
    for host in range(hosts):
        ports = [FIRST_PORT + i for i, (at, _) in enumerate(servers) if at == host]
        named = f"${{{host + 1}:-127.0.0.1}}"
        lines.append(f"  h{host}={named}")
        words += [f"--worker=http://$h{host}:{port}" for port in ports]
    safe = [word if "$h" in word else shlex.quote(word) for word in words]
    return "\n".join([*lines, f"  {' '.join(safe)} ;;", "esac", ""])


def commands(plan: Plan, row: Row, replicas: int | None = None) -> list[str]:
    """Return one command for each replica, with its GPUs. replicas: instead of the row's."""
    return [line for _, line in placed(_served(plan, row, replicas), row.candidate.tp)]


def script(plan: Plan) -> str | None:
    """Return start.sh, or None if nothing is to be bought."""
    found = decide(plan)
    if found is None:
        return None
    row, n = found[0].row, found[0].replicas
    return start_script(_served(plan, row, n), row.candidate.tp, row.candidate.router)


def _served(plan: Plan, row: Row, replicas: int | None = None) -> list[str]:
    count = replicas or row.replicas or 0
    return [shlex.join(started(plan, row, i)) for i in range(count)]


def started(plan: Plan, row: Row, index: int) -> list[str]:
    """Return the words that start replica `index`."""
    ttft, tpot = (
        next((o.bound_s for o in plan.objectives if o.metric == metric), None)
        for metric in ("ttft", "tpot")
    )
    return serve_arguments(row.candidate, index, (ttft, tpot), plan.longest)


def emitted_file(kind: str, plan: Plan) -> tuple[str, str]:
    """Return name and content of the file of `kind` that starts what is to be bought. Raises
    SettingsError if nothing is."""
    found = decide(plan)
    if found is None:
        raise SettingsError(f"--emit {kind}: nothing in this plan keeps the objectives; drop it")
    row, n = found[0].row, found[0].replicas
    return FILES[kind], emitted(kind, row.candidate, n, started(plan, row, 0))
