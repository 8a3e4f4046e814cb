"""Workloads stated in a line: KIND:option=value,option=value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches

from twinserve.traces.workload import WorkloadError


class Options:
    """The options of one workload. What a kind reads is marked as known; `done` refuses the rest.

    bare    option whose name may be left out: stages:2x60 is stages:rates=2x60

    Each getter raises WorkloadError for a value that cannot be.
    """

    def __init__(self, name: str, bare: str | None = None) -> None:
        self.name = name
        self.kind, _, text = name.partition(":")
        self.given: dict[str, str] = {}
        self.known: list[str] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = part.partition("=")
            if not equals and bare is not None and bare not in self.given:
                key, equals, value = bare, "=", part
            key = key.strip().lstrip("-").replace("-", "_")
            if not equals or not value.strip():
                self.fail(f"'{part}' is no option: write option=value")
            if key in self.given:
                self.fail(f"{key} is given twice: keep one")
            self.given[key] = value.strip()

    def fail(self, problem: str) -> None:
        raise WorkloadError(f"trace '{self.name[:80]}': {problem}")

    def text(self, key: str, default: str | None = None) -> str | None:
        self.known.append(key)
        return self.given.get(key, default)

    def number(
        self, key: str, default: float | None, low: float = 0.0, *, above: bool = False
    ) -> float | None:
        """Return a number of at least `low`, or above it; `inf` only if the default is infinite."""
        text = self.text(key)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        endless = default is not None and math.isinf(default)
        fits = value > low if above else value >= low
        if not fits or not (math.isfinite(value) or (endless and value == math.inf)):
            than = "above" if above else "from"
            self.fail(f"{key}={text} is no number {than} {low:g}: change it")
        return value

    def needed(self, key: str, low: float = 0.0) -> float:
        value = self.number(key, None, low, above=True)
        if value is None:
            self.fail(f"{key} is missing: add {key}=NUMBER")
        assert value is not None
        return value

    def whole(self, key: str, default: int | None, low: int = 1) -> int | None:
        text = self.text(key)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < low:
            self.fail(f"{key}={text} is no whole number from {low}: change it")
        return int(text)

    def one_of(self, key: str, choices: Mapping | tuple, default: str) -> str:
        text = self.text(key, default)
        assert text is not None
        if text not in choices:
            self.fail(f"{key}={text} is unknown: choose from {', '.join(choices)}")
        return text

    def done(self) -> None:
        """Raises WorkloadError for an option that the kind does not know."""
        for key in self.given:
            if key not in self.known:
                near = get_close_matches(key, self.known, 1)
                hint = f"did you mean {near[0]}" if near else f"there is {', '.join(self.known)}"
                self.fail(f"{key} is no option of {self.kind}: {hint}")
