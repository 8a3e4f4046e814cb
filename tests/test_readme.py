"""Every command of the README runs, and prints what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import test_guide

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.S)
# Shown in the README, but either run by .ci/run itself or by this very test.
ELSEWHERE = ("pip install", "python -m pytest")
# What depends on the machine: seconds of wall time, speed, paths of local copies.
VARIES = re.compile(r"wall time|simulated steps/s|local copy|/.*\.jsonl")


# Commands that need a live engine, or what one has written. Their figures are the machine's, so
# only words are compared.
LIVE = re.compile(r"--model tiny|cpu\.json|replay run")


def commands(page: Path = README) -> list[tuple[str, str]]:
    """(command, output shown) in order of appearance."""
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = command[:-1] + more.strip()
            found.append((command.strip(), output.strip()))
    return found


def comparable(text: str) -> list[str]:
    """Lines without those that vary, and without the run of blanks that a longer number pushes
    aside."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not VARIES.search(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The commands share one folder: later ones read what earlier ones wrote, and all the policy of
    the guide."""
    path = tmp_path_factory.mktemp("readme")
    path.joinpath("mine.py").write_text(test_guide.blocks("python")[0].text)
    return path


def test_the_readme_has_commands():
    names = {command.split()[0] for command, _ in commands()}
    assert {"simulate", "twinserve", "pip"} <= names


def cases(page: Path = README) -> list:
    return [
        pytest.param(
            command,
            shown,
            id=command[:60],
            marks=[pytest.mark.live] if LIVE.search(command) else [],
        )
        for command, shown in commands(page)
    ]


def words(lines: list[str]) -> list[str]:
    """Lines without their numbers."""
    return [re.sub(r"[-+]?[\d][\d.,]*|outside", "#", line) for line in lines]


def environment(folder: Path) -> dict[str, str]:
    """Of a command that is run as a user would: scripts beside this interpreter, no colours."""
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "TWINSERVE_CACHE": str(folder / "cache"),
    }


def carried_out(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in that folder, as a user would run it."""
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "shown"), cases())
def test_command(command: str, shown: str, folder: Path):
    if command.startswith(ELSEWHERE):
        pytest.skip("run by .ci/run")
    live = LIVE.search(command) is not None
    if live and not os.environ.get("TWINSERVE_REQUIRE_LIVE"):
        pytest.importorskip("vllm")
    done = carried_out(command, folder)
    said = done.stdout + done.stderr
    expected_to_fail = shown.startswith("error:")
    assert (done.returncode != 0) == expected_to_fail, said
    assert "Traceback" not in said
    if shown and (expected_to_fail or os.environ.get("TWINSERVE_TRACES")):
        # Figures are those of the original trace; its replica gives others.
        got, expected = comparable(said), comparable(shown)
        if live:
            got, expected = words(got), words(expected)
        missing = [line for line in expected if line not in got]
        assert not missing, f"the README shows {missing}; the command prints\n{said}"
