"""Run the large sets, in parts of at most 40 minutes a call:

    .ci/nightly [PART ...]     no PART: all of them

A part is a list of units: short commands whose results are kept in .nightly/ as soon as each ends.
A part that is stopped, by its limit or by a signal, loses only the units that run then. The same
call on the same commit goes on with the units that are left; a new commit starts anew. When no unit
is left, the part's entry in docs/results/nightly.json is replaced. A call after that runs the units
that failed again. Exit code 1 if a unit failed or is left.

NIGHTLY_SIZE=0.01   a hundredth of all sizes (for trials, with --out): too few steps for every
                    phenomenon, so that some units fail
NIGHTLY_SEED        seed of the examples; by default other ones each time
NIGHTLY_MINUTES     limit of a part, by default 40; a unit that alone takes longer fails
NIGHTLY_LIVE        environment with vLLM, for parts `identity`, `live` and `faults`
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from twinserve.traces.write import write_atomically

ROOT = Path(__file__).resolve().parent.parent
KEPT = "docs/results/nightly.json"
SIZE = float(os.environ.get("NIGHTLY_SIZE", "1"))
# The first that matches a test's file is its part. A test that is live is in part `live` anyway.
FILES = {
    "live": r"tests/(live|identity)/",
    "pages": r"tests/(test_|notebooks/|experiments/|golden/)",
    "fleet": r"tests/(route/|sim/test_(apart|autoscaling|cold_start|failures|fleet|leases|plan|"
    r"prefix_index|recent_prefixes|router|signals))",
    "fuzz": r"tests/",
}
PARTS = ("identity", "fleet", "fuzz", "live", "pages", "faults")
ALONE = ("live", "faults")  # tests compare wall times, or the command has workers of its own
LIVE = r"mark\.live"
READERS = "tests/traces/test_trace_bad_input.py"
MARKS = "(nightly or hypothesis)"
SHARES = {"tests/live/test_twin_pressure.py": 50}  # files whose tests take more than 40 minutes
NO_TESTS = 5  # pytest's exit code where a file has no test with the marks
# "3 passing examples, 0 failing examples", or "3 passing, 0 failing, and ... test cases"
EXAMPLES = re.compile(r"(\d+) passing(?: examples)?, (\d+) failing")
OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


class Unit(NamedTuple):
    """set  where its result goes in the part's entry
    words   of the command, behind `python -m`
    live    runs in the environment with vLLM"""

    set: str
    name: str
    words: list[str]
    live: bool = False
    factor: float = 1.0  # of the examples
    share: str = ""  # of its file's tests, as "2/50"


# -- units -----------------------------------------------------------------------------------------
def units(part: str, seed: int) -> list[Unit]:
    if part == "identity":
        return list(_identity())
    return list(_faults() if part == "faults" else _tests(part, seed))


def _identity():
    """Imports what compares, which needs no vLLM."""
    from tests.identity.regimes import SETS

    for name, of in (
        ("identity", "single"), ("drafts", "drafts"), ("remote", "apart"), ("tiers", "tiers"),
    ):  # fmt: skip
        for kind in SETS[of]:
            words = f"tests.identity.regimes --of {of} --steps {int(100_000 * SIZE)} --only".split()
            yield Unit(name, f"{name}: {kind}", [*words, kind], live=True)


def _tests(part: str, seed: int):
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        own = part_of(name)
        if not re.search("nightly|hypothesis", text) or (
            own != part and not (part == "live" and re.search(LIVE, text))
        ):
            continue
        live = {"live": ""}.get(own, " and live" if part == "live" else " and not live")
        words = ["pytest", "-p", "tests.nightly", "-q", "--hypothesis-show-statistics"]
        words += ["-p", "no:cacheprovider", f"--hypothesis-seed={seed}", "-m", MARKS + live, name]
        factor = (100 if name == READERS else 10) * SIZE
        kind, shares = "bad_input" if name == READERS else "tests", SHARES.get(name, 1)
        for share in [f"{i + 1}/{shares}" for i in range(shares)]:
            yield Unit(kind, f"{name} {share}", words, part == "live", factor, share)


def part_of(name: str) -> str:
    """Return the part of a file's tests that are not live."""
    return next(part for part, files in FILES.items() if re.match(files, name))


