"""Servers in manifests of Kubernetes: what has pods (Deployment, StatefulSet, Job,
LeaderWorkerSet), and KServe's InferenceService and LLMInferenceService."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twinserve.sim.serve_line.launch import (
    DECODE,
    PREFILL,
    Found,
    Launch,
    ReadNamed,
    count,
    of_container,
    words_of,
)
from twinserve.sim.serve_line.words import ServeLineError, Word, line_of, split, without_value
from twinserve.sim.serve_line.yaml_lines import Map, as_word, listed, maps_of, part

_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915")
# Labels of nodes that name the GPU or the machine.
GPU_LABELS = re.compile(
    r"gpu\.product|gpu\.nvidia\.com/(?:model|class)|gke-accelerator$|instance-type$|"
    r"instance-gpu-name|instance-family|instance-size|product-name|gpu-?(?:type|model|name)?$|"
    r"accelerator(?:-?type|-?name)?$|vm-size|sku",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
_LEFT = re.compile(r"\$\([A-Za-z_][\w.-]*\)|\$\{[A-Za-z_]\w*\}")
_ADDRESS = "leader"  # of the first pod of a LeaderWorkerSet, which only the cluster knows


@dataclass
class _Pod:
    spec: Map
    path: tuple[str, ...]
    labels: dict[str, str]


def servers(docs: list[Any], where: str) -> tuple[list[Found], ReadNamed]:
    """The servers of manifests, and the files that their ConfigMaps hold."""
    items = [item for doc in docs if isinstance(doc, Map) for item in _items(doc)]
    maps = {
        str(part(item, "metadata").get("name")): part(item, "data")
        for item in items
        if item.get("kind") == "ConfigMap"
    }
    found = [one for item in items for one in _of_item(item, where, maps)]
    for item in items:
        if item.get("kind") == "HorizontalPodAutoscaler":
            spec = part(item, "spec")
            target = part(spec, "scaleTargetRef").get("name")
            for one in found:
                if target in (one.name, None):
                    least = spec.get("minReplicas", 1)
                    one.warnings.append(
                        f"HorizontalPodAutoscaler: {least} to {spec.get('maxReplicas')}"
                    )

    def read_named(name: str) -> str | None:
        last = name.rpartition("/")[2]
        return next((str(data[last]) for data in maps.values() if last in data), None)

    return found, read_named


def _items(doc: Map) -> list[Map]:
    if doc.get("kind") == "List":
        return maps_of(doc, "items")
    return [doc]


def _of_item(item: Map, where: str, maps: Mapping[str, Any]) -> list[Found]:
    kind, spec = str(item.get("kind")), part(item, "spec")
    name = part(item, "metadata").get("name") or ""
    if kind == "InferenceService" and (model := part(spec, "predictor", "model")):
        found = [_kserve_model(model, part(spec, "predictor"), where, maps)]
    elif kind == "LLMInferenceService":
        found = _kserve_llm(spec, where, maps)
    else:
        found = _of_pods(item, where, maps)
    for one in found:
        one.kind = f"KServe {kind}" if "InferenceService" in kind else _named(kind)
        one.name = one.name or name
        one.role = one.role or _role(item, one.launch)
    return found


def _named(kind: str) -> str:
    return kind if kind == "LeaderWorkerSet" else f"Kubernetes {kind}"


def _of_pods(item: Map, where: str, maps: Mapping[str, Any]) -> list[Found]:
    spec = part(item, "spec")
    group = part(spec, "leaderWorkerTemplate")
    size = count(group.get("size"), where, "size")
    found: dict[bool, list[Found]] = {True: [], False: []}
    for pod in _pods(item, ()):
        leads = "workerTemplate" not in pod.path
        env: dict[str, str] = {}
        if group:
            env = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "0"}
            env["LWS_LEADER_ADDRESS"] = _ADDRESS
        for one in _containers(pod.spec, where, maps, env):
            replicas = spec.get("replicas", part(spec, "predictor").get("minReplicas"))
            one.replicas = count(replicas, where, "replicas")
            one.nodes = size
            one.role = _of_labels(pod.labels)
            found[leads].append(one)
    return found[True] or found[False]


def _pods(value: Any, path: tuple[str, ...], labels: dict | None = None) -> Iterator[_Pod]:
    """Every part that has containers."""
    if isinstance(value, list):
        for item in value:
            yield from _pods(item, path, labels)
    if not isinstance(value, Map):
        return
    labels = {**(labels or {}), **part(value, "metadata", "labels")}
    if isinstance(value.get("containers"), list):
        yield _Pod(value, path, labels)
        return
    for key, item in value.items():
        if key not in ("status", "metadata"):
            yield from _pods(item, (*path, key), labels)


def _containers(
    pod: Map, where: str, maps: Mapping[str, Any], env: Mapping[str, str] = {}
) -> list[Found]:
    """The servers of a pod; init containers and sidecars are none."""
    found = []
    for container in maps_of(pod, "containers"):
        known, unknown = environment(container, maps, env)
        command, args = (
            [filled(word, known) for word in words_of(container.get(key), container.line)]
            for key in ("command", "args")
        )
        image = str(container.get("image") or "") or None
        defaults: list[str] = []
        for launch in of_container(command, args, known, image, None, defaults):
            mark(launch)
            launch.env = {name: text for name, text in launch.env.items() if name not in unknown}
            found.append(_found(launch, container, pod, where, defaults))
            found[-1].name = Word("", container.line)
    return found


def _found(launch: Launch, container: Map, pod: Map, where: str, defaults: list[str]) -> Found:
    gpus = gpus_of(container, where)
    one = Found(launch, "", gpus=gpus, labels=node_labels(pod), defaults=defaults)
    if gpus == 0:
        one.warnings.append("resources: no GPU")
    return one


def gpus_of(container: Mapping, where: str) -> int:
    """GPUs of a container's resources; 0: none is asked for."""
    for side in ("limits", "requests"):
        resources = part(container, "resources", side)
        for name in _GPU_RESOURCES:
            if name in resources:
                line = getattr(resources, "lines", {}).get(name, 1)
                value = Word(str(resources[name]), line_of(resources[name], line))
                if _LEFT.search(value):
                    return -1  # of a template: told only where it matters
                return count(value, where, name, 0)
        if any(str(name).startswith("nvidia.com/mig-") for name in resources):
            raise ServeLineError(
                f"{where}:{line_of(resources)}: a slice of a GPU (MIG) is not simulated;"
                " give a whole one"
            )
    return 0


