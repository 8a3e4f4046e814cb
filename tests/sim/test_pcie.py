"""Transfers between device and host memory: the link, what a plan's moves hold back, and the room
on the host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moves import IN, OUT
from tests.parameters import mostly_nightly
from tests.sim.harness import Affine, Toy, build, hybrid, simulate
from twinserve.backends.links import PcieLink
from twinserve.policies.base import EngineLimits
from twinserve.policies.plan import Hold, KvMove, StepPlan
from twinserve.traces.workload import Workload

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
