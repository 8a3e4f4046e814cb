"""The command lines of the experiments: whatever is wrong with the input is one line and exit
status 2, as for `twinserve`."""

import importlib
import re

import pytest

from twinserve.experiments.benchmark.measure import BenchmarkError
from twinserve.experiments.study.command import STUDIES
from twinserve.sim.cli.main import main
from twinserve.sim.setup.config import SettingsError

# experiment -> a function that its command calls
CALLED = {"matrices": "page"}


def ended(capsys, main, *arguments: str) -> tuple[int, str]:
    """Exit status, and the one line on stderr, below what is said of the runs."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    said = re.sub(r"\A\d+ runs\n", "", capsys.readouterr().err)
    assert said.startswith("error: ") and said.count("\n") == 1
    return stopped.value.code, said


def module_of(name: str) -> str:
    return f"twinserve.experiments.{name}" + (".main" if name != "matrices" else "")


def main_of(name: str):
    """The entry point of an experiment: `twinserve study NAME` of those that are studies."""
    if name in STUDIES:
        return lambda arguments: main(["study", name, *arguments])
    return importlib.import_module(module_of(name)).main


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", CALLED)
def test_an_unknown_option_is_named(name, capsys):
    code, said = ended(capsys, main_of(name), "--nonsense")
    assert code == 2 and "nonsense" in said


@pytest.mark.parametrize("name", CALLED)
def test_ctrl_c_ends_with_a_line(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(f"{module_of(name)}.{CALLED[name]}", interrupted)
    code, said = ended(capsys, main_of(name), "--out", str(tmp_path / "out"))
    assert code == 130 and "interrupted" in said


def test_a_measurement_that_failed_is_a_line(capsys, monkeypatch):
    def failing(*_, **__):
        raise BenchmarkError("a command\nfailed")

    monkeypatch.setattr("twinserve.experiments.matrices.page", failing)
    assert ended(capsys, main_of("matrices")) == (2, "error: a command failed\n")


def test_a_defect_is_not_taken_for_bad_input(monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such axis")

    monkeypatch.setattr("twinserve.experiments.matrices.page", broken)
    with pytest.raises(ValueError, match="no such axis"):
        main_of("matrices")([])


def test_a_study_ends_as_the_others(capsys, monkeypatch, tmp_path):
    bros = main_of("bros")
    assert ended(capsys, bros, "--nonsense")[0] == 2
    code, said = ended(capsys, main, "study", "bross")
    assert code == 2 and "did you mean 'bros'?" in said
    code, said = ended(capsys, bros, "fig0", "--out", str(tmp_path))
    assert code == 2 and "no figure 'fig0'" in said
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", interrupted)
    code, said = ended(capsys, bros, "fig2", "--out", str(tmp_path))
    assert code == 130 and "goes on from there" in said


def test_a_file_in_no_folder_is_refused_before_anything_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(f"{module_of('matrices')}.{CALLED['matrices']}", interrupted)
    code, said = ended(capsys, main_of("matrices"), "--out", str(tmp_path / "no" / "file"))
    assert code == 2 and "there is no folder" in said


def test_counts_below_one_are_refused(capsys):
    for name in ("forms", "sensitivity"):
        for option in ("--seeds", "--workers"):
            code, said = ended(capsys, main_of(name), option, "0")
            assert code == 2 and option in said


def test_settings_errors_of_points_are_a_line(capsys, monkeypatch, tmp_path):
    def refused(*_, **__):
        raise SettingsError("three  is\ntoo many")

    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", refused)
    assert ended(capsys, main_of("bros"), "fig2", "--out", str(tmp_path)) == (
        2,
        "error: three is too many\n",
    )
