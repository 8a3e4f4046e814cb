"""Tables of data that ship with the package."""

from __future__ import annotations

import csv
import json
from importlib import resources


def rows(package: str | None, name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of `package`. Lines that begin with # are remarks."""
    text = resources.files(package or "twinserve").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def document(package: str | None, name: str) -> dict:
    """What a JSON file of `package` holds."""
    return json.loads(resources.files(package or "twinserve").joinpath(name).read_bytes())


def number(text: str) -> float | None:
    """None for an empty cell."""
    return float(text) if text else None
