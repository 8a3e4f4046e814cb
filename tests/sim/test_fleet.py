"""Replicas that come, drain and fail while the clock runs; requests that are held, moved and
rejected (docs/fleet.md). A step takes a second here, whatever is in it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.harness import Affine, build, hybrid
from twinserve.policies.base import EngineLimits
from twinserve.policies.requests import End, RequestClass
from twinserve.sim.engine.clock import BEFORE_STEPS
from twinserve.sim.engine.loop import NoProgressError
from twinserve.sim.fleet.replica import Life
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.results.metrics import latencies, summarise
from twinserve.traces.workload import BestEffortPool, Workload

STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)
NAN = float("nan")


def small(workload, events=(), replicas=2, **settings):
    """events: (seconds, what to do with the fleet)."""
    sim = build(workload, model=STEP, replicas=replicas, audit=False, **settings)
    if events:
        sim.clock.process(happen(sim.clock, sim.source.fleet, events))
    return sim


def happen(clock, fleet, events):
    for time, what in events:
        yield clock.at(time, BEFORE_STEPS)
        what(fleet)


def one(output=10, **more):
    return Workload.build([0.0], [8], [output], **more)


def stays(sim):
    rows = sim.rows.placements
    return list(zip(rows.replica, rows.output_tokens, rows.outcome, strict=True))


# -- failures --------------------------------------------------------------------------------------
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("at_s, tokens", [(0.5, 0), (2.5, 2), (2.0, 1), (9.999, 9)])
def test_a_failure_voids_the_step_under_way(at_s, tokens, fast):
    """A step that would end at that very instant is void, too."""
    sim = small(one(), [(at_s, lambda fleet: fleet.fail(0))], fast=fast).run()
    (request,) = sim.requests.itertuples()
    assert (request.outcome, request.ended_s, request.output_tokens) == ("failed", at_s, tokens)
    assert sim.steps.end_s.tolist() == [*range(1, tokens + 1)]
    assert summarise(sim.rows)["wasted_output_tokens"] == tokens


@pytest.mark.parametrize("fast", [True, False])
def test_a_moved_request_goes_on_with_what_its_client_has(fast):
    """Its prompt and two tokens are computed again in one step; nothing is emitted twice."""
    sim = small(one(), [(2.5, lambda fleet: fleet.fail(0))], migrates=True, fast=fast).run()
    (request,) = sim.requests.itertuples()
    assert (request.outcome, request.output_tokens, request.replica) == ("completed", 10, 1)
    assert (request.first_token_s, request.last_token_s) == (1.0, 10.5)
    assert stays(sim) == [(0, 2, "moved"), (1, 8, "completed")]
    gaps = sim.rows.gaps.groupby("gap_s")["count"].sum().to_dict()
    assert gaps == {1.0: 8, 1.5: 1}
    ours = latencies(sim.requests).iloc[0]
    assert (ours.ttft_s, ours.e2el_s) == (1.0, 10.5)


class Turns(Router):
    """Each request to the next replica, those of one application too."""

    name = "turns"

    def setup(self):
        self.next = -1

    def place(self, request, stage, view):
        self.next += 1
        return view.up[self.next % len(view.up)]


def test_an_application_fails_wherever_its_requests_are():
    """Three requests of a stage on three replicas; one of these fails. The others are withdrawn at
    their next boundary, the next stage is never sent, and a stranger is not touched."""
    load = Workload.build(
        [0.0] * 4 + [NAN], [8] * 5, [9] * 5, group=np.array([0, 0, 0, -1, 0]),
        stage=np.array([0, 0, 0, 0, 1]), delay_s=np.zeros(5), group_names=["graph"],
    )  # fmt: skip
    sim = small(load, [(2.5, lambda fleet: fleet.fail(1))], router=Turns(), replicas=3).run()
    ends = sim.requests.set_index("request_id")[["outcome", "ended_s"]].T.to_dict("list")
    gone = ["failed", 2.5]
    assert ends == {"r0": gone, "r1": gone, "r2": gone, "r3": ["completed", 9.0]}
    assert sim.rows.never_sent == 1
    # they ran on to the boundary
    assert sim.requests.set_index("request_id").output_tokens.tolist() == [3, 9, 2, 3]


def test_an_application_fails_at_the_instant_at_which_a_client_leaves():
    """Its sibling, on another replica with a step under way, leaves at that one's own boundary."""
    load = Workload.build(
        [0.0, 0.5], [8] * 2, [9] * 2, group=np.zeros(2, int), stage=np.zeros(2, int),
        delay_s=np.zeros(2), group_names=["graph"],
    )  # fmt: skip
    events = [(2.2, lambda f: f.withdraw(f.requests[0], End.DISCONNECTED))]
    sim = small(load, events, router=Turns()).run()
    rows = sim.requests.set_index("request_id")
    assert rows.outcome.to_dict() == {"r0": "disconnected", "r1": "failed"}
    assert rows.ended_s.tolist() == [2.2, 2.2] and rows.output_tokens.tolist() == [3, 2]


