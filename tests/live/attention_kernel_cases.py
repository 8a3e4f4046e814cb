"""The Triton kernels in Triton's interpreter, on a CPU. Run by test_attention_kernel.py in a
process of its own: the interpreter is chosen (TRITON_INTERPRET=1) when Triton is first imported."""

import pytest
import torch
import triton
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.live.attention.batches import LAYOUTS, Batch, make_batch
from twinserve.backends.live.attention import launch

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

# The interpreter multiplies the bits of bfloat16 numbers, so that type can only be stored here.
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 4e-3, "rtol": 1e-2},
}


def on_device(batch: Batch, decodes: int, splits: int, spare_rows: int = 0) -> launch.Batch:
    """spare_rows: rows and tokens that only pad the batch, as CUDA graphs have."""

    def padded(array, value):
        tensor = torch.from_numpy(array)
        return torch.cat([tensor, tensor.new_full((spare_rows, *tensor.shape[1:]), value)])

    return launch.Batch(
        padded(batch.table, 0),
        padded(batch.lengths, 0),
        padded(batch.query_start, int(batch.query_start[-1])),
        len(batch.query) + spare_rows,
        decodes,
        splits,
        None if batch.first is None else padded(batch.first, 0),
    )


def computed(batch: Batch, step: launch.Batch, **tuning) -> torch.Tensor:
    """The kernels' answer: first they store the new tokens."""
    spare = step.tokens - len(batch.query)

    def padded(tensor):
        return torch.cat([tensor, tensor.new_full((spare, *tensor.shape[1:]), torch.nan)])

    out = torch.full((step.tokens, *batch.query.shape[1:]), 7.0, dtype=batch.query.dtype)
    launch.store(padded(batch.key), padded(batch.value), batch.keys, batch.values, step)
    launch.attend(out, padded(batch.query), batch.keys, batch.values, step, batch.scale, **tuning)
    assert (out[len(batch.query) :] == 7.0).all()
    return out[: len(batch.query)]


def small(rows: int, tile: int) -> dict[str, launch.Tuning]:
    return {"prefill": launch.Tuning(rows, tile, 4, 1), "decode": launch.Tuning(16, tile, 4, 1)}


# no shrinking: an example takes half a second
@examples(25, derandomize=True, phases=[Phase.generate])
@given(
    batch=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32 - 1),
            "sequences": st.integers(1, 4),
            "block_tokens": st.sampled_from([16, 32]),
            "kv_heads": st.integers(1, 2),
            "group": st.sampled_from([1, 3, 4]),
            "head": st.just(16),
            "dtype": st.sampled_from(list(TOLERANCE)),
            "partial": st.booleans(),
            "layout": st.sampled_from(LAYOUTS),
        }
    ),
    splits=st.sampled_from([1, 2, 8]),
    tiles=st.sampled_from([(16, 16), (16, 32), (32, 64)]),
    all_by_prefill=st.booleans(),
    spare_rows=st.integers(0, 2),
)
def test_the_kernels_are_the_reference(batch, splits, tiles, all_by_prefill, spare_rows):
    batch = make_batch(**batch)
    decodes = 0 if all_by_prefill else int((batch.new == 1).sum())
    step = on_device(batch, decodes, splits, spare_rows)
    out = computed(batch, step, **small(*tiles))
    assert out.isfinite().all()
    torch.testing.assert_close(out.float(), batch.answer(), **TOLERANCE[batch.query.dtype])


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_sizes_of_real_models(head, block_tokens):
    """With the sizes of tiles that a GPU gets."""
    batch = make_batch(head, 3, block_tokens, 2, 5, head, torch.float16, partial=block_tokens == 32)
    out = computed(batch, on_device(batch, int((batch.new == 1).sum()), 4))
    torch.testing.assert_close(out.float(), batch.answer(), **TOLERANCE[torch.float16])


def test_a_padded_decode_batch_alone():
    batch = make_batch(3, 4, 16, 1, 2, 16, decodes_only=True)
    step = on_device(batch, 6, 2, spare_rows=2)
    out = computed(batch, step, **small(16, 16))
    torch.testing.assert_close(out, batch.answer(), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_tokens_are_stored_in_their_slots_and_nowhere_else(dtype, layout):
    batch = make_batch(11, 4, 16, 3, 1, 16, dtype, partial=True, layout=layout)
    before = batch.kv_cache.clone()
    launch.store(batch.key, batch.value, batch.keys, batch.values, on_device(batch, 0, 1))
    stored = torch.zeros(batch.keys.shape[:2], dtype=torch.bool)
    for row, (begin, end) in enumerate(zip(batch.query_start, batch.query_start[1:], strict=False)):
        where = batch.slots_of(row)[-(end - begin) :]
        block, slot = where // 16, where % 16
        assert torch.equal(batch.keys[block, slot], batch.key[begin:end])
        assert torch.equal(batch.values[block, slot], batch.value[begin:end])
        stored[block, slot] = True
    for cache in (batch.keys, batch.values):
        cache[stored] = 0.0
    kept = batch.kv_cache.clone()
    batch.kv_cache.copy_(before)
    for cache in (batch.keys, batch.values):
        cache[stored] = 0.0
    torch.testing.assert_close(kept, batch.kv_cache, equal_nan=True, atol=0, rtol=0)


def test_a_slot_of_another_sequence_changes_nothing():
    batch = make_batch(5, 5, 16, 1, 2, 16, partial=True)
    assert batch.shared
    step = on_device(batch, int((batch.new == 1).sum()), 2)
    out = computed(batch, step, **small(16, 16))
    size = batch.block_tokens
    for row in range(5):
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        others = torch.ones(batch.keys.shape[:2], dtype=torch.bool)
        where = batch.slots_of(row)
        others[where // size, where % size] = False
        kept = batch.kv_cache.clone()
        for cache in (batch.keys, batch.values):
            cache[others] = torch.nan
        again = torch.empty_like(out)
        launch.attend(
            again, batch.query, batch.keys, batch.values, step, batch.scale, **small(16, 16)
        )
        assert torch.equal(again[begin:end], out[begin:end])
        batch.kv_cache.copy_(kept)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head", "said"),
    [
        (4, 2, 48, "head size 48"),
        (3, 2, 64, "3 query heads over 2 KV heads"),
        (34, 2, 64, "34 query heads over 2 KV heads"),
    ],
)
def test_sizes_that_the_kernel_does_not_take_are_refused(heads, kv_heads, head, said):
    with pytest.raises(ValueError, match=said):
        launch.check_shapes(torch.zeros(1, heads, head), torch.zeros(2, 16, kv_heads, head))


@pytest.mark.parametrize(
    ("decodes", "kv_heads", "longest", "splits"),
    [(1, 8, 16384, 32), (1, 8, 128, 1), (256, 8, 16384, 1), (0, 8, 64, 1), (1, 1, 10**6, 64)],
)
def test_splits_fill_the_processors(monkeypatch, decodes, kv_heads, longest, splits):
    monkeypatch.setattr(launch, "_processors", lambda device: 132)  # an H200's
    assert launch.splits_for(decodes, kv_heads, longest, torch.device("cuda")) == splits
