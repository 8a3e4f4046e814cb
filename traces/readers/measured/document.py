"""JSON documents of tools: the whole of a file, and fields of its rows by path."""

import json
from collections.abc import Sequence
from typing import Any

from twinserve.traces.readers.columns import MAX_SECONDS, Rows, shown
from twinserve.traces.readers.jsonl import decode_text, parse
from twinserve.traces.workload import WorkloadError


def documents(data: bytes, path: str) -> list[dict]:
    """The JSON objects of a file: one over many lines, or one a line. Raises WorkloadError."""
    text = decode_text(data, path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return parse(data, path)[0]
    if type(found) is not dict:
        raise WorkloadError(f"{path}: not a JSON object but {shown(found)}: check the format")
    return [found]


def document(data: bytes, path: str, several: str) -> dict:
    """Return the one JSON object of a file; `several` is the advice if there are more."""
    found = documents(data, path)
    if len(found) > 1:
        raise WorkloadError(f"{path}: holds {len(found)} results: {several}")
    return found[0]


def at(row: Any, *names: str) -> Any:
    """Return the value at a path of names; None if any is missing."""
    for name in names:
        if type(row) is not dict:
            return None
        row = row.get(name)
    return row


def listed(value: Any) -> list:
    """A list as it is; anything else as an empty one."""
    return value if type(value) is list else []


def lists(
    content: dict, where_path: str, names: Sequence[str], needed: str
) -> tuple[dict[str, list], Rows]:
    """The named columns of a document that holds one list a field, all as long as `needed`."""
    found: dict[str, list] = {}
    n = len(content[needed]) if type(content.get(needed)) is list else 0
    for name in names:
        values = content.get(name)
        if values is None:
            continue
        if type(values) is not list or len(values) != n:
            what = f"has {len(values)} entries" if type(values) is list else "is no list"
            raise WorkloadError(
                f"{where_path}: field '{name}' {what}, '{needed}' has {n}: "
                "the file is torn or was edited, measure again"
            )
        found[name] = values
    return found, Rows(where_path, range(1, n + 1), "request")


def numbers_of(content: dict) -> dict[str, float]:
    """The numbers at the top of a document."""
    return {
        name: float(value)
        for name, value in content.items()
        if type(value) in (int, float) and abs(value) < MAX_SECONDS**4
    }
