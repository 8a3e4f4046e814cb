"""Metrics by windows of arrivals: they are the run, cut into pieces."""

import io
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.sim.test_metrics import request, rows_of
from tests.sim.test_results_rows import empty_rows, toy_rows
from twinserve.sim.report.fleet import MOST_LINES, of_interest, print_windows
from twinserve.sim.results.files import RunResult, RunRows
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.options import MetricsOptions, Objective, Warmup, read_options
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.objectives import metrics_options
from twinserve.sim.setup.run import simulate
from twinserve.traces.load import load_trace


def by(every_s: float, **more) -> MetricsOptions:
    return MetricsOptions(every_s=every_s, **more)


def troubled_rows(seed: int) -> RunRows:
    """Of the requests some were cut short, some never got a token."""
    rows = toy_rows(60, seed)
    rng = np.random.default_rng(seed)
    requests = rows.requests
    cut = rng.random(60) < 0.2
    requests.loc[cut, ["finished", "outcome"]] = [False, "timed_out"]
    never = cut & (rng.random(60) < 0.5)
    requests.loc[never, ["first_token_s", "last_token_s", "output_tokens"]] = [np.nan, np.nan, 0]
    still = ~cut & (rng.random(60) < 0.1)
    requests.loc[still, ["finished", "outcome", "ended_s"]] = [False, None, np.nan]
    rows.gaps["warmup"] = False
    return rows


@pytest.mark.slow
@given(
    seed=st.integers(0, 200),
    every_s=st.floats(0.05, 100),
    warmup=st.none() | st.integers(1, 50).map(lambda n: Warmup(requests=n)),
)
def test_counts_of_the_windows_add_up_to_the_run(seed, every_s, warmup):
    rows = troubled_rows(seed)
    summary = summarise(rows, by(every_s, warmup=warmup))
    windows = summary["windows"]
    assert [w["end_s"] for w in windows[:-1]] == [w["start_s"] for w in windows[1:]]
    for name in ("rt", "be"):
        whole = summary["classes"].get(name, {"submitted": 0, "completed": 0})
        parts = [w["classes"][name] for w in windows if name in w["classes"]]
        assert sum(p["requests"] for p in parts) == whole["submitted"]
        assert sum(p["completed"] for p in parts) == whole["completed"]
    for window in windows:
        for count in ("requests", "completed", "served", "in_system"):
            parts = [part[count] for part in window["classes"].values()]
            assert sum(parts) == window[count]
    if warmup is None:
        assert sum(w["served"] for w in windows) == summary["completed"]
        assert windows[0]["start_s"] == rows.requests["arrival_s"].min()
    # who is there at the end of a window: counted afresh, from the rows
    arrival, ended = rows.requests["arrival_s"], rows.requests["ended_s"].fillna(math.inf)
    for window in windows[:-1]:
        end = window["end_s"]
        assert window["in_system"] == ((arrival < end) & (ended >= end)).sum()
    assert windows[-1]["in_system"] == (ended == math.inf).sum()


@pytest.mark.nightly
@given(seed=st.integers(0, 200), every_s=st.floats(0.5, 5))
def test_a_window_is_what_its_requests_say(seed, every_s):
    """Latencies and attainment against a summary of those rows alone."""
    rows = troubled_rows(seed)
    objectives = (Objective("rt", "e2el", 2.0),)
    arrival = rows.requests["arrival_s"]
    windows = summarise(rows, by(every_s, percentiles=(99.9,), objectives=objectives))["windows"]
    for window in windows[:-1]:
        here = (arrival >= window["start_s"]) & (arrival < window["end_s"])
        alone = summarise(
            RunRows(rows.requests[here], rows.steps, rows.gaps, 600),
            MetricsOptions(percentiles=(99.9,), objectives=objectives),
        )
        for name, value in alone.items():
            if name in window and name not in ("classes", "start_s", "end_s"):
                assert window[name] == value, name
        assert window["p99.9_ttft_ms"] == alone["p99.9_ttft_ms"]
        for name, part in alone["classes"].items():
            for shown in ("ttft_attainment", "slo_attainment", "mean_tpot_ms"):
                assert window["classes"][name][shown] == part[shown]
        if "rt" in alone["classes"]:
            assert window["classes"]["rt"]["e2el_attainment"] is not None


