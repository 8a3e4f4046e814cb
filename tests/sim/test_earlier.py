"""What predictors learn from before a run: requests of the same trace, none of which is served."""

import numpy as np
import pytest

from twinserve.policies.layerkv.lengths import LengthRange
from twinserve.policies.requests import RequestTable
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation

SETTINGS = {"offline": True, "profile": "llama-3.1-8b@h100", "async_scheduling": True}


def inputs(policy: str = "layerkv", **settings):
    return resolve(SimulationConfig(policy=(policy,), **(SETTINGS | settings)))


@pytest.fixture(scope="module")
def file_of_200(tmp_path_factory):
    """Arrivals a second apart; prompts 1000, 1001, .., so that each row can be told."""
    file = tmp_path_factory.mktemp("trace") / "own.csv"
    rows = [f"2023-11-16 18:{i // 60:02d}:{i % 60:02d},{1000 + i},{10 + i}" for i in range(200)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return str(file)


def test_of_a_recorded_trace_no_request_is_both_served_and_learned_from(file_of_200):
    found = inputs(trace=file_of_200, requests=80)
    served, learned = found.workload.prompt_tokens, found.earlier.prompt_tokens
    assert len(served) == 80 and len(learned) == 120
    assert not set(served.tolist()) & set(learned.tolist())
    assert (found.earlier.output_tokens == learned - 990).all()


def test_where_too_few_are_left_it_is_said(file_of_200):
    found = inputs(trace=file_of_200, requests=190)
    assert found.earlier is None
    assert sum("too few requests" in line for line in found.notices) == 1


def test_of_a_generated_trace_it_is_another_draw_of_the_same_kind():
    found = inputs(trace="sharegpt", rate=2.0, requests=300, seed=3)
    assert len(found.earlier.prompt_tokens) == 1000
    served = found.workload.prompt_tokens
    assert not np.array_equal(found.earlier.prompt_tokens[:300], served)
    assert found.earlier.prompt_tokens.mean() == pytest.approx(served.mean(), rel=0.4)
    fixed = inputs(trace="fixed:2048,512", rate=1.0, requests=10).earlier
    assert set(fixed.prompt_tokens) == {2048} and set(fixed.output_tokens) == {512}


def test_only_who_asks_for_it_gets_it():
    for policy in ("vllm", "layerkv:predictor=history", "layerkv:predictor=oracle-length"):
        assert inputs(policy, trace="fixed:64,8", rate=1.0, requests=5).earlier is None


def test_the_predictor_knows_before_the_first_request():
    found = inputs(trace="fixed:2048,512", rate=1.0, requests=10)
    policy = Simulation(found, found.policies[0]).engines[0].core.policy
    table = RequestTable()
    table.submit("r0", prompt_tokens=2048)
    assert policy.predictor.predict(0, table) == LengthRange(512, 512, 512)
