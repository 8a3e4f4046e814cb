"""The longest wait first, step by step: a step lasts a second. Blocks of four tokens."""

import pytest

from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits


def desk_with(
    policy: str, blocks: int, *requests: tuple[str, int, int], seats=8, tokens=99, host=0
):
    limits = EngineLimits(max_num_seqs=seats, max_num_batched_tokens=tokens, max_model_len=64)
    desk = Desk(policy, blocks, host=host, limits=limits)
    for name, prompt, output in requests:
        desk.submit(name, prompt, output, arrival_s=0.0)
    return desk


def test_those_who_were_left_out_come_first_in_the_next_iteration():
    desk = desk_with("preemptive-wait", 20, ("a", 4, 9), ("b", 4, 9), ("c", 4, 9), seats=2)
    assert desk.step().scheduled == {"a": 4, "b": 4}  # equal waits: by arrival
    assert desk.step().scheduled == {"c": 4, "a": 1}  # c has waited for 1 s, a and b for none
    assert list(desk.step().scheduled) == ["b", "a"]  # b has waited for 1 s
    assert list(desk.step().scheduled) == ["c", "a"]


def test_a_new_request_waits_since_its_arrival():
    desk = desk_with("preemptive-wait", 20, ("a", 4, 9), ("b", 4, 9), seats=1)
    assert desk.scheduled(2) == [{"a": 4}, {"b": 4}]
    desk.submit("c", 4, 9, arrival_s=1.5)
    assert desk.step().scheduled == {"a": 1}  # at 2 s: a since 1 s, c since 1.5 s, b since 2 s
    assert desk.step().scheduled == {"c": 4}
    assert desk.step().scheduled == {"b": 1}


def test_swapping_instead():
    desk = desk_with("preemptive-wait:preemption_mode=swap", 4, ("a", 8, 9), ("b", 8, 9), host=8)
    desk.step()
    desk.submit("c", 4, 9, arrival_s=0.5)
    assert desk.step().scheduled == {"c": 4, "a": 1}
    assert desk.preempted() == [("b", "swap")]
    assert desk.moves() == [("b", "d2h", 8, "before")]
    assert desk.step().scheduled == {"b": 1}
    assert desk.preempted() == [("c", "swap"), ("a", "swap")]
    assert ("b", "h2d", 8, "before") in desk.moves()
    assert not desk.table.recomputes.any()


def test_newcomers_may_be_told_to_wait_for_free_memory():
    text = "preemptive-wait:newcomers_preempt=false"
    desk = desk_with(text, 4, ("a", 7, 3), ("b", 8, 9))
    desk.step()
    desk.submit("c", 4, 9, arrival_s=0.5)
    assert desk.step().scheduled == {"a": 1}  # b cannot grow, and is paused
    assert desk.held("b") == 2 and not desk.preempted()
    # b waits longer than a now and holds memory already, so it may take a's; c gets what is left.
    assert desk.step().scheduled == {"b": 1}
    assert desk.preempted() == [("a", "recompute")]
    assert desk.step().scheduled == {"c": 4, "b": 1}  # a, since 2 s, needs three blocks
    assert desk.preempted() == []


def test_if_no_eviction_helps_nobody_loses_anything():
    desk = desk_with("preemptive-wait", 4, ("a", 8, 3))
    desk.step()
    desk.submit("long", 20, 1, arrival_s=0.0)
    assert desk.step().scheduled == {"a": 1}
    assert desk.preempted() == [] and desk.held("a") == 3


@pytest.mark.parametrize("seats, stands", [(3, True), (2, False)])
def test_a_decision_stands_only_if_everybody_runs(seats, stands):
    requests = (("a", 4, 90), ("b", 4, 90), ("c", 4, 90))
    desk = desk_with("preemptive-wait", 90, *requests, seats=seats)
    desk.scheduled(4)
    assert (desk.plan.valid_for > 0) == stands
    assert desk.plan.rows.tolist() == ([0, 1, 2] if stands else [2, 0])