def test_one_window_by_hand():
    rows = rows_of(
        [
            request("a", 10.0, 10.0, 11.0, 12.0, 10, 2, ended_s=12.0),
            request("b", 14.0, 14.0, 17.0, 21.0, 10, 2, ended_s=21.0),
            # on an edge: of the window that starts there
            request("c", 15.0, 15.0, 15.5, 16.0, 10, 2, ended_s=16.0),
        ]
    )
    windows = summarise(rows, by(5.0))["windows"]
    assert [(w["start_s"], w["end_s"]) for w in windows] == [(10, 15), (15, 20), (20, 21)]
    assert [(w["requests"], w["served"], w["in_system"]) for w in windows] == [
        (2, 1, 1),
        (1, 1, 1),
        (0, 1, 0),
    ]
    assert [w["arrivals_per_s"] for w in windows] == [2 / 5, 1 / 5, 0.0]
    assert [w["served_per_s"] for w in windows] == [1 / 5, 1 / 5, 1.0]
    assert windows[0]["mean_ttft_ms"] == pytest.approx(2000)
    assert windows[2]["mean_ttft_ms"] is None
    pool = request("d", 10.0, 10.0, 19.0, 20.0, 10, 2, ended_s=20.0, service_class="be")
    of_both = pd.concat([rows.requests, pd.DataFrame([pool])], ignore_index=True)
    shown = of_interest(summarise(replace(rows, requests=of_both), by(5.0))["windows"])
    assert shown[0]["mean_ttft_ms"] == pytest.approx(2000)


def test_a_run_without_requests_has_no_windows():
    assert summarise(empty_rows(), by(1.0))["windows"] == []


@pytest.mark.parametrize("every_s", [0.0, -1.0, math.nan, math.inf])
def test_a_window_has_seconds(every_s):
    with pytest.raises(SettingsError, match="--metrics-every .*: give the seconds of a window"):
        metrics_options(every_s=every_s)


def test_more_windows_than_anybody_reads_are_refused_before_the_run():
    config = SimulationConfig(trace="fixed:90,10", rate=5.0, requests=100)
    with pytest.raises(SettingsError, match="more than 2,000 windows; choose longer ones"):
        simulate(config, lambda progress: 1 / 0, by(0.001))


def printed(every_s: float) -> str:
    rows = toy_rows()
    sink = io.StringIO()
    summary = summarise(rows, by(every_s))
    print_windows({"fcfs": RunResult(rows, summary=summary)}, Console(file=sink, width=80))
    return sink.getvalue()


@pytest.mark.slow
def test_a_few_windows_are_printed_and_many_are_not():
    few = printed(3.0)
    assert "fcfs" in few and "attained" in few and max(map(len, few.splitlines())) <= 80
    assert len(few.splitlines()) >= 4
    many = printed(0.01)
    assert "too many to print" in many and len(many.splitlines()) == 2
    assert MOST_LINES < 100


def test_stages_of_a_stated_load_are_windows():
    name = "stages:4x10/16x5/2x10,input=64,output=8"
    (result,) = simulate(SimulationConfig(trace=name, slo="none")).values()
    windows = result.summary["windows"]
    assert [w["start_s"] for w in windows[:3]] == [0.0, 10.0, 15.0]
    assert [w["end_s"] for w in windows[:2]] == [10.0, 15.0]
    workload = load_trace(name)
    counts, _ = np.histogram(workload.arrival_s, [0, 10, 15, 25])
    assert [w["requests"] for w in windows[:3]] == counts.tolist()
    assert windows[1]["arrivals_per_s"] == pytest.approx(counts[1] / 5)
    assert summarise(result.rows, read_options(result.config))["windows"] == windows
