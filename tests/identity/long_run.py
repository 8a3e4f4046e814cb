"""Policy `vllm` and vLLM's scheduler in lockstep over many seeds of every class of scenarios:

    python -m tests.identity.long_run --steps 1000000 --out identity.json

Each class runs with synchronous and with asynchronous scheduling, from seed 0 on, until it has a
tenth of the steps; every third seed has clients that leave. The file has the steps by class, how
many differ, and where the first one does. Exit code 1 where one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.ours import OurScheduler
from twinserve.backends.live.versions import installed_vllm
from twinserve.traces.write import write_atomically

CLASSES = ("preemption", "prefix_eviction", "partial_chunks", "priority", "mixed")
LEAVING = 0.05  # of the steps, where clients leave
KINDS = {
    f"{name}, {'asynchronous' if asynchronous else 'synchronous'}": (name, asynchronous)
    for name in CLASSES
    for asynchronous in (False, True)
}


def run_seed(name: str, asynchronous: bool, seed: int) -> Report:
    """The first step that differs ends it."""
    scenario = getattr(scenarios, name)(seed)
    settings = dataclasses.replace(scenario.settings, async_scheduling=asynchronous)
    leaving = LEAVING if seed % 3 == 2 else 0.0
    return run_identity(settings, scenario.requests, OurScheduler, leaving=leaving)


def run_kind(name: str, asynchronous: bool, steps: int) -> dict:
    """As many seeds as `steps` take."""
    total = Report()
    for seed in itertools.count():
        report = run_seed(name, asynchronous, seed)
        if report.mismatches:
            report.first_mismatch = f"{name}, seed {seed}: {report.first_mismatch}"
        total += report
        if total.steps >= steps:
            return {
                "class": name,
                "scheduling": "asynchronous" if asynchronous else "synchronous",
                "seeds": seed + 1,
                "requests": total.requests,
                "steps": total.steps,
                "mismatches": total.mismatches,
                "first_mismatch": total.first_mismatch,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="at least, of all classes")
    parser.add_argument("--only", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    given = parser.parse_args()
    found = []
    for kind in given.only or KINDS:
        found.append(run_kind(*KINDS[kind], -(-given.steps // len(KINDS))))
        print(f"{kind}: {found[-1]['steps']} steps, {found[-1]['mismatches']} differ", flush=True)
    result = {
        "vllm": installed_vllm(),
        "steps": sum(kind["steps"] for kind in found),
        "mismatches": sum(kind["mismatches"] for kind in found),
        "classes": found,
    }
    write_atomically(given.out, (json.dumps(result, indent=2) + "\n").encode())
    raise SystemExit(1 if result["mismatches"] else 0)


if __name__ == "__main__":
    main()
