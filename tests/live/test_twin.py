"""Every policy on every ledger drives a real engine: vLLM schedules exactly its plans, and no request can tell from its
answer what was done to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from twinserve.backends.live.engine import LiveSettings, VllmEngine
from twinserve.backends.live.planned import PlannedStep
from twinserve.backends.live.prompts import PromptTexts
from twinserve.backends.live.tiny_model import VOCAB, write_model
from twinserve.policies.registry import ledger_names, policy_names
from twinserve.policies.requests import RequestClass
from twinserve.sim.config import SimulationConfig
from twinserve.sim.inputs import Inputs, resolve
from twinserve.sim.live import LiveRun, live_settings
from twinserve.sim.replay import tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.live]

# A third of the memory that the requests would take together, so that everybody loses it some time.
SETTINGS = {
    "trace": "poisson",
    "rate": 300.0,
    "requests": 24,
    "cap_length": 180,
    "num_blocks": 26,
    "block_tokens": 32,
    "host_blocks": 200,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 192,
    "slo": "ttft=0.02,tpot=0.02",
}
# Sums of float32 taken in another order may turn an argmax with a smaller margin than this (log probability).
TIE = 1e-4


def inputs_for(policy: str, **changes) -> Inputs:
    """Every third request is best-effort."""
    inputs = resolve(SimulationConfig(**{**SETTINGS, "policy": (policy,), **changes}))
    workload = inputs.workload
    klass = np.where(np.arange(len(workload)) % 3 == 2, RequestClass.BEST_EFFORT, RequestClass.REAL_TIME)
    return replace(inputs, workload=replace(workload, klass=klass.astype(workload.klass.dtype)))


@dataclass
class Bench:
    """One engine with more memory than any run needs, and the answers it gives to requests that have it to themselves."""

    engine: VllmEngine
    alone: dict[str, tuple[list[int], list[float]]]

    def undisturbed(self, name: str, prompt: list[int], output_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens, and the margin of each: log probability of the best less that of the second best."""
        if name not in self.alone:
            self.engine.forget_prefixes()
            self.engine.submit(name, prompt, output_tokens, logprobs=2)
            tokens, margins, grant = [], [], len(prompt)
            while len(tokens) < output_tokens:
                answer = self.engine.step(PlannedStep({name: grant}))
                tokens += answer.tokens[name]
                best = sorted(answer.logprobs[name].values(), reverse=True)
                margins.append(best[0] - best[1])
                grant = 1
            self.alone[name] = tokens, margins
        return self.alone[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def own_pool_run(vllm, model) -> LiveRun:
    """Policy vllm in wall time on a pool of exactly the ledger's size. A process has room for one engine at a time: this
    one is gone before the bench is set up."""
    inputs = inputs_for("vllm")
    engine = VllmEngine(live_settings(inputs, inputs.policies[0], LiveSettings(model, None, 0, 0, 0, 0)))
    try:
        assert engine.num_blocks == SETTINGS["num_blocks"]
        run = LiveRun(inputs, inputs.policies[0], engine, wall=True)
        run.run()
        assert engine.scheduler.drift == 0, engine.scheduler.first_drift
    finally:
        engine.close()
    return run


@pytest.fixture(scope="module")
def bench(own_pool_run, model) -> Iterator[Bench]:
    engine = VllmEngine(LiveSettings(model, 400, 32, 16, 2400, 200, prefix_caching=True, swap_blocks=200))
    try:
        yield Bench(engine, {})
    finally:
        engine.close()


def live_run(bench: Bench, policy: str, **changes) -> LiveRun:
    inputs = inputs_for(policy, **changes)
    bench.engine.forget_prefixes()
    bench.engine.scheduler.forget_counts()
    run = LiveRun(inputs, inputs.policies[0], bench.engine, wall=False)
    run.run()
    return run


def check_answers(bench: Bench, run: LiveRun) -> int:
    """Compare every answer with that of the undisturbed request; returns how many tokens were compared."""
    answers = tokens_of(run.answers)
    requests, texts = run.engines[0].core.requests, PromptTexts(VOCAB, 32)
    compared = 0
    for request in requests:
        prompt = texts.tokens(request.id, request.prompt_tokens, request.prefix)
        expected, margins = bench.undisturbed(request.id, prompt, request.output_tokens)
        told = answers[request.id]
        assert len(told) == len(expected)
        tie = next((i for i, margin in enumerate(margins) if margin < TIE), len(margins))
        assert told[:tie] == expected[:tie], f"{request.id} was told something else"
        compared += tie
    return compared


CROWDED = {"tgi": "max_new_tokens=12,"}  # with more, memory is set aside for so much text that nobody loses any
POLICIES = [f"{policy}:{CROWDED.get(policy, '')}kv={kv}" for policy in policy_names() for kv in ledger_names()] + [
    "vllm-v0:preemption_mode=swap",
    "bros:chunk=48",
    "bros:swap=false",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_do_not_depend_on_the_policy(bench, policy):
    run = live_run(bench, policy)
    rows = run.rows().requests
    assert rows["finished"].all()
    assert bench.engine.scheduler.drift == 0, bench.engine.scheduler.first_drift
    lost = rows[["recomputes", "swaps", "swapped_tokens"]].to_numpy().sum()
    assert lost > 0, "nobody lost any memory: the run shows nothing"
    tokens = int(rows["output_tokens"].sum())
    assert check_answers(bench, run) > 0.95 * tokens
    run.engines[0].core.ledger.check()


def test_the_answers_are_worth_comparing(bench):
    """They are not one token again and again, and they depend on the KV that was computed."""
    run = live_run(bench, "bros")
    check_answers(bench, run)
    assert min(len(set(tokens)) for tokens, _ in bench.alone.values() if len(tokens) > 20) > 5


def test_a_swap_that_loses_the_kv_is_seen(bench, monkeypatch):
    """What comes back from the host is zeros: the answers change."""
    from twinserve.backends.live.kv_transfer_copy import SlotCopier

    monkeypatch.setattr(SlotCopier, "_from_host", lambda self, rows, into: into.zero_())
    run = live_run(bench, "bros")
    assert run.rows().requests["swaps"].sum() > 0
    with pytest.raises(AssertionError, match="told something else"):
        check_answers(bench, run)


def test_policy_vllm_runs_in_wall_time_on_a_pool_of_its_own_size(own_pool_run, bench):
    rows = own_pool_run.rows()
    assert rows.requests["finished"].all() and rows.requests["recomputes"].sum() > 0
    steps = rows.steps
    assert (steps["end_s"] > steps["start_s"]).all()
    assert (steps["start_s"].to_numpy()[1:] >= steps["end_s"].to_numpy()[:-1]).all()
    tokens = int(rows.requests["output_tokens"].sum())
    assert check_answers(bench, own_pool_run) > 0.95 * tokens
