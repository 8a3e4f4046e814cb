"""A sweep that is killed at any moment, or stopped, goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from twinserve.experiments.benchmark.sweep import (
    kept,
    start,
    sweep_arguments,
    tortured,
    undisturbed,
)
from twinserve.sim.sweep.points import KEPT

ARGUMENTS = [*sweep_arguments(60, requests=40), "--workers", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    undisturbed(ARGUMENTS, folder)
    return folder


@pytest.mark.nightly
def test_killed_at_random_it_ends_as_if_undisturbed(tmp_path, whole):
    found = tortured(ARGUMENTS, tmp_path / "killed", whole, kills=6)
    assert found.same and found.rows == found.distinct == 60
    assert found.kept == sorted(found.kept) and 0 < found.kept[-2] <= 60
    left = [path.name for path in (tmp_path / "killed" / KEPT).iterdir()]
    assert len(left) == 61  # a file each and the lock: nothing torn stays


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
        "error: interrupted; what has ended is kept: the same command goes on from there\n"
    )
    assert 10 <= kept(tmp_path / "out") < 60
    undisturbed(ARGUMENTS, tmp_path / "out")
    name = "runs.parquet"
    assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()
