"""The reference of commands: each with its options, as `--help` has them."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from docs.reference.markdown import cell, code, table, text
from twinserve.sim.cli.main import VERBS, twinserve_app
from twinserve.sim.setup.config import SimulationConfig

_HEAD = """# Commands

This page is made from the code, and says what `--help` says. [At the terminal](../terminal.md)
has names that vLLM has for options, and completion.

`simulate` is short for `twinserve simulate`. `--help` and `--version` go with every command.
"""
_SETTINGS = "settings-of-a-run"


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD, "## Settings of a run", _settings()]
    for verb in VERBS:
        parts += _verb(verb)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _settings() -> str:
    said = "Options of `simulate`, `sweep` and `validate`. A `run.json` and Python have the same "
    said += "names with underscores."
    options = [one for one in _options(twinserve_app(["simulate"])["simulate"]) if _is_setting(one)]
    return f"{said}\n\n{_groups(options, '###')}"


def _verb(verb: str) -> Iterator[str]:
    app = twinserve_app([verb])[verb]
    names = [name for name in app if not name.startswith("-")]
    yield f"## twinserve {verb}"
    if not names:
        yield from _command(app, f"twinserve {verb}", "###")
        return
    yield text(app.help)
    for name in names:
        yield f"### twinserve {verb} {name}"
        yield from _command(app[name], f"twinserve {verb} {name}", "####")


def _command(app: Any, called: str, below: str) -> Iterator[str]:
    options = _options(app)
    needed = [one for one in options if one.required]
    own = [one for one in options if not _is_setting(one)]
    words = [_placeholder(one) for one in needed]
    yield f"```text\n{' '.join([called, *words, '[OPTIONS]'])}\n```"
    yield from _said(app.default_command)
    if len(own) < len(options):
        yield f"Takes the [settings of a run](#{_SETTINGS}), and:"
    if own:
        yield _groups(own, below)


def _said(command: Any) -> Iterator[str]:
    """The docstring down to its parameters; examples as a listing."""
    said = (inspect.getdoc(command) or "").partition("\nParameters\n---")[0]
    for paragraph in re.split(r"\n\s*\n", said.strip()):
        lines = paragraph.splitlines()
        if all(line.startswith("$ ") for line in lines):
            yield "```bash\n" + "\n".join(line[2:] for line in lines) + "\n```"
        else:
            yield text(" ".join(paragraph.split()))


def _options(app: Any) -> list[Any]:
    found = app.assemble_argument_collection(parse_docstring=True)
    return [one for one in found if one.parse and one.parameter.show is not False and one.names]


def _is_setting(option: Any) -> bool:
    return bool(option.keys) and option.keys[0] in SimulationConfig.model_fields


def _groups(options: list[Any], heading: str) -> str:
    """A table for each group, in the order in which help has them; few options need no heading."""
    groups: dict[str, list[Any]] = {}
    places: dict[str, Any] = {}
    for option in options:
        (group, *_) = option.parameter.group
        groups.setdefault(group.name, []).append(option)
        places[group.name] = group.sort_key if isinstance(group.sort_key, int) else 0
    order = sorted(groups, key=places.__getitem__)
    tables = {name: _table(groups[name]) for name in order}
    if len(order) == 1:
        return tables[order[0]]
    if heading == "####":
        return "\n\n".join(tables.values())
    return "\n\n".join(f"{heading} {name}\n\n{tables[name]}" for name in order)


def _table(options: list[Any]) -> str:
    rows = [(_names(one), _value(one), cell(_help(one))) for one in options]
    return table(("option", "value", "what it is"), rows)


def _positional(option: Any) -> bool:
    return bool(option.field_info.is_positional)


def _placeholder(option: Any) -> str:
    name = option.names[0]
    if _positional(option):
        return name.lstrip("-").upper()
    return f"{name} {_kind(option)}"


def _names(option: Any) -> str:
    if _positional(option):
        return code(_placeholder(option))
    return ", ".join(code(name) for name in option.names)


def _help(option: Any) -> str:
    said = option.parameter.help or ""
    default = option.field_info.default
    plain = isinstance(default, (int, float, str)) and not isinstance(default, bool)
    if plain and default != "" and "default" not in said:
        said += f" [default: {default}]"
    return said


def _value(option: Any) -> str:
    choices = option.get_choices(force=True)
    if choices:
        return ", ".join(code(choice) for choice in choices)
    kind = _kind(option)
    return code(kind) if kind else ""


_KINDS = {"int": "INT", "float": "FLOAT", "str": "TEXT", "Path": "PATH", "bool": ""}


def _kind(option: Any) -> str:
    """What follows the option; empty for a flag."""
    named = re.findall(r"int|float|str|Path|bool", str(option.hint).replace("pathlib", ""))
    words = [_KINDS[name] for name in dict.fromkeys(named)]
    many = re.search(r"list|tuple", str(option.hint))
    if many and re.search(r"tuple\[(\w+), \1\]", str(option.hint)):
        return f"{words[0]} {words[0]}"
    return (" ".join(words) + "...") if many else " ".join(filter(None, words))
