"""`twinserve replay --mode apart` and what it needs, without an engine; tests/live has some. Where
the engine parts from its plans results are given all the same, and the command fails."""

import contextlib
import fcntl
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.commands import status
from twinserve.backends.live.apart import engine, shelf
from twinserve.backends.live.apart.shelf import Shelf
from twinserve.backends.live.versions import LiveEngineError
from twinserve.sim.cli.main import main
from twinserve.sim.twin.apart import ApartLive
from twinserve.sim.twin.replay import LockedReplay, parting

LOAD = "-t fixed:40,4 --rate 50 --requests 3 --num-blocks 90 --slo none --quiet".split()
SYNC = "--no-async-scheduling"


def command(*arguments: str) -> int:
    return status(main, arguments)


def simulated(tmp_path: Path, *arguments: str) -> str:
    run = tmp_path / "run"
    assert not command("simulate", *LOAD, *arguments, "--out", str(run))
    return str(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "replay", "said"),
    [
        (("--replicas", "2", SYNC), (), "no pool has the role prefill"),
        (("--fleet", "1P1D"), (), "give --no-async-scheduling"),
        (("--fleet", "5P5D", SYNC), (), "10 replicas; at most 8"),
        (("--fleet", "1P1D", SYNC), ("--physical",), "--physical: .*drop it"),
        (("--fleet", "1P1D", SYNC), ("--out", "x"), "--out: .*give --json"),
        (("--fleet", "1P1D", SYNC), ("--steps", "x"), "--steps: .*give --json"),
        (("--fleet", "1P1D", SYNC), ("--decisions",), "--decisions "),
        (("--fleet", "1P1D", SYNC), ("--model", "tinny"), "--model tinny: no folder"),
        (("--fleet", "1P1D", SYNC, "--mttf", "9", "--mttr", "1"), (), "replicas that fail"),
    ],
)
def test_what_live_engines_cannot_follow_is_one_line(tmp_path, capsys, settings, replay, said):
    run = simulated(tmp_path, *settings)
    capsys.readouterr()
    model = () if "--model" in replay else ("--model", "tiny")
    assert command("replay", run, "--mode", "apart", *model, *replay)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)


def test_a_folder_that_holds_no_run_is_one_line(tmp_path, capsys):
    assert command("replay", str(tmp_path), "--mode", "apart", "--model", "tiny")
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json" in line


@pytest.mark.parametrize("differing", [0, 1])
def test_json_says_what_came_of_it_and_a_difference_fails(tmp_path, capsys, monkeypatch, differing):
    run = simulated(tmp_path, "--fleet", "1P1D", SYNC)
    found = ApartLive(Counter(prefill=3, decode=9), differing, "how" * differing)
    found.tokens = found.alone = {"0": [1, 2]}
    monkeypatch.setattr("twinserve.backends.live.engine.tiny_model.write_model", lambda *_, **__: 0)
    monkeypatch.setattr("twinserve.backends.live.versions.installed_vllm", lambda: "0.0")
    monkeypatch.setattr("twinserve.sim.twin.apart.run_apart", lambda *_, **__: found)
    capsys.readouterr()
    code = command("replay", run, "--mode", "apart", "--model", "tiny", "--json")
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["steps"] == {"prefill": 3, "decode": 9} and told["vllm"] == "0.0"
    assert bool(code) == bool(told["differing"]) == bool(said.err) == bool(differing)


# -- waits end, and nothing is left behind ---------------------------------------------------------
def _mute(pipe, settings, part) -> None:
    pipe.recv()  # asked, it says nothing
    pipe.recv()


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_an_error_and_is_ended(monkeypatch):
    monkeypatch.setattr(engine, "main", _mute)
    monkeypatch.setattr(engine, "_PRELOAD", __name__)
    monkeypatch.setattr(engine, "START_S", 0.05)
    monkeypatch.setattr(engine, "_END_S", 0.2)
    process = engine.Process(None)
    with pytest.raises(LiveEngineError, match="alone has not answered for 0.05 s"):
        process.wait()
    process.close()
    assert not process._process.is_alive()


def test_folders_of_runs_that_were_killed_are_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "_MEMORY", tmp_path)
    old, begun, used = (tmp_path / f"twinserve-apart-{name}" for name in ("old", "new", "used"))
    for one in (old, begun, used):
        one.mkdir()
    (old / "lock").touch()
    with (used / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with shelf.shared_folder() as name, shelf.shared_folder() as other:
            assert sorted(tmp_path.iterdir()) == sorted([begun, used, Path(name), Path(other)])
    assert sorted(tmp_path.iterdir()) == [begun, used]


def test_requests_may_have_any_name_and_an_engine_that_starts_anew_keeps_nothing(tmp_path):
    shelf = Shelf(tmp_path, "p/0")
    names = ["a", "a.done", "a.beat", "..", "x" * 400, "\ud800"]
    for name in names:
        shelf.put(name)
    shelf.done("a")
    shelf.beat("a.done", 3.0)
    assert [shelf.is_done(name) for name in names] == [True] + [False] * 5
    assert shelf.last_beat("a.done") == 3.0 and shelf.last_beat("a") < 0
    Shelf(tmp_path, "p/0").tell({})
    assert not any(shelf.has(name) for name in names)


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
    assert not status(main, ["simulate", *load, *kept])

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
        words = ["replay", tmp_path / "run", "--model", "tiny", "--quiet", *arguments]
        return status(main, words)

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
    assert parting(Counts(), expected, {"a": [1, 2]}).startswith("b got 0 of 3 tokens (1 of 2")
    longer = {"a": [1, 2], "b": [1, 2, 3, 4]}
    assert parting(Counts(), expected, longer).startswith("b got 4 of 3 tokens")
