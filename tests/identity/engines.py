"""What the installed vLLM passes, for docs/invariants.md; .ci/engines runs it for each release:

    python -m tests.identity.engines --seeds 7 --steps 600 --out docs/results/engines/0.32.0.json

Rules are those that the release is seen to follow. Each class of scenarios runs with synchronous
and with asynchronous scheduling, `seeds` times for at most `steps` steps: with the option `release`
of policy vllm that has these rules, and where that is not 0.32 with 0.32's too, to count the runs
that part. --tests adds what pytest wrote (--junitxml) of the tests of a use of the twin. Exit code
1 where a step differs.
"""

import argparse
import dataclasses
import json
import xml.etree.ElementTree as xml
from functools import partial
from pathlib import Path

from tests.identity.compare import compare
from tests.identity.ours import OurScheduler
from tests.identity.regimes import SINGLE, leaving
from tests.identity.release import installed_release, installed_rules
from twinserve.backends.live.needs import NEEDS, missing
from twinserve.backends.live.versions import installed_vllm
from twinserve.traces.write import write_atomically

NEWEST = "0.32"


def compare_all(seeds: int, steps: int, release: str) -> dict:
    """All classes, each run up to the first step that differs. Returns runs and steps, how many
    runs part and where, the first step of the first one said in full."""
    found: dict = {"runs": 0, "steps": 0, "parted": {}, "first": ""}
    for name in SINGLE:
        for asynchronous in (False, True):
            for seed in range(seeds):
                report = compare(
                    name, seed, 1, leaving(seed), asynchronous,
                    partial(OurScheduler, release=release), max_steps=steps,
                )  # fmt: skip
                found["runs"] += 1
                found["steps"] += report.steps
                if report.mismatches:
                    kind = f"{name}, {'asynchronous' if asynchronous else 'synchronous'}"
                    found["parted"].setdefault(kind, []).append(report.steps)
                    found["first"] = found["first"] or f"{kind}, seed {seed}: " + " ".join(
                        report.first_mismatch.split()
                    )
            print(name, asynchronous, release, found["steps"], found["parted"], flush=True)
    return found


def of_tests(file: Path) -> dict:
    """Of one run of pytest: tests by outcome, and the first failure in one line."""
    cases = list(xml.parse(file).iter("testcase"))
    failed = [part for case in cases for part in case if part.tag in ("failure", "error")]
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    said = " ".join((failed[0].get("message") or failed[0].text or "").split()) if failed else ""
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "first": said[:300],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=600, help="of each run, at most")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument(
        "--tests", action="append", default=[], metavar="USE=FILE", help="replay=replay.xml"
    )
    given = parser.parse_args()
    release = installed_release()
    result = {
        "vllm": installed_vllm(),
        "rules": dataclasses.asdict(installed_rules()),
        "release": release,
        "missing": {use: missing(use) for use in NEEDS},
        "identity": compare_all(given.seeds, given.steps, release),
    }
    if release != NEWEST:
        result["as_newest"] = compare_all(given.seeds, given.steps, NEWEST)
    for use, _, file in (text.partition("=") for text in given.tests):
        result[use] = of_tests(Path(file))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out, (json.dumps(result, indent=2) + "\n").encode())
    raise SystemExit(1 if result["identity"]["parted"] else 0)


if __name__ == "__main__":
    main()
