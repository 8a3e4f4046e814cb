"""A server in vLLM's words: settings of command line, environment and place; which are
simulated."""

import re
from dataclasses import dataclass, field
from typing import Any

from twinserve.profiles.gpu_labels import gpu_of_label, machine_of_label
from twinserve.profiles.kv_memory.releases import V1_ENGINE, Release, parse_release
from twinserve.sim.serve_line.argv import Given, Option, options, read_argv
from twinserve.sim.serve_line.launch import Found, release_of_image
from twinserve.sim.serve_line.shell import BRANCH
from twinserve.sim.serve_line.words import ServeLineError, find_line, lacking, line_of, plain

# Environment: what changes time or memory, and why; then what does not.
_ENV_MATTERS: tuple[tuple[str, str], ...] = (
    (r"VLLM_ALL2ALL_BACKEND|VLLM_DEEPEP\w*|VLLM_MOE_DP\w*", "how experts exchange tokens"),
    (r"VLLM_(?:ATTENTION_BACKEND|FLASH\w*|USE_\w+|MOE_\w+|ROCM_\w+)", "another kernel"),
    (r"VLLM_(?:CPU_\w+|TORCH_\w+|ENABLE_V1_MULTIPROCESSING|V1_\w+|SKIP_\w+)", "time of the host"),
    (r"VLLM_(?:PP_LAYER_PARTITION|ALLOW_LONG\w+|KV_CACHE_LAYOUT)", "layout of the model"),
    (r"LMCACHE_\w+", "a cache of LMCache"),
    (r"NCCL_P2P_DISABLE|VLLM_SKIP_P2P_CHECK", "GPUs without direct links"),
    (r"CUDA_LAUNCH_BLOCKING", "time of the host"),
)
_ENV_PASSED = re.compile(
    r"HF_\w+|HUGGING\w+|TRANSFORMERS_\w+|VLLM_(?:USE_MODELSCOPE|USE_V1|LOGGING_\w+|LOG_\w+|API_KEY|"
    r"HOST_IP|PORT|CACHE_ROOT|CONFIG_ROOT|WORKER_MULTIPROC_METHOD|NIXL_\w+|DO_NOT_TRACK|"
    r"NO_USAGE_STATS|USAGE_\w+|RPC_TIMEOUT|ASSETS_\w+|TRACE_\w+|ENGINE_\w+TIMEOUT\w*|S3_\w+)"
)
_FP8_KV, _PLAIN_KV = ("fp8", "fp8_e4m3", "fp8_e5m2"), ("auto", "bfloat16", "float16")
_PLAIN_TYPES = ("auto", "half", "float16", "bfloat16")
# Options that matter with some of their values only.
_HARMLESS: dict[str, tuple[str, ...]] = {
    "--distributed-executor-backend": ("mp", "uni"),
    "--runner": ("auto", "generate"),
    "--task": ("auto", "generate"),
    "--convert": ("auto", "none"),
}
_POOLING = dict.fromkeys(("--runner", "--task"), "a pooling model generates nothing")
_FORMATS_TO_LOAD = ("bitsandbytes", "gguf", "dummy")  # of --load-format
_CONNECTORS = ("NixlConnector", "NixlPushConnector", "OffloadingConnector")
_OLD_DRAFTS = {
    "--speculative-model": "model",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
    "--spec-method": "method",
}
V0_POLICY = "vllm-v0"
# Fields of a Server, and the options that say them.
_SAID = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "ep": "--enable-expert-parallel",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in "dtype quantization kv_cache_dtype max_num_seqs max_num_batched_tokens "
    "gpu_memory_utilization enable_prefix_caching enable_chunked_prefill scheduling_policy "
    "async_scheduling block_size".split()
}


@dataclass
class Server:
    """One server, or one pool of a fleet. Sizes are vLLM's; None: the release's default.

    gpu: the catalogue's name; gpu_from: the words that it came from. gpus_per_replica: of one
    server, over all its nodes. taken: (setting, value, where). passed_over: what means nothing
    here. warn: what matters and is not simulated.
    """

    kind: str
    where: str
    line: int
    argv: list[str]
    model: str
    given: Given
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    speculative: dict[str, Any] | None = None
    kv_transfer: dict[str, Any] | None = None
    kv_offload: dict[str, Any] | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    block_size: int | None = None
    gpu: str | None = None
    gpu_from: str | None = None
    gpus_per_replica: int = 1
    replicas: int = 1
    release: str | None = None
    role: str | None = None
    v0: bool = False
    taken: list[tuple[str, str, str]] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    warn: list[str] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)

    @property
    def served_name(self) -> str | None:
        names = self.given.get("--served-model-name") or []
        return names[0] if names else None


