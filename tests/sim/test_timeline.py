"""The timeline keeps to the rules of the trace event format. Of a fleet, requests flow from router
to replicas and back."""

import gzip
import json
from collections import defaultdict

import numpy as np
import pytest

from tests.sim.harness import hybrid
from tests.sim.test_fleet import one, small
from tests.sim.test_results_rows import empty_rows, toy_rows
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.timeline import ROUTER, write_timeline


def written(tmp_path, rows: RunRows, **limits) -> dict:
    path = tmp_path / "trace.json.gz"
    write_timeline(path, rows, **limits)
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.fixture(scope="module")
def two_replicas() -> RunRows:
    """The second half on replica 1, and one request of each unfinished kind."""
    rows = toy_rows(40)
    rows.requests.loc[20:, "replica"] = 1
    rows.steps.loc[len(rows.steps) // 2 :, "replica"] = 1
    rows.requests.loc[3, ["first_scheduled_s", "first_token_s", "last_token_s"]] = np.nan
    rows.requests.loc[[3, 4], "finished"] = False
    return rows


def test_every_event_has_what_its_phase_needs(tmp_path, two_replicas):
    document = written(tmp_path, two_replicas)
    assert document["displayTimeUnit"] == "ms"
    needs = {
        "M": {"args"}, "X": {"dur", "tid", "args"}, "C": {"args"}, "b": {"id2", "cat"},
        "e": {"id2", "cat"}, "n": {"id2", "cat"},
    }  # fmt: skip
    seen = set()
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid", "ts"} <= event.keys()
        assert needs[event["ph"]] <= event.keys()
        assert event["pid"] > 0 and event["ts"] >= 0 and event.get("dur", 0) >= 0
        seen.add(event["ph"])
    assert seen == set(needs)


def test_asynchronous_events_are_balanced_and_nested(tmp_path, two_replicas):
    tracks = defaultdict(list)
    for event in written(tmp_path, two_replicas)["traceEvents"]:
        if event["ph"] in "ben":
            tracks[event["pid"], event["cat"], event["id2"]["local"]].append(event)
    assert len(tracks) == len(two_replicas.requests)
    for events in tracks.values():
        # Viewers sort by time and keep the file's order among equals.
        events.sort(key=lambda event: event["ts"])
        open_names = []
        for event in events:
            if event["ph"] == "b":
                open_names.append(event["name"])
            elif event["ph"] == "e":
                assert open_names.pop() == event["name"]
            else:
                assert len(open_names) == 1
        assert open_names == []


def test_times_are_microseconds_of_the_simulated_clock(tmp_path, two_replicas):
    events = written(tmp_path, two_replicas)["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == len(two_replicas.steps)
    for event, row in zip(steps, two_replicas.steps.itertuples(), strict=True):
        assert event["ts"] == pytest.approx(row.start_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((row.end_s - row.start_s) * 1e6, abs=2e-3)
        assert event["pid"] == row.replica + 1
        kinds = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode"}
        assert event["name"] == kinds[row.prefill_requests > 0, row.decode_requests > 0]


def test_a_request_is_queued_then_prefilled_then_decoded(tmp_path, two_replicas):
    events = written(tmp_path, two_replicas)["traceEvents"]
    row = two_replicas.requests.iloc[7]
    mine = [e for e in events if e.get("id2") == {"local": hex(7)}]
    at = {(e["name"], e["ph"]): e["ts"] / 1e6 for e in mine}
    assert at["queued", "b"] == pytest.approx(row.arrival_s)
    assert at["queued", "e"] == at["prefill", "b"] == pytest.approx(row.first_scheduled_s)
    assert at["prefill", "e"] == at["decode", "b"] == pytest.approx(row.first_token_s)
    assert at["decode", "e"] == at["ended", "n"] == pytest.approx(row.last_token_s)
    assert mine[0]["name"] == row.request_id
    assert mine[0]["args"]["output_tokens"] == row.output_tokens
    never = [e["name"] for e in events if e.get("id2") == {"local": hex(3)}]
    assert "unfinished" in never and "prefill" not in never and "ended" not in never


def test_counters_change_and_say_what_the_steps_say(tmp_path, two_replicas):
    counters = defaultdict(list)
    for event in written(tmp_path, two_replicas)["traceEvents"]:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append(event)
    assert len(counters) == 2 * 3
    for (pid, _), events in counters.items():
        assert all(a["args"] != b["args"] for a, b in zip(events, events[1:], strict=False))
        steps = two_replicas.steps[two_replicas.steps["replica"] == pid - 1]
        if "waiting" in events[0]["args"]:
            most = max(event["args"]["waiting"] for event in events)
            assert most == steps["waiting"].max()


def test_limits_are_kept_and_told(tmp_path, two_replicas):
    document = written(tmp_path, two_replicas, max_requests=5, max_steps=7)
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == 7
    assert len({e["id2"]["local"] for e in document["traceEvents"] if "id2" in e}) == 5
    told = document["otherData"]
    assert (told["requests_drawn"], told["steps_drawn"]) == (5, 7)
    assert (told["requests"], told["steps"]) == (40, len(two_replicas.steps))


def test_the_same_rows_give_the_same_bytes_and_none_give_a_file(tmp_path):
    for name in ("one", "two"):
        write_timeline(tmp_path / name, toy_rows())
    packed = (tmp_path / "one").read_bytes()
    assert packed == (tmp_path / "two").read_bytes()
    assert packed[4:8] == bytes(4)  # gzip's time stamp
    assert written(tmp_path, empty_rows())["traceEvents"] == []


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


def test_requests_that_are_drawn_are_the_first_of_all_replicas(fleet, tmp_path):
    found = drawn(tmp_path, fleet, max_requests=6)
    first = fleet.requests.sort_values("arrival_s").request_id[:6]
    assert {e["name"] for e in found if e["ph"] == "b"} >= set(first)
    assert sum(e["ph"] == "s" for e in found) == 12
