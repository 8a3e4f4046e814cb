"""TGI's router: a batch that never outgrows its budget, interrupted for prompts by the rules of its
queue."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy

LIMITS = EngineLimits(max_num_seqs=8, max_model_len=64, kv_bytes_per_token=1)


def test_prompts_interrupt_the_batch_and_join_it():
    """By hand: a budget of 40 tokens, and a client asks for 6. a: 10 + 6 = 16, b: 8 + 6 = 14, c: 4
    + 6 = 10, d the same."""
    desk = Desk("tgi:max_new_tokens=6,max_batch_total_tokens=40", 12, limits=LIMITS)
    desk.submit("a", 10, 4)
    desk.submit("b", 8, 3)
    assert desk.scheduled(2) == [{"a": 10, "b": 8}, {"a": 1, "b": 1}]
    assert desk.policy.charged_tokens() == 30
    desk.submit("c", 4, 2)
    desk.submit("d", 4, 2)
    # One waits for two that run, 0.3 x 2 rounds down to none: c comes in at once, alone, since 30 +
    # 10 leaves nothing for d.
    assert desk.scheduled(2) == [{"c": 4}, {"a": 1, "b": 1, "c": 1}]
    # b and c have ended: 24 tokens are free for d.
    assert desk.scheduled(2) == [{"d": 4}, {"a": 1, "d": 1}]
    assert not desk.stepper.core.active


def test_what_one_is_promised_is_set_aside_from_the_others_in_whole_blocks():
    """Four times 10 tokens are 40, and four times three blocks are more than ten."""
    desk = Desk("tgi:max_new_tokens=6", 10, limits=LIMITS)
    for name in "abcd":
        desk.submit(name, 4, 6)
    assert desk.scheduled(1) == [{"a": 4, "b": 4, "c": 4}]


def test_a_batch_waits_for_enough_requests_or_for_long_enough():
    """Ratio 1.5 of two that run: three are needed. After max_waiting_tokens tokens one will do."""
    desk = Desk(
        "tgi:max_new_tokens=12,waiting_served_ratio=1.5,max_waiting_tokens=4", 40, limits=LIMITS
    )
    desk.submit("a", 4, 12)
    desk.submit("b", 4, 12)
    assert desk.scheduled(1) == [{"a": 4, "b": 4}]
    desk.submit("c", 4, 1)
    # its prompt counts as the first of the four tokens
    assert desk.scheduled(5) == [{"a": 1, "b": 1}] * 3 + [{"c": 4}, {"a": 1, "b": 1}]
    for name in "def":
        desk.submit(name, 4, 1)
    assert desk.scheduled(2) == [{"d": 4, "e": 4, "f": 4}, {"a": 1, "b": 1}]


def test_after_an_interruption_the_batch_decodes_before_the_next_one():
    desk = Desk("tgi:max_new_tokens=4,max_batch_prefill_tokens=8", 40, limits=LIMITS)
    for name in "abc":
        desk.submit(name, 8, 3)
    # the first prompts find no batch, the second interrupt none that has decoded yet
    assert desk.scheduled(4) == [{"a": 8}, {"b": 8}, {"a": 1, "b": 1}, {"c": 8}]
    assert desk.scheduled(1) == [{"a": 1, "b": 1, "c": 1}]


def test_prompts_of_a_step_stay_within_their_budget_rounded_to_blocks():
    desk = Desk("tgi:max_new_tokens=2,max_batch_prefill_tokens=9", 40, limits=LIMITS)
    for name in "abc":
        desk.submit(name, 6, 2)
    assert desk.scheduled(1) == [{"a": 6, "b": 6}]  # 9 is rounded up to 12


def test_where_there_is_none_it_leaves_and_comes_again():
    """a and b fill 16 tokens of memory with 4 + 4 each. Both want a fifth token: a asks first, in
    vain, and leaves; b takes the room that it left."""
    desk = Desk("tgi:max_new_tokens=4", 4, limits=LIMITS)
    a, b = desk.submit("a", 4, 6), desk.submit("b", 4, 6)
    desk.scheduled(4)
    assert desk.policy.charged_tokens() == 16
    desk.step()
    assert desk.preempted() == [("a", "recompute")]
    assert desk.granted() == {"b": 1}
    # its answer so far is computed again with its prompt
    assert desk.scheduled(2) == [{"b": 1}, {"a": 8}]
    desk.step()
    assert desk.table.output_tokens[[a, b]].tolist() == [6, 6]


def test_a_request_that_has_the_memory_to_itself_may_use_all_of_it():
    desk = Desk("tgi:max_new_tokens=50", 4, limits=LIMITS)
    desk.submit("a", 10, 7)  # 16 tokens of KV
    desk.submit("b", 2, 1)
    assert desk.scheduled(8) == [{"a": 10}, *[{"a": 1}] * 6, {"b": 2}]


def test_prompts_that_could_never_be_computed_are_known_beforehand():
    policy = parse_policy("tgi:max_batch_prefill_tokens=32").build(LIMITS)
    assert policy.traits.prompt_limit == (32, "the option max_batch_prefill_tokens")
    policy = parse_policy("tgi:max_batch_total_tokens=16").build(LIMITS)
    assert policy.traits.prompt_limit == (16, "the option max_batch_total_tokens")
    assert parse_policy("tgi").build(LIMITS).traits.prompt_limit[0] == 64 + 50
    with pytest.raises(
        RegistryError, match="max_new_tokens=0: should be greater than or equal to 1"
    ):
        parse_policy("tgi:max_new_tokens=0")


sizes = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 24), st.integers(0, 20)), min_size=1, max_size=8
)


@examples(60, suppress_health_check=list(HealthCheck))
@given(
    sizes,
    st.integers(1, 30),
    st.integers(44, 160),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.3, 1.2, 3.0]),
)
def test_the_batch_never_exceeds_its_budget(requests, new, total, seats, ratio):
    """Whenever it runs: what it is charged with fits (but for a request that is alone), covers its
    text, and its memory is there. Steps are prompts within their budget, or one token of everybody
    in the batch. Everybody ends."""
    limits = EngineLimits(max_num_seqs=seats, max_model_len=64, kv_bytes_per_token=1)
    text = (
        f"tgi:max_new_tokens={new},max_batch_total_tokens={total},"
        f"max_batch_prefill_tokens=48,waiting_served_ratio={ratio}"
    )
    desk = Desk(f"{text},max_waiting_tokens=5", 40, limits=limits)
    policy, table = desk.policy, desk.table
    for _ in desk.arriving(requests, steps=2000):
        known = table.prompt_tokens + table.output_tokens
        computed = table.computed_tokens.copy()
        waited = list(policy.waiting)
        desk.step()
        plan, batch = desk.plan, policy._batch()
        granted = {
            row: int(n) for row, n in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        }
        assert granted, "work waits and nothing runs"
        ran = set(granted) | set(batch.tolist())
        assert len(ran) <= seats
        assert policy.charged_tokens() <= total or len(batch) == 1
        if plan.admitted:
            assert set(granted) == {row for row, _ in plan.admitted} and sum(granted.values()) <= 48
            assert list(granted) == [row for row in sorted({*waited, *granted}) if row in granted]
        else:
            assert set(granted.values()) == {1}
            assert all(known[row] - computed[row] == 1 for row in granted)
    assert table.output_tokens.tolist() == [
        dict(enumerate(requests))[int(name[1:])][1] for name in table.ids
    ]