def server_of(found: Found, where: str, asked: str | None = None) -> Server:
    """The server of a file. asked: the release that the user names, which wins. Raises
    ServeLineError: file, line, what is wrong, what to do."""
    launch = found.launch
    named = asked or release_of_image(launch.image) or found.release
    release = None if named is None else parse_release(named)
    try:
        given = read_argv(launch.argv, release)
    except ServeLineError as error:
        text = str(error)
        line = next((w.line for w in launch.argv if plain(w).split("=")[0] in text), found.line)
        raise ServeLineError(f"{where}:{line}: {text}") from None
    _check_values(given, found, where)
    model = given.model
    if model is None:
        raise ServeLineError(
            f"{where}:{found.line}: names no model; write it behind `vllm serve`, or as --model"
        )
    server = Server(
        found.kind,
        where,
        found.line,
        [plain(word) for word in launch.argv],
        model,
        given,
        **{name: given.values[said] for name, said in _SAID.items() if said in given.values},
        replicas=found.replicas,
        release=named,
        role=found.role,
    )
    length = given.get("--max-model-len")
    server.max_model_len = "auto" if length == -1 else length
    server.v0 = launch.env.get("VLLM_USE_V1") == "0" or (
        release is not None and release < V1_ENGINE and launch.env.get("VLLM_USE_V1") != "1"
    )
    _drafts(server)
    _transfer(server)
    _sort(server, release)
    _environment(server, found)
    _gpu(server, found)
    _check_gpus(server, found)
    server.passed_over += found.passed
    server.warn += found.warnings
    for of_branch, said in enumerate(("defaults taken", "of several branches the first is taken")):
        names = [n for n in dict.fromkeys(found.defaults) if n.startswith(BRANCH) == of_branch]
        if names:
            listed = ", ".join(f"${{{name.removeprefix(BRANCH)}}}" for name in names)
            server.warn.append(f"{listed}: {said}")
    if found.role is not None:
        server.taken.append(("role", found.role, where))
    return server


def _check_values(given: Given, found: Found, where: str) -> None:
    """Raise ServeLineError for what is refused, or a variable without a needed value."""
    if given.model is not None:
        _check_has_value(given.model, "the model", found, where)
    for name, value in given.values.items():
        option = options()[name]
        words = found.launch.argv
        why = option.why if option.treated == "refused" else _POOLING.get(name, "")
        if why and not _is_harmless(name, value):
            line = find_line(words, given.said[name].split(".")[0], found.line)
            raise ServeLineError(f"{where}:{line}: {given.said[name]}: {why}")
        if option.treated == "passed" or name == "--model":
            continue
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _check_has_value(text, given.said[name], found, where)


def _check_has_value(text: str, what: str, found: Found, where: str) -> None:
    missing = lacking(text)
    if not missing:
        return
    line = find_line(found.launch.argv, text, found.line)
    do = "give the value in the file"
    if missing[0].startswith("{"):
        do = "give what `helm template` (or your tool) makes of the file"
    elif missing[0].startswith(("$(", "`")) and " " in missing[0]:
        do = "write what the command prints; nothing is run"
    elif found.kind.startswith(("Kubernetes", "KServe", "Leader", "compose")):
        do = f"envsubst < {where} > rendered.yaml, or give the value in the file"
    raise ServeLineError(f"{where}:{line}: {missing[0]} has no value, and {what} needs it; {do}")


def _is_harmless(name: str, value: Any) -> bool:
    if name == "--load-format":
        return value not in _FORMATS_TO_LOAD
    return value in _HARMLESS.get(name, ())


def _sort(server: Server, release: Release | None) -> None:
    """Each option to what was taken, passed over, or matters and is not simulated."""
    for name, value in server.given.values.items():
        option = options()[name]
        if option.treated == "passed" or (option.treated != "taken" and _is_harmless(name, value)):
            server.passed_over.append(name)
        elif option.treated == "warned":
            server.warn.append(name)
            server.why[name] = _why(option, server)
        elif (why := _not_taken(name, value, server)) is not None:
            server.warn.append(name)
            server.why[name] = why
        else:
            said = plain(str(value))
            server.taken.append((name, said, f"{server.given.said[name]}"))


def _why(option: Option, server: Server) -> str:
    if option.gone is not None and not server.v0 and "V0" in option.why:
        return f"{option.why}, without effect in V1"
    return option.why


def _not_taken(name: str, value: Any, server: Server) -> str | None:
    """Why a value of an option that is simulated otherwise is not; None: it is."""
    if name == "--kv-cache-dtype" and value not in _FP8_KV + _PLAIN_KV:
        return f"a KV cache of {value} is not simulated"
    if name == "--dtype" and value not in _PLAIN_TYPES:
        return "weights and KV of 32 bits are not simulated"
    if name == "--kv-transfer-config":
        connector = (server.kv_transfer or {}).get("connector")
        if connector not in _CONNECTORS:
            return f"{connector} is not simulated"
    if name == "--kv-offloading-backend" and value != "native":
        return f"{value} is not simulated"
    return None


