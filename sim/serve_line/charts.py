"""Servers of charts' values: production-stack and llm-d's modelservice make the command line
themselves, with the rules of their templates."""

from __future__ import annotations

import json
from typing import Any

from twinserve.sim.serve_line.found import DECODE, PREFILL, Found, count, words_of
from twinserve.sim.serve_line.kubernetes import environment, filled, gpus_of, mark, node_labels
from twinserve.sim.serve_line.launch import Launch, of_container
from twinserve.sim.serve_line.words import Word
from twinserve.sim.serve_line.yaml_lines import Map, as_word, maps_of, part

# Of production-stack's vllmConfig, in the order of its template.
_STACK_VALUES = (
    ("maxModelLen", "--max-model-len"),
    ("dtype", "--dtype"),
    ("tensorParallelSize", "--tensor-parallel-size"),
    ("maxNumSeqs", "--max-num-seqs"),
    ("maxLoras", "--max-loras"),
    ("gpuMemoryUtilization", "--gpu-memory-utilization"),
)


def production_stack(doc: Map, where: str) -> list[Found]:
    """A server for each entry of `servingEngineSpec.modelSpec`."""
    spec = part(doc, "servingEngineSpec")
    found = []
    for model in maps_of(spec, "modelSpec"):
        found.append(_stack_model(model, spec, where))
    return found


def vllm_chart(doc: Map, where: str) -> list[Found]:
    """The server of vLLM's own chart (`examples/online_serving/chart-helm`)."""
    image = part(doc, "image")
    name = f"{image.get('repository')}:{image.get('tag')}"
    gpus = part(doc, "resources", "limits").get("nvidia.com/gpu")
    found = of_container(words_of(image.get("command"), image.line), [], {}, name)
    models = tuple(map(str, doc.get("gpuModels") or ()))
    return [
        Found(
            one,
            "values of vLLM's chart",
            replicas=count(doc.get("replicaCount"), where, "replicaCount"),
            gpus=count(gpus, where, "nvidia.com/gpu", 0),
            labels=[("gpuModels", models)] if models else [],
        )
        for one in found
    ]


def _stack_model(model: Map, spec: Map, where: str) -> Found:
    config, ray = part(model, "vllmConfig"), part(model, "raySpec")
    with_ray = bool(ray and ray.get("enabled", True))
    argv = [as_word(model.get("modelURL"), model.line)]

    def add(option: str, *values: Any, key: str = "") -> None:
        line = config.lines.get(key, model.line)
        argv.extend(as_word(value, line) for value in (Word(option, line), *values))

    if not with_ray:
        add("--host", "0.0.0.0")
        add("--port", "8000")
    if model.get("enableLoRA"):
        add("--enable-lora")
    if model.get("enableTool"):
        add("--enable-auto-tool-choice")
    if model.get("toolCallParser"):
        add("--tool-call-parser", model["toolCallParser"])
    if "enableChunkedPrefill" in config:
        no = "" if config["enableChunkedPrefill"] else "no-"
        add(f"--{no}enable-chunked-prefill", key="enableChunkedPrefill")
    if config.get("enablePrefixCaching"):
        add("--enable-prefix-caching", key="enablePrefixCaching")
    elif config and not (with_ray and "enablePrefixCaching" not in config):
        add("--no-enable-prefix-caching", key="enablePrefixCaching")  # also if it is not named
    for key, option in _STACK_VALUES:
        if key in config:
            add(option, config[key], key=key)
        if with_ray and key == "tensorParallelSize" and "pipelineParallelSize" in config:
            add("--pipeline-parallel-size", config["pipelineParallelSize"])
    argv += words_of(config.get("extraArgs"), model.line)
    cache = part(model, "lmcacheConfig")
    env = {str(e["name"]): str(e.get("value", "")) for e in maps_of(model, "env") if "name" in e}
    if cache.get("enabled"):
        role = cache.get("kvRole", "kv_both")
        transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": role}
        add("--kv-transfer-config", json.dumps(transfer))
        if "cpuOffloadingBufferSize" in cache:
            env["LMCACHE_MAX_LOCAL_CPU_SIZE"] = str(cache["cpuOffloadingBufferSize"])
    image = f"{model.get('repository')}:{model.get('tag')}"
    one = Found(Launch(argv, env, image, model.line), "production-stack values")
    one.name = as_word(model.get("name"), model.line)
    gpus = count(model.get("requestGPU"), where, "requestGPU", 0)
    one.replicas = count(model.get("replicaCount"), where, "replicaCount")
    one.gpus, one.labels = gpus, node_labels(model) or node_labels(spec)
    if with_ray:  # its workers and the head are one server
        head = count(part(ray, "headNode").get("requestGPU"), where, "requestGPU", 0)
        one.nodes, one.replicas = one.replicas + bool(head), 1
        one.warnings.append("raySpec: Ray executor")
    if part(doc_autoscaling := part(model, "keda")) and doc_autoscaling.get("enabled"):
        one.warnings.append("keda: replicas change")
    return one


