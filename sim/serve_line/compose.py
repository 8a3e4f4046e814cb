"""Servers in compose files, with the values of the `.env` file."""

import re
from collections.abc import Mapping
from typing import Any

from twinserve.sim.serve_line.launch import Found, ReadNamed, count, of_container
from twinserve.sim.serve_line.shell import interpolated
from twinserve.sim.serve_line.words import Word, line_of, split
from twinserve.sim.serve_line.yaml_lines import Map, as_word, listed, maps_of, part


def read_env(text: str | None) -> dict[str, str]:
    """NAME=VALUE lines of a .env file; quotes around a value go, and a comment behind one."""
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        said = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*", line)
        if said is None:
            continue
        value = said[2]
        quoted = re.fullmatch(r"""(["'])(.*)\1(?:\s+#.*)?""", value)
        found[said[1]] = quoted[2] if quoted else re.sub(r"(?:^|\s+)#.*$", "", value)
    return found


def servers(doc: Map, where: str, read_named: ReadNamed) -> list[Found]:
    values = read_env(read_named(".env"))
    services = part(doc, "services")
    found = []
    for name, service in services.items():
        if isinstance(service, Map):
            line = services.lines.get(name, 1)
            whole = _extended(service, services)
            found += _of_service(Word(name, line), whole, values, where, read_named)
    return found


def _extended(service: Map, services: Map) -> Map:
    """With what it has from another service of the file (`extends`)."""
    said = service.get("extends")
    name = said.get("service") if isinstance(said, Map) and not said.get("file") else said
    whole = Map()
    whole.line = service.line
    for one in (part(services, str(name)) if name is not None else Map(), service):
        whole.update(one)
        whole.lines |= one.lines
    return whole


def _of_service(
    name: Word, service: Map, values: Mapping[str, str], where: str, read_named: ReadNamed
) -> list[Found]:
    defaults: list[str] = []

    def filled(value: Any, line: int) -> Word:
        word = as_word(value, line)
        return Word(interpolated(word, values, defaults), line_of(word, line))

    def words(key: str) -> list[Word]:
        value, line = service.get(key), service.lines.get(key, name.line)
        if isinstance(value, list):
            return [filled(item, line) for item in value]
        text = filled(value or "", line)
        return [Word(word, text.line) for word in split(text)]

    env: dict[str, str] = {}
    files = service.get("env_file") or []
    for file in files if isinstance(files, list) else [files]:
        path = file.get("path", "") if isinstance(file, Map) else file
        env |= read_env(read_named(str(path)))
    said = service.get("environment") or {}
    pairs = said.items() if isinstance(said, Map) else (str(i).partition("=")[::2] for i in said)
    taken: list[str] = []
    env |= {
        str(key): interpolated("" if value is None else str(value), values, taken)
        for key, value in pairs
    }
    entry, command = words("entrypoint"), words("command")
    image = str(filled(service.get("image") or "", name.line)) or None
    visible = _visible(service)
    found = [
        Found(launch, "compose", name, gpus=visible, defaults=defaults)
        for launch in of_container(entry, command, env, image, visible, defaults)
    ]
    for one in found:
        replicas = part(service, "deploy").get("replicas", service.get("scale"))
        one.replicas = count(replicas, where, "replicas")
    return found


def _visible(service: Map) -> int | None:
    """GPUs of a service; None: all, or not said."""
    devices = maps_of(part(service, "deploy", "resources", "reservations"), "devices")
    for device in devices:
        if listed(device, "device_ids"):
            return len(device["device_ids"])
        if str(device.get("count")).isdigit():
            return int(str(device["count"]))
    said = service.get("gpus")
    return int(str(said)) if str(said).isdigit() else None
