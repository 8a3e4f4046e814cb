"""A run as a Chrome trace (JSON, gzip): open it at ui.perfetto.dev or chrome://tracing.

A replica is a process. Its steps are a thread of complete events; batch, queue and KV use are
counters; each request is an asynchronous track: queued, prefill, decode, ended. With several
replicas the router is a process too, and requests are flows between them. Failures are slices on a
thread of their replica. Simulated seconds become microseconds.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator

import numpy as np
import pandas as pd

from twinserve.sim.results.drafts import DRAFT_COLUMNS
from twinserve.sim.results.files import RunRows

ROUTER = 10_000  # its process; replicas have 1 to 4,096
_THREAD = 1
_LONGEST_US = 100.0  # of a slice of the router, so that it can be seen


def router_events(
    placements: pd.DataFrame, requests: pd.DataFrame, steps: pd.DataFrame
) -> Iterator[dict]:
    """Return slices on the router's track and flows for the stays of `requests`, in order of time.

    steps  the drawn ones; a stay without a drawn step has no arrow
    """
    yield from router_names()
    drawn = placements[placements["request_id"].isin(set(requests["request_id"]))]
    drawn = drawn.sort_values(["placed_s", "request", "placement"], kind="stable")
    marks = [*_sent(drawn), *_ended(drawn)]
    marks.sort(key=lambda mark: mark["ts"])
    yield from _with_lengths(marks)
    yield from _flows(drawn, _Steps(steps))


def router_names() -> Iterator[dict]:
    """Return the events that name the router's track."""
    for kind, tid, args in (
        ("process_name", 0, {"name": "router"}),
        ("process_sort_index", 0, {"sort_index": -1}),
        ("thread_name", _THREAD, {"name": "requests"}),
    ):
        yield {"ph": "M", "name": kind, "pid": ROUTER, "tid": tid, "ts": 0, "args": args}


def _sent(stays: pd.DataFrame) -> Iterator[dict]:
    for stay in stays.itertuples(index=False):
        args = {"replica": int(stay.replica), "placement": int(stay.placement)}
        yield _slice(str(stay.request_id), stay.placed_s, args)


def _ended(stays: pd.DataFrame) -> Iterator[dict]:
    for stay in stays[stays["ended_s"].notna()].itertuples(index=False):
        args = {"replica": int(stay.replica), "output tokens": int(stay.output_tokens)}
        yield _slice(f"{stay.request_id} {stay.outcome}", stay.ended_s, args)


def _slice(name: str, at_s: float, args: dict) -> dict:
    about = {"ph": "X", "cat": "router", "name": name, "pid": ROUTER, "tid": _THREAD}
    return about | {"ts": _us(at_s), "args": args}


def _with_lengths(marks: list[dict]) -> Iterator[dict]:
    """Give slices lengths: each lasts until the next one begins, so that none overlap."""
    times = np.array([mark["ts"] for mark in marks])
    later = np.append(np.unique(times)[1:], np.inf)
    until = dict(zip(np.unique(times).tolist(), later.tolist(), strict=True))
    for mark in marks:
        yield mark | {"dur": round(min(_LONGEST_US, until[mark["ts"]] - mark["ts"]), 3)}


def _flows(stays: pd.DataFrame, steps: _Steps) -> Iterator[dict]:
    for number, stay in enumerate(stays.itertuples(index=False)):
        replica = int(stay.replica)
        begun = steps.around(replica, stay.first_scheduled_s, "right")
        if begun is not None and begun >= _us(stay.placed_s):
            yield from _arrow(f"to {number}", (ROUTER, _us(stay.placed_s)), (replica + 1, begun))
        ended = steps.around(replica, stay.ended_s, "left")
        if ended is not None and begun is not None and stay.outcome == "completed":
            yield from _arrow(f"back {number}", (replica + 1, ended), (ROUTER, _us(stay.ended_s)))


def _arrow(name: str, tail: tuple[int, float], head: tuple[int, float]) -> Iterator[dict]:
    """Return a flow; both ends are bound to their slices."""
    flow = {"cat": "flow", "name": "request", "id": name, "tid": _THREAD}
    yield flow | {"ph": "s", "pid": tail[0], "ts": tail[1]}
    yield flow | {"ph": "f", "bp": "e", "pid": head[0], "ts": head[1]}


