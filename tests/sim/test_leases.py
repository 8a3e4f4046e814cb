"""Leases of KV that was handed over, and the heartbeats that renew them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.sim.fleet.connector import Heartbeats, Lease

EVERY, LONG = 5.0, 20.0


def test_a_lease_runs_out_where_nobody_asks():
    assert Lease(30.0, LONG).renew(29.0) == 30.0


def test_one_heartbeat_goes_out_for_all_that_are_waited_for():
    """The second prompt's lease is renewed when the first one's is, and not five seconds after it
    was asked for."""
    beats, first, second = Heartbeats(EVERY), Lease(30.0, LONG), Lease(30.0, LONG)
    first.track(beats, 11.0)
    second.track(beats, 14.0)
    assert second.renew(15.9) == 30.0
    assert second.renew(16.0) == first.renew(16.0) == 36.0


def test_who_asks_too_late_for_the_next_heartbeat_loses_the_kv():
    beats, first, second = Heartbeats(EVERY), Lease(99.0, LONG), Lease(17.0, LONG)
    first.track(beats, 14.0)
    second.track(beats, 16.0)
    assert second.renew(17.0) == 17.0


def test_the_last_heartbeat_counts_when_nobody_waits_any_more():
    beats, lease = Heartbeats(EVERY), Lease(30.0, LONG)
    lease.track(beats, 20.0)
    lease.let_go(34.0)
    assert not lease.tracked and lease.renew(100.0) == 30.0 + LONG


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6))
def test_heartbeats_are_those_of_an_engine_that_looks_every_second(stays):
    """stays: when a prompt is asked for, and for how long it is waited for."""
    beats, leases = Heartbeats(EVERY), [Lease(0.0, LONG) for _ in stays]
    last, expected = -math.inf, [0.0] * len(stays)
    for now in range(90):
        for lease, (since, length) in zip(leases, stays, strict=True):
            if now == since + length:
                lease.let_go(now)
        for lease, (since, _) in zip(leases, stays, strict=True):
            if now == since:
                lease.track(beats, now)
        waited = [i for i, (since, length) in enumerate(stays) if since <= now < since + length]
        if waited and now - last >= EVERY:
            last = float(now)
            for i in waited:
                expected[i] = max(expected[i], now + LONG)
        assert [lease.renew(now) for lease in leases] == expected
