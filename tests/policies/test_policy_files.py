"""`-p FILE.py:Class`: a policy of one's own without a package."""

import json
from pathlib import Path

import pytest

from twinserve.backends.live.serving.options import EngineFacts, build_core, read_options
from twinserve.backends.live.versions import LiveEngineError
from twinserve.experiments.study.points import Point, run_grid
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy, policy_class
from twinserve.sim.cli import main as cli
from twinserve.sim.setup.audit import check_policy
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.presets import check_policy_file
from twinserve.sim.setup.run import simulate

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from twinserve.policies.base import Policy
from twinserve.policies.baselines.vllm import VllmOptions, VllmPolicy

@dataclass
class Weights:
    prompt: int = 1

class MineOptions(VllmOptions):
    patience: int | None = 3

class Mine(VllmPolicy):
    name = "mine"
    Options = MineOptions
    weights = Weights()

class Half(Policy):
    name = "half"

class Taken(VllmPolicy): ...

class Nameless(Mine):
    name = None

def function(): ...
"""
SMALL = ["-t", "poisson", "--rate", "20", "--requests", "12", "--cap-length", "100", "-q"]
CONFIG = {"trace": "poisson", "rate": 20.0, "requests": 12, "cap_length": 100}


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def command(capsys, *arguments: str) -> tuple[int, str]:
    """(exit code, what it says on stderr) of `simulate`."""
    try:
        cli.simulate_main([*arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


def test_the_text_leads_to_the_class_with_its_options(file):
    spec = parse_policy(" mine.py:Mine:patience=5,kv=bidirectional ")
    assert spec.policy.name == "mine" and spec.options == {"patience": 5}
    assert (spec.kv_name, spec.label) == ("bidirectional", "mine:patience=5,kv=bidirectional")
    again = parse_policy(spec.text)
    assert again == spec and again.policy is spec.policy  # the file is run once
    assert parse_policy(f"{file}:Mine").label == "mine"
    assert policy_class("mine.py:Mine") is spec.policy


def test_a_home_directory_and_colons_may_be_in_the_path(file, tmp_path, monkeypatch):
    (tmp_path / "a:b.py c").mkdir()
    (tmp_path / "a:b.py c" / "m:n.py").write_text(MINE)
    spec = parse_policy("a:b.py c/m:n.py:Mine:patience=none")
    assert spec.options == {"patience": None} and spec.label == "mine:patience=none"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_policy("~/mine.py:Mine").policy.name == "mine"


def test_an_option_whose_value_ends_in_py_is_no_file():
    with pytest.raises(RegistryError, match="option chunk=a.py: should be a valid integer"):
        parse_policy("bros:chunk=a.py")


ERRORS = {
    "stray.py:Nameless": "TypeError: Nameless.pipelined: write traits = Traits(pipelined=...)",
    "gone.py:Mine": "policy file gone.py: there is no such file; check the path",
    "folder.py:Mine": "policy file folder.py: cannot be read (Is a directory)",
    "syntax.py:Mine": "policy file syntax.py, line 2: SyntaxError: invalid syntax",
    "bytes.py:Mine": "policy file bytes.py: ",
    "imports.py:Mine": "policy file imports.py, line 3: ModuleNotFoundError: No module named 'now",
    "beside.py:Mine": "policy file beside.py, line 1: ModuleNotFoundError: No module named 'synta",
    "deep.py:Mine": "policy file deep.py, line 4: KeyError: 'x'",
    "exits.py:Mine": "policy file exits.py, line 1: SystemExit: 3",
    "mine.py": "policy file mine.py needs a class; write mine.py:Mine or Half or Taken or Nameless",
    "mine.py:Mime": "has no 'Mime' (did you mean 'Mine'?); write mine.py:Mine or Half",
    "empty.py:Mine": "has no 'Mine'; it has no subclass of Policy",
    "mine.py:function": "policy file mine.py: function is not a Policy",
    "mine.py:Half": "policy file mine.py: Half lacks on_arrival, on_finish, plan",
    "mine.py:Taken": "Taken says name = 'vllm', which another policy has",
    "mine.py:Nameless": "Nameless lacks a name",
    "mine.py:Mine:patience": "expected option=value, not 'patience'",
    "mine.py:Mine:patient=1": "no option 'patient' (did you mean 'patience'?)",
    "mine.py:Mine:patience=x": "option patience=x: should be a valid integer",
    "mine.py:Mine:kv=page": "no KV ledger 'page' (did you mean 'paged'?)",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ERRORS)
def test_what_is_wrong_with_a_file_is_one_line(text, file, capsys):
    (file.parent / "folder.py").mkdir()
    (file.parent / "syntax.py").write_text("x = 1\nclass\n")
    (file.parent / "bytes.py").write_bytes(b"\0\xff")
    (file.parent / "imports.py").write_text("import os\n\nimport nowhere\n")
    (file.parent / "beside.py").write_text("import syntax\n")
    # the last line of the file on the way to the error, not the first
    (file.parent / "deep.py").write_text("def f():\n    return g()\ndef g():\n    {}['x']\nf()\n")
    (file.parent / "exits.py").write_text("raise SystemExit(3)\n")
    (file.parent / "empty.py").write_text("")
    stray = MINE.replace("    name = None", "    name = 'stray'\n    pipelined = True")
    (file.parent / "stray.py").write_text(stray)
    code, said = command(capsys, "-p", text, *SMALL)
    assert code == cli.BAD_INPUT and ERRORS[text] in said
    assert said.startswith("error: ") and said.count("\n") == 1


def test_a_file_that_is_mended_is_read_again(file):
    file.write_text("class Mine: ...")
    with pytest.raises(RegistryError, match="Mine is not a Policy"):
        parse_policy("mine.py:Mine")
    file.write_text(MINE)
    assert parse_policy("mine.py:Mine").policy.name == "mine"


def test_a_run_says_which_file_it_was_and_repeats_to_the_byte(file, capsys, tmp_path):
    run = ["-p", "mine.py:Mine:patience=4", *SMALL, "--out", "one"]
    assert command(capsys, *run)[0] == 0
    described = json.loads((tmp_path / "one" / "run.json").read_text())
    assert described["label"] == "mine:patience=4"
    assert described["config"]["policy"] == ["mine.py:Mine:patience=4"]
    assert described["policy"]["options"]["patience"] == 4
    assert len(described["policy"]["file_sha256"]) == 64
    assert command(capsys, "--config", "one/run.json", "-q", "--out", "two")[0] == 0
    for name in ("run.json", "requests.parquet", "steps.parquet", "gaps.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.slow
def test_a_repeat_with_a_changed_file_is_refused(file, capsys, tmp_path):
    assert command(capsys, "-p", "mine.py:Mine", *SMALL, "--out", "one")[0] == 0
    described = json.loads((tmp_path / "one" / "run.json").read_text())
    check_policy_file(described)
    file.write_text(MINE + "\n# better now\n")
    again = ["--config", "one/run.json", "-q", "--out", "two"]
    code, said = command(capsys, *again)
    assert code == cli.BAD_INPUT and "its file has changed since that run" in said
    assert command(capsys, *again, "-p", "mine.py:Mine")[0] == 0  # it is meant
    assert command(capsys, *again, "-p", "vllm", "--overwrite")[0] == 0
    with pytest.raises(SettingsError, match="has changed since that run"):
        check_policy_file(described)
    file.unlink()
    assert "there is no such file" in command(capsys, *again, "--overwrite")[1]


def test_two_versions_of_a_policy_stand_side_by_side(file, tmp_path):
    (tmp_path / "old.py").write_text(MINE.replace("patience: int | None = 3", "patience: int = 1"))
    config = SimulationConfig(**CONFIG, policy=("vllm", "mine.py:Mine", "old.py:Mine"))
    results = simulate(config)
    assert list(results) == ["vllm", "mine.py:Mine", "old.py:Mine"]
    options = [result.config["policy"]["options"] for result in results.values()]
    assert [given.get("patience") for given in options] == [None, 3, 1]
    with pytest.raises(SettingsError, match="--policy mine.py:Mine is given twice"):
        resolve(config.model_copy(update={"policy": ("mine.py:Mine", "mine.py:Mine")}))


def work(policy: str, seed: int) -> dict:
    """A point of a grid: in a process of its own, all it knows is the text."""
    (result,) = simulate(SimulationConfig(**CONFIG, policy=(policy,), seed=seed)).values()
    return {"label": result.config["label"], "completed": result.summary["completed"]}


@pytest.mark.slow
def test_worker_processes_find_it_by_its_text(file, tmp_path):
    points = [Point({"seed": s}, {"policy": "mine.py:Mine:patience=2", "seed": s}) for s in (0, 1)]
    rows = run_grid(work, points, tmp_path / "grid", workers=2)
    assert rows["label"].tolist() == ["mine:patience=2"] * 2
    assert rows["completed"].tolist() == [12, 12]


@pytest.mark.slow
def test_its_rules_are_checked_like_those_of_others(file):
    assert check_policy("mine.py:Mine", kv=["paged"], seeds=[0]) > 100


def test_a_server_takes_it(file):
    facts = EngineFacts(100, 16, 8, 512, 256, 1024, prefix_caching=True)
    core = build_core(read_options({"policy": "mine.py:Mine:patience=9"}), facts)
    assert core.policy.name == "mine" and core.policy.options.patience == 9
    with pytest.raises(LiveEngineError, match="--additional-config: policy file gone.py: there is"):
        build_core(read_options({"policy": "gone.py:Mine"}), facts)
