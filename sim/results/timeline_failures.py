"""Failures in a timeline: a slice on the replica that each struck, from its beginning to its end,
and a mark where its router learned of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

FAILURE_THREAD = 2


def failure_events(failures: pd.DataFrame, end_s: float) -> Iterator[dict]:
    """end_s: of the timeline, where those that last end."""
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


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
