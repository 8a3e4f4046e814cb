"""Who goes first, for any arrivals: the order that each policy promises, recomputed from what is to
be seen from outside."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.order_runs import LONGEST, Arrival, Step, arrivals, watched
from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits
from twinserve.policies.parts.predictors import Predictor
from twinserve.policies.requests import State

property_test = examples(40, suppress_health_check=list(HealthCheck))
seats = st.integers(1, 4)
short_memory = st.integers(LONGEST // 4 + 1, 20)  # blocks: one request fits, and at most a few
AMPLE = 200


def desk_of(policy: str, blocks: int, seats: int, tokens: int = 64, host: int = 0) -> Desk:
    limits = EngineLimits(
        max_num_seqs=seats, max_num_batched_tokens=tokens, max_model_len=64, kv_bytes_per_token=1
    )
    return Desk(policy, blocks, host=host, limits=limits)


# -- first come, first served ----------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["vllm", "vllm-v0", "sarathi", "tgi:max_new_tokens=8"])
@property_test
@given(arrivals(), seats, short_memory)
def test_nobody_begins_before_one_that_came_earlier(policy, many, seats, blocks):
    for step in watched(desk_of(policy, blocks, seats), many):
        assert not step.begun or max(step.begun) < min(step.waiting, default=len(many))


# -- preemptive-wait -------------------------------------------------------------------------------
def by_wait(many: list[Arrival], step: Step, ended: dict[int, int]) -> list[int]:
    """Who is here, the longest wait first; ended: when a row's last iteration ended."""
    return sorted(step.active, key=lambda row: (ended.get(row, many[row].step), row))


@property_test
@given(arrivals(), seats, st.integers(1, 40))
def test_with_memory_for_all_the_longest_waits_run_until_seats_or_tokens_are_used_up(
    many, seats, tokens
):
    ended: dict[int, int] = {}
    computed = [0] * len(many)
    for step in watched(desk_of("preemptive-wait", AMPLE, seats, tokens), many):
        expected, left = [], tokens
        for row in by_wait(many, step, ended)[:seats]:
            new = 1 if computed[row] else many[row].prompt
            if new > left and expected:
                break
            expected.append(row)
            left -= new
        assert sorted(step.running) == sorted(expected) and not step.lost
        for row in expected:
            computed[row], ended[row] = 1, step.now + 1


@pytest.mark.parametrize("option", ["", ":preemption_mode=swap"])
@property_test
@given(arrivals(), seats, short_memory)
def test_memory_is_taken_from_the_shortest_waits_and_the_longest_one_always_runs(
    option, many, seats, blocks
):
    ended: dict[int, int] = {}
    for step in watched(desk_of(f"preemptive-wait{option}", blocks, seats, host=40), many):
        order = by_wait(many, step, ended)
        assert order[0] in step.running
        holders = [row for row in order if row in step.holders]
        # the end of the order
        assert set(step.lost) == set(holders[len(holders) - len(step.lost) :])
        ended |= dict.fromkeys(step.running, step.now + 1)


# -- round-robin -----------------------------------------------------------------------------------
@property_test
@given(arrivals(classes=True), st.integers(1, 3))
def test_with_memory_for_all_classes_take_turns_each_served_from_its_front(many, size):
    turn = 0
    for step in watched(desk_of(f"round-robin:batch_size={size}", AMPLE, 8), many):
        queues = [
            [row for row in step.active if many[row].service_class == service_class]
            for service_class in (0, 1)
        ]
        if not queues[turn]:
            turn = 1 - turn
        assert step.running == queues[turn][:size] and not step.lost
        turn = 1 - turn


@property_test
@given(arrivals(classes=True), st.integers(1, 3), short_memory)
def test_a_class_takes_memory_of_its_own_last_ones_unless_nobody_could_run(many, size, blocks):
    for step in watched(desk_of(f"round-robin:batch_size={size}", blocks, 8), many):
        # one class in a step, and never nobody
        (service_class,) = {many[row].service_class for row in step.running}
        front = [row for row in step.active if many[row].service_class == service_class]
        # both were stuck: the oldest that holds memory took it
        if {many[row].service_class for row in step.lost} - {service_class}:
            assert step.running == [min(step.holders)]
        else:
            mine = [row for row in front if row in step.holders]
            assert step.lost == mine[: -len(step.lost) - 1 : -1]  # the last to arrive first
            assert not step.begun or max(step.begun) < min(
                set(front) & set(step.waiting), default=len(many)
            )


