"""What is one per fleet although policies are one per replica: the closed
loop; and what replicas tell the router of their caches (docs/fleet.md)."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.sim.test_fleet import happen, small
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.fleet.prefix_index import PrefixIndex
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.results.files import RunResult, read_run, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import Description
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.traces.workload import BestEffortPool, Workload


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
    assert not LeastRequests().hears_kv_events()
    assert all(engine.core.ledger.pool.events is None for engine in run.engines)


# -- the closed loop -------------------------------------------------------------------------------
BATCH = 6


def loop(until_s: float = 2.0) -> Workload:
    """BROS's closed loop of best-effort batches beside a few real-time requests."""
    workload = crowd(2, 12)
    pool = BestEffortPool(BATCH, (8, 120), (4, 60), seed=3, until_s=until_s)
    return replace(workload, pool=pool)


def one_loop(run: Simulation) -> list[list[Request]]:
    """Runs it. The requests of the loop, batch by batch: each batch whole, and each after the first
    begun when the fleet was rid of the last request of the one before, wherever that was."""
    gone_s: dict[int, float] = {}  # what is withdrawn is gone at the end of the step
    after = run.fleet.on_ended

    def ended(requests):
        gone_s.update({request.number: run.clock.now for request in requests})
        after(requests)

    run.fleet.on_ended = ended
    run.run()
    batches: dict[int, list[Request]] = {}
    for request in run.fleet.requests:
        if request.id.startswith("be-"):
            batches.setdefault(request.values["stage"], []).append(request)
    assert list(batches) == list(range(len(batches))) and len(batches) > 2
    came = {number: {r.arrival_s for r in batch} for number, batch in batches.items()}
    assert all(len(batch) == BATCH for batch in batches.values())
    assert came[0] == {0.0}
    for number in range(1, len(batches)):
        assert came[number] == {max(gone_s[r.number] for r in batches[number - 1])}
    return list(batches.values())


def replicas_of(batch: list[Request]) -> set[int]:
    return {placement.replica.index for request in batch for placement in request.placements}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("policy", ["bros", "vllm"])
def test_the_closed_loop_is_one_for_the_whole_fleet(policy, replicas):
    run = made(policy, loop(), replicas)
    most = 0

    def unfinished():
        here = [r for r in run.fleet.requests if r.id.startswith("be-") and r.end is End.NONE]
        return len(here)

    submit = run.fleet.submit

    def watched(request):
        nonlocal most
        submit(request)
        most = max(most, unfinished())

    run.fleet.submit = watched
    batches = one_loop(run)
    assert most == BATCH
    assert all(len(replicas_of(batch)) == replicas for batch in batches)
    assert all(request.end is End.COMPLETED for batch in batches for request in batch)


@pytest.mark.slow
@pytest.mark.parametrize("migrates", [False, True])
@pytest.mark.parametrize("trouble", ["drain", "grace", "fail"])
def test_the_loop_goes_on_when_a_replica_leaves(trouble, migrates):
    """The next batch comes when all of the last one have ended: failed where the fleet does not
    migrate, completed elsewhere where it does."""
    run = made("bros", loop(), migrates=migrates)
    fleet = run.fleet
    does = {
        "drain": lambda: fleet.drain(0),
        "grace": lambda: fleet.drain(0, 0.01),
        "fail": lambda: fleet.fail(0),
    }
    at(run, 0.2, does[trouble])
    batches = one_loop(run)
    hit = next(batch for batch in batches if batch[0].arrival_s <= 0.2 <= max_end(batch))
    assert replicas_of(hit) == {0, 1}
    ends = {request.end for request in hit}
    loses = trouble != "drain" and not migrates
    assert ends == ({End.COMPLETED, End.FAILED} if loses else {End.COMPLETED})
    moved = [request for request in hit if len(request.placements) > 1]
    assert bool(moved) == (trouble != "drain" and migrates)
    after = batches[batches.index(hit) + 1 :]
    assert after and all(replicas_of(batch) == {1} for batch in after)


def max_end(batch: list[Request]) -> float:
    return max(request.ended_s for request in batch)


# What a fleet leaves behind: replicas that differ, rows of requests that nobody got, files.
NAN = float("nan")


def test_replicas_may_differ_in_all_and_results_say_so(tmp_path):
    config = CROWDED.model_copy(update={"replicas": 2})
    other = resolve_hardware(config.model_copy(update={"num_blocks": 61, "block_tokens": 16}))
    spec = parse_policy("vllm")
    inputs = Inputs(config, crowd(2), resolve_hardware(config), (spec,), ())
    made_of = [
        Description(inputs.hardware, spec),
        Description(other, parse_policy("bros:kv=paged")),
    ]
    run = Simulation(inputs, spec, made_of=made_of, migrates=True)
    run.clock.process(happen(run.clock, run.fleet, [(0.05, lambda fleet: fleet.fail(1))]))
    result = run_simulation(run)
    lives = result.rows.replicas
    assert lives[["policy", "ledger", "num_blocks", "block_tokens", "failed"]].values.tolist() == [
        ["vllm", "paged", 40, 8, False],
        ["bros:kv=paged", "paged", 61, 16, True],
    ]
    stays = result.rows.placements
    assert set(stays.replica) == {0, 1} and (stays.outcome == "moved").any()
    assert result.rows.requests.finished.all() and result.summary["kv"]["total_blocks"] is None
    used = result.rows.steps.groupby("replica")["kv_used_blocks"].max() / lives["num_blocks"]
    assert result.summary["kv"]["peak_use"] == used.max()
    again = read_run(write_run(tmp_path / "run", result))
    for table in ("requests", "placements", "replicas", "steps", "gaps"):
        ours, theirs = getattr(result.rows, table), getattr(again.rows, table)
        pd.testing.assert_frame_equal(
            ours[list(theirs)], theirs, check_dtype=False, check_exact=True
        )
    said = dict(result.summary)
    assert said.pop("step_times")  # of the profiles, which rows do not have
    assert summarise(again.rows) == said


def test_a_request_that_was_never_sent_has_a_row_in_the_file(tmp_path):
    load = Workload.build(
        [0.0, NAN], [8] * 2, [50, 5], group=np.zeros(2, int), stage=np.arange(2),
        delay_s=np.zeros(2), group_names=["talk"],
    )  # fmt: skip
    rows = small(load, client_timeout=3.0).run().rows
    file = pq.read_table(write_run(tmp_path / "run", RunResult(rows)) / "requests.parquet")
    ends = dict(zip(*(file[name].to_pylist() for name in ("request_id", "outcome")), strict=True))
    assert ends == {"r0": "timed_out", "r1": "never_sent"}
    again = read_run(tmp_path / "run").rows
    assert again.requests.request_id.tolist() == ["r0"] and again.never_sent == 1


def test_a_replica_that_is_not_up_all_the_time_is_busy_while_it_is():
    """Two replicas, a request of ten seconds each; one of them fails after half of that."""
    load = Workload.build([0.0, 0.0], [8] * 2, [10, 10])
    sim = small(load, [(5.0, lambda fleet: fleet.fail(0))]).run()
    # four whole steps of the five seconds before it failed, ten of ten
    assert summarise(sim.rows)["scheduler"]["busy"] == pytest.approx(14 / 15)
