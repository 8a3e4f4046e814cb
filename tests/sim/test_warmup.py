"""A warm-up is left out of the metrics, and of nothing else."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parameters import mostly_nightly
from tests.sim.harness import POLICIES, of_rows
from tests.sim.test_metrics import request, rows_of, step
from tests.sim.test_results_rows import toy_rows
from tests.sim.troubled import troubled
from twinserve.policies.registry import parse_policy
from twinserve.sim.results.files import POOL_GROUP, ResultsError, RunResult, read_run, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.metrics_requests import warmup_end_s
from twinserve.sim.results.options import MetricsOptions, Warmup, read_options
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.objectives import parse_warmup
from twinserve.sim.setup.run import run_policy, simulate
from twinserve.traces.workload import WorkloadError

TRAFFIC = {"trace": "poisson", "rate": 40.0, "requests": 60, "cap_length": 200, "num_blocks": 90}
HYBRID = TRAFFIC | {"max_num_seqs": 8, "pool": 2}


def run(policy: str = "vllm", warmup: Warmup | None = None, **settings) -> RunResult:
    inputs = resolve(SimulationConfig(policy=(policy,), **HYBRID | settings))
    return run_policy(inputs, inputs.policies[0], options=MetricsOptions(warmup=warmup))


def pooled(gaps: pd.DataFrame) -> pd.DataFrame:
    return gaps.groupby(["service_class", "gap_s"])["count"].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "asynchronous"),
    [
        ("vllm", True),
        *mostly_nightly([(p, False) for p in POLICIES], ("vllm", False), ("echo", False)),
    ],
)
def test_runs_of_steps_are_split_where_single_steps_would_be(policy, asynchronous):
    """At any instant, so also in the middle of a run that is executed at once; both classes with
    objectives."""
    settings = {"rate": 8.0, "requests": 24, "slo": "ttft < 1 s; be: tpot < 50 ms"}
    for warmup in (Warmup(seconds=1.001), Warmup(requests=17)):
        fast, exact = (
            run(policy, warmup, exact=exact, async_scheduling=asynchronous, **settings)
            for exact in (False, True)
        )
        for name in ("requests", "steps", "gaps"):
            ours, theirs = getattr(fast.rows, name), getattr(exact.rows, name)
            pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
        assert fast.rows.gaps["warmup"].nunique() == 2
        assert fast.summary == exact.summary


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_they_are_in_a_fleet_that_fails_and_moves_its_requests(seed):
    """Also there every token after the first has one gap, before or after the end."""
    _, rows = troubled(parse_policy("vllm"), seed, 20, True, warmup=Warmup(seconds=0.1))
    assert rows.gaps["warmup"].nunique() == 2


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [Warmup(requests=20), Warmup(seconds=0.5)])
def test_nothing_changes_but_what_is_measured(warmup):
    plain, warmed = run(), run(warmup=warmup)
    for name in ("requests", "steps", "placements", "replicas"):
        pd.testing.assert_frame_equal(
            getattr(plain.rows, name), getattr(warmed.rows, name), check_exact=True
        )
    assert "warmup" not in plain.rows.gaps
    pd.testing.assert_series_equal(pooled(plain.rows.gaps), pooled(warmed.rows.gaps))
    assert summarise(run().rows) == of_rows(plain.summary)
    assert not {"warmup", "windows", "percentiles", "objectives"} & set(plain.summary)


@pytest.mark.parametrize("policy", ["vllm", "bros:chunk=64"])
def test_gaps_that_count_are_those_of_the_steps_that_count(policy):
    """Without preemptions each decoding request of a step has one gap that ends with it."""
    result = run(policy, Warmup(seconds=0.7), pool=0, num_blocks=2000)
    steps, gaps = result.rows.steps, result.rows.gaps
    early = steps["start_s"] < result.summary["warmup"]["end_s"]
    for part, warmup in ((steps[early], True), (steps[~early], False)):
        count = gaps.loc[gaps["warmup"] == warmup, "count"].sum()
        assert count == part["decode_requests"].sum() > 0
    measured = gaps[~gaps["warmup"]]
    assert result.summary["mean_itl_ms"] == pytest.approx(
        np.average(measured["gap_s"], weights=measured["count"]) * 1000
    )


def test_the_numbers_by_hand():
    rows = rows_of(
        [
            request("a", 10.0, 10.0, 11.0, 30.0, 100, 4, group="g"),
            request("b", 12.0, 12.0, 12.5, 13.0, 10, 2),
            request("c", 14.0, 14.0, 14.5, 18.0, 30, 3, group="g", stage=1),
            request("d", 15.0, 15.0, 15.5, 16.0, 60, 2, group="h"),
        ],
        [step(10.0, 14.0, waiting=9), step(14.0, 20.0, waiting=2, decode_requests=3)],
    )
    rows.gaps = pd.DataFrame(
        {"service_class": "rt", "gap_s": [0.1, 0.3], "count": [5, 2], "warmup": [True, False]}
    )
    summary = summarise(rows, MetricsOptions(warmup=Warmup(requests=2)))
    assert summary["warmup"] == {"end_s": 14.0, "requests": 2}
    assert (summary["submitted"], summary["completed"]) == (2, 2)
    assert summary["duration"] == 16.0  # to the last token, whosever it is
    assert summary["request_throughput"] == pytest.approx(2 / 16)
    assert summary["mean_e2el_ms"] == pytest.approx((4000 + 1000) / 2)
    assert summary["mean_itl_ms"] == pytest.approx(300)
    assert (summary["scheduler"]["steps"], summary["scheduler"]["max_waiting"]) == (1, 2)
    assert summary["applications"]["submitted"] == 1  # the other one began before
    assert summary == summarise(rows, MetricsOptions(warmup=Warmup(seconds=4.0)))


@pytest.mark.slow
@given(n=st.integers(1, 59), seed=st.integers(0, 50))
def test_of_n_requests_the_others_are_left(n, seed):
    rows = toy_rows(60, seed)
    rows.gaps["warmup"] = False
    summary = summarise(rows, MetricsOptions(warmup=Warmup(requests=n)))
    assert summary["submitted"] == 60 - n  # no two arrive at once
    assert sum(part["submitted"] for part in summary["classes"].values()) == 60 - n


def test_the_pool_is_not_counted_as_warm_up_requests():
    pool = dict(service_class="be", group=POOL_GROUP)
    listed = [request(f"r{i}", 1.0 + i, 1.0 + i, 2.0 + i, 3.0 + i, 10, 2) for i in range(4)]
    batch = [request(f"p{i}", 0.0, 0.0, 1.0, 2.0, 10, 2, **pool) for i in range(9)]
    requests = rows_of([*batch, *listed]).request_columns
    assert warmup_end_s(Warmup(requests=2), requests) == 3.0
    assert warmup_end_s(Warmup(seconds=2.0), requests) == 2.0  # since the first of all


@pytest.mark.parametrize("warmup", [Warmup(requests=60), Warmup(seconds=999.0)])
def test_a_warm_up_as_long_as_the_trace_is_told_before_the_run(warmup):
    with pytest.raises(WorkloadError, match=f"--warmup {warmup}: .*so none is left to measure"):
        simulate(SimulationConfig(**TRAFFIC), lambda progress: 1 / 0, MetricsOptions(warmup=warmup))
    with pytest.raises(WorkloadError, match="so none is left to measure"):
        warmup_end_s(warmup, toy_rows(60).request_columns)
    with pytest.raises(WorkloadError, match="so none is left to measure"):
        warmup_end_s(warmup, toy_rows(60).request_columns.take(np.zeros(0, int)))


@pytest.mark.slow
def test_a_stored_run_gives_its_summary_again(tmp_path):
    result = run(warmup=Warmup(requests=20))
    again = read_run(write_run(tmp_path / "run", result))
    assert again.summary == result.summary
    assert summarise(again.rows, read_options(again.config)) == of_rows(again.summary)
    plain = run().rows
    assert summarise(again.rows)["p99_itl_ms"] == summarise(plain)["p99_itl_ms"]
    with pytest.raises(ResultsError, match="pooled from its start"):
        summarise(plain, MetricsOptions(warmup=Warmup(requests=20)))


@pytest.mark.parametrize(
    ("text", "read"),
    [("500", Warmup(requests=500)), ("60s", Warmup(seconds=60.0)), ("0.5 s", Warmup(seconds=0.5))],
)
def test_requests_and_seconds_are_told_apart(text, read):
    assert parse_warmup(text) == read


@pytest.mark.parametrize("text", ["", "0", "0s", "1.5", "-3", "60m", "1.2.3s", "s", "nan", "infs"])
def test_what_is_neither_is_one_line(text):
    with pytest.raises(SettingsError, match=r"--warmup .*: write a number of requests, as 500"):
        parse_warmup(text)
