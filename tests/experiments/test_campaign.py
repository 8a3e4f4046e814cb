"""The campaign's stages: what is written survives being killed, and a second call goes on from
there."""

import subprocess
import sys
from pathlib import Path

import pytest

from twinserve.experiments.campaign import main as campaign
from twinserve.experiments.campaign import needs
from twinserve.experiments.campaign.runs import Cell, Plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["steps,nothing"], "'nothing' is no stage"),
        (["steps:fast"], "write NAME or NAME:SECONDS"),
        (["validate"], "need a folder with .jsonl or .csv traces"),
        (["steps", "--engine-arg", "threads"], "write NAME=VALUE"),
        (["report", "--policies", "vlm"], "no policy 'vlm' (did you mean 'vllm'?)"),
        (["report", "--policies", "bros:chnk=8"], "has no option 'chnk'"),
    ],
)
def test_wrong_arguments_get_one_line(tmp_path, capsys, arguments, said):
    assert campaign.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "package"), [("profile", "scipy.optimize"), ("report", "simpy"), ("steps", "torch")]
)
def test_a_missing_package_stops_the_campaign_at_once(
    tmp_path, monkeypatch, capsys, stage, package
):
    monkeypatch.setitem(sys.modules, package, None)
    assert campaign.main([stage, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: stage {stage} needs {package}") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_campaign_that_cannot_be_imported_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "twinserve.experiments.campaign.needs", None)
    assert campaign.main(["steps", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "cannot be imported" in error and error.count("\n") == 1


def test_a_checkout_that_is_not_installed_is_told_so(tmp_path, monkeypatch, capsys, traces):
    """Every run writes the version of the distribution, and would fail after the engine's start."""

    def version(name):
        raise needs.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(needs.metadata, "version", version)
    arguments = ["plan", "--out", str(tmp_path / "out"), "--traces", str(traces)]
    assert campaign.main(arguments) == 2
    assert "stage plan needs the installed distribution twinserve" in capsys.readouterr().err


def test_a_failing_stage_leaves_the_others_their_turn(tmp_path, monkeypatch):
    seen = []

    def stage(name, *rest):
        seen.append(name)
        if name == "steps":
            raise RuntimeError("no\nGPU")

    monkeypatch.setattr(campaign, "_run", stage)
    monkeypatch.setattr(campaign, "_check", lambda *rest: None)
    assert campaign.main(["steps,profile", "--out", str(tmp_path / "out")]) == 1
    assert seen == ["steps", "profile"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "steps failed: RuntimeError: no GPU" in log and "Traceback" in log


@pytest.mark.nightly
def test_what_hangs_is_ended(tmp_path):
    """Also where no signal is heard: the host would end the call, and what follows in it."""
    hung = """
import sys, time
from twinserve.experiments.campaign import main as campaign
campaign.GRACE_S, campaign._check, campaign._run = 0.5, lambda *a: None, lambda *a: time.sleep(9999)
sys.exit(campaign.main(["report", "--time-limit", "5.5", "--out", sys.argv[1]]))
"""
    command = [sys.executable, "-c", hung, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, timeout=600)
    assert done.returncode == 1
    assert b"Timeout" in done.stderr


def test_units_come_in_order_of_worth():
    policies = ("vllm", "bros", "echo")
    plan = Plan({"a": Path("a"), "b": Path("b")}, (0.8, 1.1, 0.5), policies, 10.0, 2)
    units = [(cell.load, part) for cell, part in plan.units() if cell.policy != "echo"]
    assert len(plan.units()) == len(set(plan.units())) == 2 * 3 * 3 * 3
    order = list(dict.fromkeys(units))
    assert order[:5] == [
        (0.8, "locked"),
        (0.8, "live-1"),
        (1.1, "locked"),
        (1.1, "live-1"),
        (0.8, "live-2"),
    ]
    assert order[-1] == (0.5, "live-2")
    # one locked replay of what vLLM itself does comes before everything else
    assert plan.units()[0] == (Cell("a", 0.8, "vllm", 10.0), "locked")
    # a third policy waits until the first two have run at all loads
    third = [number for number, (cell, _) in enumerate(plan.units()) if cell.policy == "echo"]
    ran = {(cell.policy, cell.load) for cell, _ in plan.units()[: third[0]]}
    assert ran == {(policy, load) for policy in ("vllm", "bros") for load in plan.loads}
    assert len(plan.cells()) == len(set(plan.cells())) == 2 * 3 * 3
