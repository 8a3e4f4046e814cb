"""Settings as YAML or JSON: an error is one line, with its place and what to do."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from twinserve.formats import DEEPEST
from twinserve.policies.names import hint
from twinserve.sim.setup.config import SettingsError


def text_of(where: str, path: str) -> str:
    """Return a file's text. where: name for errors. Raises SettingsError with one line."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{where}: there is no such file; check the path") from None
    except OSError as error:
        raise SettingsError(f"{where}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{where}: this is no text; name a YAML file") from None


class _Loader(yaml.SafeLoader):
    """Refuse a field that is given twice, which a reader would miss."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ValueError(f"line {line}: {key!r} is no name of a field")
        if key in found:
            raise ValueError(f"line {line}: {key} is given twice; keep one of them")
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
# JSON writes 0.00001 as 1e-05, which is a text to YAML 1.1 and a number to YAML 1.2.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_yaml(where: str, text: str) -> Any:
    """Return the content of a YAML or JSON text. Raises SettingsError with one line."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise ValueError(f"line {line}: refers to another part (*); write it out")
            if getattr(event, "tag", None):  # what it makes of a value may be any error
                line = event.start_mark.line + 1
                raise ValueError(f"line {line}: has a tag ({event.tag}); drop it")
            opens = isinstance(event, yaml.CollectionStartEvent)
            depth += opens - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(f"more than {DEEPEST} levels within each other; write fewer")
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise SettingsError(
            f"{where}: {line}this is not YAML ({error.problem}); correct it"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: {' '.join(str(error).split())}") from None


def said_of(
    error: ValidationError, part: Callable[[Sequence[int | str]], type[BaseModel]], what: str
) -> str:
    """Return the first error of settings: field, what, and what to do.

    part  returns the model that has the last field of a place
    what  an empty list lacks
    """
    errors = error.errors()  # a typo explains what is missing
    first = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    loc, given = first["loc"], first.get("input")
    path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in loc).lstrip(".")
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = sorted(part(loc).model_fields)
        near = hint(str(loc[-1]), known)
        return f"{path}: there is no such field{near}; there are {', '.join(known)}"
    if first["type"] == "missing":
        return f"{path}: is missing; give it"
    if first["type"] == "too_short":
        return f"{path}: the list is empty; write at least one {what}"
    if not loc:
        return said
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, type(None))) else ""
    return f"{path}: {said[0].lower()}{said[1:]}{shown}"
