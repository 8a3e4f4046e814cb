"""docs/sweep.md from top to bottom: its commands run in one folder and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import test_readme

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sweep.md"
JSON = re.compile(r"^```json (\S+)\n(.*?)^```$", re.S | re.M)


def commands() -> list[tuple[str, str]]:
    """(command, what it prints), in order."""
    blocks = test_readme.BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    for name, text in JSON.findall(PAGE.read_text(encoding="utf-8")):
        (path / name).write_text(text)
    return path


def fails(command: str, shown: str) -> bool:
    return shown.startswith("error:") or "num-blocks=50" in command


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "shown"), commands())
def test_command(command: str, shown: str, folder: Path):
    done = test_readme.carried_out(command, folder)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails(command, shown), said
    assert "Traceback" not in said
    got = test_readme.comparable(said)
    missing = [line for line in test_readme.comparable(shown) if line not in got]
    assert not missing, f"the page shows {missing}; the command prints\n{said}"


def test_the_page_has_commands_and_a_file():
    assert len(commands()) > 6 and len(JSON.findall(PAGE.read_text(encoding="utf-8"))) == 1
