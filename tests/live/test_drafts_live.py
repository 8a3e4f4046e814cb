"""vLLM's own n-gram drafts on a live engine: every policy that drafts plans with as many as the
proposer found for each request, no answer changes, and the run is carried out again to the letter
by the engine, and decision for decision by the simulator."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.commands import status
from tests.live.test_twin import Bench, same_up_to_a_tie
from tests.live.twin_workloads import CROWDED
from tests.parameters import mostly_nightly
from twinserve.backends.live.engine.engine import LiveSettings, StepAnswer, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.engine.tiny_model import VOCAB
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import policy_class, policy_for, policy_names
from twinserve.sim.cli.main import main
from twinserve.sim.results.decisions import DecisionLog, parse_log, read_log
from twinserve.sim.results.files import RunResult, write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import run_policy, run_simulation
from twinserve.sim.twin.live import LiveRun
from twinserve.sim.twin.replay import replay_locked, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.live]

TIGHT, WIDE = 26, 300  # KV blocks: a third of what the requests would take together, and all
SETTINGS = CROWDED | {"slo": "ttft=0.02,tpot=0.02"}
NGRAMS = "k=3,method=ngram,lookup=1-3"
DRAFTING = [
    name if policy_class(name).default_kv == "paged" else f"{name}:kv=paged"
    for name in policy_names()
    if policy_for("drafts", policy_class(name)) is not None
]
# the others take minutes
IN_CI = (("vllm", TIGHT), ("kv-share", WIDE))


def inputs_for(policy: str, blocks: int, acceptance: str = "acceptance=0.5") -> Inputs:
    """acceptance: which drafts are right in a simulation; no live engine asks."""
    config = {"policy": (policy,), "num_blocks": blocks, "speculate": f"{NGRAMS},{acceptance}"}
    return resolve(SimulationConfig(**SETTINGS | config))


@pytest.fixture(scope="module")
def undisturbed(vllm, model) -> dict[str, tuple[list[int], list[float]]]:
    return answers_alone(model)


def answers_alone(model: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Answers of an engine without speculation to requests that have it to themselves, and margins
    of their tokens. A process has room for one engine at a time."""
    texts = PromptTexts(VOCAB, 32)
    workload = inputs_for("vllm", TIGHT).workload
    parts = zip(workload.ids, workload.prompt_tokens, workload.output_tokens, strict=True)
    settings = LiveSettings(model, 400, 32, 16, 2400, 200, prefix_caching=True)
    with contextlib.closing(VllmEngine(settings)) as engine:
        bench = Bench(engine, {})
        for name, prompt, output in parts:
            bench.undisturbed(name, texts.tokens(name, int(prompt)), int(output))
    return bench.alone


def engine_with_drafts(model: Path) -> VllmEngine:
    """It looks n-grams up, and has the room that the widest run asks for; a step of bros may exceed
    the budget by a whole prompt."""
    return VllmEngine(
        LiveSettings(
            model, WIDE + 60, 32, 48, 195 + 187, 187, prefix_caching=True, drafts=3, lookup=(1, 3)
        )
    )


@pytest.fixture(scope="module")
def engine(undisturbed, model) -> Iterator[VllmEngine]:
    with contextlib.closing(engine_with_drafts(model)) as engine:
        yield engine


@contextlib.contextmanager
def with_blocks(engine: VllmEngine, blocks: int) -> Iterator[None]:
    """Of the pool only so many, and nothing is left of what ran before."""
    for name in list(engine.scheduler.requests):  # of a run that failed
        engine.abort(name)
    engine.forget_prefixes()
    engine.scheduler.forget_counts()
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(engine.num_blocks - blocks)
    try:
        yield
    finally:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        pool.free_blocks(taken)


def own_blocks(policy: str, blocks: int) -> int:
    """Of vLLM's pool: policy `vllm` allocates as vLLM does; under others it must never bind."""
    return blocks if policy == "vllm" else WIDE + 60


def live(
    engine: VllmEngine, inputs: Inputs, policy: str, blocks: int, predicted: bool = True
) -> tuple[LiveRun, RunResult]:
    with with_blocks(engine, own_blocks(policy, blocks)):
        run = LiveRun(
            inputs, inputs.policies[0], engine, wall=False, predicted=predicted, decisions=True
        )
        result = run_simulation(run)
    assert run.parted() == "" and engine.scheduler.drift == 0
    run.engines[0].core.ledger.check()
    return run, result


def check_answers(told: dict[str, list[int]], undisturbed) -> None:
    compared = 0
    for name, alone in undisturbed.items():
        assert len(told[name]) == len(alone[0])
        compared += same_up_to_a_tie(name, told[name], alone)
    assert compared > 0.95 * sum(len(expected) for expected, _ in undisturbed.values())


def decisions(log: DecisionLog) -> list[tuple]:
    return [(s.grants, s.admitted, s.preempted, s.verified, s.free_blocks) for s in log.steps]


