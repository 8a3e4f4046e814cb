"""Measurements of the simulator's own speed: whole commands from outside, runs from inside."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path

import numpy as np

from twinserve.errors import TwinserveError


class BenchmarkError(TwinserveError, RuntimeError):
    """A measured command failed, or a result is not what it must be: one line."""


def simulate_command() -> list[str]:
    """`simulate` in this interpreter's folder, or its module if there is no script."""
    script = shutil.which("simulate", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-m", "twinserve.sim.cli.main", "simulate"]


def run_process(
    command: Sequence[str], folder: Path | None = None, limit_s: int | None = None
) -> tuple[dict[str, float], bytes]:
    """What a command takes from its start to its exit, and what it printed.

    folder   it runs in
    limit_s  seconds of CPU time after which it is killed; its figures are nan then

    wall_s, cpu_s (user and system), peak_mb (resident memory, 10^6 bytes). BenchmarkError if it
    fails.
    """
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=said,
            cwd=folder,
            env=_environment(),
        )
        if limit_s is not None:
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit_s, limit_s + 1))
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
        texts = []
        for file in (printed, said):
            file.seek(0)
            texts.append(file.read())
    # its own signal says so: the seconds accounted to a killed process can be far fewer
    if child.returncode == -signal.SIGXCPU:
        return dict.fromkeys(("wall_s", "cpu_s", "peak_mb"), np.nan), b""
    if child.returncode:
        both = b"\n".join(texts).decode(errors="replace").strip()
        last = both.splitlines()[-1] if both else "no output"
        raise BenchmarkError(f"{' '.join(command)}: exit code {child.returncode}: {last}")
    # ru_maxrss is in KiB, on macOS in bytes
    unit = 1 if sys.platform == "darwin" else 1024
    figures = {
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss * unit / 1e6,
    }
    return figures, texts[0]


def _environment() -> dict[str, str]:
    """Of measured commands: one thread each, and modules keep their bytecode, as those of installed
    packages do. If PYTHONDONTWRITEBYTECODE forbids that, it lies in a folder of this process: else
    compiling modules is up to half of a short command."""
    given = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if given.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
        given["PYTHONPYCACHEPREFIX"] = _bytecode().name
    return given


@cache
def _bytecode() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


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


def alone(work: Callable) -> Callable:
    """`work` on one core."""

    @wraps(work)
    def pinned(*args, **kwargs):
        with one_core():
            return work(*args, **kwargs)

    return pinned
