"""Simulate a measured run with the rules of the vLLM release that it was measured on. Compare the
times of each request under both, and the errors of their means."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from twinserve.experiments.validation.runs import (
    Case,
    profile_of,
    read_run,
    simulate,
    simulated_samples,
)

NEWEST, MEASURED, OLDEST = "0.32", "0.19", "0.15"  # the runs are of 0.19.0


def of_release(truth: Path, case: Case) -> list[dict]:
    """One row for each release: preemptions, and errors of means (fractions) by metric. Also how
    many requests have other times than under the newest release, and by how much at most (s)."""
    run = read_run(truth, case)
    profile = profile_of(run)
    found: list[dict] = []
    newest: dict[str, np.ndarray] = {}
    for release in (NEWEST, MEASURED, OLDEST):
        rows = simulate(run, profile, f"vllm:release={release}")
        ours = simulated_samples(rows)
        newest = newest or ours
        apart = np.max([np.abs(ours[name] - newest[name]) for name in ours], axis=0)
        found.append(
            {
                "release": release,
                "requests": len(apart),
                "preemptions": int(rows.requests.recomputes.sum()),
                **{
                    name: float(ours[name].mean() / run.samples[name].mean() - 1.0) for name in ours
                },
                "other_times": int(np.count_nonzero(apart)),
                "largest_s": float(apart.max()),
            }
        )
    return found
