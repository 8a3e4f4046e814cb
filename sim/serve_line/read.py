"""`--from-vllm`: a server's own command line, or a file with it, as one server or one fleet of
prefill and decode pools. Nothing is executed. production-stack, vLLM's chart and
llm-d's modelservice make the command line themselves, with the rules of their templates.
"""

import json
import re
from pathlib import Path
from typing import Any

from twinserve.profiles.kv_memory.releases import parse_release
from twinserve.sim.serve_line import compose, kubernetes, units
from twinserve.sim.serve_line.argv import is_option
from twinserve.sim.serve_line.kubernetes import environment, filled, gpus_of, mark, node_labels
from twinserve.sim.serve_line.launch import (
    DECODE,
    PREFILL,
    Found,
    Launch,
    ReadNamed,
    count,
    launches,
    of_commands,
    of_container,
    one_server,
    pinned_release,
    release_of_image,
    words_of,
)
from twinserve.sim.serve_line.server import Server, server_of
from twinserve.sim.serve_line.shell import read_shell
from twinserve.sim.serve_line.words import ServeLineError, Word, line_of
from twinserve.sim.serve_line.yaml_lines import Map, as_word, documents, maps_of, part

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


_FALSE_COUNTS = (0, 28, 0)  # from here on `key: false` of --config is --no-key
_FILE = re.compile(r"\S+\.(?:sh|ya?ml|service|container|env|tpl|txt|json)|\S*[Dd]ockerfile")
_SLURM = re.compile(r"(?m)^#SBATCH\s+--(gres|gpus-per-node|nodes)[= ](\S+)")
_MOST_BYTES = 4_000_000


def read_servers(given: str, release: str | None = None) -> list[Server]:
    """One server, or the prefill and decode pools of one fleet.

    given: a command line, or a file with it; FILE#NAME names one service of several. release: of
    vLLM, if the user names it. Raises ServeLineError: one line with file, line, what to do.
    """
    path, name = _path(given)
    read_named: ReadNamed
    if path is None:
        where, noun = "--from-vllm", "server"
        found, read_named = _of_line(given), _nothing
    else:
        where, read_named = path.name, _reader_near(path)
        found, noun, read_named = _of_file(path, _text(path), read_named)
    if not found:
        raise ServeLineError(
            f"{where}: starts no vLLM server; give a line with `vllm serve`, or a file that has one"
        )
    chosen = one_server(found, where, noun, name)
    for one in chosen:
        _with_config(one, where, read_named, release)
    servers = [server_of(one, where, release) for one in chosen]
    if len(servers) == 1 and servers[0].role is not None:
        other = "prefill" if servers[0].role == "decode" else "decode"
        servers[0].warn.append(f"role {servers[0].role} without {other}")
    return servers


def _nothing(name: str) -> str | None:
    return None


def _path(given: str) -> tuple[Path | None, str | None]:
    """The file that is meant, and the service in it; None: it is a command line."""
    for text, name in ((given, None), tuple(given.rpartition("#")[::2])):
        try:
            if text and name != "" and "\n" not in text and Path(text).expanduser().is_file():
                return Path(text).expanduser(), name
        except OSError:  # longer than a name can be
            pass
    if _FILE.fullmatch(given):
        raise ServeLineError(f"--from-vllm {given}: there is no such file; check the path")
    return None, None


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > _MOST_BYTES:
            raise ServeLineError(f"{path}: too large for a server's file; name another")
        return data.decode("utf-8")
    except OSError as error:
        raise ServeLineError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ServeLineError(f"{path}: this is no text; name a script or a YAML file") from None


def _reader_near(path: Path) -> ReadNamed:
    """Files that the file names lie in its folder: paths of other machines end there."""

    def text(name: str) -> str | None:
        for place in (path.parent / name.lstrip("/"), path.parent / Path(name).name):
            try:
                if name and place.is_file():
                    return _text(place)
            except OSError:
                continue
        return None

    return text


def _of_line(text: str) -> list[Found]:
    defaults: list[str] = []
    found = launches(text, {}, 1, defaults)
    if not found:  # `Qwen/Qwen3-8B -tp 2`, or options alone
        words = [word for command in read_shell(text, {}) for word in command.words]
        if any(is_option(word) for word in words) or (len(words) == 1 and "/" in words[0]):
            found = [Launch(words, {})]
    return [Found(one, "one line", defaults=defaults) for one in found]


def _of_file(path: Path, text: str, read_named: ReadNamed) -> tuple[list[Found], str, ReadNamed]:
    """Read servers of a file by its content, their names, and the files that it names."""
    where, name = path.name, path.name.lower()
    if "dockerfile" in name or "containerfile" in name:
        return units.dockerfile(text, where), "image", read_named
    if re.search(r"(?m)^\[(?:Service|Container|Unit)\]\s*$", text):
        return units.systemd(text, where, read_named), "unit", read_named
    if name.endswith((".yaml", ".yml", ".json", ".tpl", ".j2")) or _looks_like_yaml(text):
        return _of_yaml(text, where, read_named)
    if re.match(r"(?:#.*\n|\s)*(?:ARG\s.*\n\s*)*FROM\s+\S+", text):
        return units.dockerfile(text, where), "image", read_named
    return _of_script(text, where, read_named)


