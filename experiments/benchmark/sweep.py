"""How well `twinserve sweep` keeps the cores busy, and whether it survives being killed:

    python -m twinserve.experiments.benchmark.sweep [--runs 1000] [--kills 20] [--executor ray]

A sweep of short runs is run undisturbed and its CPU time taken: busy share = CPU seconds of its
processes / (wall seconds x cores). On a machine with other work, the share of time in which the
workers could have used a core tells more. Then the same sweep is killed (kill -9 of all its
processes) at random moments, started again each time, and its files compared with those of the
first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cyclopts
import numpy as np
import pyarrow.parquet as pq

from twinserve.experiments.benchmark.measure import BenchmarkError
from twinserve.sim.cli.main import run_app
from twinserve.sim.sweep.points import KEPT

FILES = ("runs.parquet", "table.csv", "sweep.json")
_POLL_S = 0.01
_SAMPLE_S = 0.1
_LATE = 0.15  # of the kills, when all runs are kept and the tables are written


@dataclass(frozen=True)
class Busy:
    """wall_s, cpu_s (user and system, of all processes) of one sweep.

    busy    cpu_s as a share of wall_s x cores
    others  share of the cores that other programs used meanwhile: where that is not next to
            nothing, `busy` says little
    ready   share of wall_s x cores in which the workers ran or waited for a core that another
            program had; None, as `others`, where the system does not tell
    """

    runs: int
    cores: int
    wall_s: float
    cpu_s: float
    busy: float
    others: float | None
    ready: float | None


@dataclass(frozen=True)
class Torture:
    """kept: runs that were kept at each kill; same: every file is that of an undisturbed sweep;
    rows, distinct: of runs.parquet."""

    kept: list[int]
    same: bool
    rows: int
    distinct: int


def sweep_arguments(runs: int, requests: int = 60) -> list[str]:
    """A sweep of about so many short runs: two policies, five rates, the rest seeds."""
    seeds = max(1, round(runs / 10))
    return [
        *("--trace", "sharegpt", "--requests", str(requests), "--seeds", str(seeds)),
        *("--grid", "policy=vllm,sarathi", "--grid", "rate=5,10,15,20,25"),
    ]


# Whoever runs this in the background of a shell has Ctrl-C ignored, and children inherit that.
_COMMAND = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from twinserve.sim.cli.main import main
main()
"""


def start(arguments: Sequence[str], out: Path) -> subprocess.Popen:
    """The command in a process group of its own, quietly."""
    command = [sys.executable, "-c", _COMMAND, "sweep", *arguments]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [*command, "--quiet", "--out", str(out)],
        env={**os.environ, **threads},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def undisturbed(arguments: Sequence[str], out: Path) -> Busy:
    """One sweep from its start to its end. Raises BenchmarkError where it fails."""
    cores = len(os.sched_getaffinity(0))
    ticks, started = _machine_cpu_s(), time.perf_counter()
    process = start(arguments, out)
    with _Ready(process.pid) as ready:
        said = process.stderr.read().decode(errors="replace")
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchmarkError(f"the sweep ended with {process.returncode}: {said.strip()}")
    cpu = used.ru_utime + used.ru_stime
    others = None if ticks is None else (_machine_cpu_s() - ticks - cpu) / (wall * cores)
    share = ready.seconds() / (wall * cores) if ready.seconds() else None
    return Busy(kept(out), cores, wall, cpu, cpu / (wall * cores), others, share)


class _Ready:
    """Samples, as long as it is entered, how long the workers of a process group have run or
    waited for a core (Linux: schedstat)."""

    def __init__(self, leader: int) -> None:
        self._leader, self._ended = leader, threading.Event()
        self._of: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Ready:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self) -> float:
        return sum(self._of.values())

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == self._leader:
                        ran, waited, _ = map(int, (folder / "schedstat").read_text().split())
                        self._of[int(folder.name)] = (ran + waited) / 1e9
                except (OSError, ValueError):
                    continue  # it has ended, or this is no Linux


def _machine_cpu_s() -> float | None:
    """CPU seconds that all programs have used since the machine started; None where unknown."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _, _, irq, soft = map(int, words[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def kept(out: Path) -> int:
    """Runs that have ended."""
    folder = out / KEPT
    names = os.listdir(folder) if folder.is_dir() else []
    return sum(name.endswith(".json") and not name.startswith(".") for name in names)


def tortured(
    arguments: Sequence[str], out: Path, reference: Path, kills: int, seed: int = 0
) -> Torture:
    """The sweep, killed so many times at random, compared with that in the folder `reference`.
    Raises BenchmarkError where it fails by itself."""
    drawn, runs, seen = np.random.default_rng(seed), kept(reference), []
    late = round(kills * _LATE)
    for number in range(kills):
        process, before = start(arguments, out), kept(out)
        left = kills - late - number
        share = 1.0 if left < 1 else drawn.uniform(0, min(1.0, 2 / (left + 1)))
        target = before + share * (runs - before)
        while process.poll() is None and kept(out) < target:
            time.sleep(_POLL_S)
        # at any moment of a run, of a file's writing, or of the tables'
        time.sleep(drawn.uniform(0, 1.5 if left < 1 else 0.1))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        seen.append(kept(out))
    undisturbed(arguments, out)
    same = all((out / name).read_bytes() == (reference / name).read_bytes() for name in FILES)
    table = pq.read_table(out / "runs.parquet", columns=["policy", "rate", "seed"]).to_pylist()
    return Torture(seen, same, len(table), len({tuple(row.values()) for row in table}))


def main(arguments: list[str] | None = None) -> None:
    """The command line; prints JSON."""

    def command(*, runs: int = 1000, kills: int = 20, executor: str = "local") -> None:
        words = [*sweep_arguments(runs), "--executor", executor]
        folder = Path(tempfile.mkdtemp(prefix="sweep-"))
        try:
            busy = undisturbed(words, folder / "whole")
            print(json.dumps(asdict(busy), indent=1), flush=True)
            if kills:
                found = tortured(words, folder / "killed", folder / "whole", kills)
                print(json.dumps(asdict(found)))
        finally:
            shutil.rmtree(folder)

    app = cyclopts.App(name="twinserve.experiments.benchmark.sweep", help=__doc__, version_flags=[])
    app.default(command)
    run_app(app, arguments)


if __name__ == "__main__":
    main()
