"""docs/tutorial.md: five commands for each kind of user, each of a page whose commands are run,
with lines that it shows; and other pages that quote such a run. And each is run from nothing: a
copy of the repository, and an environment with Python alone.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import test_guide, test_journeys, test_readme

DOCS = Path(__file__).resolve().parent.parent / "docs"
_, *_SECTIONS = re.split(r"^## For an? ", (DOCS / "tutorial.md").read_text("utf-8"), flags=re.M)
USERS = {section.partition("\n")[0]: section for section in _SECTIONS}
RUN = (*test_readme.PAGES, test_guide.PAGE)
QUOTING = [DOCS / "bros.md"]


def lines_of_runs() -> dict[str, set[str]]:
    """What the pages that are run show, by command."""
    found: dict[str, set[str]] = {}
    for page in RUN:
        for command, shown in test_readme.commands(page):
            found.setdefault(command, set()).update(test_readme.comparable(shown))
    return found


def test_there_is_a_section_for_each():
    assert set(USERS) == {"contributor", "operator", "capacity planner", "researcher"}


@pytest.mark.parametrize("user", USERS)
def test_its_five_commands_are_run_elsewhere_with_these_lines(user):
    known = lines_of_runs()
    pairs = test_readme.commands_of(USERS[user])
    assert len(pairs) == 5
    for command, shown in pairs:
        assert command in known, f"no page that is run has {command}"
        assert set(test_readme.comparable(shown)) <= known[command], command


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.stem)
def test_a_page_that_quotes_a_run_quotes_it_as_it_is_shown_elsewhere(page):
    known = lines_of_runs()
    pairs = test_readme.commands(page)
    assert pairs
    for command, shown in pairs:
        assert set(test_readme.comparable(shown)) <= known.get(command, set()), command


@pytest.mark.parametrize("text", USERS.values(), ids=USERS)
def test_it_fits_on_a_screen_and_says_how_sure_it_is(text):
    assert len(text.splitlines()) <= 60
    assert all(f"**{word}" in text for word in ("The question.", "How sure?"))


# -- from nothing ----------------------------------------------------------------------------------
NO_SOURCES = (".*", "build", "dist", "out", "runs", "*.egg-info", "__pycache__")
# The whole fast suite, which .ci/run runs in an environment of its own.
SUITE = "python -m pytest"
# on disk, of an environment with nothing else; docs/index.md says what takes it
MOST_BYTES = 650 * 2**20
# The operator's commands need vLLM: tests/test_readme.py runs them where it is.
FROM_NOTHING = [user for user in USERS if user != "operator"]


@dataclass(frozen=True)
class Newcomer:
    """A copy of the repository, and an environment beside it."""

    folder: Path
    scripts: Path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env={
                **kept,
                "PATH": f"{self.scripts}{os.pathsep}{os.defpath}",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                "COLUMNS": "80",
                "TWINSERVE_CACHE": str(self.folder / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=900,
        )


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory) -> Newcomer:
    place = tmp_path_factory.mktemp("newcomer")
    ignored = shutil.ignore_patterns(*NO_SOURCES)
    shutil.copytree(test_readme.ROOT, place / "twinserve", symlinks=True, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True, timeout=300)
    found = Newcomer(place / "twinserve", place / "venv" / "bin")
    # in a virtual environment of its own the interpreter finds nothing of ours before that
    assert found.run("simulate --version").returncode == 127
    return found


@pytest.mark.nightly
def test_what_is_installed_fits_on_a_small_disk(newcomer):
    """Asked before the pages, one of which installs what tests need."""
    done = newcomer.run("pip install .")
    assert done.returncode == 0, done.stderr
    files = [
        path
        for path in newcomer.scripts.parent.rglob("*")
        if not path.is_symlink() and not {"pip", "setuptools"} & set(path.parts)  # of any venv
    ]
    assert sum(path.stat().st_blocks * 512 for path in files) < MOST_BYTES


@pytest.mark.nightly
@pytest.mark.parametrize("user", FROM_NOTHING)
def test_a_section_leads_from_nothing_to_its_answer(user, newcomer):
    (ten_lines,) = [b.text for b in test_guide.blocks("python")[:1]]
    newcomer.folder.joinpath("mine.py").write_text(ten_lines)
    for command, shown in test_readme.commands_of(USERS[user]):
        if command.startswith(SUITE):
            continue
        done = newcomer.run(command)
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == shown.startswith("error:"), said
        assert "Traceback" not in said
        if os.environ.get("TWINSERVE_TRACES"):  # figures are those of the original traces
            assert test_readme.lacking(shown, said) == [], said


@pytest.mark.nightly
def test_journeys_with_own_files_lead_there_too(newcomer):
    done = newcomer.run("pip install .")
    assert done.returncode == 0, done.stderr
    for name in test_journeys.JOURNEYS:
        for command, shown in test_journeys.steps(name):
            done = newcomer.run(f"cd tests/journeys/{name} && COLUMNS=200 {command} 2>&1")
            test_journeys.check(command, shown, done.returncode, done.stdout)
