"""A decision log is executed by a real engine: vLLM schedules exactly what was decided, and its
memory is the ledger's."""

import contextlib

import pytest

from tests.identity.release import installed_release
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.sim.results.decisions import DecisionLog, read_log
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import settings_for
from twinserve.sim.twin.replay import LockedReplay, replay_locked

pytestmark = [pytest.mark.slow, pytest.mark.live]


def logged(settings: dict, folder) -> DecisionLog:
    inputs = resolve(SimulationConfig(**settings))
    result = run_policy(inputs, inputs.policies[0], decisions=True)
    return read_log(write_run(folder, result) / "decisions.jsonl.gz")


def locked(log: DecisionLog, model) -> LockedReplay:
    with contextlib.closing(
        VllmEngine(
            settings_for(
                log.run, log.longest, log.step_tokens, LiveSettings(model, None, 0, 0, 0, 0)
            )
        )
    ) as engine:
        return replay_locked(log, engine)


@pytest.fixture(scope="module")
def vllm_log(vllm, tmp_path_factory) -> DecisionLog:
    """Shared prompts, evictions, preemptions: policy vllm, with the rules of the engine's release,
    on a pool that is too small for the embedded Mooncake replica."""
    settings = {
        "policy": (f"vllm:release={installed_release()}",), "trace": "mooncake", "offline": True,
        "rate_scale": 30.0, "requests": 80, "cap_length": 360, "num_blocks": 40, "block_tokens": 32,
        "max_num_seqs": 12, "max_num_batched_tokens": 192, "async_scheduling": False,
    }  # fmt: skip
    return logged(settings, tmp_path_factory.mktemp("run") / "vllm")


def test_a_locked_replay_does_what_was_decided_and_memory_agrees(vllm_log, model):
    found = locked(vllm_log, model)
    assert found.drift == 0, found.first_drift
    assert found.free_blocks_differ == 0
    assert found.evictions > 100
    assert sum(hit > 0 for step in vllm_log.steps for hit in step.admitted.values()) > 10
    assert sum(len(step.preempted) for step in vllm_log.steps) > 10
    assert {name: len(tokens) for name, tokens in found.tokens.items()} == {
        request.id: request.output_tokens for request in vllm_log.requests
    }


def test_a_plan_that_vllm_would_not_take_is_counted_as_drift(vllm_log, model):
    """One admission is said to find a prefix that nobody has."""
    step = next(step for step in vllm_log.steps if 0 in step.admitted.values())
    row = next(row for row, hit in step.admitted.items() if hit == 0)
    step.admitted[row] = 32
    try:
        found = locked(
            DecisionLog(
                vllm_log.run, vllm_log.requests, vllm_log.steps[: vllm_log.steps.index(step) + 1]
            ),
            model,
        )
    finally:
        step.admitted[row] = 0
    assert found.drift == 1
    assert "32 prefix tokens planned, 0 found" in found.first_drift
