"""The console blocks of study pages run, and print what the pages show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.test_readme import carried_out, commands, comparable

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("optimality", "sensitivity", "silicon", "speculation", "validation")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_its_commands_print(name: str, tmp_path: Path):
    """All lines shown are printed; the commands of a page share a folder."""
    if name == "silicon":
        pytest.importorskip("aiconfigurator_core")
    if name == "validation" and not os.environ.get("TWINSERVE_TRUTH"):
        pytest.skip("TWINSERVE_TRUTH names no folder of measured runs")
    for command, shown in commands(DOCS / f"{name}.md"):
        done = carried_out(command, tmp_path)
        assert done.returncode == 0, done.stderr
        if os.environ.get("TWINSERVE_TRACES"):  # a replica of the trace gives other figures
            printed = comparable(done.stdout)
            missing = [line for line in comparable(shown) if line not in printed]
            assert not missing, f"{command} prints\n{done.stdout}"
