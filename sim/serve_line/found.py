"""A server as a file has it, before its options are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from twinserve.sim.serve_line.launch import Launch
from twinserve.sim.serve_line.words import ServeLineError, Word, lacking, line_of
from twinserve.sim.serve_line.yaml_lines import as_word

PREFILL, DECODE = "prefill", "decode"
# Returns the text of a file that another one names; None: not there.
ReadNamed = Callable[[str], str | None]


@dataclass
class Found:
    """kind: of the file. name: of the service. role: prefill or decode. replicas: servers. nodes:
    machines or pods of one server. gpus: of a node; 0: none; None: not said. labels: what may name
    the GPU, as (key, values). release: if the image does not say it. warnings: what is no option
    and is not simulated. defaults: variables whose default was taken. passed: options that were
    left out of the words. label_text: the labels as the file has them, if not `key: value`."""

    launch: Launch
    kind: str
    name: str = ""
    role: str | None = None
    replicas: int = 1
    nodes: int = 1
    gpus: int | None = None
    labels: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    release: str | None = None
    warnings: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    label_text: str = ""

    @property
    def line(self) -> int:
        return self.launch.line


def count(value: object, where: str, what: str, default: int = 1) -> int:
    """A number of a file. Raises ServeLineError for one that is not there to read."""
    if value is None or value == "":
        return default
    text = str(value)
    if text.strip().isdigit():
        return int(text)
    line = line_of(value)
    if lacking(text):
        raise ServeLineError(
            f"{where}:{line}: {what}: {lacking(text)[0]} has no value; render the file, or write "
            "the number"
        )
    raise ServeLineError(f"{where}:{line}: {what}: {text} is no number; write one")


def one_server(found: list[Found], where: str, noun: str, name: str | None) -> list[Found]:
    """Return the one server, or its prefill and decode pools. name: the chosen one. Raises
    ServeLineError if there are several others."""
    if name is not None:
        named = [one for one in found if one.name == name]
        if not named:
            names = ", ".join(one.name for one in found if one.name)
            raise ServeLineError(f"{where}: no {noun} {name!r} runs vLLM; there are {names}")
        return named[:1]
    heads = [one for one in found if "--headless" not in one.launch.argv]
    if heads and len(heads) < len(found):
        nodes = sum(one.replicas for one in found) - sum(one.replicas for one in heads)
        heads[0].nodes += nodes if len(heads) == 1 else 0
        found = heads
    roles = [one.role or _role(one.launch.argv) for one in found]
    if len(found) == 2 and set(roles) == {PREFILL, DECODE}:
        for one, role in zip(found, roles, strict=True):
            one.role = role
        return sorted(found, key=lambda one: one.role == DECODE)
    if len(found) > 1:
        names = ", ".join(one.name or f"line {one.line}" for one in found)
        hint = f"name one: {where}#{found[0].name}" if found[0].name else "give one of them"
        line = line_of(found[1].name, found[1].line)
        raise ServeLineError(f"{where}:{line}: {len(found)} {noun}s with vLLM: {names}; {hint}")
    return found


def _role(argv: list[Word]) -> str | None:
    """Of a server that only gives KV to another one, or only takes it."""
    said = re.search(r'"kv_role"\s*:\s*"kv_(producer|consumer)"', " ".join(argv))
    return None if said is None else PREFILL if said[1] == "producer" else DECODE


def words_of(value: object, line: int = 1) -> list[Word]:
    """A list of YAML as words."""
    if value is None or value == {}:
        return []
    if isinstance(value, list):
        return [as_word(item, line) for item in value]
    return [as_word(value, line)]
