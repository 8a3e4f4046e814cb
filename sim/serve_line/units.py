"""Servers in Dockerfiles, systemd units, and the files of Ray Serve and SkyPilot."""

import json
import re
from collections.abc import Mapping

from twinserve.sim.serve_line.argv import options
from twinserve.sim.serve_line.compose import read_env
from twinserve.sim.serve_line.launch import (
    Found,
    Launch,
    ReadNamed,
    count,
    launches,
    of_container,
    of_words,
    pinned_release,
)
from twinserve.sim.serve_line.shell import interpolated
from twinserve.sim.serve_line.words import ServeLineError, Word, split
from twinserve.sim.serve_line.yaml_lines import Map, as_word, documents, maps_of, part


def _logical(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers; those that end in a backslash go on in the next."""
    found: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(text.splitlines(), 1):
        if goes_on and line.lstrip().startswith("#"):
            continue
        body = line.rstrip()
        more = body.endswith("\\")
        body = body[:-1] if more else body
        if goes_on:
            found[-1] = (found[-1][0], f"{found[-1][1]} {body.strip()}")
        else:
            found.append((number, body))
        goes_on = more
    return found


def dockerfile(text: str, where: str) -> list[Found]:
    """What the last stage of a Dockerfile starts."""
    env: dict[str, str] = {}
    arguments: dict[str, str] = {}
    image: str | None = None
    release: str | None = None
    defaults: list[str] = []
    entry: list[Word] = []
    command: list[Word] = []
    for number, line in _logical(text):
        said = re.match(r"\s*([A-Za-z]+)\s+(.*)", line)
        if said is None:
            continue
        keyword, rest = said[1].upper(), said[2].strip()
        if keyword == "FROM":
            base = [word for word in rest.split() if not word.startswith("--")]
            image = interpolated(base[0], arguments, []) if base else None
            entry, command, env = [], [], {}
        elif keyword == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value.strip("\"'")
        elif keyword == "ENV":
            env |= _environment(interpolated(rest, {**arguments, **env}, []))
        elif keyword == "RUN":
            release = pinned_release(rest) or release
        elif keyword in ("ENTRYPOINT", "CMD"):
            words = _exec_form(rest, number)
            entry, command = (words, []) if keyword == "ENTRYPOINT" else (entry, words)
    found = of_container(entry, command, env, image, None, defaults)
    return [Found(one, "Dockerfile", release=release, defaults=defaults) for one in found]


def _environment(rest: str) -> dict[str, str]:
    if re.match(r"[A-Za-z_]\w*=", rest):
        pairs = [word.partition("=") for word in split(rest)]
        return {name: value for name, equals, value in pairs if equals}
    name, _, value = rest.partition(" ")
    return {name: value.strip()}


def _exec_form(rest: str, line: int) -> list[Word]:
    """`["vllm", "serve"]` as it is; anything else is a line of a shell."""
    try:
        words = json.loads(rest)
    except ValueError:
        words = None
    if isinstance(words, list):
        return [Word(str(word), line) for word in words]
    return [Word("sh", line), Word("-c", line), Word(rest, line)]


def systemd(text: str, where: str, read_named: ReadNamed) -> list[Found]:
    """What a unit starts (`ExecStart=`), or the container of a Quadlet (`Image=`, `Exec=`)."""
    env: dict[str, str] = {}
    starts: list[tuple[int, str]] = []
    image = None
    for number, line in _logical(text):
        key, equals, value = line.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or key.startswith(("#", ";")):
            continue
        if key == "Environment":
            pairs = [word.partition("=") for word in split(value)]
            env |= {name: said for name, has, said in pairs if has}
        elif key == "EnvironmentFile":
            env |= read_env(read_named(value.removeprefix("-")))
        elif key == "Image":
            image = value
        elif key in ("ExecStart", "Exec"):
            starts.append((number, value.lstrip("@-:+!") if key == "ExecStart" else value))
    defaults: list[str] = []
    found = []
    for number, value in starts:
        words = [Word(w, number) for w in _systemd_words(value, env)]
        if image is None:
            ran = of_words(words, env, None, defaults)
        else:
            ran = of_container([], words, env, image, None, defaults)
        found += [Found(one, "systemd unit", defaults=defaults) for one in ran]
    return found


def _systemd_words(text: str, env: Mapping[str, str]) -> list[str]:
    """`${NAME}` is text in a word; `$NAME` is words by itself; `$$` is a $."""
    words: list[str] = []
    for word in split(text):
        alone = re.fullmatch(r"\$([A-Za-z_]\w*)", word)
        if alone and alone[1] in env:
            words += env[alone[1]].split()
        else:
            words.append(interpolated(word, env, []))
    return words


def ray_serve(doc: Map, where: str) -> list[Found]:
    """The models of a Ray Serve config with `ray.serve.llm`; of a RayService, its own."""
    if doc.get("kind") == "RayService":
        text = as_word(part(doc, "spec").get("serveConfigV2"))
        inner = documents(text, where, text.line)
        doc = inner[0] if inner else Map()
    found = []
    for application in maps_of(doc, "applications"):
        configs = maps_of(part(application, "args"), "llm_configs")
        found += [_ray_model(one, where) for one in configs]
    return found


def _ray_model(config: Map, where: str) -> Found:
    loading, kwargs = part(config, "model_loading_config"), part(config, "engine_kwargs")
    name = as_word(loading.get("model_id"), config.line)
    source = loading.get("model_source")
    argv = [as_word(source if isinstance(source, str) else name, config.line)]
    argv += [Word("--served-model-name", name.line), name]
    dropped: list[str] = []
    for key, value in kwargs.items():
        option, line = f"--{key.replace('_', '-')}", kwargs.lines.get(key, config.line)
        known = options().get(option)
        if known is not None and known.gone is not None and known.treated == "passed":
            dropped.append(option)  # of EngineArgs of then; serve's parser refuses it now
        elif isinstance(value, bool):
            argv.append(Word(option if value else f"--no-{option[2:]}", line))
        else:
            argv += [Word(option, line), as_word(value, line)]
    deployment = part(config, "deployment_config")
    scaling = part(deployment, "autoscaling_config")
    env = {str(k): str(v) for k, v in part(config, "runtime_env", "env_vars").items()}
    one = Found(Launch(argv, env, None, config.line), "Ray Serve config", name)
    replicas = deployment.get("num_replicas")
    if scaling or replicas == "auto":
        least = scaling.get("min_replicas", 1)
        one.warnings.append(
            f"autoscaling_config: {least} to {scaling.get('max_replicas', 'any number')}"
        )
        one.replicas = max(count(least, where, "min_replicas"), 1)
    else:
        one.replicas = count(replicas, where, "num_replicas")
    if "max_ongoing_requests" in deployment:
        one.warnings.append(f"max_ongoing_requests: {deployment['max_ongoing_requests']}")
    if config.get("accelerator_type"):
        one.labels = [("accelerator_type", (str(config["accelerator_type"]),))]
    one.passed = dropped
    return one


def skypilot(doc: Map, where: str) -> list[Found]:
    """What `run` of a SkyPilot task starts."""
    env = {str(k): str(v) for k, v in part(doc, "envs").items() if v is not None}
    resources = part(doc, "resources")
    kinds = _accelerators(resources.get("accelerators"))
    gpus = next(iter(kinds.values()), None)
    nodes = count(doc.get("num_nodes"), where, "num_nodes")
    known = {**env, "SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": "0"}
    if gpus is not None:
        known["SKYPILOT_NUM_GPUS_PER_NODE"] = str(gpus)
    run, setup = as_word(doc.get("run")), str(doc.get("setup") or "")
    defaults: list[str] = []
    found = []
    for launch in launches(run, known, run.line, defaults):
        launch.env = {k: v for k, v in launch.env.items() if not k.startswith("SKYPILOT_")}
        image = str(resources.get("image_id") or "").removeprefix("docker:")
        launch.image = launch.image or image or None
        one = Found(launch, "SkyPilot task", gpus=gpus, defaults=defaults)
        one.release = pinned_release(setup) or pinned_release(run)
        said = ", ".join(f"{name}:{number}" for name, number in kinds.items())
        one.labels = [("accelerators", tuple(kinds))] if kinds else []
        one.label_text = f"accelerators: {said}" if kinds else ""
        service = part(doc, "service")
        replicas = service.get("replicas", part(service, "replica_policy").get("min_replicas"))
        one.replicas = count(replicas, where, "replicas")
        one.nodes = nodes
        found.append(one)
    return found


def _accelerators(value: object) -> dict[str, int]:
    """`H100:8`, a list of these, or a map with or without numbers."""
    if isinstance(value, Map):
        value = [key if number is None else f"{key}:{number}" for key, number in value.items()]
    texts = value if isinstance(value, list) else [value] if value else []
    found = {}
    for text in texts:
        name, _, number = str(text).partition(":")
        found[name.strip()] = int(number) if number.strip().isdigit() else 1
    return found


def config_words(text: str, where: str, falses: bool) -> list[Word]:
    """The options of a file of `vllm serve --config`. falses: `key: false` means --no-key, as from
    0.28 on; before, it was dropped."""
    docs = documents(text, where)
    if not docs or not isinstance(docs[0], Map):
        raise ServeLineError(f"{where}: no options of vLLM; write key: value lines")
    words: list[Word] = []
    for key, value in docs[0].items():
        name, line = f"--{key}", docs[0].lines[key]
        if value is False:
            known = options().get(name.replace("_", "-"))
            if falses and known is not None and known.takes == "switch":
                words.append(Word(f"--no-{key}", line))
        elif value is True:
            words.append(Word(name, line))
        elif isinstance(value, list):
            words += [Word(name, line), *(as_word(item, line) for item in value)] if value else []
        else:
            words += [Word(name, line), as_word(value, line)]
    return words
