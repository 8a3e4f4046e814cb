"""Policy `vllm` with drafts and vLLM's scheduler in lockstep, over many seeds of each regime:

    python -m tests.identity.draft_run --steps 100000 --out docs/results/identity_drafts.json

Each regime runs from seed 0 on until it has as many steps; every third seed has clients that leave.
The file has steps, what happened on vLLM's side, and where the first step differs. Exit code 1
where one does.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

from tests.identity.compare import Report
from tests.identity.draft_scenarios import drafted
from tests.identity.drafts import DraftCounters, compare_drafts
from twinserve.backends.live.versions import installed_vllm
from twinserve.traces.write import write_atomically

LEAVING = 0.05  # of the steps, where clients leave
CLASSES = ("preemption", "partial_chunks", "prefix_eviction", "priority")
# regime -> classes of scenarios, and whether scheduling is asynchronous
REGIMES = {
    "preemption": (("preemption",), False),
    "chunks": (("partial_chunks",), False),
    "prefix cache": (("prefix_eviction", "mixed"), False),
    "priority": (("priority",), False),
    "asynchronous": ((*CLASSES, "mixed"), True),
}


def run_regime(name: str, steps: int) -> dict:
    """As many seeds as `steps` take."""
    classes, asynchronous = REGIMES[name]
    total, drafts = Report(), DraftCounters()
    for number in itertools.count():
        seed, kind = number // len(classes), classes[number % len(classes)]
        leaving = LEAVING if seed % 3 == 2 else 0.0
        report, found = compare_drafts(drafted(kind, seed, asynchronous), leaving=leaving)
        if report.mismatches:
            report.first_mismatch = f"{kind}, seed {seed}: {report.first_mismatch}"
        total, drafts = total + report, drafts + found
        if total.steps >= steps or total.mismatches:
            break
    counted = dataclasses.asdict(total.counters) | dataclasses.asdict(drafts)
    return {
        "regime": name, "runs": number + 1, "requests": total.requests, "steps": total.steps,
        "mismatches": total.mismatches, "first_mismatch": total.first_mismatch, "counters": counted,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="at least, of each regime")
    parser.add_argument("--only", action="append", choices=REGIMES, help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    given = parser.parse_args()
    found = []
    for name in given.only or REGIMES:
        found.append(run_regime(name, given.steps))
        print("{regime}: {steps} steps, {mismatches} differ".format(**found[-1]), flush=True)
        result = {
            "vllm": installed_vllm(),
            "command": f"python -m tests.identity.draft_run --steps {given.steps}",
            "regimes": found,
        }
        write_atomically(given.out, (json.dumps(result, indent=2) + "\n").encode())
    raise SystemExit(1 if any(one["mismatches"] for one in found) else 0)


if __name__ == "__main__":
    main()
