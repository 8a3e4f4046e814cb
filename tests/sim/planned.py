"""What the tests of plans plan for: short recorded traces and one small engine."""

from pathlib import Path

import numpy as np

from twinserve.sim.setup.config import SimulationConfig

MODEL, GPU = "llama-3.1-8b", "a100-40g"


def write_trace(
    path: Path, seed: int = 0, count: int = 120, rate: float = 20.0, longest: int = 600
) -> str:
    """A recording in Azure's format: random lengths, arrivals of a Poisson process."""
    rng = np.random.default_rng(seed)
    at = rng.exponential(1 / rate, count).cumsum()
    prompts, outputs = rng.integers(20, longest, count), rng.integers(2, 60, count)
    rows = [
        f"2023-11-16 18:{int(t) // 60:02d}:{int(t) % 60:02d}.{int(t % 1 * 1e7):07d},{p},{o}"
        for t, p, o in zip(at, prompts, outputs, strict=True)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return str(path)


def settings(trace: str, slo: str, **further) -> dict:
    """Of a run on one replica of that engine, as a trial has them."""
    config = SimulationConfig(trace=trace, slo=slo, profile=f"{MODEL}@{GPU}", **further)
    return config.model_dump(mode="json")