def test_transfers_of_a_failed_replica_are_lost():
    """A request is swapped out over a slow link when its replica fails: its bytes were charged, and
    have not landed."""
    load = Workload.build([0.0, 0.0], [30, 30], [40, 40])
    swaps = "vllm-v0:preemption_mode=swap"
    sim = small(
        load, [(8.5, lambda f: f.fail(0))], replicas=1, policy=swaps, blocks=5, host_blocks=8,
        bytes_per_s=5e5,
    ).run()  # fmt: skip
    port = sim.engines[0].backend.link.to_host
    port.settle(np.inf)
    assert port.queued_bytes == port.landed_bytes + port.lost_bytes
    assert port.lost_bytes > 0


def test_there_is_no_replica_before_the_first():
    sim = small(one())
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"no replica {index}: the fleet has had 2"):
            sim.source.fleet.fail(index)


# -- drains ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("migrates, outcome", [(False, "failed"), (True, "completed")])
def test_after_its_grace_a_request_leaves_a_draining_replica(migrates, outcome):
    sim = small(one(), [(1.2, lambda fleet: fleet.drain(0, grace_s=2.0))], migrates=migrates).run()
    (request,) = sim.requests.itertuples()
    assert request.outcome == outcome
    # it ran to the boundary after 3.2 s, and was moved there
    expected = [(0, 4, "moved"), (1, 6, "completed")] if migrates else [(0, 4, "failed")]
    assert stays(sim) == expected
    assert sim.rows.replicas.down_s[0] == 4.0


# -- requests that wait in the fleet ---------------------------------------------------------------
def test_requests_wait_in_the_fleet_for_a_replica_that_warms_up():
    """Not on the dead one; their time to first token counts from when they came."""

    load = Workload.build([0.0, 1.5, 2.0], [8] * 3, [4] * 3)
    spare = []
    events = [(1.2, lambda f: f.fail(0)), (2.5, lambda f: f.add(spare[0], 3.0))]
    sim = small(load, events, spares=1)
    spare += sim.spares
    sim.run()
    rows = sim.requests.set_index("request_id")
    assert rows.outcome.tolist() == ["failed", "completed", "completed"]
    assert sim.rows.placements.placed_s.tolist() == [0.0, 5.5, 5.5]
    assert rows.loc[["r1", "r2"], "first_token_s"].tolist() == [6.5, 6.5]
    assert latencies(sim.requests).ttft_s.tolist()[1:] == [5.0, 4.5]
    assert sim.rows.replicas.up_s.tolist() == [0.0, 5.5]


def test_a_client_leaves_a_request_that_the_fleet_holds():
    load = Workload.build([0.0, 1.5], [8] * 2, [4] * 2)
    sim = small(load, [(1.2, lambda f: f.fail(0))], replicas=1, client_timeout=3.0).run()
    assert sim.requests.outcome.tolist() == ["failed", "timed_out"]
    assert sim.requests.ended_s.tolist() == [1.2, 4.5]


class OneAtATime(LeastRequests):
    """Holds what would be a second request in flight; rejects best-effort ones."""

    name = "one-at-a-time"

    def place(self, request, stage, view):
        if request.values["service_class"] == RequestClass.BEST_EFFORT:
            return Verdict.REJECT
        return super().place(request, stage, view) if not sum(view.in_flight) else Verdict.HOLD


def test_a_router_holds_and_rejects():
    load = Workload.build(
        [0.0, 0.1, 0.2, 0.3], [8] * 4, [2] * 4, service_class=np.array([0, 0, 1, 0], np.int8)
    )
    sim = small(load, router=OneAtATime()).run()
    rows = sim.requests.set_index("request_id")
    assert rows.outcome.to_dict() == {
        "r0": "completed", "r1": "completed", "r2": "rejected", "r3": "completed",
    }  # fmt: skip
    assert rows.last_token_s.loc[["r0", "r1", "r3"]].tolist() == [2.0, 4.0, 6.0]
    assert rows.ended_s["r2"] == 0.2 and summarise(sim.rows)["rejected"] == 1


