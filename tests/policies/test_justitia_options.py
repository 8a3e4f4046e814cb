"""Justitia's two options that the paper does not have: preemption, and corrected demands."""

import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.justitia_reference import app, run
from tests.policies.policy_runs import Desk
from tests.policies.test_justitia import graphs
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.justitia.clock import VirtualClock
from twinserve.policies.justitia.policy import Corrections
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import Application

ELEPHANT = app([[(1, 2)] * 40])
whole = st.integers(1, 12)


@st.composite
def graphs_and_demands(draw):
    case = draw(graphs())
    demands = st.lists(st.integers(1, 900), min_size=len(case[1]), max_size=len(case[1]))
    return *case, draw(demands)


OPTIONS = ["preempt=true", "correct=true", "preempt=true,correct=true"]
# Found by the test below, with `correct=true` by itself and together with `preempt=true`. A request
# ends at the end of a run of steps. The fluid system may hear of it only after it has heard how
# many steps those were.
ENDS_A_RUN = [
    ([0.0, 5.0], [app([[(1, 5)], [(1, 1)], [(1, 1)]]), app([[(1, 1)], [(1, 1)]])], 9, 0, [1, 1]),
    ([0.0, 5.0], [app([[(1, 5)], [(1, 5), (5, 5)]]), app([[(1, 5), (5, 5)]])], 9, 0, [1, 1]),
]


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@examples(25, suppress_health_check=list(HealthCheck))
@given(case=graphs_and_demands())
@example(case=ENDS_A_RUN[0])
@example(case=ENDS_A_RUN[1])
def test_one_step_at_a_time_gives_the_same_rows(option, case):
    arrivals, samples, blocks, host, demands = case
    fast, exact = (
        run(
            f"justitia:{option}",
            arrivals,
            samples,
            blocks,
            host=host,
            seats=4,
            demands=demands,
            fast=one,
        )[1]
        for one in (True, False)
    )
    pd.testing.assert_frame_equal(fast, exact, check_exact=True)
    assert fast.finished.all()


# -- preemption ------------------------------------------------------------------------------------
def two(preempt: str):
    """An application of much demand fills memory; a small one comes."""
    desk = Desk(f"justitia:watermark=0{preempt}", 4, host=8)
    demand = {0: 1000, 1: 10}
    desk.policy.predictor.application = lambda application, cost: demand[application.group]
    desk.stepper.core.announce(Application(0, "large", 0.0, "X"))
    desk.submit("l0", 6, 6, group=0)
    desk.submit("l1", 6, 6, group=0)
    desk.step()
    desk.stepper.core.announce(Application(1, "small", 0.0, "X"))
    desk.submit("s", 4, 1, group=1)
    return desk


def test_the_next_in_order_swaps_out_the_last_of_those_behind_it():
    desk = two(",preempt=true")
    assert desk.step().scheduled == {"l0": 1} and desk.preempted() == [("l1", "swap")]
    assert desk.step().scheduled == {"l0": 1, "s": 4}
    while desk.stepper.core.active:  # `l1` comes back when `l0` leaves room
        desk.step()
    plain = two("")
    assert plain.step().scheduled == {"l0": 1, "l1": 1} and not plain.preempted()


@examples(25, suppress_health_check=list(HealthCheck))
@given(case=graphs_and_demands())
def test_preemption_ends_the_first_in_order_as_if_it_were_alone(case):
    """The application of the smallest F that comes first of all is never later for the others."""
    arrivals, samples, blocks, _, _ = case
    demands = [10**6 * (i + 1) for i in range(len(samples))]
    alone = run("justitia:preempt=true", arrivals[:1], samples[:1], blocks, demands=demands[:1])[0]
    ends = run("justitia:preempt=true", arrivals, samples, blocks, demands=demands)[0]
    stages = len(samples[0].stages)
    # a stage waits an iteration for room, and one more in which what ran grows
    assert ends[0] <= alone[0] + 2 * stages


# -- corrected demands -----------------------------------------------------------------------------
def test_an_application_of_another_finish_time_is_served_until_then():
    clock = VirtualClock()
    assert clock.arrive(10) == 10 and clock.arrive(30) == 30
    clock.advance(30)
    assert (clock.V, clock.N) == (20, 1)
    clock.move(10, 25)  # GPS had served it already
    assert clock.N == 2
    clock.move(30, 15)
    assert clock.N == 1
    clock.advance(5)
    assert (clock.V, clock.N) == (25, 0)


