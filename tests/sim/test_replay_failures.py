"""`twinserve replay` where the engine parts from its plans: results are given all the same, and the
command fails with a line. The engine is a stand-in; tests/live has real ones."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pandas as pd
import pytest

from twinserve.sim.cli.main import main
from twinserve.sim.twin.parting import parting
from twinserve.sim.twin.replay import LockedReplay

PARTED = "the engine parted from its plans at step 2: r1: 5 tokens planned, 3 scheduled"


@dataclass
class Counts:
    """What the scheduler of an engine counts."""

    steps: int = 10
    drift: int = 0
    first_drift: str = ""


@pytest.fixture
def replayed(tmp_path, monkeypatch):
    """Makes a run, and replays it with what is given as the outcome; the exit code."""
    load = "-t fixed:8,2 --rate 50 --requests 4 --num-blocks 90 --quiet".split()
    kept = ["--no-async-scheduling", "--decisions", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        main(["simulate", *load, *kept])
    assert not end.value.code

    @contextlib.contextmanager
    def live_engine(settings, model):
        yield SimpleNamespace(vocab=100, settings=settings, version="0.0")

    monkeypatch.setattr("twinserve.sim.cli.live.live_engine", live_engine)

    def replay(parted: str, *arguments: str) -> int:
        times = {"predicted_s": [0.1, 0.2], "measured_s": [0.1, 0.2], "moved": [False] * 2}
        blocks = {"planned_free_blocks": [1, 1], "live_free_blocks": [1, 1]}
        steps = pd.DataFrame({**times, **blocks, "drift": [False, bool(parted)]})
        found = LockedReplay(steps, {}, parted, 0, [], parted)
        monkeypatch.setattr("twinserve.sim.twin.replay.replay_locked", lambda *_: found)
        with pytest.raises(SystemExit) as end:
            main(["replay", str(tmp_path / "run"), "--model", "tiny", "--quiet", *arguments])
        return end.value.code or 0

    return replay


def test_a_replay_that_parts_gives_its_results_and_fails(replayed, tmp_path, capsys):
    steps = tmp_path / "steps.parquet"
    assert replayed(PARTED, "--json", "--steps", str(steps)) != 0
    said = capsys.readouterr()
    assert json.loads(said.out)["parted"] == PARTED and len(pd.read_parquet(steps)) == 2
    assert said.err == f"error: vllm: {PARTED}\n"
    assert replayed(PARTED) != 0
    assert "1 (the engine parted" in capsys.readouterr().out


def test_a_replay_to_the_letter_does_not_fail(replayed, capsys):
    assert replayed("", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parted"] == ""


def test_what_parts_is_drift_first_and_then_an_answer():
    expected = {"a": 2, "b": 3}
    whole = {"a": [1, 2], "b": [1, 2, 3]}
    assert parting(Counts(), expected, whole) == ""
    drifted = parting(Counts(drift=2, first_drift="step 4: x"), expected, {})
    assert "at step 4: x (2 of 10 steps drifted)" in drifted
    assert parting(Counts(), expected, {"a": [1, 2]}).startswith("b was told 0 of 3 tokens (1 of 2")
    longer = {"a": [1, 2], "b": [1, 2, 3, 4]}
    assert parting(Counts(), expected, longer).startswith("b was told 4 of 3 tokens")
