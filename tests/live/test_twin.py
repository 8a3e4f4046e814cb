"""Every policy on every ledger drives a real engine: vLLM schedules exactly its plans, and no
request can tell from its answer what was done to it. So it is with task graphs, stage by stage, and
with questions on shared documents."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import pytest

from tests.live.twin_workloads import BLOCK, in_turn_inputs, inputs_of
from tests.parameters import SOME_POLICIES, in_turn, mostly_nightly
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.engine.tiny_model import VOCAB
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.plan import HOST
from twinserve.policies.registry import ledger_names, policy_names
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import LiveRun, live_settings
from twinserve.sim.twin.replay import tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.live]

# A third of the memory that the requests would take together, so that everybody loses it some time.
SETTINGS = {"num_blocks": 26, "host_blocks": 200, "slo": "ttft=0.02,tpot=0.02"}
# Sums of float32 taken in another order may turn an argmax with a smaller margin than this (log
# probability).
TIE = 1e-4


def inputs_for(policy: str, **changes) -> Inputs:
    """Every third request is best-effort."""
    return in_turn_inputs(policy, 3, **{**SETTINGS, **changes})


@dataclass
class Bench:
    """One engine with more memory than any run needs, and the answers it gives to requests that
    have it to themselves."""

    engine: VllmEngine
    alone: dict[str, tuple[list[int], list[float]]]

    def undisturbed(
        self, name: str, prompt: list[int], output_tokens: int
    ) -> tuple[list[int], list[float]]:
        """Tokens, and the margin of each: log probability of the best less that of the second
        best."""
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


def same_up_to_a_tie(name: str, told: list[int], alone: tuple[list[int], list[float]]) -> int:
    """What a request was told is the beginning of what it is told alone. Return how many tokens
    were compared: those before the first tie."""
    expected, margins = alone
    tie = next((i for i, margin in enumerate(margins) if margin < TIE), len(margins))
    assert told[:tie] == expected[: len(told)][:tie], f"{name} was told something else"
    return tie


def told_as_alone(bench: Bench, requests, told: dict[str, list[int]]) -> int:
    """Compare every answer, whole, with that of the undisturbed request. Return how many tokens
    were compared."""
    texts, compared = PromptTexts(VOCAB, BLOCK), 0
    for request in requests:
        prompt = texts.tokens(request.id, request.prompt_tokens, request.prefix)
        alone = bench.undisturbed(request.id, prompt, request.output_tokens)
        assert len(told[request.id]) == len(alone[0])
        compared += same_up_to_a_tie(request.id, told[request.id], alone)
    return compared


@pytest.fixture(scope="module")
def own_pool_run(vllm, model) -> LiveRun:
    """Policy vllm in wall time on a pool of exactly the ledger's size. A process has room for one
    engine at a time: this one is gone before the bench is set up."""
    inputs = inputs_for("vllm")
    with contextlib.closing(
        VllmEngine(live_settings(inputs, inputs.policies[0], LiveSettings(model, None, 0, 0, 0, 0)))
    ) as engine:
        assert engine.num_blocks == SETTINGS["num_blocks"]
        run = LiveRun(inputs, inputs.policies[0], engine, wall=True)
        run.run()
        assert engine.scheduler.drift == 0, engine.scheduler.first_drift
    return run


@pytest.fixture(scope="module")
def bench(own_pool_run, model) -> Iterator[Bench]:
    with contextlib.closing(
        VllmEngine(
            LiveSettings(model, 400, 32, 16, 2400, 200, prefix_caching=True, swap_blocks=200)
        )
    ) as engine:
        yield Bench(engine, {})


def live_run(bench: Bench, inputs: Inputs, predicted: bool = False) -> LiveRun:
    bench.engine.forget_prefixes()
    bench.engine.scheduler.forget_counts()
    run = LiveRun(inputs, inputs.policies[0], bench.engine, wall=False, predicted=predicted)
    run.run()
    return run


def check_answers(bench: Bench, run: LiveRun) -> int:
    return told_as_alone(bench, run.engines[0].core.requests, tokens_of(run.answers))


def same_answers(bench: Bench, run: LiveRun) -> None:
    """The run ended without drift, and hardly any token came after a tie."""
    rows = run.rows().requests
    assert rows["finished"].all()
    assert bench.engine.scheduler.drift == 0, bench.engine.scheduler.first_drift
    assert check_answers(bench, run) > 0.95 * rows["output_tokens"].sum()


def other_answers(bench: Bench, run: LiveRun) -> None:
    """Damage is seen in what requests were told."""
    run.run()
    with pytest.raises(AssertionError, match="told something else"):
        check_answers(bench, run)


@pytest.mark.nightly
def test_layers_that_the_engine_cannot_move_are_counted(bench):
    run = live_run(bench, inputs_for("layerkv:x=0,slo_aware=false"))
    found, steps = run.described(), run.rows().steps
    assert found["memory"] == "accounted" and found["drift"] == 0
    layers = found["not_made"]["layers"]
    assert layers["moves"] > 20 and layers["to_device_bytes"] > 0
    asked = run.backend.twin.moved
    for way in ("to_host_bytes", "to_device_bytes"):
        assert sum(counts[way] for counts in asked.values()) == steps[way].sum()
    # The engine copies whole requests, as often as they leave, and nothing else.
    swapped = int(run.rows().requests["swaps"].sum())
    assert sum(target == HOST for target, *_ in run.backend.transfers) == swapped
    assert set(found["not_made"]) == {"layers"}


# with more, memory is set aside for so much text that nobody loses any
CROWDED = {"tgi": "max_new_tokens=12,"}
OPTIONS = ["vllm-v0:preemption_mode=swap", "bros:chunk=48", "bros:chunk=fit", "bros:swap=false"]
PAIRS = [(policy, kv) for policy in policy_names() for kv in ledger_names()]


def specs(pairs: list[tuple[str, str]]) -> list[str]:
    named = [f"{policy}:{CROWDED.get(policy, '')}kv={kv}" for policy, kv in pairs]
    return named


POLICIES = specs(PAIRS) + OPTIONS
OF_EACH_KIND = [pair for pair in PAIRS if pair[0] in ("bros", *SOME_POLICIES)]
IN_CI = [*specs(in_turn(OF_EACH_KIND)), "bros:chunk=fit"]


@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, *IN_CI))
def test_answers_do_not_depend_on_the_policy(bench, policy):
    run = live_run(bench, inputs_for(policy))
    lost = run.rows().requests[["recomputes", "swaps", "swapped_tokens"]].to_numpy().sum()
    assert lost > 0, "nobody lost any memory: the run shows nothing"
    same_answers(bench, run)
    run.engines[0].core.ledger.check()


def test_the_answers_are_worth_comparing(bench):
    """They are not one token again and again, and they depend on the KV that was computed."""
    run = live_run(bench, inputs_for("bros"))
    check_answers(bench, run)
    assert min(len(set(tokens)) for tokens, _ in bench.alone.values() if len(tokens) > 20) > 5


def test_a_swap_that_loses_the_kv_is_seen(bench, monkeypatch):
    """What comes back from the host is zeros: the answers change."""
    from twinserve.backends.live.transfer.copy import SlotCopier

    monkeypatch.setattr(SlotCopier, "_from_host", lambda self, rows, into: into.zero_())
    run = live_run(bench, inputs_for("bros"))
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


# -- graphs and documents --------------------------------------------------------------------------
FAMILIES = (
    "justitia", "srjf", "vllm-sjf", "parrot", "vtc", "kv-share", "echo", "echo-bs", "echo-bs-e",
    "echo-bs-e-s", "vllm",
)  # fmt: skip


def checked_run(bench: Bench, name: str, policy: str) -> tuple[LiveRun, pd.DataFrame]:
    """The run and its requests. Its steps take as long as predicted, so that it is, row for row,
    the simulated run."""
    inputs = inputs_of(name, policy)
    run = live_run(bench, inputs, predicted=True)
    assert bench.engine.scheduler.drift == 0, bench.engine.scheduler.first_drift
    rows, simulated = run.rows(), run_policy(inputs, inputs.policies[0]).rows
    for table in ("requests", "steps", "gaps"):
        pd.testing.assert_frame_equal(
            getattr(rows, table), getattr(simulated, table), check_exact=True
        )
    requests = rows.requests
    assert requests["finished"].all() and len(requests) == len(inputs.workload)
    assert requests[["recomputes", "swaps"]].to_numpy().sum() > 0, (
        "nobody lost any memory: the run shows nothing"
    )
    assert check_answers(bench, run) > 0.95 * int(requests["output_tokens"].sum())
    run.engines[0].core.ledger.check()
    return run, requests


@pytest.mark.parametrize("policy", mostly_nightly(FAMILIES, "justitia", "parrot", "echo-bs"))
def test_stages_of_applications_follow_each_other(bench, policy):
    """In the rows, and in the order in which the engine gave its answers."""
    run, requests = checked_run(bench, "graphs", policy)
    steps: dict[str, list[int]] = {}  # request -> steps in which it was told something
    for i, answer in enumerate(run.answers):
        for request, tokens in answer.tokens.items():
            steps.setdefault(request, []).extend([i] * len(tokens))
    followed = 0
    for _, group in requests.groupby("group"):
        for stage in range(1, int(group["stage"].max()) + 1):
            before, here = group[group["stage"] == stage - 1], group[group["stage"] == stage]
            assert (here["arrival_s"] == before["last_token_s"].max()).all()
            assert min(steps[i][0] for i in here["request_id"]) > max(
                steps[i][-1] for i in before["request_id"]
            )
            followed += len(here)
    assert followed == int((run.inputs.workload.stage > 0).sum()) > 15


@pytest.mark.parametrize("policy", mostly_nightly(FAMILIES, "kv-share", "echo", "vllm"))
def test_questions_find_the_text_of_their_document(bench, policy):
    """Where vLLM's cache did not hold what the ledger said there would be drift."""
    _, requests = checked_run(bench, "documents", policy)
    asked = requests[requests["request_id"].str.contains("-doc")]
    # what they found was another one's
    undisturbed = asked[(asked["recomputes"] == 0) & (asked["swaps"] == 0)]
    assert (undisturbed["hit_tokens"] > 0).sum() >= 3


@pytest.mark.nightly
def test_another_text_is_seen(bench, monkeypatch):
    """Questions on one document whose texts differ all the same: vLLM finds nothing of what was
    planned."""
    inputs, drawn = inputs_of("documents", "echo"), PromptTexts.tokens
    with monkeypatch.context() as patched:
        patched.setattr(
            PromptTexts, "tokens", lambda self, name, n, prefix=None: drawn(self, name, n)
        )
        with pytest.raises(LiveEngineError, match="64 prefix tokens planned, 0 found"):
            live_run(bench, inputs, predicted=True)
    bench.engine._client.abort_requests(sorted(bench.engine.scheduler.requests))
    live_run(bench, inputs, predicted=True)
    assert bench.engine.scheduler.drift == 0
