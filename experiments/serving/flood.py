"""What is measured: policies as a server has them, the engine, and the requests that it gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from twinserve.policies.registry import parse_policy, policy_names

HOST_BLOCKS = 1024  # more than a flood ever has on the host


@dataclass(frozen=True)
class Case:
    """policy: as `--additional-config` has it, None: vLLM with its own scheduler; options: further
    keys of it; host_blocks: room for swapped KV; note: what is changed."""

    policy: str | None
    options: dict = field(default_factory=dict)
    host_blocks: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        shown = "vLLM's own scheduler" if self.policy is None else f"`{self.policy}`"
        return f"{shown}{', ' * bool(self.note)}{self.note}"


STOCK = Case(None)
CHANGED = {
    "bros": (
        Case("bros:chunk=fit"),
        Case("bros:chunk=fit", host_blocks=HOST_BLOCKS, note="swapping"),
        Case("bros:chunk=64,reserve=true"),
        Case("bros:chunk=64"),
        Case("bros:chunk=64", {"kv": "bidirectional"}, note="half of the blocks"),
    )
}


def cases(policies: list[str] | None = None) -> list[Case]:
    """Of these policies; all by default. Raises RegistryError."""
    if policies is not None:
        return [Case(parse_policy(text).text) for text in policies]
    return [case for name in policy_names() for case in (Case(name), *CHANGED.get(name, ()))]


@dataclass(frozen=True)
class Engine:
    """Of all cases: blocks of the pool, tokens a block, seats, tokens of a step and of a request at
    most; model of tiny_model.MODELS; profile: what policies believe a step takes."""

    model: str = "tiny"
    blocks: int = 128
    block_tokens: int = 32
    seats: int = 16
    step_tokens: int = 256
    longest: int = 512
    profile: str = "llama-3.1-8b@h100"


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