def test_a_rejected_closed_loop_ends():
    load = replace(one(), pool=BestEffortPool(2, (8, 8), (4, 4), 0, until_s=5.0))
    sim = small(load, router=OneAtATime()).run()
    assert sorted(sim.requests.outcome) == ["completed", "rejected", "rejected"]


class NoBestEffort(LeastRequests):
    """Holds best-effort requests while anything is in flight, real-time ones while two are."""

    name = "no-best-effort"

    def place(self, request, stage, view):
        most = 0 if request.values["service_class"] == RequestClass.BEST_EFFORT else 1
        return super().place(request, stage, view) if sum(view.in_flight) <= most else Verdict.HOLD


def test_a_held_best_effort_request_holds_up_no_real_time_one():
    load = Workload.build(
        [0.0, 0.1, 0.2, 0.3], [8] * 4, [2, 3, 2, 2], service_class=np.array([0, 0, 1, 0], np.int8)
    )
    rows = small(load, router=NoBestEffort()).run().requests.set_index("request_id")
    assert rows.first_scheduled_s["r3"] == 2.0 and rows.finished.all()
    assert rows.first_scheduled_s["r2"] == rows.last_token_s["r3"] == 4.0


class Holds(LeastRequests):
    name = "holds"

    def place(self, request, stage, view):
        return Verdict.HOLD


def test_a_router_that_holds_for_ever_is_named():
    with pytest.raises(NoProgressError, match="router 'holds' holds 1 requests .* 'r0'"):
        small(one(), router=Holds()).run()


class Refuses(LeastRequests):
    """What has moved: rejects r0; or everything."""

    name = "refuses"
    everything = False

    def place(self, request, stage, view):
        if self.everything or (request.placements and request.id == "r0"):
            return Verdict.REJECT
        return super().place(request, stage, view)


def moved_with_a_rejected_one(**columns):
    """Two requests, one of them rejected when their replica fails at 2.5 s; clients wait 10 s."""
    load = Workload.build([0.0, 0.0], [8] * 2, [50] * 2, **columns)
    spare = []
    events = [(2.4, lambda fleet: fleet.add(spare[0])), (2.5, lambda fleet: fleet.fail(0))]
    more = {"replicas": 2, "spares": 1, "migrates": True, "client_timeout": 10.0}
    sim = small(load, events, router=Refuses(), **more)
    spare += sim.spares
    rows = sim.run().requests.set_index("request_id")
    return rows[["outcome", "ended_s"]].T.to_dict("list")


def test_clients_of_moved_requests_still_give_up():
    ends = moved_with_a_rejected_one()
    assert ends == {"r0": ["rejected", 2.5], "r1": ["timed_out", 10.0]}


# -- routers ---------------------------------------------------------------------------------------
class Listens(LeastRequests):
    name = "listens"

    def setup(self):
        super().setup()
        self.heard = []

    def place(self, request, stage, view):
        self.heard.append(("place", request.id, tuple(view.up), tuple(view.in_flight)))
        return super().place(request, stage, view)

    def on_dispatched(self, request, replica):
        self.heard.append(("dispatched", request.id, replica))

    def on_first_token(self, request, replica):
        self.heard.append(("first token", request.id, replica))

    def on_ended(self, request, replica):
        self.heard.append(("ended", request.id, replica))

    def on_draining(self, replica):
        self.heard.append(("draining", replica))

    def on_failed(self, replica):
        self.heard.append(("failed", replica))


@pytest.mark.parametrize("fast", [True, False])
def test_what_a_router_hears(fast):
    router = Listens()
    load = Workload.build([0.0, 0.0, 2.2], [8] * 3, [5, 3, 2])
    events = [(1.5, lambda f: f.drain(0)), (2.5, lambda f: f.fail(1))]
    small(load, events, router=router, migrates=True, replicas=3, fast=fast).run()
    assert router.heard == [
        ("place", "r0", (0, 1, 2), (0, 0, 0)),
        ("dispatched", "r0", 0),
        ("place", "r1", (0, 1, 2), (1, 0, 0)),
        ("dispatched", "r1", 1),
        ("first token", "r0", 0),
        ("first token", "r1", 1),
        ("draining", 0),
        ("place", "r2", (1, 2), (1, 1, 0)),
        ("dispatched", "r2", 2),
        ("failed", 1),
        ("ended", "r1", 1),
        ("place", "r1", (2,), (1, 0, 1)),
        ("dispatched", "r1", 2),
        ("first token", "r2", 2),
        ("first token", "r1", 2),
        ("ended", "r2", 2),
        ("ended", "r1", 2),
        ("ended", "r0", 0),
    ]


