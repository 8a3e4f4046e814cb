"""The first deviation of a live engine from its plans, and answers lost or shortened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def parting(scheduler, expected: Mapping[str, int], tokens: Mapping[str, Sequence[int]]) -> str:
    """One line, or nothing if all is as it should be.

    scheduler  of the engine (engine.scheduler.Steering), which counted this run alone
    expected   request id -> tokens that its answer should have
    tokens     request id -> token ids emitted
    """
    if scheduler.drift:
        of = f"{scheduler.drift:,} of {scheduler.steps:,} steps drifted"
        return f"the engine parted from its plans at {scheduler.first_drift} ({of})"
    short = [name for name, n in expected.items() if len(tokens.get(name, ())) != n]
    if short:
        name = short[0]
        of = f"{len(short):,} of {len(expected):,} answers differ in length"
        return f"{name} got {len(tokens.get(name, ())):,} of {expected[name]:,} tokens ({of})"
    return ""
