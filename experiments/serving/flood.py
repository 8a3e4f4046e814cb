"""A flood of best-effort requests at once, and real-time ones that arrive among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Flood:
    """best_effort requests at time 0, real_time ones of which one arrives every `every_s` seconds,
    the first after as long. Prompts and outputs in tokens; text is drawn, so no two share any."""

    best_effort: int = 100
    prompt: int = 300
    output: int = 150
    real_time: int = 20
    urgent_prompt: int = 100
    urgent_output: int = 40
    every_s: float = 0.08

    @property
    def output_tokens(self) -> int:
        return self.best_effort * self.output + self.real_time * self.urgent_output

    def requests(self, vocab: int, seed: int) -> Iterator[Sent]:
        """In order of arrival."""
        rng = np.random.default_rng(seed)

        def text(tokens: int) -> list[int]:
            return rng.integers(1, vocab, tokens).tolist()

        for i in range(self.best_effort):
            yield Sent(f"be{i}", "be", 0.0, text(self.prompt), self.output)
        for i in range(self.real_time):
            at = (i + 1) * self.every_s
            yield Sent(f"rt{i}", "rt", at, text(self.urgent_prompt), self.urgent_output)


@dataclass(frozen=True)
class Sent:
    """A request: name, class, arrival in seconds, token ids, and how many tokens it shall get."""

    name: str
    service_class: str
    at_s: float
    prompt: list[int]
    output: int
