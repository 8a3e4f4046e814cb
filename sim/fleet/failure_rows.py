"""What a run leaves behind of its failures: a row for each, and two columns of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from twinserve.policies.requests import End
from twinserve.sim.fleet.faults import Happened, Kind
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.recovery import Action
from twinserve.sim.fleet.replica import Life
from twinserve.sim.fleet.request import Request
from twinserve.sim.results.schemas import FAILURES


def failure_rows(fleet: Fleet, happened: Sequence[Happened]) -> pd.DataFrame:
    """FAILURES, in order of time."""
    under_way = _UnderWay(fleet.requests)
    return pd.DataFrame([_row(fleet, one, under_way) for one in happened], columns=list(FAILURES))


def _row(fleet: Fleet, one: Happened, under_way: _UnderWay) -> dict[str, object]:
    crashed = one.kind is Kind.CRASH
    loss = fleet.losses[one.replica.index] if crashed else None
    up_s = math.nan if one.successor is None else one.successor.since_s.get(Life.UP, math.nan)
    again = 0 if loss is None else loss.placed_again
    action = fleet.recovery.action
    if crashed or one.kind is Kind.DRAIN:
        seen_s = one.at_s if loss is None else loss.seen_s
        lasts = math.isinf(one.until_s)  # else nothing is whole before its successor is up
        whole_s = seen_s if lasts else float(np.maximum(up_s, seen_s))
    else:
        whole_s = one.end_s
    return {
        "kind": one.kind.value,
        "of": one.slot,
        "replica": one.replica.index,
        "successor": -1 if one.successor is None else one.successor.index,
        "at_s": one.at_s,
        "end_s": one.end_s,
        "seen_s": math.nan if loss is None else loss.seen_s,
        "up_s": up_s,
        "recovered_s": under_way.as_before(one.at_s, _served_from(fleet, whole_s)),
        "requests": 0 if loss is None else loss.requests,
        "failed": 0 if loss is None else loss.requests - again - loss.left,
        "retried": again if action is Action.RETRY else 0,
        "migrated": again if action is Action.MIGRATE else 0,
        "left": 0 if loss is None else loss.left,
        "lost_kv_tokens": 0 if loss is None else loss.kv_tokens,
        "discarded_tokens": 0 if loss is None else loss.discarded_tokens,
    }


def _served_from(fleet: Fleet, at_s: float) -> float:
    """When, not before `at_s`, a replica that answers clients first takes requests; NaN: never, or
    `at_s` is."""
    found = math.nan
    if math.isnan(at_s):
        return found
    for replica in fleet.replicas:
        since = replica.since_s
        if replica.prefills or Life.UP not in since:
            continue
        from_s = max(since[Life.UP], at_s)
        until_s = min(since.get(life, math.inf) for life in (Life.DRAINING, Life.DOWN))
        if from_s < until_s and not found <= from_s:
            found = from_s
    return found


class _UnderWay:
    """How many requests were under way at any time: sent to the fleet, and not ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        sent = [request for request in requests if request.end is not End.NEVER_SENT]
        self._came = np.sort([request.arrival_s for request in sent])
        self._went = np.sort([request.ended_s for request in sent])

    def as_before(self, at_s: float, whole_s: float) -> float:
        """When, not before `whole_s`, there were first no more than right before `at_s`; NaN: not
        while requests arrived, or never `whole_s`."""
        if math.isnan(whole_s):
            return math.nan
        before = self._came.searchsorted(at_s) - self._went.searchsorted(at_s)
        times = np.concatenate([[whole_s], self._went[self._went > whole_s]])
        there = self._came.searchsorted(times, "right") - self._went.searchsorted(times, "right")
        again = np.flatnonzero((there <= before) & (times <= self._came[-1]))
        return float(times[again[0]]) if len(again) else math.nan


def with_losses(frame: pd.DataFrame, requests: Sequence[Request]) -> pd.DataFrame:
    """Rows of `requests`: how often each lost its replica, and how many of its tokens were thrown
    away since it began anew."""
    return frame.assign(
        failures=np.array([r.failures for r in requests], np.int64),
        discarded_tokens=np.array([r.discarded_tokens for r in requests], np.int64),
    )
