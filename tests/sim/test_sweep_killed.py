"""A sweep that is killed at any moment, or stopped, goes on where it was."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from twinserve.sim.sweep.points import KEPT

FILES = ("runs.parquet", "table.csv", "sweep.json")
LATE = 0.15  # of the kills, when all runs are kept and the tables are written
ARGUMENTS = [
    *("--trace", "sharegpt", "--requests", "40", "--seeds", "6", "--workers", "2"),
    *("--grid", "policy=vllm,sarathi", "--grid", "rate=5,10,15,20,25"),
]


# A shell that runs this in the background ignores Ctrl-C, and children inherit that.
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


def undisturbed(out: Path) -> None:
    process = start(ARGUMENTS, out)
    said = process.stderr.read().decode(errors="replace")
    assert process.wait() == 0, said


def kept(out: Path) -> int:
    """Runs that have ended."""
    folder = out / KEPT
    names = os.listdir(folder) if folder.is_dir() else []
    return sum(name.endswith(".json") and not name.startswith(".") for name in names)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    undisturbed(folder)
    return folder


@pytest.mark.nightly
def test_killed_at_random_it_ends_as_if_undisturbed(tmp_path, whole, kills=6):
    drawn, runs, seen, out = np.random.default_rng(0), kept(whole), [], tmp_path / "killed"
    late = round(kills * LATE)
    for number in range(kills):
        process, before = start(ARGUMENTS, out), kept(out)
        left = kills - late - number
        share = 1.0 if left < 1 else drawn.uniform(0, min(1.0, 2 / (left + 1)))
        while process.poll() is None and kept(out) < before + share * (runs - before):
            time.sleep(0.01)
        # at any moment of a run, of a file's writing, or of the tables'
        time.sleep(drawn.uniform(0, 1.5 if left < 1 else 0.1))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        seen.append(kept(out))
    undisturbed(out)
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in FILES)
    table = pq.read_table(out / "runs.parquet", columns=["policy", "rate", "seed"]).to_pylist()
    assert len(table) == len({tuple(row.values()) for row in table}) == 60
    assert seen == sorted(seen) and 0 < seen[-2] <= 60
    assert len(os.listdir(out / KEPT)) == 61  # a file each and the lock: nothing torn stays


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "status", "everyone"),
    [(signal.SIGINT, 130, True), (signal.SIGINT, 130, False), (signal.SIGTERM, 143, False)],
)
def test_stopped_it_keeps_what_ended_and_says_so(tmp_path, whole, number, status, everyone):
    """everyone: as Ctrl-C on a terminal, which the workers get as well."""
    process = start(ARGUMENTS, tmp_path / "out")
    while kept(tmp_path / "out") < 10:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, number) if everyone else process.send_signal(number)
    said = process.stderr.read().decode()
    assert process.wait() == status
    assert said == (
        "error: interrupted; finished runs are kept: the same command goes on from there\n"
    )
    assert 10 <= kept(tmp_path / "out") < 60
    undisturbed(tmp_path / "out")
    name = "runs.parquet"
    assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()
