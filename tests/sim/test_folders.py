"""Folders of results: whole or not at all, no two runs in one, and what cannot be written is told
before anything is run. What cannot be written whole, as on a full disk, is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import status
from tests.disk import no_file_above
from tests.parameters import mostly_nightly
from twinserve.sim.cli.main import main, simulate_main
from twinserve.sim.results.files import find_runs, read_run
from twinserve.sim.results.folders import ResultsError, folders, resolved, whole_folder

RUN = "-t fixed:40,4 --requests 6 --rate 50 --profile llama-3.1-8b@h100 -q".split()


def simulate(*words) -> int:
    return status(simulate_main, [*RUN, *map(str, words)])


# -- names -----------------------------------------------------------------------------------------
@given(st.lists(st.text("ab/_:.é-2", max_size=6), unique=True, max_size=12))
def test_no_two_labels_share_a_folder(labels):
    names = folders(labels)
    assert list(names) == labels
    assert len({name.lower() for name in names.values()}) == len(labels)
    assert all("/" not in name for name in names.values())


def test_runs_whose_labels_look_alike_are_all_kept(tmp_path):
    """Paths with a slash and with an underscore: one folder name, two runs."""
    text = (
        "from twinserve.policies.registry import parse_policy\n"
        "class A(parse_policy('vllm').policy):\n    name = 'one'\n"
    )
    (tmp_path / "x_y").mkdir()
    one, two = tmp_path / "x_y" / "p.py", tmp_path / "x" / "y" / "p.py"
    two.parent.mkdir(parents=True)
    for file in (one, two):
        file.write_text(text)
    out = tmp_path / "runs"
    assert simulate("-p", f"{one}:A", "-p", f"{two}:A", "--out", out) == 0
    runs = find_runs([out])
    assert len(runs) == 2
    assert len({read_run(run).config["label"] for run in runs}) == 2


# -- before the run --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("out", "said"),
    [(os.fsdecode(b"r\xff"), "is no UTF-8"), ("loop/x", "is no path to a folder"), ("n\0", "")],
)
def test_what_no_folder_can_be_called_is_told_before_the_run(
    tmp_path, monkeypatch, capsys, out, said
):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    monkeypatch.setattr("twinserve.sim.setup.run.run_policy", None)  # must not be called
    assert simulate("--out", out) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    with pytest.raises(ResultsError):
        resolved(out)


@pytest.mark.parametrize("export", ["x", "x/trace.jsonl", "./y/../x"])
def test_export_and_results_are_kept_apart(tmp_path, monkeypatch, capsys, export):
    monkeypatch.chdir(tmp_path)
    assert simulate("--out", "x", "--export", export) == 2
    assert "--out writes its results there" in capsys.readouterr().err
    assert not Path("x").exists()


# -- killed ----------------------------------------------------------------------------------------
def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from twinserve.sim.results.folders import whole_folder\n"
        "with whole_folder(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = tmp_path / "run"
    assert subprocess.run([sys.executable, "-c", code, out], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".run.partial-") and not out.exists()
    with whole_folder(tmp_path / "other"):  # another run's folder is none of its business
        assert left.exists()
    with whole_folder(out) as partial:
        assert partial.exists() and not left.exists()
        # one that is being written stays
        with whole_folder(out):
            assert partial.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other"}


def test_a_folder_that_fails_leaves_what_was_there(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(ZeroDivisionError), whole_folder(out) as partial:
        (partial / "new").write_text("new")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "old"]


def call(command, *words) -> int:
    return status(command, words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "one"
    call(simulate_main, *RUN, "--out", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", mostly_nightly([0, 60_000], 60_000))
def test_a_report_is_written_whole_or_not_at_all(capsys, tmp_path, run, size):
    capsys.readouterr()
    with no_file_above(size):
        code = call(main, "report", run, "--out", tmp_path / "new" / "deep" / "page.html")
    said = capsys.readouterr().err
    assert code == 2 and "cannot be written" in said.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        "trace synth NEW/t.jsonl --requests 3",
        "profiles scale llama-3.1-8b@l40s --step 2 --out NEW/p.json",
        "simulate -t fixed:40,4 --requests 6 -q --out NEW/run",
        "simulate -t fixed:40,4 --requests 6 -q --export NEW/e.jsonl",
    ],
)
def test_a_full_disk_leaves_no_folder_behind(capsys, tmp_path, words):
    with no_file_above(0):
        code = call(main, *words.replace("NEW", str(tmp_path / "new" / "deep")).split())
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1) and said.startswith(f"error: {tmp_path / 'new'}")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_which_others_write_stays(tmp_path):
    from twinserve.formats import made_folder

    with pytest.raises(OSError), made_folder(tmp_path / "new" / "deep") as folder:
        (folder.parent / "theirs").touch()
        raise OSError
    assert (tmp_path / "new" / "theirs").exists() and not folder.exists()