def _drafts(server: Server) -> None:
    """Speculation, in the words of --speculative-config."""
    given = server.given
    said = given.get("--speculative-config")
    found = dict(said) if isinstance(said, dict) else {}
    for name, key in _OLD_DRAFTS.items():
        value = given.get(name)
        if value is not None:
            found.setdefault(key, int(value) if str(value).isdigit() else value)
    if not found:
        return
    model = str(found.get("model", ""))
    if model in ("[ngram]", "ngram"):
        found["method"] = "ngram"
        found.pop("model")
    method = found.get("method") or next(
        (kind for kind in ("eagle3", "eagle", "medusa", "mtp") if kind in model.lower()), None
    )
    if method is None:
        method = "draft_model" if model else "ngram"
    keep = {key: value for key, value in found.items() if key not in ("method", "model")}
    named = {"model": model} if "model" in found else {}
    server.speculative = {"method": method, **named, **keep}


def _transfer(server: Server) -> None:
    said = server.given.get("--kv-transfer-config")
    if isinstance(said, dict):
        extra = said.get("kv_connector_extra_config")
        server.kv_transfer = {
            "connector": said.get("kv_connector"),
            "role": said.get("kv_role"),
            "extra": extra,
        }
        size = (extra or {}).get("cpu_bytes_to_use")
        if said.get("kv_connector") == "OffloadingConnector" and isinstance(size, (int, float)):
            server.kv_offload = {"backend": "native", "gib": size / 2**30}
    size = server.given.get("--kv-offloading-size")
    if size is not None:
        backend = server.given.get("--kv-offloading-backend", "native")
        server.kv_offload = {"backend": backend, "gib": size}


def _environment(server: Server, found: Found) -> None:
    gpus = server.tp * server.pp * server.dp
    for name, value in found.launch.env.items():
        if name == "VLLM_USE_V1" and value == "0":
            server.taken.append(("engine", "V0", f"env {name}"))
        elif _ENV_PASSED.fullmatch(name):
            server.passed_over.append(f"env {name}")
        elif name == "NCCL_P2P_DISABLE" and (gpus == 1 or value == "0"):
            continue
        else:
            for pattern, why in _ENV_MATTERS:
                if re.fullmatch(pattern, name):
                    server.warn.append(f"env {name}")
                    server.why[f"env {name}"] = why
                    break


def _gpu(server: Server, found: Found) -> None:
    """The GPU by labels of the node, its instance type, or an accelerator's name."""
    for key, values in found.labels:
        names = [_gpu_name(key, value) for value in values]
        if not any(names):
            continue
        server.gpu_from = found.label_text or (
            f"{key}: {values[0]}" if len(values) == 1 else f"{key} In {', '.join(values)}"
        )
        kinds = list(dict.fromkeys(n or v.lower() for n, v in zip(names, values, strict=True)))
        if len(kinds) == 1:
            server.gpu = kinds[0]
        else:
            server.warn.append(f"gpu: {', '.join(kinds[:-1])} or {kinds[-1]}")
        return


def _gpu_name(key: str, value: str) -> str | None:
    if key == "accelerators" and value.upper() == "A100":  # SkyPilot's is the one of 40 GB
        return "a100-40g"
    return gpu_of_label(value)


def _check_gpus(server: Server, found: Found) -> None:
    """GPUs of a server, which shall be there. Raises ServeLineError."""
    ranks = server.tp * server.pp
    server.gpus_per_replica = 0 if found.gpus == 0 else ranks * server.dp
    if found.gpus == 0:
        return
    launch, where = found.launch, server.where
    visible = launch.env.get("CUDA_VISIBLE_DEVICES")
    nodes = max(found.nodes, server.given.get("--nnodes", 1))
    local = server.given.get("--data-parallel-size-local", 1)
    if visible and not lacking(visible):
        there = len([name for name in visible.split(",") if name.strip()])
        said = f"CUDA_VISIBLE_DEVICES names {there}"
        _check_enough(server, ranks, there * nodes, said, line_of(visible, found.line))
    machines = [machine_of_label(value) for _, values in found.labels for value in values]
    counted = [machine[1] for machine in machines if machine and machine[1]]
    number = found.gpus if found.gpus is not None and found.gpus > 0 else launch.visible
    if number is not None:
        needed = max(ranks, server.tp * min(local, server.dp) * nodes)
        _check_enough(server, needed, number * nodes, f"{where} gives {number * nodes}")
    elif len(counted) == 1 and len(machines) == 1:
        said = f"{server.gpu_from} has {counted[0]}"
        _check_enough(server, ranks, counted[0] * nodes, said)


def _check_enough(
    server: Server, needed: int, there: int, said: str, line: int | None = None
) -> None:
    if needed <= there:
        return
    what = f"tensor parallel {server.tp}"
    what += f" and pipeline parallel {server.pp}" if server.pp > 1 else ""
    raise ServeLineError(
        f"{server.where}:{line or server.line}: {what} needs {needed} GPUs, {said}; give the "
        f"server {needed} GPUs, or parallelism for {there}"
    )
