"""In the timeline of a fleet requests flow from the router to replicas and back."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import pytest

from tests.sim.harness import hybrid
from tests.sim.test_fleet import one, small
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.timeline import ROUTER, write_timeline


def drawn(tmp_path, run, **limits) -> list[dict]:
    path = tmp_path / "trace.json.gz"
    write_timeline(path, run.rows, **limits)
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def around(events: list[dict], event: dict) -> list[dict]:
    """Slices that a flow's end is bound to."""
    return [
        e
        for e in events
        if e["ph"] == "X"
        and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
        and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
    ]


@pytest.fixture(scope="module")
def fleet():
    load = hybrid(2, 30, sessions=2, applications=1)
    return small(load, replicas=3, router=parse_router("round-robin").build()).run()


def test_each_request_flows_to_its_replica_and_back(fleet, tmp_path):
    events = drawn(tmp_path, fleet)
    flows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
            assert around(events, event), "an end that is bound to nothing"
    assert len(flows) == 2 * len(fleet.requests)
    there = [f for name, f in flows.items() if name.startswith("to")]
    back = [f for name, f in flows.items() if name.startswith("back")]
    for flow in (*there, *back):
        assert flow["s"]["ts"] <= flow["f"]["ts"]
    per_replica = fleet.requests.groupby("replica").size().to_dict()
    for ends, side in ((there, "f"), (back, "s")):
        counts = defaultdict(int)
        for flow in ends:
            counts[flow[side]["pid"] - 1] += 1
        assert counts == per_replica
    assert {f["s"]["pid"] for f in there} == {f["f"]["pid"] for f in back} == {ROUTER}


def test_every_replica_and_the_router_have_a_track(fleet, tmp_path):
    names = {
        e["args"]["name"]: e["pid"]
        for e in drawn(tmp_path, fleet)
        if e["ph"] == "M" and e["name"] == "process_name"
    }
    assert names == {"router": ROUTER, "replica 0": 1, "replica 1": 2, "replica 2": 3}


def test_slices_of_the_router_lie_beside_or_on_each_other(fleet, tmp_path):
    slices = [e for e in drawn(tmp_path, fleet) if e["ph"] == "X" and e["pid"] == ROUTER]
    assert len(slices) == 2 * len(fleet.requests) and all(e["dur"] > 0 for e in slices)
    for first, second in zip(slices, slices[1:], strict=False):
        same = first["ts"] == second["ts"]
        assert same or first["ts"] + first["dur"] <= second["ts"] + 1e-3


def test_a_request_that_moved_flows_twice_and_one_back(tmp_path):
    events = [(2.5, lambda fleet: fleet.fail(0))]
    found = drawn(tmp_path, small(one(), events, migrates=True).run())
    starts = [e["pid"] for e in found if e["ph"] == "s"]
    heads = [e["pid"] for e in found if e["ph"] == "f"]
    assert starts == [ROUTER, ROUTER, 2] and heads == [1, 2, ROUTER]


def test_a_rejected_request_stays_with_the_router(tmp_path):
    load = hybrid(2, 12, rate=1e4, sessions=0, applications=0)
    run = small(load, replicas=2, router=parse_router("spread:shed_rt=1,shed_be=1").build()).run()
    rejected = run.requests[run.requests.outcome == "rejected"].request_id
    tracks = {e["name"]: e["pid"] for e in drawn(tmp_path, run) if e["ph"] == "b"}
    assert len(rejected) and {tracks[name] for name in rejected} == {ROUTER}


def test_one_replica_has_no_router(tmp_path):
    found = drawn(tmp_path, small(one(), replicas=1).run())
    assert {e["pid"] for e in found} == {1} and not [e for e in found if e["ph"] in "sf"]


def test_requests_that_are_drawn_are_the_first_of_all_replicas(fleet, tmp_path):
    found = drawn(tmp_path, fleet, max_requests=6)
    first = fleet.requests.sort_values("arrival_s").request_id[:6]
    assert {e["name"] for e in found if e["ph"] == "b"} >= set(first)
    assert sum(e["ph"] == "s" for e in found) == 12
