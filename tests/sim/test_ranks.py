"""Data-parallel ranks that share experts: they step together, and each has requests of its own."""

from dataclasses import replace

import pytest

from twinserve.backends.lockstep import RankError
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.profile import load_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation

NAME = "qwen3-30b-a3b@h100:dp2:ep"


def _rows(trace: str, replicas: int = 2, profile: str = NAME, **settings):
    config = SimulationConfig(
        trace=trace,
        profile=profile,
        replicas=replicas,
        async_scheduling=False,
        host_time="none",
        slo="none",
        **settings,
    )
    inputs = resolve(config)
    simulation = Simulation(inputs, inputs.policies[0])
    simulation.run()
    return simulation.rows()


def test_a_step_waits_for_steps_of_the_others_that_began_before():
    """Planned while another rank computes: it ends after that one, by its own work at least."""
    rows = _rows("closed:concurrency=8,requests=24,input=600,output=40", router="round-robin")
    assert rows.requests.finished.all() and set(rows.steps.replica) == {0, 1}
    mine, theirs = (rows.steps[rows.steps.replica == rank] for rank in (0, 1))
    starts, ends = theirs.start_s.to_numpy(), theirs.end_s.to_numpy()
    waited = 0
    for start, end in zip(mine.start_s, mine.end_s, strict=True):
        under_way = ends[(starts < start) & (ends > start)]
        assert (end > under_way + 1e-3).all()
        waited += len(under_way)
    assert waited > 0


def test_one_rank_alone_has_the_experts_of_both_for_itself():
    """Its token is the only one that the experts see."""
    profile = load_profile(NAME)
    rows = _rows("closed:concurrency=1,requests=1,input=100,output=50")
    last = rows.steps.iloc[-1]
    model = profile.model()
    work = StepComposition(1, 148, 148)
    saved = model.token_seconds(1) - model.token_seconds(0.5)
    assert saved > 0
    assert last.end_s - last.start_s == pytest.approx(model.step_seconds(work) - saved)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_rank_without_its_group_is_refused(replicas):
    with pytest.raises(SettingsError, match=r"--replicas \d: .* one of 2 data-parallel ranks"):
        _rows("closed:concurrency=1,requests=1,input=9,output=9", replicas=replicas)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shared_prefix": True}, "--shared-prefix"),
        ({"step_times": "operators"}, "--step-times roofline"),
        ({"profile": "llama-3.1-8b@h100:dp2"}, "--replicas 2"),
        ({"profile": "llama-3.1-8b@h100:tp2:ep"}, "vLLM refuses"),
        ({"profile": "qwen3-30b-a3b@h100:dp16:ep", "replicas": 16}, "links between servers"),
    ],
)
def test_ranks_that_cannot_be_are_one_clear_line(settings, words):
    with pytest.raises((ProfileError, SettingsError)) as raised:
        _rows("closed:concurrency=1,requests=1,input=9,output=9", **settings)
    assert words in str(raised.value) and "\n" not in str(raised.value)


class _Failing(Simulation):
    """The replicas `which` fail at 0.1 s."""

    def __init__(self, inputs, which):
        super().__init__(inputs, inputs.policies[0])
        self.clock.process(self._fail(which))

    def _fail(self, which):
        yield self.clock.at(0.1, BEFORE_STEPS)
        for replica in which:
            self.fleet.fail(replica)


def _inputs():
    config = SimulationConfig(
        trace="closed:concurrency=8,requests=24,input=600,output=40",
        profile=NAME,
        replicas=2,
        async_scheduling=False,
        host_time="none",
        slo="none",
        router="round-robin",
    )
    return resolve(config)


def test_a_failed_rank_ends_the_steps_of_its_group_in_one_clear_line():
    simulation = _Failing(_inputs(), [1])
    with pytest.raises(RankError) as raised:
        simulation.run()
    said = str(raised.value)
    assert "rank 1 of 2 failed at 0.100000 s" in said and "\n" not in said


def test_ranks_on_equal_hardware_are_a_group_whoever_resolved_it():
    inputs, again = _inputs(), _inputs()
    other = replace(inputs.hardware, num_blocks=inputs.hardware.num_blocks - 1)
    spec = inputs.policies[0]
    kinds = [Description(h, spec) for h in (inputs.hardware, other, again.hardware, other)]
    engines = Simulation(inputs, spec, made_of=kinds).engines
    groups = [engine.backend.group for engine in engines]
    assert groups[0] is groups[2] and groups[1] is groups[3] and groups[0] is not groups[1]
    assert [len(group.steps) for group in groups] == [2] * 4
