"""What a fleet adds to policies that are one per replica: what replicas tell the router of their caches (docs/fleet.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from twinserve.policies.registry import parse_policy
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.prefix_index import PrefixIndex
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.least_requests import LeastRequests
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.inputs import Inputs, resolve_hardware
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation
from twinserve.traces.workload import Workload


def made(policy: str, workload: Workload, replicas: int = 2, **more) -> Simulation:
    """more: of the Simulation; `settings`: of its configuration."""
    settings = {"replicas": replicas, **more.pop("settings", {})}
    config = CROWDED.model_copy(update=settings)
    spec = parse_policy(policy)
    inputs = Inputs(config, workload, resolve_hardware(config), (spec,), ())
    return Simulation(inputs, spec, **more)


def at(run: Simulation, time_s: float, what) -> None:
    """`what()` happens at `time_s`."""

    def process():
        yield run.clock.at(time_s, BEFORE_STEPS)
        what()

    run.clock.process(process())


# -- KV events -------------------------------------------------------------------------------------
class Recording(LeastRequests):
    """Keeps what it hears: an index of prefixes, and when each event came."""

    def setup(self) -> None:
        super().setup()
        self.index, self.feeds = PrefixIndex(), {}
        self.heard: list[tuple[int, str]] = []

    def on_came(self, replica):
        self.feeds[replica] = self.index.add(replica)
        self.heard.append((replica, "came"))

    def on_failed(self, replica):
        self.index.remove(replica)
        self.heard.append((replica, "failed"))

    def on_stored(self, replica, contents):
        self.feeds[replica].stored(contents)
        self.heard.append((replica, "stored"))

    def on_removed(self, replica, contents):
        self.feeds[replica].removed(contents)
        self.heard.append((replica, "removed"))


CACHING = {"prefix_caching": True}


def findable(run: Simulation, replica: int) -> list[int]:
    ledger = run.engines[replica].core.ledger
    return np.flatnonzero(ledger.pool.holds(np.arange(ledger.shared_contents))).tolist()


@pytest.mark.parametrize("ledger", ["paged", "task-aware"])
def test_a_routers_index_has_what_the_caches_of_all_replicas_hold(ledger):
    router = Recording()
    run = made(f"vllm:kv={ledger}", crowd(4), router=router, settings=CACHING)
    run.run()
    for replica in range(2):
        assert router.index.contents(replica).tolist() == findable(run, replica) != []
    assert {what for _, what in router.heard} == {"came", "stored", "removed"}


def test_a_replica_that_comes_later_is_heard_from_when_it_is_up():
    router = Recording()
    run = made("vllm", crowd(4), 1, router=router, settings=CACHING)
    description = Description(run.inputs.hardware, run.spec)
    at(run, 0.005, lambda: run.add(description, warm_up_s=0.02))
    run.run()
    of_second = [what for replica, what in router.heard if replica == 1]
    assert of_second[0] == "came" and "stored" in of_second
    assert router.index.contents(1).tolist() == findable(run, 1)


@pytest.mark.parametrize("migrates", [False, True])
def test_nothing_is_heard_of_a_replica_that_failed(migrates):
    router = Recording()
    run = made("vllm", crowd(4), 2, router=router, settings=CACHING, migrates=migrates)
    at(run, 0.15, lambda: run.fleet.fail(0))
    run.run()
    of_first = [what for replica, what in router.heard if replica == 0]
    assert of_first[-1] == "failed" and "stored" in of_first
    assert router.index.replicas == [1]
    # nor from its cache, whatever becomes of that
    heard, told = len(router.heard), PrefixIndex()
    ledger = run.engines[0].core.ledger
    ledger.subscribe(told.add(0))
    before = told.contents(0)
    for row in range(len(run.engines[0].core.requests)):
        ledger.free(row)
    assert len(before) and ledger.admit(0, ledger.num_blocks * ledger.block_tokens)
    assert len(told.contents(0)) < len(before) and len(router.heard) == heard


def test_a_replica_that_has_drained_is_heard_from_until_it_is_down():
    router = Recording()
    run = made("vllm", crowd(4), 2, router=router, settings=CACHING)
    at(run, 0.1, lambda: (router.heard.append((0, "drains")), run.fleet.drain(0)))
    run.run()
    of_first = [what for replica, what in router.heard if replica == 0]
    assert "stored" in of_first[of_first.index("drains") :]
    assert router.index.contents(0).tolist() == findable(run, 0)


def test_a_replica_whose_ledger_has_no_events_is_silent():
    """Beside one that has some."""
    router = Recording()
    run = made("vllm", crowd(4), 0, router=router, settings=CACHING, made_of=[])
    for kv in ("paged", "layerwise"):
        spec = replace(parse_policy("vllm"), kv=kv)
        inputs = run.inputs.config.model_copy(update={"prefix_caching": None})
        run.inputs = replace(run.inputs, config=inputs)
        run.add(Description(run.inputs.hardware, spec))
    run.run()
    heard = {replica: {w for r, w in router.heard if r == replica} for replica in range(2)}
    assert heard[1] == {"came"} and "stored" in heard[0]


def test_nobody_makes_events_for_a_router_that_does_not_listen():
    run = made("vllm", crowd(4), settings=CACHING)
    run.run()
    assert not Router.hears_kv_events() and not LeastRequests.hears_kv_events()
    assert all(engine.core.ledger.pool.events is None for engine in run.engines)