def llm_d(doc: Map, where: str) -> list[Found]:
    """The decode and prefill pods of llm-d's modelservice chart."""
    found = []
    for role, port in ((PREFILL, "8000"), (DECODE, "8200")):
        block = part(doc, role)
        if block and block.get("create", True) is not False:
            found.append(_modelservice(doc, block, role, port, where))
    if len(found) == 1 and not part(doc, PREFILL).get("create", False):
        found[0].role = None
    return found


def _modelservice(doc: Map, block: Map, role: str, port: str, where: str) -> Found:
    artifacts, parallel = part(doc, "modelArtifacts"), part(block, "parallelism")
    uri = str(artifacts.get("uri") or "")
    name = str(artifacts.get("name") or "")
    if uri.startswith("hf://") and "\ue000" not in uri:
        model = uri.removeprefix("hf://")
    else:
        model = name
    containers = maps_of(block, "containers") or [Map()]
    container = next((c for c in containers if c.get("modelCommand")), containers[0])
    line = container.line
    ranks = {key: count(parallel.get(key), where, key) for key in ("tensor", "data")}
    local = count(parallel.get("dataLocal"), where, "dataLocal", ranks["data"])
    workers = count(parallel.get("workers"), where, "workers")
    env = {"TP_SIZE": str(ranks["tensor"]), "DP_SIZE": str(ranks["data"])}
    env |= {"DP_SIZE_LOCAL": str(local), "LWS_GROUP_SIZE": str(workers)}
    env |= {"LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}
    said, unknown = environment(container, {}, env)
    command, args = (
        [filled(word, said) for word in words_of(container.get(key), line)]
        for key in ("command", "args")
    )
    defaults: list[str] = []
    how = str(container.get("modelCommand") or "custom")
    image = str(container.get("image") or "") or None
    if how == "custom":
        launches = of_container(command, args, said, image, None, defaults)
    else:
        own = [model, "--port", port]
        at = parallel.lines.get("tensor", line)
        if ranks["tensor"] > 1:
            own += ["--tensor-parallel-size", str(ranks["tensor"])]
        own += ["--served-model-name", name]
        launches = [Launch([*(Word(w, at) for w in own), *args], said, image, line)]
    launch = launches[0] if launches else Launch([Word(model, line), *args], said, image, line)
    mark(launch)
    launch.env = {k: v for k, v in launch.env.items() if k not in unknown and k not in env}
    one = Found(launch, "llm-d modelservice values", Word(role, block.line), role)
    one.replicas = count(block.get("replicas"), where, "replicas")
    one.nodes = max(workers, -(-ranks["data"] // local))
    one.gpus = gpus_of(container, where) or None  # else the chart asks for what parallelism needs
    one.labels = node_labels(block) or node_labels(part(doc, "accelerator"))
    one.defaults = defaults
    return one
