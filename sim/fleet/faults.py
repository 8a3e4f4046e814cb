"""Failures of replicas during a run: at given times, or drawn from a mean time to failure and a
mean time to repair (docs/fleet.md). Also the rows that a run keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from twinserve.policies.requests import End
from twinserve.sim.engine.clock import BEFORE_STEPS, Clock
from twinserve.sim.fleet.fleet import Fleet
from twinserve.sim.fleet.recovery import Action
from twinserve.sim.fleet.replica import Life, Replica
from twinserve.sim.fleet.request import Request
from twinserve.sim.results.columns import FAILURES, Columns

if TYPE_CHECKING:
    import pandas as pd


class Kind(StrEnum):
    CRASH = "crash"  # the replica dies with its KV; another one takes its place
    SLOW = "slow"  # its steps take longer
    DRAIN = "drain"  # it takes no more requests, and goes when it has none
    SIGNALS = "signals"  # its router hears nothing of it


@dataclass(frozen=True)
class Fault:
    """replica  by number in the beginning; it stands for those that take its place, too
    at_s, until_s  seconds; inf: for ever
    factor   of a slow one: how many times as long its steps take
    grace_s  of one that drains: after so long what it still has is taken away; None: never
    """

    kind: Kind
    replica: int
    at_s: float
    until_s: float = math.inf
    factor: float = 1.0
    grace_s: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The failures of a run.

    faults   at given times
    mttf_s, mttr_s  means of exponential times: from when a replica is up to its crash, and from
             there until it starts up again; None: no such crashes. Each replica draws its own
    start_up_s  from a start to taking requests
    """

    faults: tuple[Fault, ...] = ()
    mttf_s: float | None = None
    mttr_s: float = 0.0
    seed: int = 0
    start_up_s: float = 0.0


@dataclass(slots=True, eq=False)
class Happened:
    """A failure that happened.

    slot, replica  its number in the schedule, and the replica that it struck
    until_s  when it was to be over, whether the run lasted so long or not; inf: never
    end_s  when it was over; a crash: when another replica began to start up. NaN: never
    successor  that replica; None: there was none
    """

    kind: Kind
    slot: int
    replica: Replica
    at_s: float
    until_s: float
    end_s: float = math.nan
    successor: Replica | None = None


class _Due(NamedTuple):
    """At one time what ends goes before what begins: one failure may follow right on another."""

    at_s: float
    begins: bool
    order: int
    act: Callable[[], object]
    mends: bool  # it brings something back


class Faults:
    """again  called with a replica that is gone and start-up seconds: adds another one like it
    over   whether all requests have been sent

    The schedule ends with the requests: no fault strikes an empty fleet.
    """

    def __init__(
        self,
        clock: Clock,
        fleet: Fleet,
        schedule: Schedule,
        again: Callable[[Replica, float], Replica],
        over: Callable[[], bool],
    ) -> None:
        self.clock, self.fleet, self.schedule = clock, fleet, schedule
        self.happened: list[Happened] = []
        self._again, self._over = again, over
        self._now_at: list[Replica] = []  # by slot
        self._seeds = np.random.SeedSequence(schedule.seed, spawn_key=(0x6D,))
        self._due: list[_Due] = []
        self._count = self._mends = 0
        for fault in schedule.faults:
            self._put(fault.at_s, partial(self._begin, fault), begins=True)
        for replica in fleet.replicas:
            self.joins(replica, 0.0)
        clock.process(self._life())

    def joins(self, replica: Replica, up_s: float) -> None:
        """A replica is up from `up_s` on that replaces no other. It draws its own crashes if
        crashes are drawn."""
        self._now_at.append(replica)
        if self.schedule.mttf_s is not None:
            (seed,) = self._seeds.spawn(1)
            self._draw(len(self._now_at) - 1, up_s, np.random.default_rng(seed))

    def _put(
        self, at_s: float, act: Callable[[], object], *, begins: bool = False, mends: bool = False
    ) -> None:
        if math.isfinite(at_s):
            self._count += 1
            self._mends += mends
            heappush(self._due, _Due(at_s, begins, self._count, act, mends))

    def _life(self):
        while self._due:
            due = self._due[0]
            if due.at_s > self.clock.now:
                self.clock.idle_events += 1
                yield self.clock.at(due.at_s, BEFORE_STEPS)
                self.clock.idle_events -= 1
            stuck = self.clock.empty and not self._mends  # and what is held waits in vain
            if stuck if self.fleet.active else self._over():
                return
            heappop(self._due)
            self._mends -= due.mends
            due.act()

    # -- what happens ------------------------------------------------------------------------------
    def _draw(self, slot: int, up_s: float, rng: np.random.Generator) -> None:
        """The next crash of a replica that is up from `up_s` on."""
        schedule = self.schedule
        assert schedule.mttf_s is not None
        at_s = up_s + rng.exponential(schedule.mttf_s)
        until_s = at_s + rng.exponential(schedule.mttr_s) if schedule.mttr_s else at_s
        fault = Fault(Kind.CRASH, slot, at_s, until_s)
        self._put(at_s, partial(self._crash, fault, rng), begins=True)

    def _crash(self, fault: Fault, rng: np.random.Generator) -> None:
        """A drawn one, and the next. One that an autoscaler has taken away has none any more."""
        if self._begin(fault):
            up_s = fault.until_s + self.schedule.start_up_s
            self._put(fault.until_s, partial(self._draw, fault.replica, up_s, rng))

    def _begin(self, fault: Fault) -> bool:
        """Return False if the replica is down."""
        replica = self._now_at[fault.replica]
        if replica.life is Life.DOWN:
            return False
        fleet, index = self.fleet, replica.index
        happened = Happened(fault.kind, fault.replica, replica, self.clock.now, fault.until_s)
        self.happened.append(happened)
        gone = fault.kind in (Kind.CRASH, Kind.DRAIN)
        self._put(fault.until_s, partial(self._end, happened), mends=gone)
        if fault.kind is Kind.CRASH:
            fleet.fail(index)
        elif fault.kind is Kind.DRAIN:
            fleet.drain(index, fault.grace_s)
        elif fault.kind is Kind.SLOW:
            replica.engine.slow(fault.factor)
        else:
            fleet.hear(index, False)
        return True

    def _end(self, happened: Happened) -> None:
        replica, happened.end_s = happened.replica, self.clock.now
        if happened.kind in (Kind.CRASH, Kind.DRAIN):
            happened.successor = self._again(replica, self.schedule.start_up_s)
            self._now_at[happened.slot] = happened.successor
        elif replica.life is Life.DOWN:
            return
        elif happened.kind is Kind.SLOW:
            replica.engine.slow(1.0)
        else:
            self.fleet.hear(replica.index, True)


def failure_rows(fleet: Fleet, happened: Sequence[Happened]) -> pd.DataFrame:
    """Return the rows of FAILURES, in order of time."""
    import pandas as pd

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


def with_losses(table: Columns, requests: Sequence[Request]) -> Columns:
    """Return `requests` with two more columns: how often each request lost its replica, and how
    many of its tokens were discarded because it began anew."""
    return table.assign(
        failures=np.array([r.failures for r in requests], np.int64),
        discarded_tokens=np.array([r.discarded_tokens for r in requests], np.int64),
    )
