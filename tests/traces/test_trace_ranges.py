"""Prefix blocks as ranges are the same blocks, in less memory."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from twinserve.traces import prefix as blocks
from twinserve.traces.generators.longdoc import longdoc
from twinserve.traces.generators.tidal import tidal
from twinserve.traces.ranges import PrefixRanges
from twinserve.traces.transform import merge
from twinserve.traces.workload import PrefixBlocks


def written(prefix: PrefixRanges) -> PrefixBlocks:
    return PrefixBlocks(prefix.ids, prefix.offsets, prefix.block_tokens)


@st.composite
def questions(draw) -> PrefixRanges:
    """Questions on documents, some of them without one or without text of their own."""
    documents = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    of = draw(st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=6))
    own = np.array(draw(st.lists(st.integers(0, 3), min_size=len(of), max_size=len(of))))
    shared = np.array(documents)
    offsets = blocks.offsets_of(shared[of] + own)
    first_own = shared.sum() + blocks.offsets_of(own)[:-1]
    return PrefixRanges(blocks.offsets_of(shared)[:-1][of], shared[of], first_own, offsets, 16)


def assert_same(ours, theirs) -> None:
    assert_array_equal(ours.ids, theirs.ids)
    assert_array_equal(ours.offsets, theirs.offsets)
    assert ours.distinct == theirs.distinct
    for row in range(len(ours.offsets) - 1):
        assert_array_equal(ours.of(row), theirs.of(row))


@given(questions(), st.data())
def test_rows_taken_from_ranges_are_those_taken_from_ids(prefix, data):
    n = len(prefix.shared)
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True)), np.int64)
    assert_same(blocks.take(prefix, rows), blocks.take(written(prefix), rows))


@given(questions(), questions())
def test_ranges_join_as_ids_do(a, b):
    every = np.arange(len(a.shared))
    a = blocks.take(a, every)  # dense, as what is joined has to be
    assert_same(blocks.join(a, b), blocks.join(written(a), written(b)))
    assert_same(blocks.join(a, written(b)), blocks.join(written(a), b))


def test_a_pool_of_many_blocks_takes_little_memory():
    online = tidal(duration_s=600.0, peak_rate=2.0, seed=0)
    tracemalloc.start()
    load = merge(online, longdoc("loogle-short", requests=4_000, seed=0))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert load.prefix.offsets[-1] > 4_000_000
    assert most < 8_000_000  # bytes; a number a block would be 32 MB
