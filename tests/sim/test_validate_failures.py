"""`twinserve validate` where a policy fails: the others end, their results are kept, and the
command fails with a line. The engine and what runs on it are stand-ins here; tests/live has real
ones."""

import contextlib
import json

import pandas as pd
import pytest

from tests.commands import status
from twinserve.backends.live.versions import LiveEngineError
from twinserve.sim.cli.main import main
from twinserve.sim.report.html import write_report
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.replay import LockedReplay
from twinserve.sim.twin.validate import Validation

PARTED = "locked replay 1: the engine parted from its plans at step 7: b0 got 3 tokens"


class StandIn:
    def warm_up(self) -> None:
        """There is nothing to warm up."""


@pytest.fixture
def engines(monkeypatch) -> list[str]:
    """Policies whose engines were closed. That of vllm parts from its plans, that of sarathi breaks
    in an unforeseen way."""
    closed: list[str] = []
    ours = "twinserve.sim.cli.validate"

    @contextlib.contextmanager
    def live_engine(settings, model):
        try:
            yield StandIn()
        finally:
            closed.append(model)

    def validate_policy(inputs, spec, *_):
        if spec.name == "vllm":
            raise LiveEngineError(PARTED)
        if spec.name == "sarathi":
            raise KeyError("b0")
        simulated = run_policy(inputs, spec)
        times = {"predicted_s": [0.1, 0.2], "measured_s": [0.1, 0.2], "start_s": [0.0, 0.1]}
        steps = pd.DataFrame({**times, "drift": False, "moved": False, "prefill_tokens": [9, 0]})
        simulated.config["live"] = {"not_made": {}}
        replay = LockedReplay(steps, {}, "", 0, [])
        return Validation(spec, simulated, replay, [simulated], 0, {})

    monkeypatch.setattr(f"{ours}.live_engine", live_engine)
    monkeypatch.setattr("twinserve.sim.twin.validate.validate_policy", validate_policy)
    monkeypatch.setattr("twinserve.backends.live.versions.installed_vllm", lambda: "0.0")
    monkeypatch.setattr("twinserve.sim.twin.validate_report.figures", lambda validation: {})
    return closed


def run(*arguments: str) -> int:
    load = "-t fixed:8,2 --rate 50 --requests 4 --num-blocks 90 --quiet".split()
    return status(main, ["validate", *load, *arguments])


@pytest.mark.slow
def test_the_others_end_and_their_results_are_kept(engines, tmp_path, capsys):
    out = tmp_path / "v"
    policies = ("-p", "vllm", "-p", "bros", "-p", "sarathi", "-p", "tgi")
    assert run(*policies, "--out", str(out)) != 0
    assert len(engines) == 4
    said = capsys.readouterr()
    assert said.err.startswith("error: 2 of 4 policies failed: vllm: ")
    assert said.err.count("\n") == 1 and PARTED in said.err and "KeyError" in said.err
    assert "bros: simulated against" in said.out and "tgi: simulated against" in said.out
    found = json.loads((out / "validation.json").read_text())
    assert "<h2>Validation" in write_report([out], tmp_path / "page.html").read_text()
    assert [policy["policy"] for policy in found["policies"]] == ["bros", "tgi"]
    assert found["failed"]["vllm"] == PARTED and set(found["failed"]) == {"vllm", "sarathi"}
    assert PARTED in (out / "validation.md").read_text()
    assert (out / "bros" / "live-1" / "run.json").exists() and not (out / "vllm").exists()


def test_where_all_fail_nothing_is_written(engines, tmp_path, capsys):
    out = tmp_path / "v"
    assert run("-p", "vllm", "--out", str(out)) != 0
    assert "1 of 1 policies failed" in capsys.readouterr().err and not out.exists()


def test_drawn_drafts_are_refused_before_an_engine_is_built(engines, capsys):
    assert run("-p", "vllm", "--speculate", "k=3,method=ngram,acceptance=0.5") != 0
    said = capsys.readouterr().err
    assert said.startswith("error: --speculate: the engine executes") and said.count("\n") == 1
    assert engines == []


def test_where_none_fails_the_command_does_not(engines, tmp_path):
    out = tmp_path / "v"
    assert run("-p", "bros", "--out", str(out)) == 0
    assert json.loads((out / "validation.json").read_text())["failed"] == {}
