"""Puts together what .ci/nightly has run:

    python -m tests.nightly FOLDER docs/results/nightly.json

FOLDER has identity.json (tests.identity.long_run), drafts.json (tests.identity.draft_run),
remote.json and tiers.json (tests.identity.regimes) and, of each set of property tests and of tests
of every pair, what pytest printed (NAME.txt, with --hypothesis-show-statistics where it draws
examples) and its exit code (NAME.code). Exit code 1 where anything failed or is missing.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from twinserve.traces.write import write_atomically

REGIMES = ("remote", "tiers")
SETS = ("properties", "bad_input", "replays")
WHOLE = ("pairs", "live_pairs")  # tests without examples
# "3 passing examples, 0 failing examples", or "3 passing, 0 failing, and ... test cases"
EXAMPLES = re.compile(r"(\d+) passing(?: examples)?, (\d+) failing")
OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def summary(printed: str, code: int) -> dict[str, int]:
    """Tests and examples of one run of pytest, from what it printed."""
    lines = printed.strip().splitlines() or [""]
    tests = {name.rstrip("s"): int(n) for n, name in OUTCOMES.findall(lines[-1])}
    examples = [(int(passed), int(failed)) for passed, failed in EXAMPLES.findall(printed)]
    return {
        "tests_passed": tests.get("passed", 0),
        "tests_failed": tests.get("failed", 0) + tests.get("error", 0),
        "examples_passed": sum(passed for passed, _ in examples),
        "examples_failed": sum(failed for _, failed in examples),
        "exit_code": code,
    }


def report(folder: Path) -> dict:
    """The content of nightly.json. Raises OSError where a file is not there."""
    found: dict = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": int(os.environ["NIGHTLY_SEED"]),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("twinserve", "numpy", "hypothesis")},
        },
        "identity": json.loads((folder / "identity.json").read_text()),
        "drafts": json.loads((folder / "drafts.json").read_text())["regimes"],
        **{name: json.loads((folder / f"{name}.json").read_text()) for name in REGIMES},
    }
    for name in (*SETS, *WHOLE):
        printed, code = ((folder / f"{name}.{end}").read_text() for end in ("txt", "code"))
        found[name] = summary(printed, int(code))
    return found


def commit() -> str:
    """With "-changed" where the working tree is not that commit's."""
    said = [
        subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    return said[0] + ("-changed" if said[1] else "")


def failures(found: dict) -> list[str]:
    """One line for each thing that is wrong."""
    wrong = []
    identity = found["identity"]
    if identity["mismatches"] or not identity["steps"]:
        wrong.append(f"identity: {identity['mismatches']} of {identity['steps']} steps differ")
    for regime in found.get("drafts", []):  # none in results kept from before there were drafts
        if regime["mismatches"] or not regime["steps"]:
            differ = f"{regime['mismatches']} of {regime['steps']} steps differ"
            wrong.append(f"drafts, {regime['regime']}: {differ}")
    none: dict = {"regimes": []}  # in results kept from before there were these
    for part in [part for name in REGIMES for part in found.get(name, none)["regimes"]]:
        never = [name for name, times in part["seen"].items() if not times]
        if part["mismatches"] or never:
            wrong.append(
                f"{part['regime']}: {part['mismatches']} of {part['steps']} steps differ, "
                f"{len(never)} phenomena have not happened"
            )
    for name in (*SETS, *WHOLE):
        if name not in found:
            continue  # results kept from before there was this set; `report` has them all
        part, counted = found[name], "tests_passed" if name in WHOLE else "examples_passed"
        if part["exit_code"] or part["tests_failed"] or not part[counted]:
            failed, passed = part["tests_failed"], part["tests_passed"]
            wrong.append(f"{name}: {failed} tests failed, {passed} passed")
    return wrong


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    try:
        found = report(folder)
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    write_atomically(out, (json.dumps(found, indent=2) + "\n").encode())
    wrong = failures(found)
    print("\n".join(wrong) or f"all of it held: {out}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