@pytest.mark.parametrize(
    ("policy", "blocks"), mostly_nightly(product(DRAFTING, [TIGHT, WIDE]), *IN_CI)
)
def test_drafts_change_no_answer_and_are_replayed(engine, undisturbed, policy, blocks, tmp_path):
    run, result = live(engine, inputs_for(policy, blocks), policy, blocks)
    told = tokens_of(run.answers)
    check_answers(told, undisturbed)
    log = parse_log(result.decisions)
    assert (sum(len(step.preempted) for step in log.steps) > 3) is (blocks == TIGHT)
    seen = [part for step in log.steps for part in (step.verified or {}).values()]
    assert {drafts for drafts, _, _ in seen} == {0, 1, 2, 3}
    assert sum(right for _, right, _ in seen) > 20
    assert sum(drafts - right for drafts, right, _ in seen) > 100

    with with_blocks(engine, own_blocks(policy, blocks)):
        locked = replay_locked(log, engine)
    assert not locked.parted and locked.drift == 0, locked.parted
    assert locked.tokens == told
    if policy == "vllm":
        assert locked.free_blocks_differ == 0

    recorded = inputs_for(policy, blocks, f"recorded={write_run(tmp_path / 'live', result)}")
    simulated = run_policy(recorded, recorded.policies[0], decisions=True)
    assert decisions(parse_log(simulated.decisions)) == decisions(log)
    for name in ("requests", "steps"):
        theirs, ours = (getattr(one.rows, name) for one in (result, simulated))
        pd.testing.assert_frame_equal(theirs, ours, check_exact=True)
    assert simulated.summary["speculation"] == result.summary["speculation"]


def test_on_measured_times_the_simulator_decides_the_same(engine, undisturbed, tmp_path):
    """All requests are there from the start, so that no decision depends on how long steps take."""
    at_once = [
        replace(inputs, workload=replace(inputs.workload, arrival_s=np.zeros(24)))
        for inputs in [inputs_for("vllm", TIGHT)]
    ]
    run, result = live(engine, at_once[0], "vllm", TIGHT, predicted=False)
    check_answers(tokens_of(run.answers), undisturbed)
    recorded = inputs_for("vllm", TIGHT, f"recorded={write_run(tmp_path / 'live', result)}")
    recorded = replace(recorded, workload=at_once[0].workload)
    simulated = run_policy(recorded, recorded.policies[0], decisions=True)
    assert decisions(parse_log(simulated.decisions)) == decisions(parse_log(result.decisions))


def test_a_rejected_token_that_is_booked_as_accepted_is_caught(engine, monkeypatch):
    """One draft of the first step that rejects some counts as right."""
    step, broken = engine.step, []

    def wrong(planned) -> StepAnswer:
        answer = step(planned)
        for name, drafts in answer.scheduled.drafts.items():
            if not broken and answer.accepted[name] < drafts and name not in answer.finished:
                answer.accepted[name] += 1
                broken.append(name)
        return answer

    monkeypatch.setattr(engine, "step", wrong)
    with pytest.raises(LiveEngineError, match="tokens of a step are booked, and the engine gave"):
        live(engine, inputs_for("vllm", TIGHT), "vllm", TIGHT)
    assert len(broken) == 1


@pytest.mark.nightly
def test_a_log_in_which_a_rejected_token_is_right_is_not_carried_out(engine):
    _, result = live(engine, inputs_for("vllm", TIGHT), "vllm", TIGHT)
    log = parse_log(result.decisions)
    number, row = next(
        (i, row)
        for i, step in enumerate(log.steps)
        for row, (drafts, right, _) in (step.verified or {}).items()
        if right < drafts
    )
    drafts, right, found = log.steps[number].verified[row]
    log.steps[number].verified[row] = drafts, right + 1, found
    with with_blocks(engine, TIGHT):
        locked = replay_locked(log, engine)
    assert locked.drift == 1 and f"{right + 1} of {drafts} drafts logged" in locked.first_drift


def command(*words: str) -> None:
    assert not status(main, words)


def test_commands(vllm, tmp_path, capsys):
    """simulate, a free replay with real drafts, its locked replay, and its simulation."""
    run, live_, again = (str(tmp_path / name) for name in ("run", "live", "again"))
    options = (
        "-t poisson --rate 300 --requests 6 --cap-length 100 --num-blocks 20 --block-tokens 32 "
        "--max-num-seqs 4 --max-num-batched-tokens 64 --no-async-scheduling"
    ).split()
    simulated = ["simulate", *options, "--quiet", "--speculate"]
    command(*simulated, f"{NGRAMS},acceptance=0.5", "--out", run)
    free = ["--mode", "free", "--pace", "measured", "--decisions", "--out", live_]
    command("replay", run, "--model", "tiny", "--quiet", *free)
    told = json.loads((tmp_path / "live" / "run.json").read_text())["live"]
    assert told["drift"] == 0 and told["drafts"] == {"most": 3, "lookup": [1, 3]}
    capsys.readouterr()
    command("replay", live_, "--model", "tiny", "--json")
    locked = json.loads(capsys.readouterr().out)
    assert locked["drift"] == 0 and locked["parted"] == "" and locked["free_blocks_differ"] == 0
    log = read_log(tmp_path / "live" / "decisions.jsonl.gz")
    assert locked["steps"] == len(log.steps)
    assert max(part[0] for step in log.steps for part in (step.verified or {}).values()) == 3
    command(*simulated, f"{NGRAMS},recorded={live_}", "--out", again)
