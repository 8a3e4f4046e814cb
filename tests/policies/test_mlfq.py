"""FastServe's skip-join MLFQ: where requests join, when they fall, when they rise, and what is
swapped ahead of time."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.policy_runs import BY_HAND, Desk, simulate
from twinserve.policies.base import EngineLimits
from twinserve.policies.baselines.mlfq_queues import FeedbackQueues
from twinserve.policies.parts.estimators import LinearEstimator
from twinserve.policies.registry import parse_policy
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.traces.workload import Workload

TWO = EngineLimits(max_num_seqs=2, max_model_len=64, kv_bytes_per_token=1)


# -- the queues ------------------------------------------------------------------------------------
def queues(starve_limit: float = math.inf, quanta=(1.0, 2.0, 4.0)) -> FeedbackQueues:
    return FeedbackQueues(np.array(quanta), starve_limit)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_a_request_joins_the_first_queue_that_covers_its_first_iteration():
    some = queues()
    assert [some.joined(s) for s in (0.1, 1.0, 1.001, 2.0, 3.0, 4.0, 100.0)] == [
        0, 0, 1, 1, 2, 2, 2,
    ]  # fmt: skip


def test_quanta_run_down_in_the_batch_and_an_iteration_is_charged_to_all_its_queues():
    some = queues()
    for row in (0, 1):
        some.add(row, 0, now=10.0)
    some.run(rows(0), 10.0)
    some.advance(10.9)
    assert some.level[:2].tolist() == [0, 0]
    some.advance(11.0)  # the quantum of a second is used up
    assert some.level[:2].tolist() == [1, 0]
    assert some.order().tolist() == [1, 0]
    some.run(rows(1), 11.5)  # half a second of the next one is used
    some.advance(14.6)
    assert some.level[:2].tolist() == [1, 2]  # 1 + 2 < 3.1 seconds
    some.run(rows(0), 14.6)
    assert some.next_change() == pytest.approx(14.6 + 1.5)


def test_the_quantum_of_a_request_that_is_no_more_never_ends():
    """Else an engine that idles for a day counts millions of them before its next plan."""
    queues = FeedbackQueues(np.array([0.01, 0.02]), math.inf)
    queues.add(0, 0, 0.0)
    queues.run(np.array([0]), 0.0)
    queues.end(0)
    queues.advance(1e9)
    assert (queues.level[0], queues.entered[0]) == (0, 0.0)
    queues.run(np.zeros(0, np.int64), 1e9)
    assert not queues.running[0]


def test_in_the_last_queue_everybody_takes_turns():
    some = queues()
    for row in (0, 1):
        some.add(row, 2, now=float(row))
    some.run(rows(0), 2.0)
    some.advance(6.0)
    assert some.level[0] == 2 and some.order().tolist() == [1, 0]


def test_who_starves_rises_to_the_first_queue():
    some = queues(starve_limit=3.0)
    for row in (0, 1, 2):
        some.add(row, row, now=0.0)
    some.run(rows(0), 0.0)
    assert some.next_change() == 1.0  # its quantum; then the others' patience
    some.advance(2.9)
    assert some.level[:3].tolist() == [1, 1, 2]
    some.advance(3.0)
    assert some.level[:3].tolist() == [2, 0, 0]
    assert some.entered[[1, 2]].tolist() == [3.0, 3.0]


def test_the_estimated_next_scheduled_time():
    """By hand, two seats. Row 0 in queue 0 and row 1 in queue 1 come before row 2 in queue 2: they
    use 1 + 2 and 2 seconds until they are there. Row 2 would rise after 10 seconds of waiting, of
    which 8 are over."""
    some = queues(starve_limit=10.0)
    for row in (0, 1, 2):
        some.add(row, row, now=0.0)
    everybody = rows(0, 1, 2)
    assert some.next_scheduled(everybody, 2, now=4.0).tolist() == [0.0, 0.5, 2.5]
    assert some.next_scheduled(everybody, 2, now=8.0).tolist() == [0.0, 0.5, 2.0]


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0, math.inf]))
@examples(40)
def test_the_order_is_that_of_sorting_everybody(seed, starve_limit):
    """Queues are kept in order as rows move between them. By definition: all of them sorted, all
    of them asked whether they starve. Times are of a coarse grid, so that many are equal."""
    draw = np.random.default_rng(seed)
    some, there, now = queues(starve_limit, (0.25, 0.5, 1.0)), [], 0.0
    for row in range(60):
        some.add(row, int(draw.integers(3)), now)
        there.append(row)
        if row % 5 == 4:
            gone = there.pop(int(draw.integers(len(there))))
            some.end(gone)
        now += 0.25 * int(draw.integers(4))
        everybody = np.array(there)
        starve = ~some.running[everybody] & (some.level[everybody] > 0)
        starve &= some.left_out[everybody] + starve_limit <= now
        rises = everybody[starve]
        some.advance(now)
        assert not some.level[rises].any()
        assert (some.entered[rises] == some.left_out[rises] + starve_limit).all()
        sort = np.lexsort((everybody, some.entered[everybody], some.level[everybody]))
        assert some.order().tolist() == everybody[sort].tolist()
        some.run(draw.permutation(everybody)[: int(draw.integers(1, 6))], now)
        out = everybody[~some.running[everybody] & (some.level[everybody] > 0)]
        quanta = some._until[everybody[some.running[everybody]]]
        patience = some.left_out[out] + starve_limit
        assert some.next_change() == min([*quanta, *patience, math.inf])


def test_turns_of_the_past_take_no_memory():
    """Row 0 waits all the time, far from starving, while the others take turns."""
    some = queues(starve_limit=1e9)
    for row in range(4):
        some.add(row, 1, now=0.0)
    for turn in range(2000):
        some.run(rows(1 + turn % 3), now=1e-3 * turn)
    assert len(some._starving) <= 16
    assert some._first_starving() == 0


# -- the policy ------------------------------------------------------------------------------------
# 0.1 s a prompt token: a desk's steps take a second each.
SLOW = LinearEstimator(
    BrosLinearModel(PhaseCost(0.1, 0.0, 0.0), PhaseCost(1.0, 0.0, 0.0)),
    SwapTimeModel(seconds_per_byte=1e-3),
)


def levels(desk: Desk) -> dict[str, int]:
    return {name: int(desk.policy.queues.level[row]) for row, name in enumerate(desk.table.ids)}


def test_long_prompts_skip_the_queues_that_they_would_fall_through():
    """1 ms a token: quanta of 5, 10, 20, 40 and 80 ms cover 5, 10, 20, 40 and 64 tokens."""
    desk = Desk("mlfq:quantum=0.005", 40, limits=TWO)
    assert desk.policy.queues.quanta.tolist() == [0.005, 0.01, 0.02, 0.04, 0.08]
    for name, prompt in (("a", 4), ("b", 6), ("c", 20), ("d", 40)):
        desk.submit(name, prompt, 1)
    desk.step()
    assert levels(desk) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert list(desk.granted()) == ["a", "b"]
    plain = Desk("mlfq:quantum=0.005,skip_join=false", 40, limits=TWO)
    plain.submit("d", 40, 1)
    plain.step()
    assert levels(plain) == {"d": 0}


def arrivals(at, prompts, outputs, **columns) -> Workload:
    return Workload.build(at, prompts, outputs, **columns)


def run_order(text: str, **settings) -> list[str]:
    work = arrivals([0.0, *np.arange(0.01, 1.2, 0.012)], [40, *[4] * 100], [60, *[6] * 100])
    limits = EngineLimits(max_num_seqs=1, max_model_len=128, kv_bytes_per_token=1)
    _, _, requests, _ = simulate(work, text, "paged", 200, limits=limits, **settings)
    return requests.sort_values("last_token_s").request_id.tolist()


@pytest.mark.slow
def test_a_stream_of_short_requests_does_not_starve_a_long_one():
    """More than one seat's worth of short requests: with promotion the long one ends among them,
    without it at the end."""
    assert run_order("mlfq:quantum=0.005,starve_limit=none")[-1] == "r0"
    assert run_order("mlfq:quantum=0.005,starve_limit=0.01").index("r0") < 90


sizes = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 24)), min_size=2, max_size=8
)


@examples(40, suppress_health_check=list(HealthCheck))
@given(
    sizes,
    st.integers(1, 3),
    st.integers(16, 40),
    st.sampled_from([0, 40]),
    st.sampled_from([3.0, 12.0, math.inf]),
)
def test_the_batch_is_the_front_of_the_queues_and_nobody_is_forgotten(
    requests, seats, blocks, host, starve
):
    """Whoever runs comes before whoever could and does not; a row left out for the starve limit is
    in the first queue. A step takes a second, the first quantum as well."""
    arrivals, prompts, outputs = zip(*sorted(requests), strict=True)
    limits = EngineLimits(max_num_seqs=seats, max_model_len=64, kv_bytes_per_token=1)
    text = (
        f"mlfq:quantum=1,starve_limit={'none' if starve == math.inf else starve},min_free_blocks=1"
    )
    desk = Desk(text, blocks, host=host, limits=limits, estimator=SLOW)
    queues_of, table, first = desk.policy.queues, desk.table, arrivals[0]
    for now in range(3000):
        while len(table) < len(arrivals) and arrivals[len(table)] - first <= now:
            row = len(table)
            desk.submit(
                f"r{row}", prompts[row], outputs[row], arrival_s=float(arrivals[row] - first)
            )
        if not desk.stepper.core.active and len(table) == len(arrivals):
            break
        active = [row for row in range(len(table)) if table.state[row] != 3]
        held = {row for row in active if table.state[row] == 1}
        desk.step()
        plan = desk.plan
        batch = set(plan.rows.tolist())
        assert len(batch) <= seats and (batch or not active)
        level, entered = queues_of.level, queues_of.entered
        order = sorted(active, key=lambda row: (level[row], entered[row], row))
        paused = held - batch - {row for row, _ in plan.preempted}
        assert not active or order[0] in batch
        if len(batch) == seats and batch <= held:
            assert all(order.index(one) < order.index(other) for one in batch for other in paused)
        for row in active:
            if row not in batch and now - queues_of.left_out[row] >= starve:
                assert queues_of.level[row] == 0
    assert not desk.stepper.core.active
    assert table.output_tokens.tolist() == list(outputs)


# -- proactive swapping ----------------------------------------------------------------------------
def test_who_is_left_out_is_swapped_ahead_of_time():
    """Ten blocks, two seats, three blocks to be kept free. c (15 tokens, 1.5 s: the second queue)
    has used up its two seconds when a and b come into the first. When those take a second block
    each, two are free: c goes beside the step. Its turn comes when a and b have ended."""
    desk = Desk("mlfq:quantum=1,min_free_blocks=3", 10, host=20, limits=TWO, estimator=SLOW)
    c = desk.submit("c", 15, 8)
    desk.scheduled(2)
    desk.submit("a", 4, 3)
    desk.submit("b", 4, 3)
    assert desk.scheduled(1) == [{"a": 4, "b": 4}]
    assert levels(desk) == {"c": 2, "a": 0, "b": 0}
    assert not desk.preempted() and desk.ledger.free_blocks == 10 - 4 - 2
    desk.step()
    assert desk.preempted() == [("c", "swap")] and desk.moves() == [("c", "d2h", 16, "step")]
    assert desk.granted() == {"a": 1, "b": 1}
    assert desk.scheduled(1) == [{"a": 1, "b": 1}] and desk.table.state[c] == 2
    assert desk.scheduled(1) == [{"c": 1}] and desk.moves() == [("c", "h2d", 16, "before")]


def test_and_comes_back_before_its_turn_where_there_is_room():
    """Nine blocks, one to be kept free. c goes when none is. When b has ended and d has its seat,
    six are free: c comes back into four of them beside the step, and keeps waiting for a seat."""
    desk = Desk("mlfq:quantum=1,min_free_blocks=1", 9, host=20, limits=TWO, estimator=SLOW)
    desk.submit("c", 15, 8)
    desk.scheduled(2)
    desk.submit("a", 4, 6)
    desk.submit("b", 10, 2)
    desk.scheduled(2)
    assert desk.preempted() == [("c", "swap")]
    desk.submit("d", 4, 4, arrival_s=4.0)
    assert desk.scheduled(1) == [{"d": 4, "a": 1}]
    assert desk.moves() == [("c", "h2d", 16, "request")] and desk.held("c") == 4


def test_the_longest_prompt_has_a_queue():
    policy = parse_policy("mlfq:queues=3").build(TWO, BY_HAND)
    assert policy.queues.quanta.tolist() == [0.01, 0.02, 0.04]
