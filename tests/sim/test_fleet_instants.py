"""What happens at one and the same instant on several replicas. A step takes a second here."""

import numpy as np
import pytest

from tests.sim.harness import build, same_rows
from tests.sim.test_fleet import STEP, small
from twinserve.policies.base import EngineLimits
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.setup.audit import CROWDED
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.traces.transform import take_rows
from twinserve.traces.workload import Workload


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_application_leaves_with_one_of_its_requests(asynchronous, exact):
    """A client leaves one of three requests that one replica computes; the others follow at the
    same boundary, and the run goes on to its end."""
    config = CROWDED.model_copy(
        update={"exact": exact, "async_scheduling": asynchronous, "num_blocks": 200}
    )
    load = Workload.build(
        [0.0] * 4, [20] * 4, [80] * 4, group=np.array([0, 0, 0, -1]), stage=np.zeros(4, int),
        delay_s=np.zeros(4), group_names=["graph"],
    )  # fmt: skip
    for count in (3, 4):  # nobody is left behind, or a stranger
        spec = parse_policy("vllm")
        inputs = Inputs(
            config, take_rows(load, np.arange(count)), resolve_hardware(config), (spec,), ()
        )
        run = Simulation(inputs, spec)
        run.clock.process(_leave(run.clock, run.fleet, 0.1, 0))
        run.run()
        rows = run.rows().requests
        assert rows.outcome.tolist() == ["disconnected", "failed", "failed", "completed"][:count]
        assert rows.ended_s[1] == rows.ended_s[2] < 0.11 and not run.fleet.active


def _leave(clock, fleet, time, number):
    yield clock.at(time, BEFORE_STEPS)
    fleet.withdraw(fleet.requests[number], End.DISCONNECTED)


@pytest.mark.parametrize("draining, sees_s", [(1, 5.0), (0, 4.0)])
def test_a_move_at_a_boundary_of_both_replicas(draining, sees_s):
    """Steps of both end at 4 s, where a request leaves one of them. Replica 0 has planned then,
    replica 1 has not; and so it is where steps are taken at once."""
    load = Workload.build([0.0, 0.0], [8] * 2, [20, 20])
    events = [(1.5, lambda fleet: fleet.drain(draining, 2.0))]
    fast, exact = (
        small(load, events, migrates=True, fast=fast).run().rows for fast in (True, False)
    )
    same_rows(fast, exact)
    moved = fast.placements.sort_values(["placed_s", "replica"]).iloc[-1]
    assert (moved.placed_s, moved.first_scheduled_s) == (4.0, sees_s)


class Gate(Router):
    """r0 to replica 0, r1 to replica 1; others wait until that has none."""

    name = "gate"

    def place(self, request, stage, view):
        if request.id in ("r0", "r1"):
            return int(request.id[1])
        return Verdict.HOLD if view.in_flight[1] else 0


def test_a_held_request_is_placed_at_a_boundary_of_both_replicas():
    rows = []
    for fast in (True, False):
        load = Workload.build([0.0, 0.0, 1.0], [8] * 3, [20, 20, 4])
        sim = small(load, fast=fast, router=Gate())
        sim.clock.process(_leave(sim.clock, sim.source.fleet, 4.5, 1))
        rows.append(sim.run().rows)
    same_rows(*rows)
    held = rows[0].requests.set_index("request_id").loc["r2"]
    assert (held.first_scheduled_s, held.ended_s) == (6.0, 10.0)


def test_a_view_at_the_very_end_of_a_step():
    """Whoever asks then, before the next step is planned, sees the one that ends."""
    rng = np.random.default_rng(4)
    load = Workload.build(
        np.sort(rng.integers(0, 20, 30)).astype(float),
        rng.integers(4, 90, 30), rng.integers(2, 40, 30),
    )  # fmt: skip
    seen = []
    for fast in (True, False):
        limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64)
        sim = build(load, model=STEP, limits=limits, blocks=40, fast=fast, audit=False)
        loads = []

        def look(sim=sim, loads=loads):
            for time in range(60):
                yield sim.clock.at(float(time), BEFORE_STEPS)
                loads.extend(
                    sim.engines[0].load(float(t)) for t in range(max(time - 3, 0), time + 1)
                )

        sim.clock.process(look())
        sim.run()
        seen.append(loads)
    assert seen[0] == seen[1]
    assert len({load.used for load in seen[0]}) > 10


def test_a_run_ends_with_its_last_request_not_with_a_deadline():
    """Three clients come at once, and would wait a thousand seconds."""
    load = Workload.build([0.0] * 3 + [3.0], [8] * 4, [5] * 4)
    sim = small(load, client_timeout=1000.0).run()
    assert sim.clock.now == sim.requests.ended_s.max() == 8.0
