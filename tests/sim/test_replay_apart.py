"""`twinserve replay --mode apart` and what it needs, without an engine; tests/live has some."""

from __future__ import annotations

import fcntl
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from twinserve.backends.live.apart import engine, shelf
from twinserve.backends.live.apart.shelf import Shelf
from twinserve.backends.live.versions import LiveEngineError
from twinserve.sim.cli.main import main
from twinserve.sim.twin.apart import ApartLive

LOAD = "-t fixed:40,4 --rate 50 --requests 3 --num-blocks 90 --slo none --quiet".split()
SYNC = "--no-async-scheduling"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


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
    with pytest.raises(LiveEngineError, match="alone has said nothing for 0.05 s"):
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