def test_a_demand_doubles_when_what_has_ended_took_more():
    known = Corrections()
    known.begins(0, 100.0, 7)
    known.ends(1, 0, 5)
    assert known.finish(0) == 107
    known.ends(2, 0, 5)
    assert known.finish(0) == 120


@pytest.mark.parametrize(
    ("predicted", "believed"), [(60, 60), (40, 40), (150, 100), (900, 100), (3, 25)]
)
def test_a_stage_that_comes_moves_a_demand_that_is_far_off(predicted, believed):
    known = Corrections()
    known.begins(0, 0.0, predicted)
    known.comes(1, 0, 0, 10)
    known.comes(2, 0, 0, 10)
    # earlier ones cost 2.5 times their first stage
    assert known.look(lambda number, stage: 2.5) == [0]
    assert known.believed[0] == believed
    assert known.look(lambda number, stage: 9.0) == []
    known.comes(3, 0, 1, 5)
    known.look(lambda number, stage: None)  # of a class about which nothing is known
    assert known.believed[0] == believed


@st.composite
def misjudged(draw):
    """Applications of one stage, with demands up to twelve times too high or too low."""
    one = st.tuples(
        st.integers(0, 40), st.lists(whole, min_size=1, max_size=5), st.floats(1 / 12, 12)
    )
    apps = sorted(draw(st.lists(one, min_size=2, max_size=9)), key=lambda one: one[0])
    return (
        [float(a) for a, _, _ in apps],
        [app([[(1, d) for d in lengths]]) for _, lengths, _ in apps],
        [max(1, round(64 * sum(lengths) * error)) for _, lengths, error in apps],
        draw(st.integers(1, 4)),
    )


@examples(60, suppress_health_check=list(HealthCheck))
@given(misjudged())
def test_nothing_that_comes_late_enough_passes_whatever_is_predicted(case):
    """docs/justitia.md, bound 3: an application is passed by none that comes later than C N / M
    iterations after it, C the most that it was believed to need and N the most that are open."""
    arrivals, samples, demands, blocks = case
    most, believed = 0, dict(enumerate(map(float, demands)))

    def watched(core):
        policy = core.policy
        decide = policy.plan

        def plan(view, ledger):
            nonlocal most
            most = max(most, len(policy.F))
            found = decide(view, ledger)
            for number, C in policy.corrections.believed.items():
                believed[number] = max(believed[number], C)
                # never too low for long, and V is never slower than the open ones make it
                assert C >= policy.corrections._spent[number]
            assert policy.clock.N <= len(policy.F)
            return found

        policy.plan = plan

    _, requests, _ = run(
        "justitia:watermark=0,correct=true",
        arrivals,
        samples,
        blocks,
        size=64,
        demands=demands,
        watched=watched,
    )
    begun = requests.groupby("group").first_scheduled_s.agg(["min", "max"])
    first = requests.groupby("group").arrival_s.min()
    numbers = {name: int(name.rpartition("-")[2]) for name in begun.index}
    for name in begun.index:
        last = first[name] + believed[numbers[name]] * most / (64 * blocks) + 1
        for other in begun.index:
            if first[other] > last:
                assert begun["min"][other] >= begun["max"][name]


def crowd(policy: str, mice: int, factor: float = 12.0) -> tuple[float, list[float]]:
    """When an elephant ends whose demand is believed to be `factor` times what it is, among mice
    that come in every iteration and are believed to need ten times as much as they do."""
    arrivals = [0.0, *map(float, range(1, mice + 1))]
    samples = [ELEPHANT, *[app([[(1, 1)]])] * mice]
    demands = [round(64 * 80 * factor), *[640] * mice]
    ends = run(policy, arrivals, samples, 1, size=64, demands=demands)[0]
    return ends[0], ends[1:]


@pytest.mark.slow
def test_what_has_ended_slows_the_fluid_system_down_for_others_unless_corrected():
    """Mice believed ten times too large stay in the fluid system long after they have ended: V
    nearly stands still, and with it the elephant's turn."""
    plain = [crowd("justitia:watermark=0", n)[0] for n in (200, 400)]
    corrected = [crowd("justitia:watermark=0,correct=true", n)[0] for n in (200, 400)]
    assert plain[1] > 400
    assert corrected[1] <= plain[1]


