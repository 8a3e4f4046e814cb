"""Every command in a ```console block of these pages runs, and prints what the page shows."""

import os
import re
from pathlib import Path

import pytest

from tests import test_readme

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (
    *("fleet", "from_vllm", "metrics", "policies", "profiles", "traces", "invariants"),
    *("optimality", "validation", "bros", "layerkv", "justitia"),
)
CASES = [
    pytest.param(page, command, shown, id=f"{page}: {command[:60]}")
    for page in PAGES
    for command, shown in test_readme.commands(DOCS / f"{page}.md")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder: later commands read what earlier ones wrote, and all the table of traces.md."""
    path = tmp_path_factory.mktemp("pages")
    (table,) = re.findall(r"```csv\n(.*?)```", (DOCS / "traces.md").read_text("utf-8"), re.S)
    path.joinpath("requests.csv").write_text(table)
    return path


def test_every_page_has_a_command():
    assert all(test_readme.commands(DOCS / f"{page}.md") for page in PAGES)
    elsewhere = {page.stem for page in test_readme.PAGES} | {"tutorial", "sweep"}
    elsewhere |= {"your_own_policy", "routers"}  # test_guide.py, test_router_guide.py
    shown = {page.stem for page in DOCS.glob("*.md") if test_readme.commands(page)}
    assert shown - elsewhere == set(PAGES)


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "command", "shown"), CASES)
def test_command(page: str, command: str, shown: str, folder: Path):
    if page == "validation":
        pytest.importorskip("aiconfigurator_core")
    if page == "validation" and not os.environ.get("TWINSERVE_TRUTH"):
        pytest.skip("TWINSERVE_TRUTH names no folder of measured runs")
    done = test_readme.carried_out(command, folder)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == shown.startswith("error:"), said
    if os.environ.get("TWINSERVE_TRACES"):  # a replica of the trace gives other figures
        missing = test_readme.lacking(shown, said)
        assert not missing, f"the page shows {missing}; the command prints\n{said}"
