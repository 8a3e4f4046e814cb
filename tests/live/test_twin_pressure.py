"""Every policy's own decision log, on every ledger it runs on, is carried out to the letter by an
engine of the size that `twinserve replay` would build: no step drifts, and every answer is, token
by token, what the request is told with the engine to itself. Memory is far too small: requests are
swapped, dropped, cut into chunks, and come in bursts.

`.ci/run` has one policy of each kind and each ledger, and draws two workloads for each such pair.
`.ci/nightly` has all pairs, draws ten times as many workloads as are written here, and longer
ones."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.examples import AS_WRITTEN, examples
from tests.live.paper_engine import on_paper
from tests.live.pressure import BLOCK, Pressure, as_large_as, logged, pressed, settings_of
from tests.live.test_twin import Bench, told_as_alone
from tests.parameters import SOME_POLICIES, in_turn, mostly_nightly
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.live.engine.tiny_model import VOCAB
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import ledger_names, policy_names
from twinserve.sim.results.decisions import DecisionLog
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.live import LiveRun, live_settings, owns_pool
from twinserve.sim.twin.replay import replay_locked

pytestmark = [pytest.mark.slow, pytest.mark.live]

OPTIONS = [
    "vllm-v0:preemption_mode=swap",
    "preemptive-wait:preemption_mode=swap",
    "layerkv:x=0,slo_aware=false",
    "bros:chunk=48",
    "bros:swap=false",
]
PAIRS = [(policy, kv) for policy in policy_names() for kv in ledger_names()]
POLICIES = [f"{policy}:kv={kv}" for policy, kv in PAIRS] + OPTIONS
OF_EACH_KIND = [pair for pair in PAIRS if pair[0] in ("bros", *SOME_POLICIES)]
IN_CI = [f"{policy}:kv={kv}" for policy, kv in in_turn(OF_EACH_KIND)] + OPTIONS[1:4]
AHEAD = [*policy_names(), "vllm-v0:preemption_mode=swap", "bros:chunk=48"]
SIZES = [12] if settings.default.max_examples <= AS_WRITTEN else [12, 40, 80]  # requests


class References:
    """What each request of a workload is told alone; workloads are the same for all policies."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._of_workload = cache(lambda seed, requests: Bench(engine, {}))

    def check(self, log: DecisionLog, tokens: dict[str, list[int]], seed: int, size: int) -> None:
        with as_large_as(self.engine, self.engine.settings):
            told_as_alone(self._of_workload(seed, size), log.requests, tokens)


def texts() -> PromptTexts:
    return PromptTexts(VOCAB, BLOCK)


@pytest.fixture(scope="module")
def references(model) -> Iterator[References]:
    with contextlib.closing(
        VllmEngine(
            LiveSettings(model, 2000, BLOCK, 64, 2400, 240, prefix_caching=True, swap_blocks=1000)
        )
    ) as engine:
        yield References(engine)