class Dated(LeastRequests):
    """Notes what time it is by the view, whatever it hears."""

    name = "dated"

    def setup(self):
        super().setup()
        self.heard = []

    def on_came(self, replica):
        self.heard.append(("came", self.view.now))

    def on_first_token(self, request, replica):
        self.heard.append(("first token", self.view.now))

    def on_stored(self, replica, contents):
        self.heard.append(("stored", self.view.now))

    def on_ended(self, request, replica):
        self.heard.append(("ended", self.view.now))

    def on_draining(self, replica):
        self.heard.append(("draining", self.view.now))


def test_the_view_is_of_the_time_at_which_a_router_hears():
    load = hybrid(4, 1, sessions=0, applications=0, prefix_block=16)
    router = Dated()
    events = [(0.25, lambda fleet: fleet.drain(1))]
    sim = small(load, events, router=router, caching=True).run()
    (request,) = sim.requests.itertuples()
    said = {what: now for what, now in router.heard}
    assert said == {
        "came": 0.0,
        "stored": request.first_scheduled_s,
        "draining": 0.25,
        "first token": request.first_token_s,
        "ended": request.last_token_s,
    }


class Stubborn(LeastRequests):
    name = "stubborn"

    def place(self, request, stage, view):
        return 0


def test_a_router_cannot_send_to_a_dead_replica():
    load = Workload.build([0.0, 2.0], [8] * 2, [5] * 2)
    with pytest.raises(ValueError, match="router 'stubborn' sent .* replica 0, which is down"):
        small(load, [(1.5, lambda f: f.fail(0))], router=Stubborn()).run()


@pytest.mark.parametrize("answer", [None, 7, -1])
def test_a_router_that_names_no_replica_is_told_so(answer):
    class Lost(LeastRequests):
        name = "lost"

        def place(self, request, stage, view):
            return answer

    with pytest.raises(ValueError, match=f"router 'lost' sent a request to {answer}, which is no"):
        small(one(), router=Lost()).run()


def test_a_replica_does_not_fail_inside_its_own_events():
    class Fails(LeastRequests):
        name = "fails"

        def on_first_token(self, request, replica):
            fleet.fail(replica)

    sim = small(one(), router=Fails())
    fleet = sim.source.fleet
    with pytest.raises(ValueError, match="replica 0 cannot fail inside an event of its own"):
        sim.run()
    assert fleet.replicas[0].life is Life.UP


def test_a_replica_ends_once():
    sim = small(one(), [(1.5, lambda f: (f.fail(0), f.fail(0), f.drain(0)))]).run()
    assert sim.source.fleet.replicas[0].life is Life.DOWN
    assert sim.rows.replicas.draining_s.isna().all()


# -- views -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_views_are_of_any_age_and_cut_no_run():
    """Asked at any time for any time before, a run of steps shows what single steps would: the row
    of the step that had begun."""
    rng = np.random.default_rng(4)
    load = Workload.build(
        np.sort(rng.random(30) * 20), rng.integers(4, 90, 30), rng.integers(2, 40, 30)
    )
    times = np.sort(rng.random(400) * 60)
    ages = rng.exponential(3.0, 400)
    seen, plans = {}, {}
    for fast in (True, False):
        limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64)
        sim = build(load, model=STEP, limits=limits, blocks=40, fast=fast, audit=False)
        loads = seen[fast] = []

        def look(sim=sim, loads=loads):
            for time, age in zip(times.tolist(), ages.tolist(), strict=True):
                yield sim.clock.at(time, BEFORE_STEPS)
                loads.append(sim.engines[0].load(max(time - age, 0.0)))

        sim.clock.process(look())
        sim.run()
        plans[fast] = len(sim.engines[0].decision_seconds)
    assert seen[True] == seen[False]
    assert plans[True] < 0.6 * plans[False]
    steps = sim.steps
    for found in seen[True]:
        under_way = steps[(steps.start_s <= found.at_s) & (found.at_s < steps.end_s)]
        if len(under_way):
            step = under_way.iloc[0]
            assert (found.used, found.running, found.waiting) == (
                step.kv_used_blocks, step.running, step.waiting,
            )  # fmt: skip
    assert max(found.used for found in seen[True]) > 30
