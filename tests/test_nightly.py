"""What the nightly runs are said to have shown is what they showed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nightly import SETS, WHOLE, failures, report, summary

PRINTED = """
tests/a.py::test_one:
  - during generate phase (0.15 seconds):
    - 90 passing examples, 0 failing examples, 2 invalid examples
  - during shrink phase (0.15 seconds):
    - 3 passing, 7 failing, and 2 invalid test cases
1 failed, 41 passed, 2 skipped, 9 deselected, 1 error in 3.21s
"""
GOOD = {
    "identity": {"steps": 1000, "mismatches": 0},
    "drafts": [{"regime": "priority", "steps": 100, "mismatches": 0}],
    **{
        name: summary("- 5 passing examples, 0 failing examples\n4 passed in 1s", 0)
        for name in SETS
    },
    **{name: summary("4 passed in 1s", 0) for name in WHOLE},
}


def test_what_pytest_prints_is_counted():
    found = summary(PRINTED, 1)
    assert found.pop("exit_code") == 1
    assert found == {
        "tests_passed": 41,
        "tests_failed": 2,
        "examples_passed": 93,
        "examples_failed": 7,
    }


def test_nothing_is_wrong_with_runs_that_held():
    assert failures(GOOD) == []


@pytest.mark.parametrize(
    "change",
    [
        {"identity": {"steps": 1000, "mismatches": 1}},
        {"identity": {"steps": 0, "mismatches": 0}},
        {"drafts": [{"regime": "priority", "steps": 100, "mismatches": 1}]},
        {"drafts": [{"regime": "priority", "steps": 0, "mismatches": 0}]},
        {"remote": {"regimes": [{"regime": "a", "steps": 9, "mismatches": 0, "seen": {"b": 0}}]}},
        {"tiers": {"regimes": [{"regime": "a", "steps": 9, "mismatches": 1, "seen": {"b": 1}}]}},
        {"properties": summary(PRINTED, 1)},
        {"properties": summary("", 2)},  # pytest did not even start
        {"bad_input": summary("4 passed in 1s", 0)},  # and drew no example
        {"pairs": summary("1 failed, 4 passed in 1s", 1)},
        {"live_pairs": summary("9 deselected in 1s", 0)},
    ],
)
def test_what_failed_or_did_not_run_is_told(change):
    assert len(failures(GOOD | change)) == 1


def test_a_part_that_is_missing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("NIGHTLY_SEED", "1")
    with pytest.raises(OSError, match=r"identity\.json"):
        report(tmp_path)


# -- what is kept, and what the README says of it --------------------------------------------------
ROOT = Path(__file__).resolve().parent.parent
KEPT = json.loads((ROOT / "docs" / "results" / "nightly.json").read_text(encoding="utf-8"))


def test_what_is_kept_held_at_full_size():
    assert failures(KEPT) == [] and not KEPT["commit"].endswith("-changed")
    assert KEPT["identity"]["steps"] >= 1_000_000
    assert all(part["steps"] >= 100_000 for part in KEPT["identity"]["classes"])


@pytest.mark.parametrize("scheduling", ["synchronous", "asynchronous"])
def test_the_readme_says_how_many_steps_were_compared(scheduling):
    steps = sum(
        part["steps"] for part in KEPT["identity"]["classes"] if part["scheduling"] == scheduling
    )
    assert f"{steps:,} steps of" in (ROOT / "README.md").read_text(encoding="utf-8")