def test_a_fleets_order_cannot_be_corrected():
    from twinserve.policies.base import EngineLimits

    policy = parse_policy("justitia:correct=true").build(EngineLimits(max_num_seqs=4))
    with pytest.raises(PolicyError, match="drop correct=true"):
        policy.fleet_order()


# -- applications first come, first served ---------------------------------------------------------
def test_the_requests_of_an_application_are_not_interleaved_with_the_next_ones():
    # Memory for one request. With vLLM the second stage of the first application queues behind the
    # second one.
    samples = [app([[(1, 2)], [(1, 2)]]), app([[(1, 2)] * 3])]
    assert run("parrot", [0.0, 1.0], samples, 1)[0] == [4.0, 10.0]
    assert run("vllm", [0.0, 1.0], samples, 1)[0] == [10.0, 8.0]


def test_requests_of_no_application_queue_by_arrival():
    desk = Desk("parrot", 20, limits=EngineLimits(max_num_seqs=1, max_model_len=64))
    desk.submit("x", 4, 1)
    desk.submit("s0", 4, 1, group=7)  # a group that nobody announced as an application of a class
    desk.stepper.core.announce(Application(8, "app8", 0.0, "X"))
    desk.submit("a0", 4, 1, group=8)
    desk.submit("y", 4, 1)
    desk.submit("a1", 4, 1, group=8)
    desk.submit("s1", 4, 1, group=7)
    assert [list(s)[0] for s in desk.scheduled(6)] == ["x", "s0", "a0", "a1", "y", "s1"]


def test_prompts_are_computed_in_parts_unless_told_otherwise():
    limits = EngineLimits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)
    for policy, expected in (
        ("parrot", [{"a": 6, "b": 2}, {"a": 1, "b": 4}, {"b": 1}]),
        ("parrot:enable_chunked_prefill=false", [{"a": 6}, {"a": 1, "b": 6}, {"b": 1}]),
    ):
        desk = Desk(policy, 20, limits=limits)
        desk.submit("a", 6, 2)
        desk.submit("b", 6, 2)
        assert desk.scheduled(3) == expected
        assert not desk.stepper.core.active


# Shortest first: requests by predicted duration, applications by what is left of their cost.
TRUTH = "predictor=perfect"


def test_requests_go_by_their_output_whatever_application_they_belong_to():
    samples = [app([[(1, 3), (1, 1)]]), app([[(1, 2), (1, 2)]])]
    ends, requests, _ = run(f"vllm-sjf:{TRUTH}", [0.0, 0.0], samples, 1)
    order = requests.sort_values("last_token_s").request_id.tolist()
    assert order == ["X-0/0.1", "X-1/0.0", "X-1/0.1", "X-0/0.0"]
    assert ends == [8.0, 5.0]


def test_applications_go_by_the_cost_that_is_left():
    """A costs 3 * 9 = 27 and B 10: B first. C comes when A has one request of 9 left and costs more
    than that."""
    samples = [app([[(1, 3)] * 3]), app([[(3, 2), (1, 1)]]), app([[(4, 2)]])]
    ends = run(f"srjf:{TRUTH}", [0.0, 0.0, 9.0], samples, 1, size=8)[0]
    assert samples[1].requests == [(3, 2), (1, 1)]
    assert ends == [12.0, 3.0, 14.0]


def test_predictions_follow_what_has_ended():
    desk = Desk("vllm-sjf:error=0", 20)
    desk.submit("a", 4, 2)
    desk.scheduled(2)
    desk.submit("b", 4, 2)
    desk.step()
    assert desk.policy._duration == {1: 129}  # (256 + 2) / 2


def test_the_usual_error_is_that_of_the_papers_baseline():
    errors = {
        text: parse_policy(text).given.error
        for text in (
            "vllm-sjf",
            "vllm-sjf:predictor=class-mean",
            "vllm-sjf:error=0.5",
            "vllm-sjf:predictor=perfect",
            "vllm-sjf:predictor=oracle",
            "vllm-sjf:predictor=perfect,error=1",
        )
    }
    assert list(errors.values()) == [4.52, 4.52, 0.5, 0.0, 0.0, 1.0], errors
