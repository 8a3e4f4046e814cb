"""The engine that is served."""

from __future__ import annotations

from dataclasses import dataclass


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
