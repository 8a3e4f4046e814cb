"""What the nightly runs are said to have shown is what they showed."""

import json

import pytest

from tests import nightly
from tests.conftest import NIGHTLY
from tests.nightly import FILES, ROOT, Unit, entry, failures, merged, run, summary, units

PRINTED = """
tests/a.py::test_one:
  - during generate phase (0.15 seconds):
    - 90 passing examples, 0 failing examples, 2 invalid examples
  - during shrink phase (0.15 seconds):
    - 3 passing, 7 failing, and 2 invalid test cases
1 failed, 41 passed, 2 skipped, 9 deselected, 1 error in 3.21s
"""
HELD = summary("- 5 passing examples, 0 failing examples\n4 passed in 1s", 0)
GOOD = {
    "identity": {
        "identity": {"classes": [{"class": "mixed", "steps": 1000, "mismatches": 0}]},
        "drafts": [{"regime": "priority", "steps": 100, "mismatches": 0}],
    },
    "fuzz": {"tests": HELD, "bad_input": HELD},
    "live": {"tests": summary("4 passed in 1s", 0)},
    "faults": {"faults": {"caught": 9}},
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


def _regimes(mismatches: int, times: int) -> dict:
    row = {"regime": "a", "steps": 9, "mismatches": mismatches, "seen": {"b": times}}
    return {"regimes": [row]}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("identity", {"identity": {"classes": [{"class": "a", "steps": 1000, "mismatches": 1}]}}),
        ("identity", {"identity": {"classes": [{"class": "a", "steps": 0, "mismatches": 0}]}}),
        ("identity", {"drafts": [{"regime": "priority", "steps": 100, "mismatches": 1}]}),
        ("identity", {"remote": _regimes(0, 0)}),
        ("identity", {"tiers": _regimes(1, 1)}),
        ("identity", {"failed": ["tiers: a"]}),  # ended without a result
        ("fuzz", {"tests": summary(PRINTED, 1)}),
        ("fuzz", {"tests": summary("", 2)}),  # pytest did not even start
        ("fuzz", {"bad_input": summary("4 passed in 1s", 0)}),  # and drew no example
        ("live", {"tests": summary("1 failed, 4 passed in 1s", 1)}),
        ("live", {"tests": summary("9 deselected in 1s", 5)}),
        ("faults", {"failed": ["policies 1"]}),
    ],
)
def test_what_failed_or_did_not_run_is_told(part, change):
    assert len(failures(GOOD | {part: GOOD[part] | change})) == 1


def test_results_of_units_are_added_up():
    kinds = [_regimes(0, 1) | {"classes": ["x", "y"]}] * 2
    assert merged(kinds) == {"regimes": kinds[0]["regimes"] * 2, "classes": ["x", "y"]}
    assert merged([HELD, HELD])["examples_passed"] == 10
    state = {"commit": "a", "seed": 1}
    results = [{"seconds": 1.0, "failed": False, "result": {"x": "caught"}}, {"seconds": 2.0}]
    found = [(Unit("faults", name, []), one) for name, one in zip("ab", results, strict=True)]
    made = entry(state, [found[0], (found[1][0], {"seconds": 2.0, "failed": True})])
    assert (made["faults"], made["failed"], made["seconds"]) == ({"caught": 1}, ["b"], 3)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_unit_that_takes_all_the_time_of_a_part_fails_and_the_next_ones_are_left():
    kept = {}
    endless = Unit("tests", "endless", ["http.server", "0"])
    todo = [endless, endless._replace(name="next")]
    run(todo, 1, 0.5, lambda unit, found: kept.update({unit.name: found}))
    assert list(kept) == ["endless"] and kept["endless"]["failed"]


def test_a_part_goes_on_where_it_was_stopped_and_a_new_commit_starts_anew(tmp_path, monkeypatch):
    out, ran = tmp_path / "nightly.json", []
    out.write_text(json.dumps({"pages": {"commit": "of before"}}))

    def stopped_after(count):
        def run(todo, jobs, limit_s, keep):
            for unit in todo[:count]:
                ran.append(unit.name)
                keep(unit, {"seconds": 1.0, "failed": False, "result": HELD})

        monkeypatch.setattr(nightly, "run", run)

    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "units", lambda *_: [Unit("tests", name, []) for name in "abc"])
    for commit, count, left in ("x", 2, 1), ("y", 1, 2), ("y", 1, 1), ("y", 1, 0):
        monkeypatch.setattr(nightly, "commit", lambda commit=commit: commit)
        stopped_after(count)
        assert nightly.run_part("live", out) == (not left)
    assert ran == [*"ab", *"abc"]
    entries = json.loads(out.read_text())
    assert list(entries) == ["live", "pages"] and entries["live"]["commit"] == "y"
    assert entries["live"]["tests"]["tests_passed"] == 12


def test_each_nightly_or_property_test_is_in_one_part(request):
    """Of the tests that pytest has collected for this call: in the whole suite, all of them."""
    parts: dict[tuple[str, bool], set[str]] = {}
    for part in FILES:
        for unit in units(part, 1):
            marks, name = unit.words[-2:]
            for live in (False, True):
                if (" and not live" not in marks) if live else not marks.endswith(" and live"):
                    parts.setdefault((name, live), set()).add(part)
    for path, live in request.config.stash[NIGHTLY]:
        assert len(parts[path.relative_to(ROOT).as_posix(), live]) == 1


# -- what is kept, and what the README says of it --------------------------------------------------
KEPT = json.loads((ROOT / "docs" / "results" / "nightly.json").read_text(encoding="utf-8"))
COMPARED = KEPT["identity"]["identity"]


def test_what_is_kept_held_at_full_size():
    assert failures(KEPT) == []
    assert not any("-changed" in part["commit"] for part in KEPT.values())
    assert COMPARED["steps"] >= 1_000_000
    assert all(part["steps"] >= 100_000 for part in COMPARED["classes"])


@pytest.mark.parametrize("scheduling", ["synchronous", "asynchronous"])
def test_the_readme_says_how_many_steps_were_compared(scheduling):
    steps = sum(part["steps"] for part in COMPARED["classes"] if part["scheduling"] == scheduling)
    assert f"{steps:,} steps of" in (ROOT / "README.md").read_text(encoding="utf-8")
