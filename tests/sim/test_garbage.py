"""The collector is left as it was found, whatever happens meanwhile, and kept out of the way of
every run."""

import gc
import weakref

import numpy as np
import pytest

from twinserve.experiments.study.runs import WhileOnline
from twinserve.policies.registry import parse_policy
from twinserve.sim.engine.garbage import collected_seldom
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.sim.twin.live import LiveRun, WallClock
from twinserve.traces.workload import Workload


@pytest.mark.slow
def test_it_is_left_as_it_was():
    before, frozen = (gc.get_threshold(), gc.isenabled()), gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), collected_seldom():
        assert gc.get_threshold()[0] > 10_000
        with collected_seldom():
            pass
        assert gc.get_threshold()[0] > 10_000  # the inner one does not end the outer one
        raise ZeroDivisionError
    assert (gc.get_threshold(), gc.isenabled()) == before
    # nothing was frozen for good; what another test has left frozen may end meanwhile
    assert gc.get_freeze_count() <= frozen


@pytest.mark.slow
def test_what_is_there_already_is_not_looked_at():
    generations = []

    def note(phase, info):
        generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with collected_seldom():
            kept = [[] for _ in range(1_500_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) and 0 < len(generations) < 100 and 2 not in generations


def test_the_garbage_of_many_short_runs_does_not_stay():
    class Circle:
        def __init__(self):
            self.itself, self.parts = self, [[] for _ in range(5_000)]

    left = []
    for _ in range(50):
        with collected_seldom():
            circle = Circle()
        left.append(weakref.ref(circle))
        del circle
    assert sum(circle() is not None for circle in left) < 25


class WithoutVllm(LiveRun):
    """A live run in wall time whose steps are simulated."""

    wall = True

    def __init__(self, *given):
        Simulation.__init__(self, *given, clock=WallClock())


@pytest.mark.parametrize("kind", [Simulation, WhileOnline, WithoutVllm])
def test_it_is_kept_out_of_the_way_of_every_run(kind):
    config = SimulationConfig(policy=("vllm",))
    load = Workload.build(np.zeros(2), [16, 16], [5, 5])
    inputs = Inputs(config, load, resolve_hardware(config), (parse_policy("vllm"),), ())
    run = kind(inputs, inputs.policies[0])
    begin, before, seen = run.clock.run, gc.get_threshold(), []

    def looked(*until):
        seen.append(gc.get_threshold()[0] > 10_000)
        return begin(*until)

    run.clock.run = looked
    run.run()
    assert (
        set(seen) == {True} and run.rows().requests.finished.all() and gc.get_threshold() == before
    )
