"""Measurements of the simulator's own speed: whole commands from outside, runs from inside."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from twinserve.errors import TwinserveError
from twinserve.sim.results.files import RunResult, dump_json
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_policy


class BenchmarkError(TwinserveError, RuntimeError):
    """A measured command failed, or a result is not what it must be: one line."""


@dataclass(frozen=True)
class ProcessFigures:
    """One finished command: wall seconds, CPU seconds (user and system), peak resident memory."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int


def simulate_command() -> list[str]:
    """`simulate` beside this interpreter, or its module where there is no script."""
    script = shutil.which("simulate", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-m", "twinserve.sim.cli.main", "simulate"]


def run_command(arguments: Sequence[str]) -> ProcessFigures:
    """Run `simulate ARGUMENTS`, from interpreter start to exit. BenchmarkError if it fails."""
    return run_process([*simulate_command(), *arguments])


def run_process(command: Sequence[str], folder: Path | None = None) -> ProcessFigures:
    """Run any command, in `folder`. BenchmarkError if it fails."""
    return run_printing(command, folder)[0]


def run_printing(
    command: Sequence[str], folder: Path | None = None
) -> tuple[ProcessFigures, bytes]:
    """`run_process`, and what the command wrote to its standard output."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=said,
            cwd=folder,
            env={**os.environ, **one_thread},
        )
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
        texts = []
        for file in (printed, said):
            file.seek(0)
            texts.append(file.read())
    if child.returncode:
        both = b"\n".join(texts).decode(errors="replace").strip()
        last = both.splitlines()[-1] if both else "no output"
        raise BenchmarkError(f"{' '.join(command)}: exit code {child.returncode}: {last}")
    # ru_maxrss is in KiB, on macOS in bytes
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = used.ru_utime + used.ru_stime
    return ProcessFigures(wall, cpu, used.ru_maxrss * unit), texts[0]


@contextlib.contextmanager
def one_core() -> Iterator[int | None]:
    """This process and its children on one core, the last allowed one; gives its number.

    None, and nothing done, on systems that pin no processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def kept_bytecode() -> Iterator[None]:
    """Children of this process keep the bytecode of their modules, as installed packages do: where
    PYTHONDONTWRITEBYTECODE forbids that, it lies in a folder of its own. Else compiling modules is
    up to half of a short command."""
    name = "PYTHONDONTWRITEBYTECODE"
    forbidden = os.environ.pop(name, None)
    if forbidden is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        try:
            yield
        finally:
            del os.environ["PYTHONPYCACHEPREFIX"]
            os.environ[name] = forbidden


def timed_run(config: SimulationConfig, at_once: bool = False) -> tuple[Inputs, RunResult]:
    """One policy's run in this process. at_once: all requests are submitted at time 0."""
    inputs = resolve(config)
    if at_once:
        workload = inputs.workload
        inputs = replace(inputs, workload=replace(workload, arrival_s=np.zeros(len(workload))))
    return inputs, run_policy(inputs, inputs.policies[0])


class CpuTimed:
    """`function`, with the CPU time of each call: what it costs on a core of its own, however busy
    the machine is.

    seconds  of the calls so far
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *arguments):
        started = time.thread_time()
        result = self._function(*arguments)
        self.seconds.append(time.thread_time() - started)
        return result


def same_results(one: RunResult, other: RunResult) -> bool:
    """Whether two runs gave the same rows and metrics."""
    pairs = [
        (getattr(one.rows, name), getattr(other.rows, name))
        for name in ("requests", "steps", "gaps")
    ]
    return dump_json(one.summary) == dump_json(other.summary) and all(a.equals(b) for a, b in pairs)


def machine() -> dict:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("twinserve", "numpy", "pandas", "simpy", "pyarrow")
        },
    }
