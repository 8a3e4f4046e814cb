"""docs/invariants.md: its table is of the results, and its rules are those of policy `vllm`."""

from pathlib import Path

from tests.identity.engines_table import read_results, table
from twinserve.backends.live.versions import KNOWN
from twinserve.policies.baselines.vllm import RULES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "invariants.md").read_text()
RESULTS = read_results(ROOT / "docs" / "results" / "engines")


def test_the_table_is_that_of_the_results():
    assert table(RESULTS) in PAGE


def test_every_release_decides_as_policy_vllm_does_with_its_rules():
    for one in RESULTS:
        assert one["identity"]["parted"] == {}, one["vllm"]
        assert RULES[one["release"]].__dict__ == one["rules"]


def test_no_release_is_said_to_work_for_what_it_lacks():
    missing = {one["vllm"]: one["missing"] for one in RESULTS}
    for release, uses in KNOWN.items():
        assert [use for use in uses if missing[release][use]] == []


def test_the_page_names_every_release_that_an_option_stands_for():
    for release in RULES:
        assert f"`{release}`" in PAGE
