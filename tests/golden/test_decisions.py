"""Policy `vllm` decides step by step as it did when decisions.json was written.

    python -m tests.golden.test_decisions       # writes the file anew; say in the commit why
    python -m tests.golden.test_decisions CASE  # what it would write

The scenarios are those in which tests/identity compares the policy with vLLM: that comparison says
that a decision is right, and needs vLLM. Here any change of a decision is seen without it.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from tests.identity import ours, scenarios
from tests.identity.compare import submit_due
from tests.identity.draft_scenarios import drafted
from tests.identity.drafts import OurDrafts
from tests.identity.leases import LeasingOurs
from tests.identity.offload import TIERS, OffloadOurs
from tests.identity.protocol import EngineSettings, Scenario
from tests.identity.regimes import _prompts_alone
from tests.identity.remote import RemoteOurs

GOLDEN = Path(__file__).with_name("decisions.json")
STEPS = 600
LEAVING = 0.05  # of the steps: some client leaves
Case = tuple[Scenario, Callable[[EngineSettings], ours.OurScheduler]]


class Anything:
    """Unequal to nothing: vLLM's jobs, where it is not there."""

    def __ne__(self, other: object) -> bool:
        return False


def plain(name: str, seed: int, ahead: bool = False, stages: int = 1) -> Case:
    scenario = getattr(scenarios, name)(seed)
    settings = dataclasses.replace(
        scenario.settings, async_scheduling=ahead, pipeline_stages=stages
    )
    return dataclasses.replace(scenario, settings=settings), ours.OurScheduler


def apart(name: str, seed: int, ahead: bool, recompute: bool = True) -> Case:
    scenario, _ = plain(name, seed, ahead)
    return scenario, lambda settings: RemoteOurs(settings, recompute=recompute)


def prefill(name: str, seed: int) -> Case:
    return _prompts_alone(plain(name, seed, True)[0]), LeasingOurs


def tiered(name: str, seed: int, tier: int, ahead: bool = False) -> Case:
    scenario, _ = plain(name, seed, ahead)
    settings = dataclasses.replace(scenario.settings, enable_prefix_caching=True)
    kind, size = TIERS[tier]
    chunks = max(int(size * settings.num_blocks / kind.blocks_per_chunk), 2)
    kind, vllm = dataclasses.replace(kind, chunks=chunks), SimpleNamespace(began=Anything())
    return (
        dataclasses.replace(scenario, settings=settings),
        lambda settings: OffloadOurs(settings, kind, vllm),
    )


CASES: dict[str, Callable[[], Case]] = {
    **{
        f"{name} {seed}{' ahead' * ahead}": lambda name=name, seed=seed, ahead=ahead: plain(
            name, seed, ahead
        )
        for name, seed, ahead in (
            *(("preemption", seed, False) for seed in (1, 2, 3, 6)),
            *(("partial_chunks", 1, False), ("priority", 2, False), ("priority", 5, False)),
            *(("mixed", 0, False), ("mixed", 2, False)),
            *(("preemption", 3, True), ("partial_chunks", 5, True), ("mixed", 3, True)),
        )
    },
    "stages": lambda: plain("partial_chunks", 5, stages=4),
    "stages preempt": lambda: plain("preemption", 3, stages=4),
    "stages ahead": lambda: plain("mixed", 4, True, stages=4),
    "stages preempt ahead": lambda: plain("preemption", 3, True, stages=4),
    **{
        f"drafts {name} {seed}{' ahead' * ahead}": lambda name=name, seed=seed, ahead=ahead: (
            drafted(name, seed, ahead),
            OurDrafts,
        )
        for name, seed, ahead in (
            *(("preemption", 1, False), ("preemption", 5, False), ("preemption", 7, False)),
            *(("partial_chunks", 1, False), ("partial_chunks", 2, False), ("priority", 5, False)),
            *(("partial_chunks", 4, False), ("mixed", 6, False)),
            *(("preemption", 1, True), ("preemption", 7, True)),
        )
    },
    "decode": lambda: apart("mixed", 1, False),
    "decode preempts": lambda: apart("preemption", 1, False),
    "decode ahead": lambda: apart("preemption", 1, True),
    "decode chunks ahead": lambda: apart("partial_chunks", 1, True),
    "decode fails": lambda: apart("preemption", 1, True, recompute=False),
    "prefill": lambda: prefill("preemption", 1),
    "prefill priority": lambda: prefill("priority", 2),
    "tier lru": lambda: tiered("preemption", 1, 0),
    "tier mixed": lambda: tiered("mixed", 1, 0),
    "tier arc": lambda: tiered("preemption", 1, 1),
    "tier late": lambda: tiered("preemption", 1, 2),
    "tier chunks": lambda: tiered("mixed", 1, 3),
    "tier prompts": lambda: tiered("preemption", 1, 4),
    "tier ahead": lambda: tiered("preemption", 1, 0, True),
    "tier arc ahead": lambda: tiered("preemption", 1, 1, True),
}


def digest(name: str) -> str:
    """Of what the first STEPS steps of a case show, as `Observed` has it."""
    scenario, make = CASES[name]()
    with patch.object(ours, "installed_release", lambda: "0.32"):
        side = make(scenario.settings)
    core, seen = side.stepper.core, hashlib.sha256()
    rng, submitted, clock = np.random.default_rng(6), 0, 0
    for _ in range(STEPS):
        if not core.active and submitted < len(scenario.requests):
            clock = max(clock, scenario.requests[submitted].arrival_step)
        submitted = submit_due(scenario.requests, submitted, clock, side)
        here = [n for n, end in zip(core.requests.ids, core.requests.end, strict=False) if not end]
        if here and rng.random() < LEAVING:
            side.withdraw(here[int(rng.integers(len(here)))])
        seen.update(repr(side.step()).encode())
        clock += 1
    return seen.hexdigest()[:16]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_decisions_are_as_ever(name):
    assert digest(name) == json.loads(GOLDEN.read_text(encoding="utf-8"))[name]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["0", "1"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["preemption 1", "partial_chunks 5 ahead"], id="two"),
        pytest.param(list(CASES), id="all", marks=pytest.mark.nightly),
    ],
)
def test_decisions_are_the_same_with_and_without_kernels(names, compiled):
    said = subprocess.run(
        [sys.executable, "-m", "tests.golden.test_decisions", *names],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TWINSERVE_NATIVE": compiled},
        capture_output=True,
        text=True,
        check=True,
    )
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert json.loads(said.stdout) == {name: kept[name] for name in names}


if __name__ == "__main__":
    found = {name: digest(name) for name in sys.argv[1:] or CASES}
    if sys.argv[1:]:
        sys.exit(print(json.dumps(found)))
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
