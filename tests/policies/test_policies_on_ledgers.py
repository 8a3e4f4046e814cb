"""Every policy on every ledger keeps the rules of `sim.setup.audit`: each plan checked, every
request served, and runs of decode steps taken at once byte for byte what single steps give.
docs/matrices.md says which pairs there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parameters import SOME_POLICIES, mostly_nightly_pairs
from twinserve.policies.registry import ledger_names, policy_names
from twinserve.sim.setup.audit import CROWDED, check_policy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "matrices.md"


def allowed(heading: str) -> list[tuple[str, str]]:
    """Pairs (policy, ledger) with a yes in the first table below `heading` of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(heading)[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()
    ledgers, *rows = (
        [cell.strip("*` ") for cell in line.strip("|").split("|")]
        for line in (table[0], *table[2:])
    )
    return [
        (row[0], ledger)
        for row in rows
        for ledger, cell in zip(ledgers[1:], row[1:], strict=True)
        if cell == "yes"
    ]


PLAIN = allowed("## Policy and KV ledger")
WITH_PREFIXES = allowed("With `--prefix-caching`:")


def test_the_page_allows_every_pair_and_prefixes_where_both_know_them():
    assert PLAIN == [(policy, ledger) for policy in policy_names() for ledger in ledger_names()]
    assert {policy for policy, _ in WITH_PREFIXES} == set(policy_names()) - {"bros", "bros-exact"}
    assert {ledger for _, ledger in WITH_PREFIXES} == {
        "checkpointed",
        "paged",
        "paged-rc",
        "task-aware",
    }


@pytest.mark.nightly
def test_one_that_waits_may_enter_blocks_of_others_once_they_are_full():
    """Found by the slow tests: policy vllm-v0, which admits before it decodes, promised that memory
    would keep it out."""
    assert check_policy("vllm-v0", kv=["bidirectional"], seeds=[1]) > 300


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ledger"), mostly_nightly_pairs(PLAIN, "bros", *SOME_POLICIES))
def test_rules_are_kept_on_every_ledger(policy, ledger):
    assert check_policy(policy, kv=[ledger], seeds=[1]) > 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "ledger"), mostly_nightly_pairs(WITH_PREFIXES, "bros", *SOME_POLICIES)
)
def test_rules_are_kept_where_prompts_share_prefixes(policy, ledger):
    config = CROWDED.model_copy(update={"prefix_caching": True})
    assert check_policy(policy, kv=[ledger], seeds=[2], config=config) > 300
