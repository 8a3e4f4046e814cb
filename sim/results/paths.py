"""Look up numbers of a summary by dotted name (classes.rt.p99.9_ttft_ms); write values as text."""

from collections.abc import Mapping
from typing import Any


def lookup(summary: Mapping, path: str) -> Any:
    """Return the value of a dotted name, or None."""
    value: Any = summary
    while path:
        if not isinstance(value, Mapping):
            return None
        # a name may have a dot of its own: p99.9_ttft_ms
        head, _, rest = (path, "", "") if path in value else path.partition(".")
        value, path = value.get(head), rest
    return value


def text_of(value: Any) -> str:
    """Return a value as a flag has it."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(text_of, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
