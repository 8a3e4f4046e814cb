"""Sarathi-Serve: decodes first, prompts in what is left of the budget."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.policy_runs import Desk
from twinserve.policies.base import EngineLimits
from twinserve.policies.drafting import Drafting, DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy

LIMITS = EngineLimits(max_num_seqs=8, max_model_len=64, kv_bytes_per_token=1)


def test_decodes_come_first_then_prompts_that_have_begun_then_new_ones():
    """By hand, eight tokens a step. a's prompt of ten takes two steps; b gets what a's second part
    leaves; from then on a's decode comes first, and c begins in what b leaves."""
    desk = Desk("sarathi:chunk_size=8", 40, limits=LIMITS)
    desk.submit("a", 10, 4)
    desk.submit("b", 12, 2)
    desk.submit("c", 9, 2)
    assert desk.scheduled(5) == [
        {"a": 8}, {"a": 2, "b": 6}, {"a": 1, "b": 6, "c": 1}, {"a": 1, "b": 1, "c": 6},
        {"a": 1, "c": 2},
    ]  # fmt: skip
    assert [list(s) for s in desk.scheduled(1)] == [["c"]]


def test_the_chunk_size_is_the_token_budget_of_a_step():
    policy = parse_policy("sarathi:chunk_size=32").build(LIMITS)
    assert policy.step_tokens(64) == 32
    small = EngineLimits(max_num_seqs=8, max_num_batched_tokens=16)
    assert parse_policy("sarathi:chunk_size=32").build(small).step_tokens(64) == 16
    with pytest.raises(RegistryError, match="option enable_chunked_prefill=false"):
        parse_policy("sarathi:enable_chunked_prefill=false")


@pytest.mark.parametrize(
    ("drafting", "seats"),
    [
        (Drafting(3), 128),
        (Drafting.of("draft_model", 3), 102),
        (Drafting(3, by_batch=(3,) * 200 + (1,)), 128),  # 200 would not fit, 256 would
        (Drafting(3, by_batch=(3,) * 100 + (1,)), 256),
    ],
)
def test_with_drafts_no_decode_is_left_out_of_a_step(drafting, seats):
    limits = DraftingLimits(max_num_seqs=300, drafting=drafting)
    assert parse_policy("sarathi:chunk_size=512").build(limits).limits.max_num_seqs == seats


def test_a_chunk_size_of_a_draft_models_slots_alone_is_refused():
    drafting = Drafting.of("draft_model", 3)
    with pytest.raises(PolicyError, match=r"option chunk_size=1: .* give 2 or more"):
        parse_policy("sarathi:chunk_size=1").build(DraftingLimits(drafting=drafting))
    limits = DraftingLimits(drafting=drafting)
    assert parse_policy("sarathi:chunk_size=2").build(limits).limits.max_num_seqs == 1


sizes = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=8
)

KINDS = st.sampled_from(["paged", "cached", "bidirectional"])


@examples(60, suppress_health_check=list(HealthCheck))
@given(sizes, st.integers(1, 24), st.integers(1, 10), st.integers(13, 40), KINDS)
def test_the_budget_holds_and_no_decode_stalls(requests, chunk, seats, blocks, kind):
    """At most `chunk` tokens a step; who has computed its prompt gets a token in every step, or has
    lost its memory."""
    limits = EngineLimits(max_num_seqs=seats, max_model_len=64, kv_bytes_per_token=1)
    desk = Desk(f"sarathi:chunk_size={chunk}", blocks, kind=kind, limits=limits)
    table = desk.table
    for _ in desk.arriving(requests, steps=3000):
        decoding = np.flatnonzero(
            (table.state == 1)
            & (table.prompt_tokens + table.output_tokens - table.computed_tokens == 1)
        )
        desk.step()
        plan = desk.plan
        assert len(plan.rows) and plan.tokens.sum() <= chunk
        lost = {row for row, _ in plan.preempted}
        assert set(decoding.tolist()) <= set(plan.rows.tolist()) | lost
        order = [row in decoding for row in plan.rows.tolist()]
        assert order == sorted(order, reverse=True)  # decodes before prompts
        begun = [row for row, _ in plan.admitted]
        assert plan.rows.tolist()[len(plan.rows) - len(begun) :] == begun  # new ones last
