"""Percentiles that somebody asks for, beside those that are always there."""

import copy
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.test_results_rows import toy_rows
from twinserve.sim.results.metrics import latencies, summarise
from twinserve.sim.results.options import MetricsOptions, percentile_name
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.objectives import parse_percentiles


def asked(*percentiles: float) -> dict:
    return copy.deepcopy(_asked(*percentiles))


@cache
def _asked(*percentiles: float) -> dict:
    return summarise(toy_rows(group_size=3), MetricsOptions(percentiles=percentiles))


@pytest.mark.slow
@given(st.lists(st.floats(0, 100), max_size=4, unique=True))
def test_they_are_added_and_change_nothing_else(percentiles):
    plain, more = asked(), asked(*percentiles)
    assert {name: more[name] for name in plain if name not in ("classes", "applications")} == {
        name: plain[name] for name in plain if name not in ("classes", "applications")
    }
    rows = toy_rows(group_size=3)
    found = latencies(rows.requests)
    gaps = np.repeat(rows.gaps["gap_s"], rows.gaps["count"])
    for q in percentiles:
        name = percentile_name(q)
        for metric in ("ttft", "tpot", "e2el"):
            expected = np.percentile(found[f"{metric}_s"].dropna(), q) * 1000
            assert more[f"{name}_{metric}_ms"] == pytest.approx(expected, rel=1e-12)
        assert more[f"{name}_itl_ms"] == pytest.approx(np.percentile(gaps, q) * 1000, rel=1e-12)
        assert (
            f"{name}_ttft_ms" in more["classes"]["rt"] and f"{name}_jct_s" in (more["applications"])
        )


@pytest.mark.parametrize(
    ("percentile", "name"), [(99, "p99"), (99.0, "p99"), (99.9, "p99.9"), (0.5, "p0.5")]
)
def test_they_are_named_as_vllm_names_them(percentile, name):
    assert percentile_name(percentile) == name


@pytest.mark.parametrize(
    ("text", "read"), [("50,90,99.9", (50, 90, 99.9)), ("0, 100", (0, 100)), ("99.9", (99.9,))]
)
def test_numbers_with_commas(text, read):
    assert parse_percentiles(text) == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("101", "'101' is no percentile"),
        ("-1,50", "'-1' is no percentile"),
        ("50,nan", "'nan' is no percentile"),
        ("p99", "'p99' is no percentile"),
        ("50,", "'' is no percentile"),
        ("50,99,50.0", "50.0 is given twice"),
    ],
)
def test_what_is_none_is_one_line(text, said):
    with pytest.raises(SettingsError, match="--percentiles") as error:
        parse_percentiles(text)
    assert said in str(error.value) and "\n" not in str(error.value)
