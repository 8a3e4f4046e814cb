"""What it changes to simulate a measured run with the rules of the vLLM release that it was
measured on: the times of each request under both, and the errors of their means."""

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
    """One row for each release: preemptions, errors of means (fractions, by metric), and beside the
    newest release how many requests have other times, and by how much at most (s)."""
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
                "run": case.label,
                "release": release,
                "requests": len(apart),
                "preemptions": int(rows.requests.recomputes.sum()),
                "errors": {
                    name: float(ours[name].mean() / run.samples[name].mean() - 1.0) for name in ours
                },
                "other_times": int(np.count_nonzero(apart)),
                "largest_s": float(apart.max()),
            }
        )
    return found


def releases_markdown(rows: list[dict]) -> str:
    """The rows of `of_release` as a table."""
    lines = [
        "| run | rules | preemptions | TTFT, TPOT, E2E means against measured | requests with "
        "other times than under 0.32 (largest change) |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        errors = ", ".join(f"{100 * row['errors'][name]:+.2f}" for name in ("TTFT", "TPOT", "E2E"))
        other = f"{row['other_times']} of {row['requests']} ({row['largest_s']:.3f} s)"
        lines.append(
            f"| {row['run']} | {row['release']} | {row['preemptions']} | {errors} % | "
            f"{other if row['release'] != NEWEST else '-'} |"
        )
    return "\n".join(lines) + "\n"
