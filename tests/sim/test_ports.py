"""Ports that transfers pass: rates, queues, and what became of every byte."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.moves import IN, OUT
from tests.parameters import mostly_nightly
from tests.sim.harness import Affine, Toy, build, hybrid, simulate
from twinserve.backends.links import PcieLink
from twinserve.backends.ports import Port, Transfer, send
from twinserve.policies.base import EngineLimits
from twinserve.policies.plan import HOST, Hold, KvMove, Place, StepPlan
from twinserve.traces.workload import Workload


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


# Transfers between device and host memory: the link, what a plan's moves hold back, and the room
# on the host.
STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)  # every step takes a second
BYTES = 1_000_000  # bytes a second of the link in tests of transfers; a token is 1,000 bytes
LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=10_000, kv_bytes_per_token=1000)


def test_a_transfer_takes_latency_plus_size_over_bandwidth():
    assert PcieLink(1000, latency_s=0.5).transfer(2.0, 3000, *OUT) == 5.5


def test_transfers_of_one_direction_are_served_one_after_another():
    link = PcieLink(1000, latency_s=0.5)
    assert [link.transfer(0.0, 1000, *OUT), link.transfer(0.25, 2000, *OUT)] == [1.5, 3.5]
    assert link.transfer(10.0, 1000, *OUT) == 11.5  # it was idle by then


def test_directions_do_not_delay_each_other():
    link = PcieLink(1000, latency_s=0.0)
    assert link.transfer(0.0, 5000, *OUT) == 5.0
    assert link.transfer(1.0, 1000, *IN) == 2.0


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 10**9), st.sampled_from([OUT, IN])), max_size=30
    ),
    st.floats(1e6, 1e11),
)
def test_order_bandwidth_and_bytes_are_kept(requests, bandwidth):
    link, now = PcieLink(bandwidth), 0.0
    ends = {OUT: [0.0], IN: [0.0]}  # of the bytes of each transfer
    sizes = {OUT: 0, IN: 0}
    for pause, size, way in requests:
        now += pause
        end = link.transfer(now, size, *way) - 1e-5
        begin = max(now, ends[way][-1])
        assert end - begin == pytest.approx(size / bandwidth, rel=1e-6, abs=1e-9)
        ends[way].append(end)
        sizes[way] += size
    assert {OUT: link.to_host.queued_bytes, IN: link.to_device.queued_bytes} == sizes


@pytest.mark.parametrize("settings", [(0.0,), (-1.0,), (float("nan"),), (1e9, -1e-6)])
def test_a_link_without_bandwidth_is_refused(settings):
    with pytest.raises(ValueError, match="bytes/s with"):
        PcieLink(*settings)


# -- transfers -------------------------------------------------------------------------------------
def toy(**script):
    moves = {int(k[1:]): v for k, v in script.items()}
    return type("Scripted", (Toy,), {"script": moves})


def move(tokens, hold, way=OUT, row=0, layers=None):
    return KvMove(row, *way, tokens, hold, layers=layers)


def starts(sim) -> list[float]:
    return sim.steps.start_s.tolist()


def transfer_run(moves, arrivals=(0.0,), outputs=(6,), layers=1):
    workload = Workload.build(arrivals, [8] * len(arrivals), outputs)
    return simulate(
        workload, toy(p2=moves), model=STEP, limits=LIMITS, bytes_per_s=BYTES, layers=layers
    )


LATENCY = 10e-6  # of a transfer


def test_before_step_delays_the_step():
    sim = transfer_run([move(2500, Hold.BEFORE_STEP)])  # 2.5 s
    ends = sim.steps.end_s.to_numpy()
    assert ends == pytest.approx([1, 2, 2 + 2.5 + LATENCY + 1, 6.5, 7.5, 8.5], abs=1e-4)


def test_step_overlaps_and_the_step_ends_no_earlier():
    long, short = transfer_run([move(2500, Hold.STEP)]), transfer_run([move(500, Hold.STEP)])
    assert long.steps.end_s.to_numpy() == pytest.approx([1, 2, 4.5, 5.5, 6.5, 7.5], abs=1e-4)
    assert short.steps.end_s.tolist() == [1, 2, 3, 4, 5, 6]


def test_nothing_waits_for_nothing():
    sim = transfer_run([move(2500, Hold.NOTHING)])
    assert sim.steps.end_s.tolist() == [1, 2, 3, 4, 5, 6]
    assert sim.steps.to_host_bytes.tolist() == [0, 0, 2_500_000, 0, 0, 0]


def test_request_holds_back_only_its_row_until_the_first_boundary_after_it_lands():
    sim = transfer_run([move(2500, Hold.REQUEST)], arrivals=(0.0, 0.0), outputs=(6, 6))
    # The move starts with the third step, in which row 0 still runs: it comes in at 4.5 s, between
    # steps.
    assert sim.steps.decode_requests.tolist()[1:] == [2, 2, 1, 1, 2, 1, 1]
    assert sim.requests.last_token_s.tolist() == [8.0, 6.0]


def test_an_engine_without_other_work_wakes_when_the_transfer_lands():
    sim = transfer_run([move(2500, Hold.REQUEST)])
    assert starts(sim) == pytest.approx([0, 1, 2, 4.5, 5.5, 6.5], abs=1e-4)


def test_a_row_with_two_transfers_waits_for_the_later_one():
    """The second one is on the other direction and lands first; it must not release the row."""
    script = toy(p2=[move(4500, Hold.REQUEST)], p3=[move(500, Hold.REQUEST, IN)])
    sim = simulate(
        Workload.build([0.0, 0.0], [8, 8], [5, 12]),
        script,
        model=STEP,
        limits=LIMITS,
        bytes_per_s=BYTES,
    )
    # three tokens by 3 s, landed at 6.5 s, two more steps from 7 s
    assert sim.requests.last_token_s[0] == 9.0


def test_a_transfer_of_some_layers_moves_their_share():
    sim = transfer_run([move(2000, Hold.STEP, layers=(0, 3))], layers=4)
    assert sim.steps.to_host_bytes.tolist()[2] == 1_000_000


def test_transfers_queue_in_their_direction_only():
    both = transfer_run([move(1500, Hold.STEP), move(1500, Hold.STEP, IN)])
    same = transfer_run([move(1500, Hold.STEP), move(1500, Hold.STEP)])
    assert both.steps.end_s[2] == pytest.approx(3.5, abs=1e-4)
    assert same.steps.end_s[2] == pytest.approx(5.0, abs=1e-4)


class MovesFirst(Toy):
    """Its second plan computes nothing and only moves KV."""

    hold = Hold.STEP

    def plan(self, view, ledger):
        if self.plans == 1:
            self.plans += 1
            ledger.begin_step()
            return StepPlan(moves=[move(1500, self.hold)])
        return super().plan(view, ledger)


@pytest.mark.parametrize("hold", [Hold.STEP, Hold.BEFORE_STEP, Hold.REQUEST])
def test_a_plan_without_work_still_moves_and_the_engine_plans_again_when_it_is_done(hold):
    policy = type("Moving", (MovesFirst,), {"hold": hold})
    sim = simulate(
        Workload.build([0.0], [8], [3]), policy, model=STEP, limits=LIMITS, bytes_per_s=BYTES
    )
    assert starts(sim) == pytest.approx([0, 2.5, 3.5], abs=1e-4)
    # booked with the step that follows
    assert sim.steps.to_host_bytes.tolist() == [0, 1_500_000, 0]


# -- host memory -----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(["bros", "bros:kv=paged"], "bros"))
def test_swaps_stay_within_host_memory(policy):
    workload = hybrid(1, 40, be_share=0.5, prefix_block=None)
    roomy = simulate(workload, policy, blocks=80, host_blocks=400, recount=False)
    none = simulate(workload, policy, blocks=80, host_blocks=0, recount=False)
    assert roomy.requests.swaps.sum() > 0
    assert none.requests.swaps.sum() == 0
    assert none.steps.to_host_bytes.sum() == 0
    assert none.requests.finished.all() and roomy.requests.finished.all()
    for room in (0, 20, 400):
        sim = build(workload, policy, blocks=80, host_blocks=room, recount=False)
        ledger, peak = sim.engines[0].core.ledger, []
        plan = sim.engines[0].core.plan
        sim.engines[0].core.plan = lambda now, plan=plan, peak=peak, ledger=ledger: (
            plan(now), peak.append(ledger.usage().host_tokens)
        )[0]  # fmt: skip
        sim.run()
        assert max(peak) <= room * 16
