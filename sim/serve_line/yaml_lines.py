"""YAML whose texts know their lines."""

import json
import re
from typing import Any

import yaml

from twinserve.sim.serve_line.words import TEMPLATE, ServeLineError, Word, line_of, without_value


class Map(dict[str, Any]):
    """A mapping. line: of itself; lines: of its keys."""

    line: int = 1

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):
    """first: the line of the text's first line."""

    first = 1


def _text(loader: _Loader, node: yaml.ScalarNode) -> Word:
    block = node.style in ("|", ">")
    return Word(str(node.value), loader.first + node.start_mark.line + block)


def _map(loader: _Loader, node: yaml.MappingNode) -> Map:
    loader.flatten_mapping(node)
    found = Map()
    found.line = loader.first + node.start_mark.line
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        found[key] = loader.construct_object(value_node, deep=True)
        found.lines[key] = loader.first + key_node.start_mark.line
    return found


def _unknown(loader: _Loader, node: yaml.Node) -> Any:
    """A tag that is not of YAML (`!reference`, `!Sub`): its content."""
    if isinstance(node, yaml.MappingNode):
        return _map(loader, node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return _text(loader, node)


_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)
_Loader.add_constructor("tag:yaml.org,2002:map", _map)
_Loader.add_constructor(None, _unknown)


def documents(text: str, where: str, first: int = 1) -> list[Any]:
    """The documents of a YAML text. Raises ServeLineError."""
    # a template's brackets would be a mapping to YAML, and its quotes and colons end a word
    loader = _Loader(TEMPLATE.sub(lambda it: without_value(re.sub("[\"':#]", "", it[0])), text))
    loader.first = first
    found = []
    try:
        while loader.check_data():
            found.append(loader.get_data())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        template = TEMPLATE.search(text)
        if template is not None:
            line = first + text.count("\n", 0, template.start())
            raise ServeLineError(
                f"{where}:{line}: {template[0]} is a template that was not rendered; give what "
                "`helm template` (or your tool) makes of it"
            ) from None
        mark = getattr(error, "problem_mark", None)
        line = first + (mark.line if mark else 0)
        why = getattr(error, "problem", None) or str(error)
        raise ServeLineError(f"{where}:{line}: this is not YAML ({why}); correct it") from None
    finally:
        loader.dispose()
    return [one for one in found if one is not None]


def as_word(value: Any, line: int = 1) -> Word:
    """A value of YAML as the word that a program gets."""
    if isinstance(value, Word):
        return value
    if isinstance(value, (dict, list)):
        return Word(json.dumps(value), line_of(value, line))
    return Word("" if value is None else str(value), line)


def part(value: Any, *keys: str) -> Map:
    """Return value[a][b]...; an empty Map if a part is missing or no mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Map) else None
    return value if isinstance(value, Map) else Map()


def listed(value: Any, key: str) -> list[Any]:
    """Return the list value[key]; empty if missing or no list."""
    found = value.get(key) if isinstance(value, Map) else None
    return found if isinstance(found, list) else []


def maps_of(value: Any, key: str) -> list[Map]:
    """The mappings of the list value[key]."""
    return [item for item in listed(value, key) if isinstance(item, Map)]
