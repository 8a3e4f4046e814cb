"""What a table of runs does not show and its reader must know."""

from __future__ import annotations

from collections.abc import Mapping

from twinserve.sim.report.table import overloaded, warmup_line
from twinserve.sim.results.files import RunResult


def notes_of(results: Mapping[str, RunResult]) -> list[str]:
    """A line each: what the warm-up took, which runs do not keep up, what policies counted."""
    loads = [said for label, run in results.items() for said in overloaded(run.summary, label)]
    return [*_left_out(results), *loads, *_counted(results)]


def _left_out(results: Mapping[str, RunResult]) -> list[str]:
    """What the warm-up took from the metrics; one line where that is the same in all runs."""
    found = [r.summary["warmup"] for r in results.values() if "warmup" in r.summary]
    return list(dict.fromkeys(map(warmup_line, found)))


def _counted(results: Mapping[str, RunResult]) -> list[str]:
    """A line for each policy that counts how its steps were decided."""
    counters = {
        label: result.config["policy"].get("counters", {}) for label, result in results.items()
    }
    return [
        f"{label}: "
        + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in found.items())
        for label, found in counters.items()
        if found
    ]
