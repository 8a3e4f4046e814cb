"""The benchmark of decisions measures what it says; no figure is judged: that depends on the
machine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experiments.study_checks import quick_run, table
from twinserve.experiments.benchmark.measure import CpuTimed
from twinserve.experiments.decisions.main import (
    BATCH,
    FIRST,
    STUDY,
    SteadyQueue,
    settings,
    short_blocks,
)
from twinserve.policies.requests import State
from twinserve.sim.setup.inputs import resolve

out = quick_run(STUDY)


@pytest.mark.nightly
def test_every_policy_and_length_is_there(out):
    assert "not run" not in (out / "tables.md").read_text()
    queued = table(out, "queued")
    assert set(zip(queued.policy, queued.queued, strict=True)) == {
        (policy, n) for policy in FIRST["policy"] for n in (10, 100)
    }
    for found in (queued, table(out, "short")):
        assert (0 < found.ms).all() and (found.ms <= found.p99_ms).all()
    assert set(table(out, "whole").policy) == set(FIRST["policy"])


def test_the_state_is_steady():
    """A full batch, the queue as long as asked for, and somebody ends and arrives at almost every
    step."""
    state = SteadyQueue(resolve(settings("vllm")), 50)
    state.decide(160)
    requests = state.engine.core.requests
    assert set(state.batches[5:]) == {BATCH}  # the first prompts take a few steps
    # looked at within an instant: who ended is replaced at once, and may not be gone yet
    active = state.engine.core.active
    assert 0 <= active - (BATCH + 50) <= 2 and np.mean(state.waiting[1:]) == pytest.approx(
        50, abs=2
    )
    assert (requests.state == State.FINISHED).sum() > 80
    assert len(requests) == active + int((requests.state == State.FINISHED).sum())


def test_same_seed_same_decisions():
    ids = []
    for _ in range(2):
        state = SteadyQueue(resolve(settings("bros")), 5, seed=3)
        state.decide(20)
        ids.append(
            (state.batches, state.waiting, state.engine.core.requests.computed_tokens.tolist())
        )
    assert ids[0] == ids[1]


def test_memory_for_three_quarters_of_a_batch_is_short():
    state = SteadyQueue(resolve(settings("vllm", num_blocks=short_blocks())), 50)
    state.decide(120)
    assert state.engine.core.requests.recomputes.sum() > 0


def test_calls_are_timed_one_by_one():
    timed = CpuTimed(lambda n: sum(range(n)))
    assert timed(10) == 45 and timed(2_000_000) == sum(range(2_000_000))
    assert len(timed.seconds) == 2 and 0 <= timed.seconds[0] < timed.seconds[1]
