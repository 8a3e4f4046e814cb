"""Prefill apart from decode, where the prefill replica writes: beside the pull, and alone. Leases
of KV that was handed over, and their heartbeats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import mostly_nightly
from tests.sim.apart import hand_over
from tests.sim.test_apart import BYTES, LATENCY, ROOMY, run_of, sent_s, some, stays_of
from tests.sim.troubled import TABLES
from twinserve.policies.requests import End
from twinserve.sim.fleet.connector import Heartbeats, Lease, Push
from twinserve.sim.fleet.recovery import Recovery
from twinserve.sim.fleet.replica import Role
from twinserve.sim.setup.audit import crowd

AT_ONCE = Push(poll_s=0.0, timeout_s=1.0)
LIMITLESS = (math.inf, 0.0)  # bytes/s, seconds of latency


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", mostly_nightly(range(4), 0))
def test_over_a_limitless_link_a_push_is_a_pull(seed, asynchronous):
    """Whoever begins, nothing takes time: every row of every table is the same, with memory that
    runs short, preemptions and several replicas of each role."""
    config = ROOMY.model_copy(update={"num_blocks": 60, "async_scheduling": asynchronous})
    pulled, pushed = (
        run_of(crowd(seed), hand_over(push=p), config, network=LIMITLESS, prefill=2, decode=2)[1]
        for p in (None, AT_ONCE)
    )
    assert pulled.placements["recomputes"].sum() > 0
    assert stays_of(pulled, "decode")["load_tokens"].sum() > 0
    for table in TABLES:
        assert getattr(pulled, table).equals(getattr(pushed, table)), table


def test_a_push_alone_takes_one_message_more_than_a_pull():
    (pulled, pushed) = (run_of(some([100]), hand_over(push=p))[1] for p in (None, AT_ONCE))
    assert pulled.requests["transfer_s"][0] == pytest.approx(sent_s(100), rel=1e-9)
    assert pushed.requests["transfer_s"][0] == pytest.approx(sent_s(100) + LATENCY, rel=1e-9)
    same = ["router_s", "queue_s", "prefill_s"]
    assert pulled.requests[same].equals(pushed.requests[same])


@pytest.mark.slow
@pytest.mark.parametrize("push", [None, AT_ONCE, Push()], ids=["pull", "push", "polled"])
def test_each_byte_is_sent_once(push):
    """What was asked for passes one port of each side, whoever begins the transfers."""
    run, rows = run_of(crowd(1), hand_over(push=push), prefill=2, decode=3)
    asked = stays_of(rows, "decode")["load_tokens"].sum() * BYTES
    for side, port in ((Role.PREFILL, "out"), (Role.DECODE, "into")):
        ports = [getattr(r.network, port) for r in run.fleet.replicas if r.role is side]
        for one in ports:
            one.settle(np.inf)
        assert sum(one.landed_bytes for one in ports) == asked > 0
        assert sum(one.lost_bytes for one in ports) == 0


# -- what is lost ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("recompute", "end"), [(False, "failed"), (True, "completed")])
def test_nobody_says_that_a_write_will_not_come(recompute, end):
    """A pull from a replica that fails is known to have failed at that time; a push is waited for
    until its time is over."""
    fails = [(0.1, lambda run: run.fleet.fail(0))]
    for push, known_s in ((None, 0.1), (AT_ONCE, None)):
        _, rows = run_of(some([160]), hand_over(recompute=recompute, push=push), events=fails)
        (decode,) = stays_of(rows, "decode").itertuples()
        assert decode.load_begin_s < 0.1 and decode.load_failed
        assert decode.load_end_s == (known_s or decode.load_begin_s + AT_ONCE.timeout_s)
        assert rows.requests["outcome"].tolist() == [end]


def test_who_asks_after_the_lease_waits_in_vain():
    """The only decode replica fails, and another comes when the lease has run out."""
    events = [
        (1e-4, lambda run: run.fleet.fail(1)),
        (1.0, lambda run: run.add(run.kinds[Role.DECODE])),
    ]
    connector = hand_over(lease_s=0.5, recompute=True, push=AT_ONCE)
    run, rows = run_of(some([100]), connector, events=events)
    (decode,) = stays_of(rows, "decode").itertuples()
    assert decode.load_begin_s == 1.0 and decode.load_end_s == 1.0 + AT_ONCE.timeout_s
    assert rows.requests["outcome"].tolist() == ["completed"]
    assert rows.requests["transfer_s"][0] == pytest.approx(AT_ONCE.timeout_s)
    assert run.fleet.replicas[0].network.out.queued_bytes == 0


def test_a_decode_replica_that_fails_before_the_write_gets_none():
    """The prefill replica keeps the prompt until its lease is over."""
    fails = [(0.03, lambda run: run.fleet.fail(1))]
    connector = hand_over(lease_s=0.3, push=Push(poll_s=0.04))
    run, rows = run_of(some([160]), connector, events=fails)
    (kept,), (decode,) = (stays_of(rows, role).itertuples() for role in ("prefill", "decode"))
    assert kept.ended_s < 0.03 < kept.ended_s + 0.04  # asked for, and not seen
    assert math.isnan(decode.load_end_s)
    assert kept.lease_expired and run.fleet.replicas[0].network.out.queued_bytes == 0


@pytest.mark.parametrize("push", [None, Push(poll_s=0.04)], ids=["pull", "push"])
def test_nothing_lands_on_a_replica_that_is_not_yet_known_to_be_dead(push):
    """The router learns of it only after the KV would have come."""

    def fail(run):
        run.fleet.recovery = Recovery(detection_s=0.5)
        run.fleet.fail(1)

    connector = hand_over(lease_s=0.3, push=push)
    run, rows = run_of(some([160]), connector, events=[(0.03, fail)])
    (kept,), (decode,) = (stays_of(rows, role).itertuples() for role in ("prefill", "decode"))
    assert decode.load_begin_s < 0.03 and decode.load_failed and math.isnan(decode.load_end_s)
    assert kept.lease_expired
    (port,) = (replica.network.into for replica in run.fleet.replicas[1:])
    port.settle(np.inf)
    assert port.landed_bytes == 0


def test_a_decode_replica_that_fails_while_it_waits_in_vain_learns_nothing():
    """First the prefill replica fails, then the one that waits for it."""
    fails = [(0.1, lambda run: run.fleet.fail(0)), (0.2, lambda run: run.fleet.fail(1))]
    _, rows = run_of(some([160]), hand_over(push=AT_ONCE), events=fails)
    (decode,) = stays_of(rows, "decode").itertuples()
    assert decode.ended_s == 0.2 and decode.load_failed and math.isnan(decode.load_end_s)
    assert rows.requests["outcome"].tolist() == ["failed"]


def test_memory_of_who_left_and_failed_is_kept_until_the_lease_is_over():
    """Nobody is left to say that the KV has come, and the prefill replica drains all the same."""
    events = [
        (0.025, lambda run: run.fleet.withdraw(run.fleet.requests[0], End.DISCONNECTED)),
        (0.03, lambda run: run.fleet.fail(1)),
    ]
    connector = hand_over(lease_s=0.3, push=Push(poll_s=0.04))
    run, rows = run_of(some([160]), connector, events=events)
    (kept,) = stays_of(rows, "prefill").itertuples()
    assert kept.lease_expired and run.fleet.replicas[0].network.out.queued_bytes == 0
    assert run.engines[0].core.ledger.usage().free == 400


EVERY, LONG = 5.0, 20.0


def test_one_heartbeat_goes_out_for_all_that_are_waited_for():
    """The second prompt's lease is renewed when the first one's is, and not five seconds after it
    was asked for."""
    beats, first, second = Heartbeats(EVERY), Lease(30.0, LONG), Lease(30.0, LONG)
    first.track(beats, 11.0)
    second.track(beats, 14.0)
    assert second.renew(15.9) == 30.0
    assert second.renew(16.0) == first.renew(16.0) == 36.0


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
