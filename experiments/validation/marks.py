"""Public measurements of decode steps on vLLM, one number each: the marks of docs/profiles.md.

Milliseconds of a decode step, or the TPOT of a steady stage, of vLLM 0.14 to 0.19; the middle of a
range stands for it. Contexts are about 700 tokens unless given.
"""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """engine: MODEL@GPU[:tpN]; requests that decode, tokens of context each, milliseconds."""

    engine: str
    requests: int
    context: int
    ms: float


MARKS = (
    Mark("llama-3.1-8b@h100", 15, 700, 7.56),
    Mark("llama-3.1-8b@h100", 46, 700, 9.10),
    Mark("llama-3.1-8b@h100", 91, 1800, 15.7),
    Mark("qwen3-14b@h100", 8, 700, 12.1),
    Mark("qwen3-14b@h100", 26, 700, 13.2),
    Mark("qwen3-14b@h100", 87, 700, 17.5),
    Mark("llama-2-70b@h100:tp4", 15, 700, 16.9),
    Mark("llama-2-70b@h100:tp4", 35, 700, 18.5),
    Mark("llama-2-70b@h100:tp4", 114, 700, 21.5),
    Mark("codellama-34b@h100:tp2", 25, 700, 14.6),
    Mark("codellama-34b@h100:tp2", 90, 700, 16.8),
    Mark("llama-3.1-8b@a100-80g", 8, 700, 12.2),
    Mark("llama-3.1-8b@a100-80g", 22, 700, 14.5),
    Mark("llama-2-70b@a100-80g:tp4", 20, 700, 32.1),
    Mark("llama-2-70b@a100-80g:tp4", 57, 700, 37.8),
    Mark("llama-3.1-8b@l40s", 16, 700, 25.4),
    Mark("llama-3.1-8b@l40s", 48, 700, 31.8),
)


# Decodes of our own servers, vLLM 0.25.1 with asynchronous scheduling (docs/calibrate.md): steps of
# no other request's prompt. A fit of Hopper's constants has them beside the marks.
OWN = tuple(
    Mark(f"llama-3.1-8b@{gpu}", requests, 1024, ms)
    for gpu, times in (
        ("h100", (6.50, 6.98, 8.26, 13.46, 20.78)),
        ("h200", (4.93, 5.24, 6.27, 10.29, 17.19)),
    )
    for requests, ms in zip((1, 8, 32, 128, 256), times, strict=True)
)
