"""Every value of every policy's runs is what it was when golden.json was written (golden_runs.py
says how to write it).

A golden file alone would keep a wrong value for ever: the rules that the same runs must keep are
asked for in tests/policies/test_policies_on_ledgers.py and tests/sim/test_invariants.py.
"""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.golden.golden_runs import GOLDEN, POLICIES, cases, crowded, differing, digests

KEPT = json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_file_has_each_policy():
    assert sorted(KEPT["runs"]) == sorted(POLICIES)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_of_the_file_is_as_ever(policy):
    """Of each policy the next one of its list."""
    number = POLICIES.index(policy) % sum(name.startswith("crowd") for name in KEPT["runs"][policy])
    name, inputs = next(islice(cases(policy), number, None))
    assert digests(inputs, KEPT["columns"]) == KEPT["runs"][policy][name], name


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_every_run_of_the_file_is_as_ever(policy):
    assert differing(policy, KEPT) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        # The oldest kernels of numpy's BLAS, and two threads: what np.dot sums up in another order.
        {"OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "2"},
        {"TWINSERVE_NATIVE": "0"},
        {"TWINSERVE_NATIVE": "1"},
    ],
)
def test_another_processor_and_other_kernels_count_the_same(changes):
    said = subprocess.run(
        [sys.executable, "-m", "tests.golden.golden_runs", "vllm", "bros", "echo"],
        cwd=Path(__file__).parents[2],
        env=os.environ | changes,
        capture_output=True,
        text=True,
    )
    assert said.stdout.splitlines() == ["vllm same", "bros same", "echo same"], said.stderr


def test_a_changed_bit_is_found():
    digest = digests(crowded("vllm"), KEPT["columns"])
    other = digests(crowded("vllm", max_num_batched_tokens=100), KEPT["columns"])
    assert digest["steps"] != other["steps"]