class _Steps:
    """Steps of each replica, in order of time."""

    def __init__(self, steps: pd.DataFrame) -> None:
        self._of = {
            int(replica): mine[["start_s", "end_s"]].to_numpy(np.float64)
            for replica, mine in steps.groupby("replica", sort=False)
        }

    def around(self, replica: int, at_s: float, side: str) -> float | None:
        """Return the middle (microseconds) of the first step that ends after `at_s`, or with "left"
        then; None if none is drawn."""
        steps = self._of.get(replica)
        if steps is None or np.isnan(at_s):
            return None
        place = int(np.searchsorted(steps[:, 1], at_s, side))  # type: ignore[call-overload]
        return None if place == len(steps) else _us(steps[place].mean())


FAILURE_THREAD = 2


def failure_events(failures: pd.DataFrame, end_s: float) -> Iterator[dict]:
    """Return the slices of failures. end_s: end of the timeline, for failures that last."""
    for replica in sorted(set(failures["replica"])):
        name = {"name": "failures"}
        about = {"pid": int(replica) + 1, "tid": FAILURE_THREAD}
        yield {"ph": "M", "name": "thread_name", "ts": 0, "args": name} | about
    for one in failures.itertuples(index=False):
        about = {"cat": "failure", "pid": int(one.replica) + 1, "tid": FAILURE_THREAD}
        until_s = max(end_s, one.at_s) if math.isnan(one.end_s) else one.end_s
        told = {"requests": one.requests, "failed": one.failed, "retried": one.retried}
        told |= {"migrated": one.migrated, "successor": one.successor}
        yield about | {
            "ph": "X",
            "name": one.kind,
            "ts": _us(one.at_s),
            "dur": round(_us(until_s) - _us(one.at_s), 3),
            "args": {name: int(value) for name, value in told.items()},
        }
        if not math.isnan(one.seen_s):
            yield about | {"ph": "i", "s": "t", "name": "router knows", "ts": _us(one.seen_s)}


STEP_THREAD = 1
MAX_REQUESTS = 1_000  # a track each: more cannot be read, and slow the viewer down
MAX_STEPS = 200_000


def write_timeline(
    path: str | os.PathLike,
    rows: RunRows,
    max_requests: int = MAX_REQUESTS,
    max_steps: int = MAX_STEPS,
) -> None:
    """Write trace.json.gz with the first `max_requests` requests and the first `max_steps` steps.

    `otherData` has the full counts. The same rows give the same bytes.
    """
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        packed.writelines(piece.encode() for piece in _document(rows, max_requests, max_steps))


def trace_events(
    rows: RunRows, max_requests: int = MAX_REQUESTS, max_steps: int = MAX_STEPS
) -> Iterator[dict]:
    """Yield the trace's events: metadata, steps and counters, then the requests' tracks."""
    steps = rows.steps.iloc[:max_steps]
    requests, flows = rows.requests, _has_flows(rows)
    if flows:  # else those of the first replica come first
        requests = requests.sort_values("arrival_s", kind="stable")
    requests = requests.iloc[:max_requests]
    replicas = np.union1d(steps["replica"].to_numpy(), requests["replica"].to_numpy())
    end_s = float(rows.steps["end_s"].max()) if len(rows.steps) else 0.0
    yield from _names(replicas[replicas >= 0].astype(int).tolist())
    if flows and rows.placements is not None:
        yield from router_events(rows.placements, requests, steps)
    elif (replicas < 0).any():
        yield from router_names()
    if rows.failures is not None:
        yield from failure_events(rows.failures, end_s)
    yield from _steps(steps)
    yield from _counters(steps)
    yield from _requests(requests, end_s)


def _has_flows(rows: RunRows) -> bool:
    return rows.placements is not None and rows.replicas is not None and len(rows.replicas) > 1


