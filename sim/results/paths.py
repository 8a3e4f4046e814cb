"""Numbers of a summary by their dotted names: classes.rt.p99.9_ttft_ms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lookup(summary: Mapping, path: str) -> Any:
    """What stands there; None where nothing does."""
    value: Any = summary
    while path:
        if not isinstance(value, Mapping):
            return None
        # a name may have a dot of its own: p99.9_ttft_ms
        head, _, rest = (path, "", "") if path in value else path.partition(".")
        value, path = value.get(head), rest
    return value
