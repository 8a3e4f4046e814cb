"""Clients that wait no longer, on a real engine: it forgets their requests when the policy does,
whatever they were doing, and nobody else can tell."""

import contextlib
from collections.abc import Iterator
from itertools import product

import pandas as pd
import pytest

from tests.live.test_twin import Bench, inputs_for, same_up_to_a_tie
from tests.parameters import SOME_POLICIES, mostly_nightly_pairs
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.engine.tiny_model import VOCAB
from twinserve.policies.registry import policy_names
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import LiveRun
from twinserve.sim.twin.replay import replay_locked, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.live]

# with more, memory is set aside for so much text that nobody loses any
CROWDED = {"tgi": "tgi:max_new_tokens=12"}
POLICIES = [
    *(CROWDED.get(name, name) for name in policy_names()),
    "vllm-v0:preemption_mode=swap",
    "bros:chunk=48",
    "bros:chunk=fit",
]


@pytest.fixture(scope="module")
def bench(model) -> Iterator[Bench]:
    with contextlib.closing(
        VllmEngine(
            LiveSettings(model, 400, 32, 16, 2400, 200, prefix_caching=True, swap_blocks=200)
        )
    ) as engine:
        yield Bench(engine, {})


# Seconds after which some have been answered and some have not.
PATIENCE = {"preemptive-wait": 1.5, "layerkv": 0.5}


def impatient(policy: str, asynchronous: bool) -> Inputs:
    patience = PATIENCE.get(policy, 0.8)
    return inputs_for(policy, client_timeout=patience, exact=True, async_scheduling=asynchronous)


def of_workload(inputs: Inputs) -> tuple[list[str], list[int]]:
    """Names, and how many tokens each request would have."""
    return inputs.workload.ids, inputs.workload.output_tokens.tolist()


def fresh(bench: Bench) -> VllmEngine:
    for name in list(bench.engine.scheduler.requests):  # of a test that failed
        bench.engine.abort(name)
    bench.engine.forget_prefixes()
    bench.engine.scheduler.forget_counts()
    return bench.engine


def check(bench: Bench, run: LiveRun, requests: pd.DataFrame) -> None:
    """Each answer is what the request would have been told alone, up to where its client left. The
    token of a step that was under way then is nobody's."""
    texts, answers = PromptTexts(VOCAB, 32), tokens_of(run.answers)
    whole = dict(zip(*of_workload(run.inputs), strict=True))
    outputs = requests.set_index("request_id")["output_tokens"]
    for request in run.engines[0].core.requests:
        told = answers.get(request.id, [])
        under_way = len(told) - outputs[request.id]
        assert 0 <= under_way <= run.inputs.config.async_scheduling
        if told:
            prompt = texts.tokens(request.id, request.prompt_tokens, request.prefix)
            alone = bench.undisturbed(request.id, prompt, whole[request.id])
            same_up_to_a_tie(request.id, told, alone)


@pytest.mark.parametrize(
    ("policy", "asynchronous"),
    mostly_nightly_pairs(product(POLICIES, [False, True]), *SOME_POLICIES),
)
def test_an_engine_forgets_whom_the_policy_forgets(bench, policy, asynchronous):
    """Row for row the simulated run, executed; answers of those who stayed are whole."""
    inputs = impatient(policy, asynchronous)
    engine = fresh(bench)
    run = LiveRun(inputs, inputs.policies[0], engine, wall=False, predicted=True)
    run.run()
    assert engine.scheduler.drift == 0, engine.scheduler.first_drift
    assert not engine.scheduler.requests, "the engine still has requests"
    rows = run.rows()
    simulated = run_policy(inputs, inputs.policies[0], decisions=True)
    for table in ("requests", "steps", "gaps"):
        pd.testing.assert_frame_equal(
            getattr(rows, table), getattr(simulated.rows, table), check_exact=True
        )
    outcomes = rows.requests["outcome"].value_counts()
    assert outcomes["timed_out"] >= 3 and outcomes["completed"] >= 1
    check(bench, run, rows.requests)
    log = parse_log(simulated.decisions)
    whole = rows.requests["request_id"].map(dict(zip(*of_workload(inputs), strict=True)))
    cut = (rows.requests["output_tokens"] < whole).sum()  # some got their last token just too late
    assert sum(len(step.withdrawn) for step in log.steps) + len(log.withdrawn) == cut >= 3
    found = replay_locked(log, fresh(bench))
    assert found.drift == 0, found.first_drift
    assert not engine.scheduler.requests
    assert found.tokens == {name: t for name, t in tokens_of(run.answers).items() if t}
