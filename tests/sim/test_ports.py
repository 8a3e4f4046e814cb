"""Ports that transfers pass: rates, queues, and what became of every byte."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.moves import IN, OUT
from twinserve.backends.links import PcieLink
from twinserve.backends.ports import Port, Transfer, send
from twinserve.policies.plan import HOST, Place


def ports(*rates: float, latency_s: float = 0.0) -> list[Port]:
    return [Port(f"port {i}", rate, latency_s) for i, rate in enumerate(rates)]


# -- by hand ---------------------------------------------------------------------------------------
def test_a_transfer_goes_at_the_rate_of_the_slowest_after_all_latencies():
    path = ports(1000, 250, 500, latency_s=0.5)
    sent = send(path, 2.0, 1000)
    assert (sent.begin_s, sent.lands_s) == (2.0, 2.0 + 3 * 0.5 + 4.0)


def test_it_begins_when_all_ports_are_free():
    first, second = ports(1000, 1000)
    send([first], 0.0, 5000)
    send([second], 0.0, 2000)
    sent = send([first, second], 1.0, 1000)
    assert (sent.begin_s, sent.lands_s) == (5.0, 6.0)


def test_eight_senders_to_one_port_share_its_rate():
    """Eight cards of 1,000 bytes a second send 1,000 bytes each: to eight receivers in a second, to
    one receiver in eight, one after another."""
    senders, receivers = ports(*[1000] * 8), ports(*[1000] * 8)
    apart = [send([a, b], 0.0, 1000).lands_s for a, b in zip(senders, receivers, strict=True)]
    assert apart == [1.0] * 8
    senders, (receiver,) = ports(*[1000] * 8), ports(1000)
    together = [send([sender, receiver], 0.0, 1000).lands_s for sender in senders]
    assert together == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_fast_receiver_takes_from_slow_senders_side_by_side_up_to_its_rate():
    """Four times as fast as each of eight senders: 8,000 bytes take it 2 s, and the last ones are a
    second on their way."""
    senders, (receiver,) = ports(*[1000] * 8), ports(4000)
    landings = [send([sender, receiver], 0.0, 1000).lands_s for sender in senders]
    assert landings == [1.0 + 0.25 * k for k in range(8)]
    assert receiver.free_at == 2.0


def test_a_slow_disk_does_not_keep_the_port_behind_it():
    """1,000 bytes come from a disk in 100 s. PCIe is theirs for one of these."""
    disk, pcie = ports(10, 1000)
    assert send([disk, pcie], 0.0, 1000).lands_s == 100.0
    assert send([pcie], 0.0, 1000).lands_s == 2.0
    assert send([disk, pcie], 0.0, 10).begin_s == 100.0


def test_what_is_lost_was_charged():
    """The target of the second of three transfers fails while it is on its way: its ports carry it
    to the end, and the third waits as if nothing had happened."""
    out, into = ports(1000, 1000)
    _, failed, last = (send([out, into], 0.0, size) for size in (1000, 2000, 3000))
    failed.lost = True
    assert last.lands_s == 6.0
    for now, landed, lost in ((0.5, 0, 0), (1.0, 1000, 0), (3.0, 1000, 2000), (6.0, 4000, 2000)):
        for port in (out, into):
            port.settle(now)
            assert (port.landed_bytes, port.lost_bytes) == (landed, lost)
            assert port.queued_bytes == 6000


@pytest.mark.parametrize("rate, latency", [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1e-6)])
def test_a_port_without_a_rate_is_refused(rate, latency):
    with pytest.raises(ValueError, match="port wire of .* bytes/s with .* s latency"):
        Port("wire", rate, latency)


# -- a plain model ---------------------------------------------------------------------------------
RATES = st.floats(1.0, 1e6)


@st.composite
def traffic(draw):
    """Rates and latencies of ports; (pause, path, bytes, lost) of transfers."""
    several = draw(st.lists(st.tuples(RATES, st.floats(0.0, 0.1)), min_size=1, max_size=5))
    path = st.lists(
        st.integers(0, len(several) - 1), min_size=1, max_size=len(several), unique=True
    )
    pauses = st.one_of(st.just(0.0), st.floats(0.0, 5.0))
    sent = st.tuples(pauses, path, st.integers(0, 10**6), st.booleans())
    return several, draw(st.lists(sent, max_size=25)), draw(st.floats(0.0, 100.0))


@examples(100)
@given(traffic())
def test_ports_agree_with_a_plain_model(case):
    """The model is a list of (begin, end, bytes) for each port."""
    several, transfers, later = case
    real = [Port(f"port {i}", rate, latency) for i, (rate, latency) in enumerate(several)]
    served: list[list[tuple[float, float, int]]] = [[] for _ in several]
    found: list[tuple[list[int], Transfer]] = []
    now = 0.0
    for pause, path, size, lost in transfers:
        now += pause
        sent = send([real[i] for i in path], now, size)
        sent.lost = lost
        found.append((path, sent))
        assert sent.begin_s == max([now, *(served[i][-1][1] for i in path if served[i])])
        slowest = min(several[i][0] for i in path)
        alone = sum(several[i][1] for i in path) + size / slowest
        assert sent.lands_s - sent.begin_s == pytest.approx(alone, rel=1e-6, abs=1e-9)
        for i in path:
            rate, _ = several[i]
            served[i].append((sent.begin_s, sent.begin_s + size / rate, size))
            assert real[i].free_at == served[i][-1][1] <= sent.lands_s * (1 + 1e-12)
    now += later
    for i, port in enumerate(real):
        for (_, end, _), (begin, _, _) in zip(served[i], served[i][1:], strict=False):
            assert begin >= end  # one after another, in the order of queueing
        if served[i]:  # over any stretch that it is busy from, no more than its rate allows
            _, last, _ = served[i][-1]
            for k, (begin, _, _) in enumerate(served[i]):
                carried = sum(size for *_, size in served[i][k:])
                assert carried <= several[i][0] * (last - begin) * (1 + 1e-6) + 1e-3
        port.settle(now)
        mine = [sent for path, sent in found if i in path]
        landed = [sent for sent in mine if sent.lands_s <= now]
        assert port.queued_bytes == sum(sent.size for sent in mine)
        assert port.landed_bytes == sum(sent.size for sent in landed if not sent.lost)
        assert port.lost_bytes == sum(sent.size for sent in landed if sent.lost)
        port.settle(math.inf)
        assert port.landed_bytes + port.lost_bytes == port.queued_bytes


# -- the link between device and host --------------------------------------------------------------
@examples(50)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 10**9), st.sampled_from([OUT, IN]))),
    st.lists(st.tuples(st.integers(0, 10**9), st.sampled_from([OUT, IN])), max_size=6),
)
def test_landings_are_those_of_the_transfers_and_queue_nothing(before, moves):
    link, now = PcieLink(1e8), 0.0
    for pause, size, way in before:
        now += pause
        link.transfer(now, size, *way)
    charged, free_at = link.to_host.queued_bytes + link.to_device.queued_bytes, link.free_at
    foreseen = link.landings(now, [(size, *way) for size, way in moves])
    assert link.to_host.queued_bytes + link.to_device.queued_bytes == charged
    assert link.free_at == free_at
    assert foreseen == [link.transfer(now, size, *way) for size, way in moves]


def test_a_link_joins_device_and_host_and_nothing_else():
    with pytest.raises(ValueError, match="no link from host to host 2: PCIe joins device and host"):
        PcieLink(1e9).transfer(0.0, 1, HOST, Place("host", 2))
