"""From which batch on drafts stop paying, by the step-time model alone: docs/speculation.md.

    python -m twinserve.experiments.speculation

A batch of requests decodes at one context length. With drafts a step gives each request the mean
length of the rates; the gain is tokens a second with drafts over tokens a second without. Nothing
arrives, no memory is short: what a scheduler makes of it is for runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.speculative import SpeculativeModel, VerifyingComposition
from twinserve.profiles.step_times import choose
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.speculation import Speculation, parse_speculation

ENGINES = ("llama-3.1-8b@h100", "qwen2.5-14b@a100-40g:tp2", "llama-3.1-70b@h100:tp4")
CONTEXTS = (1000, 8000)
BATCHES = (1, 16, 64, 256)
LARGEST = 1024
# Rates published for EAGLE-3 (docs/speculation.md), and the same for drafts that cost nothing.
DRAFTED = ("k=3,method=eagle,rates=0.622/0.356/0.203", "k=3,method=ngram,rates=0.622/0.356/0.203")


def gain(model: SpeculativeModel, speculation: Speculation, requests: int, context: int) -> float:
    """Tokens a second with drafts over those without, of so many requests at this context."""
    resident = np.full(requests, context)
    plain = model.model.step_seconds(StepComposition(requests, requests * context, context))
    k = speculation.k
    verified = model.step_seconds(
        VerifyingComposition(
            requests,
            requests * context,
            context,
            verify_new=np.full(requests, 1 + k),
            verify_resident=resident,
            drafters=requests,
            drafts=k,
        )
    )
    return (1 + sum(speculation.accepted_rates)) * plain / verified


def last_paying(model: SpeculativeModel, speculation: Speculation, context: int) -> int:
    """The largest batch up to which every batch gains; 0: none does."""
    for requests in range(1, LARGEST + 1):
        if gain(model, speculation, requests, context) < 1.0:
            return requests - 1
    return LARGEST


def rows() -> Iterator[str]:
    """A markdown table."""
    yield (
        "| engine | drafts | context | "
        + " | ".join(f"gain at {b}" for b in BATCHES)
        + (" | pays up to | KV memory holds |")
    )
    yield "|---" * (len(BATCHES) + 5) + "|"
    for name in ENGINES:
        profile = choose(name, "roofline").profile
        for text in DRAFTED:
            speculation = parse_speculation(text)
            config = SimulationConfig(profile=name, step_times="roofline", speculate=text)
            hardware = resolve_hardware(config)
            drafter = speculation.drafter(profile, hardware.limits)
            model = SpeculativeModel(hardware.model, drafter)
            for context in CONTEXTS:
                gains = [f"{gain(model, speculation, b, context):.2f}" for b in BATCHES]
                last = last_paying(model, speculation, context)
                up_to = f"{last}" if last < LARGEST else f"{LARGEST} or more"
                held = hardware.kv_tokens // context
                told = (name, f"`{text}`", f"{context:,}", *gains, up_to, f"{held:,}")
                yield "| " + " | ".join(told) + " |"


if __name__ == "__main__":
    print("\n".join(rows()))