def _looks_like_yaml(text: str) -> bool:
    return bool(re.search(r"(?m)^(?:apiVersion|kind|services):", text)) and "<<" not in text


def _of_script(text: str, where: str, read_named: ReadNamed) -> tuple[list[Found], str, ReadNamed]:
    defaults: list[str] = []
    if where.lower().endswith((".bat", ".cmd", ".ps1")):
        text = re.sub(r"[\^`]\r?\n", "\\\n", text)  # lines that go on
    slurm = dict(_SLURM.findall(text))
    kind, _, number = slurm.get("gres", "").removeprefix("gpu:").rpartition(":")
    number = slurm.get("gpus-per-node", number).rpartition(":")[2]
    known = {"SLURM_GPUS_ON_NODE": number, "SLURM_NNODES": slurm.get("nodes", "1")}
    commands = read_shell(text, known if number else {}, 1, defaults)
    one_line = len(text.strip().splitlines()) == 1
    found = [
        Found(launch, "one line" if one_line else "shell script", defaults=defaults)
        for launch in of_commands(commands, defaults)
    ]
    if of_commands([command for command in commands if command.looped]):
        found[0].warnings.append("a loop: one of the servers that it starts")
    if found:
        for one in found:
            one.release = pinned_release(text)
            one.gpus = int(number) if number.isdigit() else one.gpus
            one.labels = [("--gres", (kind,))] if kind else []
            one.launch.env = {k: v for k, v in one.launch.env.items() if k not in known}
        written = {c.into: c.here[0] for c in commands if c.into and c.here}
        return found, "server", lambda name: written.get(name) or read_named(name)
    for command in commands:
        for body in command.here:
            if re.search(r"(?m)^(?:apiVersion|services):", body):
                found, noun, read_named = _of_yaml(body, where, read_named, line_of(body))
                for one in found:
                    one.kind = "shell script with a manifest"
                if found:
                    return found, noun, read_named
    return [], "server", read_named


def _of_yaml(
    text: str, where: str, read_named: ReadNamed, first: int = 1
) -> tuple[list[Found], str, ReadNamed]:
    docs = [doc for doc in documents(text, where, first) if isinstance(doc, Map)]
    docs = [part(doc, "spec", "values") or doc for doc in docs]  # of a HelmRelease
    doc: Any = docs[0] if docs else {}
    if isinstance(part(doc, "image").get("command"), list):
        return vllm_chart(doc, where), "server", read_named
    if "servingEngineSpec" in doc:
        return production_stack(doc, where), "model", read_named
    if "modelArtifacts" in doc:
        return llm_d(doc, where), "pool", read_named
    if "services" in doc:
        return compose.servers(doc, where, read_named), "service", read_named
    if "applications" in doc or any(one.get("kind") == "RayService" for one in docs):
        served = [one for one in docs if "applications" in one or one.get("kind") == "RayService"]
        return units.ray_serve(served[0], where), "model", read_named
    if isinstance(doc.get("run"), str) and not doc.get("apiVersion"):
        return units.skypilot(doc, where), "server", read_named
    if any("apiVersion" in one for one in docs):
        found, in_maps = kubernetes.servers(docs, where)
        return found, "container", lambda name: in_maps(name) or read_named(name)
    if doc and sum(is_option(f"--{key}") for key in doc) * 2 > len(doc):
        config = [Word("--config"), Word(where)]
        return [Found(Launch(config, {}), "serve --config")], "server", lambda name: text
    return [], "server", read_named


def _with_config(found: Found, where: str, read_named: ReadNamed, release: str | None) -> None:
    """The options of `--config FILE` in their place: behind the model, before the others. Raises
    ServeLineError if the file is not there."""
    words = found.launch.argv
    if "--config" not in words:
        return  # `--config=FILE` vLLM does not read, either
    index = words.index(Word("--config"))
    name = words[index + 1] if index + 1 < len(words) else ""
    text = read_named(name) if name else None
    if text is None:
        raise ServeLineError(
            f"{where}:{line_of(words[index])}: --config {name}: there is no such file; put it into "
            f"the folder of {where}"
        )
    named = release or release_of_image(found.launch.image) or found.release
    falses = named is None or parse_release(named) >= _FALSE_COUNTS
    said = units.config_words(text, Path(name).name, falses)
    begins = 1 if words[0] and not words[0].startswith("-") else 0
    rest = [*words[begins:index], *words[index + 2 :]] if begins <= index else words[begins:]
    found.launch.argv = [*words[:begins], *said, *rest]
