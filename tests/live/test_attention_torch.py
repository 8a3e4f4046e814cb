"""Attention over blocks filled from either end, in PyTorch: the slot-by-slot reference against
dense attention, the CPU engine's operations against the reference, and what a slot's content may
change."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples

pytestmark = pytest.mark.live


@pytest.fixture(scope="module", autouse=True)
def torch():
    try:
        import torch
    except ModuleNotFoundError:
        if os.environ.get("TWINSERVE_REQUIRE_LIVE"):
            pytest.fail("torch is not installed (TWINSERVE_REQUIRE_LIVE is set)")
        pytest.skip("torch is not installed")
    return torch


SHAPES = {
    "seed": st.integers(0, 2**32 - 1),
    "sequences": st.integers(1, 6),
    "block_tokens": st.sampled_from([4, 16, 32]),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 4),
    "head": st.sampled_from([4, 16]),
    "partial": st.booleans(),
    "layout": st.sampled_from(["split", "outer", "joint"]),
}


def computed(batch, torch):
    """`batch`'s answer by the CPU engine's operations, and what they wrote."""
    from twinserve.backends.live.attention import vectorised
    from twinserve.backends.live.attention.cache import write_slots

    plan = vectorised.plan(
        batch.table, batch.lengths, batch.query_start, batch.block_tokens, batch.first
    )
    write_slots(batch.keys, batch.values, batch.key, batch.value, plan.new_slots)
    out = torch.full(batch.query.shape, torch.nan, dtype=batch.query.dtype)
    vectorised.attend(out, batch.query, batch.keys, batch.values, plan, batch.scale)
    return out


@examples(60)
@given(**SHAPES)
def test_the_cpu_engines_operations_are_the_reference(torch, **shape):
    from tests.live.attention.batches import make_batch

    batch = make_batch(**shape)
    out = computed(batch, torch)
    torch.testing.assert_close(out, batch.answer(), atol=2e-5, rtol=1e-4)


@examples(30)
@given(**SHAPES)
def test_the_reference_is_dense_attention(torch, **shape):
    """Each sequence alone, its keys and values in order of its text, by PyTorch's own attention."""
    from tests.live.attention.batches import make_batch

    batch = make_batch(**shape)
    computed(batch, torch)
    answer, size = batch.answer(), batch.block_tokens
    for row, (begin, end) in enumerate(zip(batch.query_start, batch.query_start[1:], strict=False)):
        where = batch.slots_of(row)
        k, v = (c[where // size, where % size].transpose(0, 1) for c in (batch.keys, batch.values))
        place = torch.arange(len(where))
        dense = torch.nn.functional.scaled_dot_product_attention(
            batch.query[begin:end].transpose(0, 1),
            k.repeat_interleave(shape["group"], 0),
            v.repeat_interleave(shape["group"], 0),
            attn_mask=place <= place[-(end - begin) :, None],
            scale=batch.scale,
        ).transpose(0, 1)
        torch.testing.assert_close(answer[begin:end], dense, atol=2e-5, rtol=1e-4)


def test_batches_do_share_blocks():
    from tests.live.attention.batches import make_batch

    shared = [make_batch(seed, 5, 16, 1, 1, 4, partial=bool(seed % 2)).shared for seed in range(8)]
    assert min(shared[1::2]) >= 1 and sum(s > 0 for s in shared[::2]) >= 2


@pytest.mark.parametrize("partial", [False, True])
def test_only_own_slots_matter(torch, partial):
    from tests.live.attention.batches import make_batch

    batch = make_batch(7, 5, 16, 2, 2, 16, partial=partial)
    assert batch.shared
    out = computed(batch, torch)
    size = batch.block_tokens
    owned = torch.cat([batch.slots_of(row) for row in range(5)])
    assert len(owned) == len(owned.unique())  # no slot holds two tokens
    free = np.setdiff1d(np.arange(len(batch.keys) * size), owned.numpy())
    for cache in (batch.keys, batch.values):
        assert cache[free // size, free % size].isnan().all()
        cache[free // size, free % size] = 1e4
    torch.testing.assert_close(computed(batch, torch), out, atol=0, rtol=0)

    for row in range(5):
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        for slot in batch.slots_of(row)[: int(batch.lengths[row] - batch.new[row])]:
            kept = batch.values[slot // size, slot % size].clone()
            batch.values[slot // size, slot % size] += 1.0
            changed = (computed(batch, torch) != out).flatten(1).any(1)
            assert changed[begin:end].all() and changed.sum() == end - begin
            batch.values[slot // size, slot % size] = kept


def test_counts_that_cannot_be_are_refused(torch):
    from twinserve.backends.live.attention.cells import CellCounts
    from twinserve.backends.live.attention.slots import entries_of

    counts = CellCounts(4, 16, torch.device("cpu"))
    for wrong in (0, 17):
        with pytest.raises(ValueError, match="must be 1 to 16"):
            counts.set(entries_of([1, 2], True), [5, wrong])
    with pytest.raises(ValueError, match="block 4 is not in the cache"):
        counts.set(entries_of([1, 4], True), [5, 5])
    assert (counts.tensor == 16).all()
    counts.set(entries_of([1, 3], [True, False]), [5, 6])
    assert counts.tensor.tolist() == [16, 16, 16, 6, 16, 5, 16, 16]


def test_an_unknown_cache_shape_is_refused(torch):
    from twinserve.backends.live.attention.cache import split_cache

    with pytest.raises(ValueError, match=r"shape \[3, 3, 16, 1, 8\] is not known for head size 8"):
        split_cache(torch.zeros(3, 3, 16, 1, 8), 8)
