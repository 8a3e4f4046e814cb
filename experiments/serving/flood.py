"""What is measured: policies as a server has them, the engine, and the requests that it gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinserve.policies.registry import policy_names

HOST_BLOCKS = 1024  # more than a flood ever has on the host


@dataclass(frozen=True)
class Case:
    """policy: as `--additional-config` has it, None: vLLM with its own scheduler; options: further
    keys of it; host_blocks: room for swapped KV."""

    policy: str | None
    options: dict = field(default_factory=dict)
    host_blocks: int = 0


STOCK = Case(None)
FIT, SMALL = "bros:chunk=fit", {"model": "small"}
# name -> arguments of `main.price`
CASES: Mapping[str, Mapping[str, Any]] = {
    **{policy: {"policy": policy} for policy in policy_names()},
    FIT: {"policy": FIT},
    f"{FIT}, swapping": {"policy": FIT, "host_blocks": HOST_BLOCKS},
    "bros:chunk=64,reserve=true": {"policy": "bros:chunk=64,reserve=true"},
    "bros:chunk=64": {"policy": "bros:chunk=64"},
    "bros:chunk=64, half of the blocks": {
        "policy": "bros:chunk=64",
        "options": {"kv": "bidirectional"},
    },
    **{f"{policy}, model small": {"policy": policy, **SMALL} for policy in ("vllm", "bros", FIT)},
}


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
