"""From which batch on drafts stop paying: what the docs say is what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinserve.experiments.speculation import gain, last_paying, rows
from twinserve.profiles.forms.speculative import NgramDrafter, SpeculativeModel
from twinserve.profiles.step_times import choose
from twinserve.sim.setup.speculation import parse_speculation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "speculation.md"


@pytest.fixture(scope="module")
def model() -> SpeculativeModel:
    return SpeculativeModel(
        choose("llama-3.1-70b@h100:tp4", "roofline").profile.model(256), NgramDrafter()
    )


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_comes_out():
    assert "\n".join(rows()) in PAGE.read_text(encoding="utf-8")


def test_a_small_batch_gains_nearly_the_mean_length(model):
    drafts = parse_speculation("k=3,method=ngram,length=2.5")
    assert 2.3 < gain(model, drafts, 1, 1000) <= 2.5


def test_more_right_drafts_pay_up_to_larger_batches(model):
    drafts = [parse_speculation(f"k=3,method=ngram,length={mean}") for mean in (1, 1.5, 2.5)]
    last = [last_paying(model, one, 1000) for one in drafts]
    assert last[0] == 0 < last[1] < last[2]
