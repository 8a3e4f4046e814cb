"""Where the log of an emulated engine parts from the simulated one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinserve.sim.results.decisions import DecisionLog, LoggedRequest, LoggedStep
from twinserve.sim.twin.validate_emulated import parted

REQUESTS = [LoggedRequest("a", 0.0, 4, 2, None), LoggedRequest("b", 0.0, 4, 2, None)]
STEP = LoggedStep(0.5, 0.1, {0: 1, 1: 4}, {1: 0}, (), (), 7)


def log(*steps: LoggedStep) -> DecisionLog:
    return DecisionLog({}, REQUESTS, list(steps))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grants": {0: 1, 1: 3}}, "b computes 4 tokens in the simulation, 3 under vLLM"),
        ({"grants": {0: 1}}, "b computes 4 tokens in the simulation, 0 under vLLM"),
        ({"admitted": {}}, "admitted {1: 0} in the simulation, {} under vLLM"),
        ({"free_blocks": 6}, "free blocks 7 in the simulation, 6 under vLLM"),
        ({"seconds": 0.2}, "seconds 0.1 in the simulation, 0.2 under vLLM"),
    ],
)
def test_the_first_difference_is_named(change, said):
    line = parted(log(STEP, STEP), log(STEP, replace(STEP, **change)))
    assert line == f"step 1 at 0.500000 s: {said}"


def test_equal_logs_do_not_part_whatever_the_order_of_a_batch():
    assert parted(log(STEP), log(replace(STEP, grants={1: 4, 0: 1}))) == ""
    assert parted(log(STEP, STEP), log(STEP)) == "2 steps were simulated, and vLLM made 1"
