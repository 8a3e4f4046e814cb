"""vLLM 0.5/0.6's scheduler, step by step. Blocks of four tokens."""

import pytest

from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.plan import StepPlan
from twinserve.policies.registry import parse_policy


def test_prefills_go_first_and_alone():
    desk = Desk("vllm-v0", 100)
    desk.submit("a", 4, 3)
    assert desk.step().scheduled == {"a": 4}
    desk.submit("b", 4, 2)
    assert desk.scheduled(3) == [{"b": 4}, {"a": 1, "b": 1}, {"a": 1}]
    assert not desk.stepper.core.active


def test_prompts_are_whole_and_share_the_token_budget():
    limits = EngineLimits(max_num_seqs=8, max_model_len=8)
    desk = Desk("vllm-v0:max_num_batched_tokens=10", 100, limits=limits)
    for name in "abc":
        desk.submit(name, 4, 2)
    assert desk.scheduled(3) == [{"a": 4, "b": 4}, {"c": 4}, {"a": 1, "b": 1, "c": 1}]


def test_the_default_budget_is_the_longest_request_but_2048_at_least():
    short, long = (EngineLimits(max_model_len=n) for n in (100, 5000))
    assert parse_policy("vllm-v0").build(short).token_budget == 2048
    assert parse_policy("vllm-v0").build(long).token_budget == 5000


def test_a_budget_that_a_decode_step_must_exceed_is_refused():
    limits = EngineLimits(max_model_len=50, max_num_seqs=128)
    with pytest.raises(
        PolicyError, match=r"max_num_batched_tokens \(100\) is below max_num_seqs \(128\)"
    ):
        parse_policy("vllm-v0:max_num_batched_tokens=100").build(limits)


def test_a_budget_below_the_models_limit_is_none_of_its_business():
    """Runs are refused by their longest request (tests/sim/test_run.py), not by what the model
    could take."""
    limits = EngineLimits(max_model_len=100_000, max_num_seqs=8)
    policy = parse_policy("vllm-v0:max_num_batched_tokens=100").build(limits)
    assert policy.traits.prompt_limit[0] == policy.token_budget == 100


def test_a_seat_is_needed():
    desk = Desk("vllm-v0", 100, limits=EngineLimits(max_num_seqs=2, max_model_len=64))
    for name, output in (("a", 2), ("b", 3), ("c", 1)):
        desk.submit(name, 4, output)
    assert desk.scheduled(4) == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"c": 4}, {"b": 1}]


def test_an_admission_leaves_the_watermark_and_nobody_overtakes():
    desk = Desk("vllm-v0:watermark=0.2", 10)  # two blocks
    desk.submit("a", 20, 3)  # five
    desk.submit("b", 16, 1)  # four: one would be left
    desk.submit("c", 4, 1)  # one: four would be left
    assert desk.scheduled(4) == [{"a": 20}, {"a": 1}, {"a": 1}, {"b": 16, "c": 4}]


def test_where_nothing_runs_the_watermark_is_waived():
    desk = Desk("vllm-v0:watermark=0.2", 10)
    desk.submit("a", 40, 1)
    assert desk.step().scheduled == {"a": 40}


def test_each_decode_needs_a_free_block_even_where_it_has_room():
    desk = Desk("vllm-v0", 4)
    desk.submit("a", 7, 9)
    desk.submit("b", 7, 9)
    assert desk.step().scheduled == {"a": 7, "b": 7}
    assert desk.ledger.free_blocks == 0
    assert desk.step().scheduled == {"a": 1}  # its eighth token, in its second block
    assert desk.preempted() == [("b", "recompute")]
    assert desk.held("b") == 0
    # Prompt and generated token are computed together, and that is a prefill like any other.
    assert desk.step().scheduled == {"b": 8}


def test_the_last_to_arrive_gives_way_in_the_end_the_request_itself():
    desk = Desk("vllm-v0", 3)
    for name in "abc":
        desk.submit(name, 4, 3)
    assert desk.step().scheduled == {"a": 4, "b": 4, "c": 4}
    desk.submit("d", 1, 1)
    assert desk.step().scheduled == {"a": 1}  # takes c's block; b sees none and is the last
    assert desk.preempted() == [("c", "recompute"), ("b", "recompute")]
    # Both are ahead of d again, in order of arrival: b needs two blocks for five tokens.
    assert desk.step().scheduled == {"a": 1}
    assert desk.step().scheduled == {"b": 5}
    assert desk.step().scheduled == {"b": 1}
    assert desk.step().scheduled == {"c": 5, "d": 1}


def test_swapped_requests_are_ahead_of_waiting_ones():
    desk = Desk("vllm-v0:preemption_mode=swap", 4, host=2)
    desk.submit("a", 7, 3)
    desk.submit("b", 7, 3)
    assert desk.step().scheduled == {"a": 7, "b": 7}
    assert desk.step().scheduled == {"a": 1}
    assert desk.preempted() == [("b", "swap")]
    assert desk.moves() == [("b", "d2h", 7, "before")]
    desk.submit("c", 1, 1)
    # Two blocks are free: b's two and one more are needed, and c may not overtake.
    assert desk.step().scheduled == {"a": 1}
    assert desk.step().scheduled == {"b": 1}
    assert desk.moves() == [("b", "h2d", 7, "before")]
    assert desk.scheduled(2) == [{"c": 1}, {"b": 1}]
    assert desk.table.recomputes.sum() == 0


def test_a_swapped_request_needs_its_blocks_one_more_and_the_watermark():
    for blocks, back in ((7, False), (8, True)):
        desk = Desk("vllm-v0:preemption_mode=swap,watermark=0.3", blocks, host=8)  # two blocks
        desk.submit("a", 8, 3)
        desk.submit("b", 8, 9)
        desk.step()
        desk.ledger.begin_step()
        # as if b had been the victim of a step before
        assert desk.policy.queues.preempt_last(StepPlan(), desk.ledger) == 1
        desk.table.state[1] = 2
        desk.stepper.core.holding -= 1
        # a's third block is taken first: 4 or 5 are free, 2 + 1 + 2 are needed
        assert ("b" in desk.step().scheduled) == back


def test_nobody_comes_back_in_a_step_that_sent_somebody_away():
    desk = Desk("vllm-v0:preemption_mode=swap", 6, host=8)
    for name in "abc":
        desk.submit(name, 7, 9)
    desk.step()
    assert desk.step().scheduled == {"a": 1, "b": 1}
    assert desk.preempted() == [("c", "swap")] and not desk.plan.swapped_in


def test_a_full_host_means_recomputation():
    desk = Desk("vllm-v0:preemption_mode=swap", 4, host=1)
    desk.submit("a", 7, 3)
    desk.submit("b", 7, 3)
    desk.scheduled(2)
    assert desk.preempted() == [("b", "recompute")] and not desk.moves()


def test_a_decision_stands_as_long_as_each_row_sees_a_free_block():
    desk = Desk("vllm-v0", 6)
    desk.submit("a", 4, 30)
    desk.submit("b", 4, 30)
    desk.step()
    desk.step()  # both take their second block, two are free; it lasts for tokens 5 to 8
    assert desk.plan.valid_for == 3
    assert desk.scheduled(4) == [{"a": 1, "b": 1}] * 4
    assert desk.ledger.free_blocks == 0 and desk.plan.valid_for == 0
    assert desk.step().scheduled == {"a": 1}
