"""docs/tutorial.md from top to bottom: its commands run in one folder and print what it shows."""

import os
from pathlib import Path

import pytest

from tests import test_readme

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
# tests/test_users.py has the sections for each kind of user
LESSONS = PAGE.read_text("utf-8").partition("\n## For a")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


def test_the_page_goes_all_the_way():
    verbs = [" ".join(command.split()[:2]) for command, _ in test_readme.commands_of(LESSONS)]
    wanted = ("simulate", "twinserve sweep", "twinserve plan", "twinserve report")
    assert all(any(verb.startswith(one) for verb in verbs) for one in wanted)
    assert verbs[-1] == "twinserve replay"


@pytest.mark.nightly
@pytest.mark.traces
@pytest.mark.parametrize(("command", "shown"), test_readme.cases(LESSONS))
def test_command(command: str, shown: str, folder: Path):
    if test_readme.LIVE.search(command):
        if not os.environ.get("TWINSERVE_REQUIRE_LIVE"):
            pytest.importorskip("vllm")
        before = [one for one, _ in test_readme.commands_of(LESSONS)]
        test_readme.carried_out(before[before.index(command) - 1], folder)  # what it replays
    done = test_readme.carried_out(command, folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    missing = test_readme.lacking(shown, said)
    assert not missing, f"the page shows {missing}; the command prints\n{said}"