def _document(rows: RunRows, max_requests: int, max_steps: int) -> Iterator[str]:
    about = {
        "clock": "simulated time",
        "kv_total_blocks": int(rows.kv_total_blocks),
        "requests": len(rows.requests),
        "requests_drawn": min(len(rows.requests), max_requests),
        "steps": len(rows.steps),
        "steps_drawn": min(len(rows.steps), max_steps),
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    yield f'{{"displayTimeUnit":"ms","otherData":{encode(about)},"traceEvents":[\n'
    separator = ""
    for event in trace_events(rows, max_requests, max_steps):
        yield separator + encode(event)
        separator = ",\n"
    yield "\n]}\n"


def _names(replicas: list[int]) -> Iterator[dict]:
    for replica in replicas:
        pid = _pid(replica)
        for kind, tid, args in (
            ("process_name", 0, {"name": f"replica {replica}"}),
            ("process_sort_index", 0, {"sort_index": replica}),
            ("thread_name", STEP_THREAD, {"name": "steps"}),
        ):
            yield {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _steps(steps: pd.DataFrame) -> Iterator[dict]:
    shown = {
        "prefill requests": "prefill_requests",
        "prefill tokens": "prefill_tokens",
        "decode requests": "decode_requests",
        "dropped": "preempted_recompute",
        "swapped out": "preempted_swap",
        "bytes to host": "to_host_bytes",
        "bytes to device": "to_device_bytes",
        "prefix hit tokens": "hit_tokens",
    }
    if "draft_tokens" in steps:
        shown |= {name.replace("_", " "): name for name in DRAFT_COLUMNS}
    columns = [steps[name].astype(int).tolist() for name in shown.values()]
    starts, ends = _microseconds(steps["start_s"]), _microseconds(steps["end_s"])
    replicas = steps["replica"].astype(int).tolist()
    for replica, start, end, *values in zip(replicas, starts, ends, *columns, strict=True):
        prefills, decodes = values[0], values[2]
        # Zeros are left out: they are most of the file and tell nothing.
        yield {
            "ph": "X",
            "cat": "step",
            "name": _kind(prefills, decodes),
            "pid": _pid(replica),
            "tid": STEP_THREAD,
            "ts": start,
            "dur": round(end - start, 3),
            "args": {name: value for name, value in zip(shown, values, strict=True) if value},
        }


def _counters(steps: pd.DataFrame) -> Iterator[dict]:
    """Yield only changes: a counter keeps its value until its next event."""
    tracks = {
        "requests": {"running": "running", "waiting": "waiting"},
        "KV blocks": {
            "real-time": "kv_rt_blocks",
            "best-effort": "kv_be_blocks",
            "cached": "kv_cached_blocks",
        },
        "KV blocks used": {"used": "kv_used_blocks"},
    }
    for replica, mine in steps.groupby("replica", sort=True):
        starts = np.array(_microseconds(mine["start_s"]))
        for name, series in tracks.items():
            values = mine[list(series.values())].to_numpy(np.int64)
            changed = np.ones(len(values), bool)
            changed[1:] = (values[1:] != values[:-1]).any(axis=1)
            for ts, row in zip(starts[changed].tolist(), values[changed].tolist(), strict=True):
                args = dict(zip(series, row, strict=True))
                yield {"ph": "C", "name": name, "pid": _pid(int(replica)), "ts": ts, "args": args}


def _requests(requests: pd.DataFrame, end_s: float) -> Iterator[dict]:
    times = ("arrival_s", "first_scheduled_s", "first_token_s", "last_token_s")
    told = ("prompt_tokens", "output_tokens", "hit_tokens", "recomputes", "swaps", "late_tokens")
    columns = (*times, *told, "request_id", "service_class", "replica", "finished")
    for number, row in enumerate(requests[list(columns)].itertuples(index=False)):
        finished = bool(row.finished)
        last = row.last_token_s if finished else max(end_s, row.arrival_s)
        pid = _pid(int(row.replica))
        track = {"cat": row.service_class, "id2": {"local": hex(number)}, "pid": pid, "tid": 0}
        # Phases lie inside the request's own span; one lasts until the next begins, or the end.
        bounds = [row.arrival_s, row.first_scheduled_s, row.first_token_s]
        begun = [
            (name, start)
            for name, start in zip(("queued", "prefill", "decode"), bounds, strict=True)
            if not np.isnan(start)
        ]
        args = {name: int(getattr(row, name)) for name in told} | {"finished": finished}
        name = str(row.request_id)
        yield track | {"ph": "b", "name": name, "ts": _us(row.arrival_s), "args": args}
        for (phase, start), end in zip(begun, [*(s for _, s in begun[1:]), last], strict=True):
            yield track | {"ph": "b", "name": phase, "ts": _us(start)}
            yield track | {"ph": "e", "name": phase, "ts": _us(end)}
        yield track | {"ph": "n", "name": "ended" if finished else "unfinished", "ts": _us(last)}
        yield track | {"ph": "e", "name": name, "ts": _us(last)}


def _kind(prefills: int, decodes: int) -> str:
    if prefills and decodes:
        return "mixed"
    return "prefill" if prefills else "decode"


def _pid(replica: int) -> int:
    """Return a process id (0 is the idle task). Requests without a replica: the router's."""
    return ROUTER if replica < 0 else replica + 1


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _microseconds(seconds: pd.Series) -> list[float]:
    return np.round(seconds.to_numpy(np.float64) * 1e6, 3).tolist()
