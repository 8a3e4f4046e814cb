"""The command lines of the experiments: whatever is wrong with the input is one line and exit
status 2, as for `twinserve`."""

import re

import pytest

from twinserve.experiments.benchmark.measure import BenchmarkError
from twinserve.sim.cli.main import main
from twinserve.sim.setup.config import SettingsError


def ended(capsys, main, *arguments: str) -> tuple[int, str]:
    """Exit status, and the one line on stderr, below what is said of the runs."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    said = re.sub(r"\A\d+ runs\n", "", capsys.readouterr().err)
    assert said.startswith("error: ") and said.count("\n") == 1
    return stopped.value.code, said


def main_of(name: str):
    """`twinserve study NAME`."""
    return lambda arguments: main(["study", name, *arguments])


def interrupted(*_, **__):
    raise KeyboardInterrupt


def raising(error: Exception):
    def work(*_, **__):
        raise error

    return work


def test_a_measurement_that_failed_is_a_line(capsys, monkeypatch, tmp_path):
    failed = raising(BenchmarkError("a command\nfailed"))
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", failed)
    said = ended(capsys, main_of("bros"), "fig2", "--out", str(tmp_path))
    assert said == (2, "error: a command failed\n")


def test_a_defect_is_not_taken_for_bad_input(monkeypatch, tmp_path):
    defect = raising(ValueError("no such axis"))
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", defect)
    with pytest.raises(ValueError, match="no such axis"):
        main_of("bros")(["fig2", "--out", str(tmp_path)])


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


def test_counts_below_one_are_refused(capsys):
    for name in ("systems", "apart"):
        for option in ("--seeds", "--workers"):
            code, said = ended(capsys, main_of(name), option, "0")
            assert code == 2 and option in said


def test_settings_errors_of_points_are_a_line(capsys, monkeypatch, tmp_path):
    refused = raising(SettingsError("three  is\ntoo many"))
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", refused)
    said = ended(capsys, main_of("bros"), "fig2", "--out", str(tmp_path))
    assert said == (2, "error: three is too many\n")