def node_labels(pod: Mapping) -> list[tuple[str, tuple[str, ...]]]:
    """What node selector and affinity say of the GPU or the machine."""
    found: list[tuple[str, tuple[str, ...]]] = [
        (str(k), (str(v),)) for k, v in part(pod, "nodeSelector").items()
    ]
    required = part(
        pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"
    )
    for term in [*maps_of(required, "nodeSelectorTerms"), *maps_of(pod, "nodeSelectorTerms")]:
        for said in maps_of(term, "matchExpressions"):
            if said.get("operator") == "In":
                found.append((str(said.get("key")), tuple(map(str, listed(said, "values")))))
    return [(key, values) for key, values in found if GPU_LABELS.search(key)]


def environment(
    container: Map, maps: Mapping[str, Any], before: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    """Variables with their values, and the names of those that only the cluster fills in."""
    env, unknown = dict(before), set()
    for source in maps_of(container, "envFrom"):
        data = maps.get(str(part(source, "configMapRef").get("name")), {})
        env |= {key: str(value) for key, value in data.items()}
    for said in maps_of(container, "env"):
        if "name" not in said:
            continue
        name = str(said["name"])
        reference = part(said, "valueFrom", "configMapKeyRef")
        value = said.get("value")
        if reference:
            value = part(maps.get(str(reference.get("name")), {})).get(str(reference.get("key")))
        if value is None:
            env.setdefault(name, without_value(f"$({name})"))
            unknown.add(name)
        else:
            env[name] = filled(as_word(value), env)
    return env, unknown


def filled(word: Word, env: Mapping[str, str]) -> Word:
    """With `$(NAME)` as Kubernetes replaces it: only variables that the container has."""

    def value(found: re.Match) -> str:
        return "$" if found[1] is None else env.get(found[1], found[0])

    return Word(_VARIABLE.sub(value, word), line_of(word))


def mark(launch: Launch) -> None:
    """What is left of variables in the server's words has no value."""
    launch.argv = [
        Word(_LEFT.sub(lambda left: without_value(left[0]), word), line_of(word))
        for word in launch.argv
    ]


def _role(item: Map, launch: Launch) -> str | None:
    labels = {**part(item, "metadata", "labels")}
    said = _of_labels(labels)
    if said is None:
        text = " ".join(launch.argv)
        said = PREFILL if "kv_producer" in text else DECODE if "kv_consumer" in text else None
    return said


def _of_labels(labels: Mapping) -> str | None:
    for key, value in labels.items():
        if str(key).rpartition("/")[2] == "role" and str(value) in (PREFILL, DECODE):
            return str(value)
    return None


def _kserve_model(model: Map, predictor: Map, where: str, maps: Mapping[str, Any]) -> Found:
    """KServe's Hugging Face server: its own words, and options of vLLM behind them."""
    line = model.line
    args = words_of(model.get("args"), line)
    env, _ = environment(model, maps, {})
    uri = str(model.get("storageUri") or "")
    own: dict[str, Word] = {}
    rest: list[Word] = []
    pending = iter([filled(word, env) for word in args])
    for word in pending:
        name, equals, value = word.partition("=")
        if name in ("--model_name", "--model_id", "--model_dir", "--backend", "--model-id"):
            own[name] = Word(value if equals else next(pending, ""), line_of(word))
        else:
            rest.append(word)
    if own.get("--backend") not in (None, "vllm", "auto"):
        raise ServeLineError(
            f"{where}:{own['--backend'].line}: --backend={own['--backend']} is not vLLM; give a "
            "server of vLLM"
        )
    said = own.get("--model_id") or own.get("--model-id") or own.get("--model_dir")
    named = said or Word(uri.removeprefix("hf://") or "/mnt/models", line)
    served = own.get("--model_name")
    argv = [named, *([Word(f"--served-model-name={served}", line)] if served else []), *rest]
    launch = Launch(argv, env, str(model.get("image") or "") or None, line)
    mark(launch)
    found = _found(launch, model, predictor, where, [])
    found.replicas = max(count(predictor.get("minReplicas"), where, "minReplicas"), 1)
    return found


_PARALLEL = (
    ("data", "--data-parallel-size"),
    ("dataLocal", "--data-parallel-size-local"),
    ("expert", "--enable-expert-parallel"),
    ("tensor", "--tensor-parallel-size"),
    ("pipeline", "--pipeline-parallel-size"),
)


def _kserve_llm(spec: Map, where: str, maps: Mapping[str, Any]) -> list[Found]:
    """KServe's own server of language models: parallelism is in fields, options in
    VLLM_ADDITIONAL_ARGS or in the container's words."""
    name, uri = part(spec, "model").get("name"), str(part(spec, "model").get("uri") or "")
    model = uri.removeprefix("hf://") if uri.startswith("hf://") or not name else name
    found = []
    for role, block in ((None, spec), (PREFILL, part(spec, "prefill"))):
        if not block:
            continue
        pod = part(block, "template")
        containers = maps_of(pod, "containers") or [Map()]
        container = next((c for c in containers if c.get("name") == "main"), containers[0])
        env, _ = environment(container, maps, {})
        argv = [as_word(model)]
        parallel = part(block, "parallelism")
        for key, option in _PARALLEL:
            value = parallel.get(key)
            if key == "expert" and value:
                argv.append(Word(option, parallel.lines[key]))
            elif key != "expert" and value is not None:
                argv += [Word(option, parallel.lines[key]), Word(str(value), parallel.lines[key])]
        argv += [Word(w, container.line) for w in split(env.get("VLLM_ADDITIONAL_ARGS", ""))]
        argv += [filled(w, env) for w in words_of(container.get("args"), container.line)]
        launch = Launch(argv, env, str(container.get("image") or "") or None, container.line)
        mark(launch)
        one = _found(launch, container, pod, where, [])
        if not part(container, "resources"):  # a preset of the cluster has them
            one.gpus, one.warnings = None, []
        ranks = count(parallel.get("data"), where, "data")
        local = count(parallel.get("dataLocal"), where, "dataLocal", ranks)
        one.nodes = max(1, -(-ranks // local))
        if part(block, "worker") and not parallel.get("data") and parallel.get("pipeline"):
            one.nodes = count(parallel.get("pipeline"), where, "pipeline")
        one.replicas = count(block.get("replicas"), where, "replicas")
        one.role = role or (DECODE if part(spec, "prefill") else None)
        one.name = role or ""
        found.append(one)
    return found
