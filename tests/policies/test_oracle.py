"""`predictor=oracle-length`: the truth comes in by this door, which says that it is a bound, and by
no other."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.policies.policy_runs import BY_HAND
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.layerkv.lengths import LengthRange, TrueLength
from twinserve.policies.names import RegistryError
from twinserve.policies.parts.predictors import DemandOptions, make_predictor
from twinserve.policies.registry import parse_policy, policy_names
from twinserve.policies.requests import RequestTable
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.traces.workload import BestEffortPool, Workload

# Policies that predict how long outputs will be. Echo predicts memory and arrivals, and so has no
# use for it.
PREDICTING = ("justitia", "layerkv", "srjf", "vllm-sjf")
ROOT = Path(__file__).parents[2]
LENGTHS = [30, 5, 20, 10]


@pytest.mark.parametrize("name", PREDICTING)
def test_the_bound_is_asked_for_by_name_and_recorded(name):
    for word in ("oracle", "oracle-length"):
        spec = parse_policy(f"{name}:predictor={word}")
        policy = spec.build(EngineLimits(), 0)
        assert (
            spec.options
            == {"predictor": "oracle-length"}
            == {"predictor": policy.options.predictor}
        )
        assert policy.predictor.needs_truth and policy.predictor.truth is None


@pytest.mark.parametrize("name", policy_names())
def test_no_policy_is_told_the_truth_unasked(name):
    predictor = parse_policy(name).build(EngineLimits(), BY_HAND).predictor
    assert predictor is None or not predictor.needs_truth
    assert (predictor is not None) >= (name in PREDICTING)


@pytest.mark.slow
def test_no_policy_reaches_for_the_truth_by_itself():
    for file in (ROOT / "policies").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {node.module or "", *(alias.name for alias in node.names)}
                assert not any(
                    name.endswith("apps.truth") or name == "TrueDemand" for name in names
                ), file


def inputs_of(policy: str, outputs=LENGTHS, **changes):
    """Four requests at once, one seat: no applications, no classes."""
    settings = dict(
        trace="poisson", requests=1, rate=1.0, max_num_seqs=1, profile="llama-2-7b@l20", seed=1
    )
    inputs = resolve(SimulationConfig(policy=(policy,), **settings))
    n = len(outputs)
    return replace(inputs, workload=Workload.build(np.zeros(n), np.full(n, 16), outputs, **changes))


def order(policy: str, **changes) -> list[int]:
    """Output lengths in the order in which requests ended, the pool's as well."""
    inputs = inputs_of(policy, **changes)
    result = run_policy(inputs, inputs.policies[0])
    assert result.config["policy"]["options"]["predictor"] == inputs.policies[0].options.get(
        "predictor", "class-mean"
    )
    return result.rows.requests.sort_values("last_token_s").output_tokens.tolist()


def test_it_works_on_any_requests_and_only_it_knows_their_lengths():
    assert order("vllm-sjf:predictor=oracle-length") == sorted(LENGTHS)
    assert order("srjf:predictor=oracle") == sorted(LENGTHS)
    assert order("justitia:predictor=oracle-length") == sorted(LENGTHS)
    assert order("vllm-sjf:error=0") == LENGTHS  # as they came


def test_it_knows_the_pool():
    pool = BestEffortPool(3, (4, 16), (2, 12), until_s=0.0)
    assert order("vllm-sjf:predictor=oracle", pool=pool) == sorted(
        [*LENGTHS, *pool.draw(0)[1].tolist()]
    )


def test_a_bound_has_no_error():
    with pytest.raises(
        RegistryError,
        match="oracle-length is a bound and has no error; write predictor=perfect,error=0.5",
    ):
        parse_policy("justitia:predictor=oracle,error=0.5")
    assert parse_policy("justitia:predictor=oracle,error=0").options["predictor"] == "oracle-length"


def test_layerkv_is_told_the_length_itself():
    table = RequestTable()
    table.submit("r0", prompt_tokens=9)
    predictor = TrueLength()
    with pytest.raises(PolicyError, match="predictor=oracle-length: this engine does not know"):
        predictor.predict(0, table)
    predictor.truth = type(
        "Truth", (), {"output_tokens": lambda self, name: 77 if name == "r0" else None}
    )()
    found = predictor.predict(0, table)
    assert found == LengthRange(77, 77, 77)
    assert found.left(70) == 7 and found.left(77) == np.inf
    table.submit("somebody", prompt_tokens=9)
    assert predictor.predict(1, table) == LengthRange()


def test_an_engine_that_does_not_know_says_so():
    with pytest.raises(PolicyError, match="predictor=oracle-length: this engine does not know"):
        make_predictor(DemandOptions(predictor="oracle-length")).prepare([], lambda p, d: d)
