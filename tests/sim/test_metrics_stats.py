"""Percentiles of values with counts are numpy's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinserve.sim.results.metrics_requests import (
    PERCENTILES,
    counted_order,
    describe_counted_ms,
    describe_ms,
)

COUNTED = st.lists(
    st.tuples(st.floats(0, 1e4, allow_subnormal=False), st.integers(0, 9)), min_size=1, max_size=40
).filter(lambda pairs: any(count for _, count in pairs))


def unzip(pairs):
    values, counts = zip(*pairs, strict=True)
    return np.array(values), np.array(counts)


@given(COUNTED)
def test_descriptions_equal_those_of_the_expanded_list(pairs):
    values, counts = unzip(pairs)
    order = counted_order(values, counts)
    ours = describe_counted_ms("itl", values[order], counts[order])
    expected = describe_ms("itl", np.repeat(values, counts))
    assert ours.keys() == expected.keys()
    for name in ("median_itl_ms", *(f"p{q}_itl_ms" for q in PERCENTILES)):
        assert ours[name] == expected[name]
    # Sums are taken in another order.
    assert ours["mean_itl_ms"] == pytest.approx(expected["mean_itl_ms"], rel=1e-9, abs=1e-9)
    assert ours["std_itl_ms"] == pytest.approx(expected["std_itl_ms"], rel=1e-6, abs=1e-6)


def test_merging_equal_values_changes_nothing():
    apart = describe_counted_ms("itl", np.array([1.0, 2.0, 2.0]), np.array([5, 1, 3]))
    assert apart == describe_counted_ms("itl", np.array([1.0, 2.0]), np.array([5, 4]))


def test_no_values_have_no_description():
    assert set(describe_ms("ttft", np.zeros(0)).values()) == {None}
    assert set(describe_counted_ms("itl", np.zeros(0), np.zeros(0, int)).values()) == {None}
    with pytest.raises(ValueError, match="below zero"):
        counted_order(np.array([1.0, 2.0]), np.array([3, -1]))