def _faults():
    from tests.faults.table import read

    for path, faults in read().items():
        names = [fault.name for fault in faults if fault.caught_by]
        for i in range(0, len(names), 10):
            words = ["tests.faults", *names[i : i + 10]]
            yield Unit("faults", f"{path.stem} {i // 10 + 1}", words, live=True)


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-p tests.nightly`: keep this unit's share of its file's tests."""
    if share := os.environ.get("NIGHTLY_SHARE"):
        i, shares = map(int, share.split("/"))
        items[:] = items[i - 1 :: shares]


# -- running them ----------------------------------------------------------------------------------
class Running:
    """A unit's process, in a process group of its own."""

    def __init__(self, unit: Unit, folder: Path) -> None:
        self.unit, self.began = unit, time.monotonic()
        self.json, self.said = (Path(tempfile.mkdtemp(dir=folder)) / end for end in ("json", "txt"))
        python, env = sys.executable, {**os.environ, "NIGHTLY_SHARE": unit.share}
        env["TWINSERVE_EXAMPLES"] = f"{unit.factor:g}"
        if unit.live:
            python = f"{os.environ.get('NIGHTLY_LIVE', sys.prefix)}/bin/python"
            env["TWINSERVE_REQUIRE_LIVE"] = "1"
        words = [python, "-m", *unit.words]
        if unit.words[0].startswith("tests.identity"):
            words += ["--out", str(self.json)]
            env |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "OMP_NUM_THREADS": "1"}
            env |= {"OPENBLAS_NUM_THREADS": "1"}
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
            )

    def stop(self) -> None:
        """Let fixtures close their servers; kill what is left after 20 s."""
        for sent in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sent)
                self.process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass

    def result(self, code: int) -> dict:
        printed = self.said.read_text(encoding="utf-8", errors="replace")
        failed = code not in (0, NO_TESTS)
        found = {"seconds": round(time.monotonic() - self.began, 1), "failed": failed}
        if self.unit.words[0] == "pytest":
            found["result"] = summary(printed, code)
        elif self.unit.set == "faults":
            rows = re.findall(r"^(\w+)\b.*? +[\d.]+ s  (.+)$", printed, re.M)
            found["result"] = {name: outcome for outcome, name in rows}
        elif self.json.exists():
            found["result"] = json.loads(self.json.read_text())
        if failed:
            lines = re.findall(
                r"^(?:FAILED|ERROR|Falsifying|E  |error|missed|stale).*", printed, re.M
            )
            found["said"] = lines[:20] or printed.strip().splitlines()[-3:]
        return found


def run(todo: list[Unit], jobs: int, limit_s: float, keep) -> None:
    """Run units until all are done or the limit has come. keep: called with each one's result."""
    todo, running, end = list(todo), [], time.monotonic() + limit_s
    whole = todo[:jobs]  # these have all of the time
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (todo or running) and time.monotonic() < end:
                while todo and len(running) < jobs:
                    running.append(Running(todo.pop(0), Path(folder)))
                for one in running[:]:
                    if (code := one.process.poll()) is not None:
                        running.remove(one)
                        keep(one.unit, one.result(code))
                time.sleep(0.1)
        finally:
            for one in running:
                one.stop()
        for one in running:
            if one.unit in whole:
                keep(one.unit, one.result(-1) | {"said": ["took longer than the limit of a part"]})


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
        "exit_code": int(code not in (0, NO_TESTS)),
    }


# -- what is kept ----------------------------------------------------------------------------------
def commit() -> str:
    """With "-changed" and a hash where the working tree is not that commit's."""
    head, changes = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout
        for words in (["rev-parse", "HEAD"], ["diff", "HEAD", "--", ".", f":!{KEPT}"])
    )
    changed = f"-changed-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else ""
    return head.decode().strip() + changed


def entry(state: dict, found: list[tuple[Unit, dict]]) -> dict:
    """A part's entry in nightly.json, of its units' results."""
    made: dict = {
        "commit": state["commit"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": state["seed"],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("twinserve", "numpy", "hypothesis")},
        },
        "seconds": round(sum(result["seconds"] for _, result in found)),
    }
    for name in dict.fromkeys(unit.set for unit, _ in found):
        made[name] = merged([one.get("result", {}) for unit, one in found if unit.set == name])
    if "drafts" in made:
        made["drafts"] = made["drafts"].get("regimes", [])
    if "faults" in made:
        made["faults"] = dict(Counter(made["faults"].values()))
    # Results of the others say themselves what is wrong.
    judged = [
        (u.name, one["failed"] and u.set == "faults" or "result" not in one) for u, one in found
    ]
    if failed := [name for name, wrong in judged if wrong]:
        made["failed"] = failed
    return made


def merged(results: list[dict]) -> dict:
    """The results of a set's units as one: counts are added, rows joined."""
    whole: dict = {}
    for one in results:
        for name, value in one.items():
            rows = isinstance(value, list) and isinstance(value[0], dict)
            add = name in whole and (rows or isinstance(value, int))
            whole[name] = whole[name] + value if add else value
    return whole


def failures(entries: dict) -> list[str]:
    """One line for each thing that is wrong."""
    wrong = []
    for part, found in entries.items():
        wrong += [f"{part}: {name} failed" for name in found.get("failed", [])]
        rows = [(name, row) for name, one in found.items() for row in _rows(name, one)]
        for name, row in rows:
            never = [phenomenon for phenomenon, times in row.get("seen", {}).items() if not times]
            if row["mismatches"] or not row["steps"] or never:
                wrong.append(
                    f"{name}, {row.get('regime') or row['class']}: {row['mismatches']} of "
                    f"{row['steps']} steps differ, {len(never)} phenomena have not happened"
                )
        for name, one in found.items():
            if not isinstance(one, dict) or "exit_code" not in one:
                continue
            drawn = one["examples_passed"] or part != "fuzz"
            if one["exit_code"] or one["tests_failed"] or not one["tests_passed"] or not drawn:
                failed, passed = one["tests_failed"], one["tests_passed"]
                wrong.append(f"{part}, {name}: {failed} tests failed, {passed} passed")
    return wrong


def _rows(name: str, one) -> list[dict]:
    """What was compared with vLLM, by class or regime."""
    if name == "drafts":
        return one
    return (
        one.get({"identity": "classes"}.get(name, "regimes"), []) if isinstance(one, dict) else []
    )


# -- a call ----------------------------------------------------------------------------------------
def run_part(part: str, out: Path) -> bool:
    """Return whether all of the part is done and held."""
    path, seed = ROOT / ".nightly" / f"{SIZE:g}" / f"{part}.json", os.environ.get("NIGHTLY_SEED")
    state = json.loads(path.read_text()) if path.exists() else {"commit": "", "seed": 0}
    now = commit()
    if state["commit"] != now or (seed and int(seed) != state["seed"]):
        state = {"commit": now, "seed": int(seed or time.time()), "units": {}}
    wanted, done = units(part, state["seed"]), state["units"]
    left = [unit for unit in wanted if unit.name not in done]
    print(f"== {part}: {len(left)} of {len(wanted)} units are left", flush=True)

    def keep(unit: Unit, result: dict) -> None:
        done[unit.name] = result
        write_atomically(path, (json.dumps(state, indent=1) + "\n").encode())
        verdict = "failed" if result["failed"] else "held"
        lines = [f"{unit.name}: {verdict}, {result['seconds']} s", *result.get("said", [])]
        print("\n  ".join(lines), flush=True)

    again = [unit for unit in wanted if done.get(unit.name, {}).get("failed")]
    jobs = 1 if part in ALONE else os.cpu_count() or 1
    run(left or again, jobs, 60 * float(os.environ.get("NIGHTLY_MINUTES", "40")), keep)
    if left := [unit for unit in wanted if unit.name not in done]:
        print(f"{part}: {len(left)} units are left: call .ci/nightly {part} again to go on")
        return False
    entries = json.loads(out.read_text()) if out.exists() else {}
    entries[part] = entry(state, [(unit, done[unit.name]) for unit in wanted])
    entries = {name: entries[name] for name in PARTS if name in entries}
    write_atomically(out, (json.dumps(entries, indent=2) + "\n").encode())
    wrong = failures({part: entries[part]})
    print("\n".join(wrong) or f"{part}: all of it held: {out}")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog=".ci/nightly", description="Run the large sets.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / KEPT, help=f"default: {KEPT}")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]}: there are {', '.join(PARTS)}")
    for sent in (signal.SIGINT, signal.SIGTERM):  # also where a shell lets its jobs ignore SIGINT
        signal.signal(sent, signal.default_int_handler)
    held = True
    try:
        for part in given.parts or PARTS:
            if part == "faults" and not (ROOT / "tests" / "faults").is_dir():
                print("faults: left out, since there is no folder tests/faults")
                continue
            held = run_part(part, given.out) and held
    except KeyboardInterrupt:
        raise SystemExit("stopped: the same call goes on from here") from None
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
