"""Show that the tests catch seeded faults. Exits with 1 if a fault is missed or its row is stale.

    python -m tests.faults                  all faults
    python -m tests.faults --draw 12        twelve that need no vLLM, drawn by the commit's hash
    python -m tests.faults NAME ...         these: names, or parts of names
    python -m tests.faults --find NAME ... --among tests/policies/test_echo.py ...
                                            of those in open.yaml, which no test catches yet: record
                                            the quickest test that fails

The checkout is not touched. Each worker edits a copy of the repository in a temporary folder, and
runs there only the tests that the table names. Every call checks that each row still matches the
sources: each text that a fault replaces is there once, and so is each test. A copy has no compiled
kernels: the Python that is edited is what runs.
"""

import argparse
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from tests.faults.table import OPEN, ROOT, Fault, read, write

LIMIT_S = 300.0  # for the tests of one fault
TRIED = 20  # failing tests among which `--find` looks for the quickest


class Copy:
    """A copy of the repository in `folder`, and tests run in it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self._edits = 0
        self._env = {
            **os.environ,
            "CI": "true",  # property tests draw the same examples each time
            "PYTHONPATH": str(folder / "src"),
        }
        for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(
            "\0"
        ):
            source, target = ROOT / name, folder / name
            if name and (source.is_symlink() or source.exists()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def run(self, fault: Fault, tests: list[str], *options: str) -> tuple[int, str]:
        """Return pytest's exit code, and what it printed, with the fault in the sources."""
        path = self.root / fault.file
        before, stat = path.read_bytes(), path.stat()
        self._edits += 1
        try:
            path.write_text(fault.applied(self.root), encoding="utf-8")
            # Python tells stale bytecode by seconds and size, and both may be as they were.
            os.utime(path, (stat.st_atime, int(stat.st_mtime) + self._edits))
            return self.test(tests, *options)
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def test(self, tests: list[str], *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-rfEs"]
        command += ["-p", "no:cacheprovider", "--color=no", *options, *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=self._env, timeout=LIMIT_S,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1, f"no answer within {LIMIT_S:.0f} s"
        return done.returncode, done.stdout


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def verdict(code: int, said: str) -> str:
    """Return caught, missed, skipped, or an error with pytest's last line."""
    if code == 1:
        return "caught"
    if code == 0:
        return "missed" if re.search(r"\d+ passed", said) else "skipped"
    return "error: " + (said.strip().splitlines() or ["pytest said nothing"])[-1]


def find(copy: Copy, fault: Fault, among: list[str]) -> str:
    """Record the quickest test in `among` that fails with the fault and passes without it."""
    code, said = copy.run(fault, among, f"--maxfail={TRIED}", "--durations=0", "-vv")
    failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", said, re.M)
    took = {name: float(s) for s, name in re.findall(r"^([\d.]+)s call +(.+)$", said, re.M)}
    for test in sorted(failed, key=lambda name: took.get(name, 0.0)):
        if copy.test([test])[0] == 0 and copy.run(fault, [test])[0] == 1:
            fault.caught_by = [test]
            return f"caught by {test}"
    return (
        "missed: each of the tests fails without the fault, too" if failed else verdict(code, said)
    )


def chosen(faults: list[Fault], names: list[str], draw: int) -> list[Fault]:
    if names:
        return [fault for fault in faults if any(name in fault.name for name in names)]
    if not draw:
        return faults
    commit = _git("rev-parse", "HEAD").strip()
    here = [fault for fault in faults if fault.caught_by and not fault.live]
    print(f"{draw} of {len(here)} faults, drawn by commit {commit[:12]}")
    return random.Random(commit).sample(here, min(draw, len(here)))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", help="faults to run: names, or parts of names")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="run N of the faults")
    parser.add_argument("--find", action="store_true", help="for faults without tests: find one")
    parser.add_argument("--among", nargs="+", default=[], help="tests that --find tries")
    parser.add_argument("--jobs", type=int, default=2, help="workers (default 2)")
    return parser


def main() -> int:
    asked = options().parse_args()
    table = read()
    faults = [fault for rows in table.values() for fault in rows]
    missed = table.get(OPEN, [])
    run = chosen(
        [fault for fault in faults if (fault in missed) == asked.find], asked.names, asked.draw
    )
    if not run:
        options().error("no fault has such a name")
    stale = [(fault, said) for fault in faults if (said := fault.stale(fault in missed))]
    for fault, said in stale:
        print(f"stale     {fault.name}: {said}")
    wrong = [fault.name for fault, _ in stale]
    todo = [fault for fault in run if fault.name not in wrong and not fault.why]
    vllm = find_spec("vllm") is not None
    counts = Counter({"stale": len(stale), "no effect": sum(bool(fault.why) for fault in run)})

    def work(fault: Fault) -> tuple[str, float]:
        if fault.live and not vllm:
            return "skipped", 0.0
        copy, start = copies.get(), time.perf_counter()
        try:
            if asked.find:
                return find(copy, fault, asked.among), time.perf_counter() - start
            return verdict(*copy.run(fault, fault.caught_by)), time.perf_counter() - start
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(min(asked.jobs, len(todo))):
            copies.put(Copy(Path(folder) / str(number)))
        for fault, (said, seconds) in zip(todo, pool.map(work, todo), strict=True):
            outcome = re.split(r"\W", said)[0]
            counts[outcome] += 1
            wrong += [fault.name] if outcome not in ("caught", "skipped") else []
            print(f"{said:<9} {seconds:5.1f} s  {fault.name}", flush=True)
    if asked.find:
        for path, rows in table.items():
            write(path, rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    if counts["skipped"]:
        print("skipped: their tests need vLLM, which is not installed here")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
