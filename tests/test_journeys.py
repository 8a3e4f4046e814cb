"""Ways of a new user, each with files of its own: a CSV, a policy, a benchmark's file, a router.
`session.txt` has the commands, and lines that each prints, in order; `...` stands for others.

`python -m tests.test_journeys NAME` prints all that its commands print.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests import test_guide
from tests.test_readme import comparable

FOLDER = Path(__file__).resolve().parent / "journeys"
JOURNEYS = sorted(path.name for path in FOLDER.iterdir())


def steps(name: str) -> list[tuple[str, str]]:
    """(command, lines that it prints), in order."""
    text = (FOLDER / name / "session.txt").read_text("utf-8")
    return [part.partition("\n")[::2] for part in re.split(r"^\$ ", text, flags=re.M)[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOURNEYS)
def test_the_answers_are_those_of_the_session(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = shutil.copytree(FOLDER / name, tmp_path / name)
    for command, shown in steps(name):
        check(command, shown, *test_guide.run(command, folder))


def check(command: str, shown: str, code: int, said: str) -> None:
    """Whether what the command says has the lines of the session."""
    assert (code != 0) == shown.startswith("error:"), said
    printed = iter(comparable(said))
    missing = [line for line in comparable(shown) if line != "..." and line not in printed]
    assert not missing, f"{command}\nlacks, in this order, {missing}:\n{said}"
    if "--json" in command or shown.startswith("error:"):
        assert len(shown.strip().splitlines()) == len(said.strip().splitlines())


def test_sessions_show_answers():
    for name in JOURNEYS:
        shown = [answer for _, answer in steps(name)]
        assert len(shown) > 3 and sum(map(len, shown)) > 500


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        place = shutil.copytree(FOLDER / sys.argv[1], Path(scratch) / sys.argv[1])
        for command, _ in steps(sys.argv[1]):
            print(f"$ {command}\n{test_guide.run(command, place)[1]}", end="")
