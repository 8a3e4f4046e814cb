"""Live n-gram drafts of a model that repeats itself, so that many of them are right: answers stay
those without speculation, and runs are carried out again to the letter."""

from __future__ import annotations

import pytest

from tests.live.test_drafts_live import (
    TIGHT,
    WIDE,
    answers_alone,
    check_answers,
    decisions,
    engine_with_drafts,
    inputs_for,
    live,
    own_blocks,
    with_blocks,
)
from twinserve.backends.live.engine.tiny_model import write_model
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.replay import replay_locked, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.live]

# Of what a layer adds to a token. A token then hangs on the one before it, and hardly on the rest
# of the text, so that greedy answers run into cycles.
DEAFNESS = 0.1


@pytest.fixture(scope="module")
def chanting(tmp_path_factory):
    from safetensors.numpy import load_file, save_file

    folder = write_model(tmp_path_factory.mktemp("chanting_llama"))
    file = str(folder / "model.safetensors")
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * DEAFNESS
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def alone(vllm, chanting):
    return answers_alone(chanting)


@pytest.fixture(scope="module")
def engine(alone, chanting):
    engine = engine_with_drafts(chanting)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("blocks", [TIGHT, WIDE])
@pytest.mark.parametrize("policy", ["vllm", "bros:kv=paged", "vtc"])
def test_many_right_drafts_change_no_answer_and_are_replayed(
    engine, alone, policy, blocks, tmp_path
):
    run, result = live(engine, inputs_for(policy, blocks), policy, blocks)
    told = tokens_of(run.answers)
    check_answers(told, alone)
    log = parse_log(result.decisions)
    seen = [part for step in log.steps for part in (step.verified or {}).values()]
    drafts, right = (sum(part[i] for part in seen) for i in (0, 1))
    print(f"{policy}, {blocks} blocks: {right} of {drafts} drafts were right")
    assert right > 0.3 * drafts > 100
    with with_blocks(engine, own_blocks(policy, blocks)):
        locked = replay_locked(log, engine)
    assert not locked.parted and locked.drift == 0, locked.parted
    assert locked.tokens == told
    recorded = inputs_for(policy, blocks, f"recorded={write_run(tmp_path / 'live', result)}")
    simulated = run_policy(recorded, recorded.policies[0], decisions=True)
    assert decisions(parse_log(simulated.decisions)) == decisions(log)
