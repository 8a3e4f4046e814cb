"""What cannot be written whole is not there at all: a file that stops growing stands for a full
disk."""

from __future__ import annotations

import pytest

from tests.disk import no_file_above
from tests.parameters import mostly_nightly
from twinserve.sim.cli.main import main, simulate_main

RUN = "-t fixed:40,4 --requests 6 --rate 50 --profile llama-3.1-8b@h100 -q".split()


def call(command, *words) -> int:
    with pytest.raises(SystemExit) as end:
        command([*map(str, words)])
    return end.value.code or 0


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