# -- applications ----------------------------------------------------------------------------------
class Foretold(Predictor):
    """Predicts what it is told: demands of applications by group, outputs of requests by row."""

    def __init__(self, options, demands: list[int], outputs: list[int]) -> None:
        super().__init__(options)
        self.demands, self.outputs = demands, outputs

    def application(self, application, cost):
        return self.demands[application.group]

    def output_tokens(self, row, requests, kind=None):
        return self.outputs[row]


def foretold(
    policy: str, blocks: int, seats: int, tokens: int, demands: list[int], outputs: list[int]
) -> Desk:
    desk = desk_of(policy, blocks, seats, tokens, host=20)
    desk.policy.predictor = Foretold(desk.policy.options, demands, outputs)
    return desk


def first_rows(many: list[Arrival]) -> dict[int, int]:
    """The first request of each application."""
    return {one.group: row for row, one in reversed(list(enumerate(many)))}


def check_order(step: Step, rank, away: set[int]) -> None:
    """Nobody begins before one with a smaller `rank(row)` that waits, nor while anybody who lost
    its memory (`away`) is left out; memory is taken from the largest."""
    for row in step.begun:
        assert all(rank(row) < rank(other) for other in step.waiting)
    away.update(step.lost)
    away.difference_update(set(step.running) - set(step.lost))
    assert not (step.begun and away)
    kept = [row for row in step.holders if row in step.running and row not in step.lost]
    assert all(rank(row) < rank(other) for row in kept for other in step.lost)


@property_test
@given(arrivals(groups=4), seats, short_memory, st.integers(8, 64))
def test_parrot_never_admits_a_later_application_while_an_earlier_one_waits(
    many, seats, blocks, tokens
):
    first, away = first_rows(many), set()
    for step in watched(desk_of("parrot", blocks, seats, tokens, host=20), many):
        check_order(step, lambda row: (first[many[row].group], row), away)


demands = st.lists(st.integers(1, 400), min_size=4, max_size=4)
ANY_LENGTH = st.lists(st.integers(1, 40), min_size=10, max_size=10)


@property_test
@given(arrivals(groups=4), seats, short_memory, st.integers(8, 64), demands)
def test_srjf_admits_the_application_with_the_least_left_however_wrong_that_is(
    many, seats, blocks, tokens, demands
):
    """What is left: what was predicted less p*d + d(d+1)/2 of the requests that have ended, never
    below 0."""
    desk = foretold("srjf", blocks, seats, tokens, demands, [])
    away: set[int] = set()
    left, first = list(demands), first_rows(many)
    for step in watched(desk, many):
        check_order(step, lambda row: (left[many[row].group], first[many[row].group], row), away)
        for row in step.running:
            if desk.table.state[row] == State.FINISHED:
                p, d = many[row].prompt, many[row].output
                left[many[row].group] = max(0, left[many[row].group] - p * d - d * (d + 1) // 2)


@property_test
@given(arrivals(groups=4), seats, short_memory, st.integers(8, 64), ANY_LENGTH)
def test_vllm_sjf_admits_the_request_of_the_shortest_predicted_output(
    many, seats, blocks, tokens, outputs
):
    away: set[int] = set()
    for step in watched(foretold("vllm-sjf", blocks, seats, tokens, [], outputs), many):
        check_order(step, lambda row: (outputs[row], row), away)


# -- kv-share --------------------------------------------------------------------------------------
@property_test
@given(arrivals(groups=3), seats, st.integers(LONGEST // 4 + 1, 40), st.integers(8, 64))
def test_kv_share_keeps_every_application_within_its_share_or_at_one_request(
    many, seats, blocks, tokens
):
    """The share: the blocks of the device over the applications that are here."""
    desk = desk_of("kv-share", blocks, seats, tokens, host=20)
    for step in watched(desk, many):
        present = {many[row].group for row in step.active}
        for group in present:
            held = [desk.ledger.held_blocks(row) for row in step.active if many[row].group == group]
            assert sum(held) <= blocks // len(present) or sum(blocks > 0 for blocks in held) == 1
        # first come, first served within an application
        for group in {many[row].group for row in step.begun}:
            mine = [row for row in step.waiting if many[row].group == group]
            assert max(row for row in step.begun if many[row].group == group) < min(
                mine, default=len(many)
            )
