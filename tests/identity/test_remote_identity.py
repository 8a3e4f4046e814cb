"""Prefill apart from decode, with synchronous and asynchronous scheduling: policy `vllm` decides on
both sides what vLLM's scheduler does behind its NIXL connector. Decode side: loads pending,
arrived, failed, aborted, preempted afterwards, short of blocks. Prefill side: memory that is given
back when it has been fetched, or a lease has run out.

`tests/identity/regimes.py` runs more of it (docs/results/remote-identity.json)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.identity.leases import LeasingReal, let_go
from tests.identity.protocol import EngineSettings
from tests.identity.regimes import REGIMES, compare, wrong
from tests.parameters import mostly_nightly
from twinserve.sim.fleet.connector import FREED, Stage

KEPT = Path(__file__).resolve().parents[2] / "docs" / "results" / "remote-identity.json"

# prefill and decode; loads that fail are recomputed in one, end their request in the other
IN_CI = REGIMES[1], REGIMES[2], REGIMES[3]
# by class of scenarios, seeds that show the most in few steps
DECODE = {"preemption": (0, 1), "priority": (1,), "mixed": (1, 2), "partial_chunks": (1,)}
PREFILL = {"preemption": (0, 1), "priority": (0, 1, 2), "mixed": (0,), "partial_chunks": (1,)}


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("regime", mostly_nightly(REGIMES, *IN_CI), ids=lambda regime: regime.name)
def test_both_sides_decide_as_vllm_does(regime):
    steps, total = 0, Counter()
    for generate, seeds in (DECODE if regime.side == "decode" else PREFILL).items():
        for seed in seeds:
            report, seen = compare(regime, generate, seed)
            assert report.mismatches == 0, f"{generate} {seed}: {report.first_mismatch}"
            steps += report.steps
            total += seen
    assert steps > (10_000 if regime.side == "decode" else 3_000)
    assert all(total[name] for name in regime.phenomena), total


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_who_frees_what_is_as_vllms_connectors_have_it(push):
    nixl = LeasingReal(EngineSettings(64, 4, 512, 1024)).scheduler.connector.nixl
    for (gone, stage), freed in FREED.items():
        if push or stage is not Stage.ANNOUNCED:  # a pull announces nothing
            assert let_go(nixl, gone, stage, push) is freed[push], (gone, stage)


def test_what_is_kept_of_many_seeds_held_and_the_docs_say_so():
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert wrong(kept) == []
    page = (KEPT.parents[1] / "fleet.md").read_text(encoding="utf-8")
    for regime, part in zip(REGIMES, kept["regimes"], strict=True):
        assert part["regime"] == regime.name and part["seen"].keys() == set(regime.phenomena)
        assert part["steps"] >= 100_000
    assert f"None of {sum(part['steps'] for part in kept['regimes']):,} steps differs" in page