@pytest.mark.parametrize("policy", mostly_nightly(POLICIES, *IN_CI))
@examples(
    3,
    # a failing example is a workload, and no other one is simpler; the engine serves all of them
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(seed=st.integers(0, 10**6), size=st.sampled_from(SIZES))
def test_own_log_is_carried_out_to_the_letter(references, policy, seed, size):
    carry_out(references, pressed(seed, policy, size), seed, size)


@pytest.mark.parametrize("policy", mostly_nightly(AHEAD, "bros", "vllm", "layerkv"))
@examples(
    2,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(seed=st.integers(0, 10**6), size=st.sampled_from(SIZES))
def test_own_log_planned_ahead_is_carried_out_to_the_letter(references, policy, seed, size):
    """Locked, and free: the same decisions, made again while the engine carries them out."""
    inputs = pressed(seed, policy, size, asynchronous=True)
    carry_out(references, inputs, seed, size)
    (spec,), engine = inputs.policies, references.engine
    settings = live_settings(inputs, spec, LiveSettings(None, None, 0, 0, 0, 0))
    with as_large_as(engine, settings):
        engine.scheduler.forget_counts()
        run = LiveRun(inputs, spec, engine, wall=False, predicted=True)
        run.run()
    assert run.parted() == ""
    simulated = run_policy(inputs, spec).rows
    for table in ("requests", "steps"):
        pd.testing.assert_frame_equal(
            getattr(run.rows(), table), getattr(simulated, table), check_exact=True
        )


def carry_out(references: References, inputs: Inputs, seed: int, size: int) -> None:
    log, engine = logged(inputs), references.engine
    with as_large_as(engine, settings_of(log)):
        found = replay_locked(log, engine, texts())
    assert not found.parted and found.drift == 0, found.parted
    if owns_pool(log.run) and not inputs.config.async_scheduling:
        assert found.free_blocks_differ == 0
    references.check(log, found.tokens, seed, size)


def test_the_workloads_press():
    """Nearly every log takes memory away, by both means, and cuts prompts."""
    seen = [Pressure.of(logged(pressed(seed, "vllm-v0:preemption_mode=swap"))) for seed in range(6)]
    assert sum(one.swapped > 0 for one in seen) >= 4
    for policy in ("vllm", "bros", "conserve", "layerkv"):
        seen += [Pressure.of(logged(pressed(seed, policy))) for seed in range(3)]
    assert sum(one.swapped + one.dropped > 0 for one in seen) > 0.8 * len(seen)
    assert sum(one.dropped > 0 for one in seen) > 3 and sum(one.chunks > 0 for one in seen) > 3


def test_a_pool_of_a_block_less_than_is_held_is_seen(references):
    """vLLM preempts, or does not admit, and the replay says where: sizes are no matter of taste."""
    log, engine = logged(pressed(4, "layerkv:x=0,slo_aware=false")), references.engine
    asked = settings_of(log)
    fullest = on_paper(log, asked.swap_blocks).fullest
    assert log.run["kv"]["num_blocks"] < fullest <= asked.num_blocks
    with as_large_as(engine, replace(asked, num_blocks=fullest)):
        assert not replay_locked(log, engine, texts()).parted
    with as_large_as(engine, replace(asked, num_blocks=fullest - 1)):
        with contextlib.suppress(LiveEngineError):  # what follows may be more than vLLM can do
            assert "parted from its plans at step" in replay_locked(log, engine, texts()).parted
    assert engine.scheduler.drift and engine.scheduler.first_drift


def test_an_answer_that_lacks_tokens_is_named(references):
    """The log lost its last steps."""
    log, engine = logged(pressed(4, "vllm")), references.engine
    torn = replace(log, steps=log.steps[:-5])
    with as_large_as(engine, settings_of(log)):
        found = replay_locked(torn, engine, texts())
    assert found.drift == 0 and " got " in found.parted and "\n" not in found.parted


def test_what_the_engine_cannot_do_is_one_line(references):
    """A request of the log comes too late for the step that it is in."""
    log, engine = logged(pressed(4, "vllm")), references.engine
    late = [replace(request, arrival_s=1e9) for request in log.requests]
    with as_large_as(engine, settings_of(log)):
        with pytest.raises(LiveEngineError, match="the engine stopped in step 1: KeyError") as one:
            replay_locked(replace(log, requests=late), engine, texts())
    assert "\n" not in str(one.value)


def test_a_free_run_whose_answer_lacks_tokens_is_named(references):
    inputs, engine = pressed(4, "conserve"), references.engine
    settings = live_settings(inputs, inputs.policies[0], LiveSettings(None, None, 0, 0, 0, 0))
    with as_large_as(engine, settings):
        engine.scheduler.forget_counts()
        run = LiveRun(inputs, inputs.policies[0], engine, wall=False)
        run.run()
    assert run.parted() == run.described()["parted"] == ""
    name, lost = run.answers[-1].tokens.popitem()
    assert lost and run.parted().startswith(f"{name} got ")
