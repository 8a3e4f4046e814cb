"""docs/users: pages of five commands, each of a page whose commands are run, with lines that it
shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import test_guide, test_readme, test_sweep_page, test_tutorial

USERS = Path(__file__).resolve().parent.parent / "docs" / "users"
PAGES = sorted(USERS.glob("*.md"))
RUN = (test_readme.README, test_tutorial.PAGE, test_sweep_page.PAGE, test_guide.PAGE)


def lines_of_runs() -> dict[str, set[str]]:
    """What the pages that are run show, by command."""
    found: dict[str, set[str]] = {}
    for page in RUN:
        for command, shown in test_readme.commands(page):
            found.setdefault(command, set()).update(test_readme.comparable(shown))
    return found


def test_there_is_a_page_for_each():
    assert {page.stem for page in PAGES} == {"contributor", "operator", "planner", "researcher"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_five_commands_are_run_elsewhere_with_these_lines(page):
    known = lines_of_runs()
    pairs = test_readme.commands(page)
    assert len(pairs) == 5
    for command, shown in pairs:
        assert command in known, f"no page that is run has {command}"
        assert set(test_readme.comparable(shown)) <= known[command], command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_fits_on_a_screen_and_says_how_sure_it_is(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert all(f"**{word}" in text for word in ("The question.", "How sure?", "Next."))
