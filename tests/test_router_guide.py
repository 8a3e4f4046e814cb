"""docs/routers.md: its router works in every command as the page shows, and its tables name what
there is."""

import re
import shlex
from pathlib import Path

import pytest

from tests import test_readme
from tests.commands import status
from tests.sim.routing import Scene, prompt
from twinserve.sim.cli import main as cli
from twinserve.sim.fleet.routers.base import Shedding
from twinserve.sim.fleet.routers.registry import ROUTERS

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "routers.md").read_text("utf-8")
(CODE,) = re.findall(r"^```python\n# two_choices.py\n(.*?)^```$", PAGE, re.S | re.M)
COMMANDS = test_readme.commands_of(PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("routers")
    (path / "two_choices.py").write_text(CODE, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=lambda text: text[:40])
def test_command(command, shown, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    end = status(cli.simulate_main, [*shlex.split(command)[1:], "--quiet"])
    assert bool(end) == shown.startswith("error:")
    assert shown.strip() in "".join(capsys.readouterr())


def test_a_file_that_has_changed_is_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    flags = "-r two_choices.py:TwoChoices -t poisson --rate 20 --requests 20 --replicas 2 --quiet"
    status(cli.simulate_main, f"{flags} --out changed".split())
    file = folder / "two_choices.py"
    file.write_text(CODE + "\n# a thought\n", encoding="utf-8")
    capsys.readouterr()
    end = status(cli.simulate_main, "--config changed/run.json --quiet".split())
    file.write_text(CODE, encoding="utf-8")
    assert end == cli.BAD_INPUT
    assert (
        "router two_choices.py:TwoChoices: its file has changed since that run"
        in capsys.readouterr().err
    )


def test_it_is_the_router_that_the_page_says(folder, monkeypatch):
    """Of two that it draws it takes the emptier one: the fullest of three is hardly chosen."""
    monkeypatch.chdir(folder)
    scene = Scene("two_choices.py:TwoChoices", replicas=3)
    scene.view.in_flight[:] = [0, 5, 9]
    picks = [scene.choose(prompt(tokens=9)) for _ in range(900)]
    assert picks.count(2) < 150 < 250 < picks.count(1) < 350 < picks.count(0)


def test_the_page_names_every_router_and_its_file():
    rows = re.findall(r"^\| (`[a-z].*?) \| .*? \| `(sim/fleet/routers/\w+\.py)` \|$", PAGE, re.M)
    listed = {name: file for names, file in rows for name in re.findall(r"`([\w-]+)`", names)}
    there = {n: f"sim/fleet/routers/{w.split(':')[0]}.py" for n, w in ROUTERS.own.items()}
    assert listed == there


def test_every_router_sheds_load_as_the_page_says():
    assert all(issubclass(ROUTERS.find(name).Options, Shedding) for name in ROUTERS.own)
