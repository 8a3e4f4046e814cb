"""docs/sweep.md from top to bottom: its commands run in one folder and print what it shows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import test_readme
from twinserve.experiments.study.command import GridOptions, study

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sweep.md"
JSON = re.compile(r"^```json (\S+)\n(.*?)^```$", re.S | re.M)
STUDY = re.compile(r"^```python (mine.py)\n(.*?)^```$", re.S | re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (*JSON.findall(page), *STUDY.findall(page)):
        (path / name).write_text(text)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "shown"), test_readme.commands(PAGE))
def test_command(command: str, shown: str, folder: Path):
    done = test_readme.carried_out(command, folder)
    said = done.stdout + done.stderr
    fails = shown.startswith("error:") or "num-blocks=50" in command
    assert (done.returncode != 0) == fails, said
    assert "Traceback" not in said
    missing = test_readme.lacking(shown, said)
    assert not missing, f"the page shows {missing}; the command prints\n{said}"


def test_the_page_has_commands_and_a_file():
    assert (
        len(test_readme.commands(PAGE)) > 6
        and len(JSON.findall(PAGE.read_text(encoding="utf-8"))) == 1
    )


@pytest.mark.slow
def test_a_study_of_sixty_lines_runs(folder, capsys, monkeypatch):
    assert len((folder / "mine.py").read_text().splitlines()) < 60
    monkeypatch.chdir(folder)
    options = GridOptions(quick=True, workers=1, out=Path("small"))
    study("./mine.py", options=options)
    assert capsys.readouterr().out == "small/paper_vs_ours.md\n"
    report, table = (folder / "small" / name for name in ("paper_vs_ours.md", "fig1/table.csv"))
    assert "| Fig. 1 | TTFT of vLLM over that of BROS, 5 requests/s | 3x |" in report.read_text()
    files = {path: path.read_bytes() for path in (report, table)}
    table.unlink()
    study("./mine.py", options=replace(options, redraw=True))
    assert {path: path.read_bytes() for path in files} == files
