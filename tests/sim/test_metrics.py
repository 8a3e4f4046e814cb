"""Metrics on runs small enough to do by hand; what `--goodput` takes; percentiles of counts."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.call_count import calls
from tests.sim.test_results_rows import empty_rows, toy_rows
from twinserve.sim.fleet import source
from twinserve.sim.results.columns import GAPS, REQUESTS, STEPS
from twinserve.sim.results.files import POOL_GROUP, RunRows, dump_json
from twinserve.sim.results.metrics import (
    GoodputError,
    fair_ratio,
    job_completion,
    latencies,
    parse_goodput,
    summarise,
    summarise_fair_ratio,
)
from twinserve.sim.results.metrics_requests import (
    PERCENTILES,
    counted_order,
    describe_counted_ms,
    describe_ms,
)
from twinserve.sim.results.options import MetricsOptions

NAN = float("nan")
DEFAULTS = {
    "service_class": "rt", "group": None, "stage": 0, "priority": 0, "replica": 0, "hit_tokens": 0,
    "recomputes": 0, "swaps": 0, "swapped_tokens": 0, "late_tokens": 0, "slo_ttft_s": NAN,
    "slo_tpot_s": NAN, "finished": True,
}  # fmt: skip


def request(name, arrival, scheduled, first, last, prompt, output, **others) -> dict:
    times = dict(arrival_s=arrival, first_scheduled_s=scheduled, first_token_s=first)
    sizes = dict(last_token_s=last, prompt_tokens=prompt, output_tokens=output)
    return DEFAULTS | {"request_id": name} | times | sizes | others


def step(start, end, **others) -> dict:
    return dict.fromkeys(STEPS, 0) | {"start_s": start, "end_s": end} | others


def rows_of(requests, steps=(), gaps=(), total=100) -> RunRows:
    return RunRows(
        pd.DataFrame(requests, columns=list(REQUESTS)),
        pd.DataFrame(list(steps), columns=list(STEPS)),
        pd.DataFrame(list(gaps), columns=list(GAPS)),
        total,
    )


def good(**bounds_ms) -> MetricsOptions:
    return MetricsOptions(goodput=bounds_ms)


SLO = {"slo_ttft_s": 0.5, "slo_tpot_s": 0.2}
THREE = [
    #       name arrives scheduled first last prompt output
    request("a", 10.0, 10.1, 10.4, 11.0, 100, 4, **SLO),  # TTFT 0.4, TPOT 0.2, E2E 1.0
    request("b", 11.0, 11.5, 12.0, 12.0, 50, 1, **SLO),  # TTFT 1.0, no TPOT, E2E 1.0
    request("c", 12.0, 12.0, 12.2, 14.0, 30, 3, **SLO),  # TTFT 0.2, TPOT 0.9, E2E 2.0
]
GAPS_OF_THREE = [("rt", 0.2, 3), ("rt", 0.6, 1), ("rt", 1.2, 1)]


def test_the_numbers_of_three_requests_by_hand():
    summary = summarise(rows_of(THREE, gaps=GAPS_OF_THREE))
    assert (summary["completed"], summary["unfinished"]) == (3, 0)
    assert summary["duration"] == pytest.approx(4.0)  # 10 to 14
    assert summary["request_throughput"] == pytest.approx(3 / 4)
    assert summary["output_throughput"] == pytest.approx(8 / 4)
    assert summary["total_token_throughput"] == pytest.approx(188 / 4)
    assert summary["request_goodput"] is None
    assert summary["mean_ttft_ms"] == pytest.approx(1600 / 3)
    assert summary["median_ttft_ms"] == pytest.approx(400)
    assert summary["mean_tpot_ms"] == pytest.approx((200 + 900) / 2)  # b has none
    assert summary["mean_e2el_ms"] == pytest.approx(4000 / 3)
    assert summary["mean_itl_ms"] == pytest.approx((3 * 200 + 600 + 1200) / 5)
    assert summary["median_itl_ms"] == pytest.approx(200)
    assert summary["p90_itl_ms"] == pytest.approx(600 + 0.6 * 600)  # rank 3.6 of 0..4


def test_a_class_has_normalized_latency_queueing_and_attainment():
    late = [THREE[0] | {"late_tokens": 1}, THREE[1], THREE[2] | {"late_tokens": 2}]
    rt = summarise(rows_of(late))["classes"]["rt"]
    assert rt["normalized_latency_ms"] == pytest.approx((250 + 1000 + 2000 / 3) / 3)
    assert rt["queueing_proportion"] == pytest.approx((0.1 + 0.5 + 0.0) / 3)
    assert rt["ttft_attainment"] == pytest.approx(2 / 3)  # b is late
    assert rt["tpot_attainment"] == pytest.approx(2 / 3)  # c is slow; b has one token: good
    assert rt["every_gap_attainment"] == pytest.approx(1 / 3)  # a is good on average alone
    assert rt["tpot_token_attainment"] == pytest.approx(1 - 3 / 5)
    assert rt["slo_attainment"] == pytest.approx(1 / 3)
    assert "be" not in summarise(rows_of(late))["classes"]


def test_goodput_counts_bounds_as_met_and_single_tokens_as_good():
    rows = rows_of(
        [
            request("a", 0.0, 0.0, 0.5, 0.5, 10, 1),
            request("b", 0.0, 0.0, 0.25, 1.25, 10, 3),  # TPOT exactly 0.5
            request("c", 0.0, 0.0, 0.25, 2.0, 10, 2),
        ]
    )
    assert summarise(rows, good(tpot=500.0))["request_goodput"] == pytest.approx(2 / 2)
    assert summarise(rows, good(ttft=250.0))["request_goodput"] == pytest.approx(2 / 2)
    assert summarise(rows, good(ttft=250.0, tpot=500.0))["request_goodput"] == 0.5
    assert summarise(rows, good(e2el=1250.0))["request_goodput"] == pytest.approx(2 / 2)


def test_unfinished_requests_are_left_out_of_latencies_and_miss_their_objectives():
    starved = request("d", 12.5, NAN, NAN, NAN, 40, 0, finished=False, **SLO)
    cut = request("e", 12.5, 12.6, 12.7, 13.0, 40, 2, finished=False, **SLO)
    whole = summarise(rows_of(THREE, gaps=GAPS_OF_THREE))
    summary = summarise(rows_of([*THREE, starved, cut], gaps=GAPS_OF_THREE))
    assert (summary["submitted"], summary["completed"], summary["unfinished"]) == (5, 3, 2)
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"):
        assert summary[name] == whole[name]
    rt = summary["classes"]["rt"]
    assert rt["ttft_attainment"] == pytest.approx(3 / 5)  # e got its first token in time
    assert rt["tpot_attainment"] == pytest.approx(2 / 5)
    assert rt["every_gap_attainment"] == pytest.approx(3 / 5)  # no gap of c is said to be late
    assert rt["slo_attainment"] == pytest.approx(1 / 5)
    only_ttft = [r | {"slo_tpot_s": NAN} for r in (*THREE, starved, cut)]
    rt = summarise(rows_of(only_ttft))["classes"]["rt"]
    assert rt["slo_attainment"] == rt["ttft_attainment"] == pytest.approx(3 / 5)
    # e had its token in vain
    only_ttft[-1] |= {"outcome": "disconnected", "ended_s": 13.0, "computed_tokens": 42}
    rt = summarise(rows_of(only_ttft))["classes"]["rt"]
    assert rt["slo_attainment"] == pytest.approx(2 / 5)


def test_requests_without_objectives_do_not_count_for_attainment():
    free = [request("x", 0.0, 0.0, 9.0, 99.0, 10, 5)]
    rt = summarise(rows_of([*THREE, *free]))["classes"]["rt"]
    assert rt["ttft_attainment"] == pytest.approx(2 / 3)
    alone = summarise(rows_of(free))["classes"]["rt"]
    assert alone["slo_attainment"] is None and alone["tpot_token_attainment"] is None
    # With one of the two objectives, that one decides.
    only_ttft = [r | {"slo_tpot_s": NAN} for r in THREE]
    assert summarise(rows_of(only_ttft))["classes"]["rt"]["slo_attainment"] == pytest.approx(2 / 3)


def test_best_effort_work_is_measured_while_real_time_requests_arrive():
    rows = rows_of(
        [
            request("be0", 0.0, 0.0, 1.0, 2.0, 100, 10, service_class="be"),
            request("rt0", 1.0, 1.0, 1.5, 9.0, 10, 2),
            request("be1", 2.0, 2.0, 3.0, 4.0, 200, 20, service_class="be"),
            request("rt1", 5.0, 5.0, 5.5, 6.0, 10, 2),
            # ends after the window
            request("be2", 4.0, 4.0, 9.0, 10.0, 400, 40, service_class="be"),
        ]
    )
    be = summarise(rows)["classes"]["be"]
    assert be["window_s"] == pytest.approx(5.0)
    assert be["window_request_throughput"] == pytest.approx(2 / 5)
    assert be["window_output_throughput"] == pytest.approx(30 / 5)
    assert be["window_total_token_throughput"] == pytest.approx(330 / 5)
    assert be["request_throughput"] == pytest.approx(3 / 10)
    only_be = rows_of([r for r in rows.requests.to_dict("records") if r["service_class"] == "be"])
    assert summarise(only_be)["classes"]["be"]["window_s"] == pytest.approx(10.0)


def test_class_throughputs_add_up_to_the_whole():
    summary = summarise(toy_rows())
    for name in ("request_throughput", "output_throughput", "total_token_throughput", "completed"):
        parts = [part[name] for part in summary["classes"].values()]
        assert len(parts) == 2 and sum(parts) == pytest.approx(summary[name])


def test_memory_and_scheduler_by_hand():
    steps = [
        step(0.0, 1.0, prefill_requests=2, prefill_tokens=90, waiting=4, kv_used_blocks=40),
        step(1.0, 4.0, decode_requests=2, waiting=0, kv_used_blocks=80, preempted_swap=1),
        step(5.0, 6.0, prefill_requests=1, prefill_tokens=10, decode_requests=3, waiting=8),
    ]
    steps[1] |= {"to_host_bytes": 7, "preempted_recompute": 2}
    steps[2] |= {"to_device_bytes": 5, "kv_used_blocks": 20}
    admitted = request("a", 0.0, 0.0, 1.0, 6.0, 60, 5, hit_tokens=30)
    never = request("b", 0.0, NAN, NAN, NAN, 500, 0, finished=False)
    summary = summarise(rows_of([admitted, never], steps))
    kv, scheduler = summary["kv"], summary["scheduler"]
    assert (kv["peak_used_blocks"], kv["peak_use"]) == (80, 0.8)
    assert kv["mean_used_blocks"] == pytest.approx((40 * 1 + 80 * 3 + 20 * 1) / 5)
    assert kv["preemptions"] == {"recompute": 2, "swap": 1}
    assert kv["swapped_bytes"] == {"to_host": 7, "to_device": 5}
    assert kv["prefix_hit_rate"] == 0.5  # what was never admitted had no chance to hit
    assert scheduler["steps_by_kind"] == {"prefill": 1, "decode": 1, "mixed": 1}
    assert scheduler["mean_batch"] == pytest.approx(8 / 3)
    assert scheduler["mean_step_tokens"] == pytest.approx((90 + 2 + 13) / 3)
    assert scheduler["mean_waiting"] == pytest.approx((4 + 8) / 5)
    assert scheduler["max_waiting"] == 8
    assert scheduler["busy"] == pytest.approx(5 / 6)


def test_applications_end_with_their_last_request():
    requests = [
        request("a0", 1.0, 1.0, 1.5, 2.0, 10, 2, group="app"),
        request("a1", 2.0, 2.0, 2.5, 4.0, 10, 2, group="app", stage=1),
        request("s0", 0.0, 0.0, 0.5, 1.0, 10, 2, group="session"),
        request("x", 0.0, 0.0, 0.5, 9.0, 10, 2),
        request("u0", 0.0, 0.0, 0.5, 3.0, 10, 2, group="cut"),
        request("u1", 3.0, NAN, NAN, NAN, 10, 0, group="cut", stage=1, finished=False),
    ]
    jobs = job_completion(pd.DataFrame(requests))
    assert jobs.index.tolist() == ["app", "session", "cut"]
    assert jobs["jct_s"].tolist()[:2] == [3.0, 1.0] and np.isnan(jobs["jct_s"]["cut"])
    summary = summarise(rows_of(requests))
    assert summary["applications"]["submitted"] == 3
    assert summary["applications"]["completed"] == 2
    assert summary["applications"]["mean_jct_s"] == 2.0
    assert summary["applications"]["p90_jct_s"] == pytest.approx(1 + 0.9 * 2)
    assert summary["classes"]["rt"]["applications"]["completed"] == 2
    assert "applications" not in summarise(rows_of(THREE))


def test_the_pool_is_no_application_and_its_batches_are_timed():
    pool = dict(service_class="be", group=POOL_GROUP)
    requests = [
        request("r", 0.0, 0.0, 0.5, 9.0, 10, 2),
        request("p0", 0.0, 0.0, 0.5, 2.0, 10, 2, **pool),
        request("p1", 0.0, 0.0, 0.5, 4.0, 10, 2, **pool),
        request("p2", 4.0, 4.0, 4.5, 5.0, 10, 2, stage=1, **pool),
        request("p3", 4.0, NAN, NAN, NAN, 10, 0, stage=1, finished=False, **pool),
    ]
    summary = summarise(rows_of(requests))
    assert "applications" not in summary
    assert summary["classes"]["be"]["pool"] == {
        "batches": 2,
        "batches_completed": 1,
        "mean_batch_s": 4.0,
    }
    assert job_completion(pd.DataFrame(requests)).index.tolist() == ["r"]
    assert "pool" not in summarise(rows_of(THREE))["classes"]["rt"]


def test_the_pool_is_named_as_its_source_names_it():
    assert source.POOL_GROUP == POOL_GROUP


def test_the_fair_ratio_compares_each_job_with_itself():
    ours = [
        request("a", 0.0, 0.0, 1.0, 3.0, 10, 2, group="one"),
        request("b", 0.0, 0.0, 1.0, 1.0, 10, 2, group="two"),
        request("c", 0.0, 0.0, 1.0, 1.0, 10, 2, group="three", finished=False),
    ]
    fair = [r | {"last_token_s": 2.0, "finished": True} for r in reversed(ours)]
    ratios = fair_ratio(rows_of(ours), rows_of(fair))
    assert ratios["fair_ratio"].to_dict() == {"one": 1.5, "two": 0.5}
    assert summarise_fair_ratio(ratios) == {
        "jobs": 2,
        "mean_fair_ratio": 1.0,
        "p90_fair_ratio": pytest.approx(1.4),
        "max_fair_ratio": 1.5,
        "not_delayed": 0.5,
    }
    nothing = summarise_fair_ratio(ratios.iloc[:0])
    assert nothing["jobs"] == 0 and nothing["max_fair_ratio"] is None


def test_an_empty_run_has_no_numbers_and_no_errors():
    summary = summarise(empty_rows(), good(ttft=1.0))
    assert summary["completed"] == 0 and summary["classes"] == {}
    assert summary["duration"] == 0 and summary["request_throughput"] is None
    assert summary["mean_ttft_ms"] is None and summary["kv"]["peak_use"] is None
    nothing_emitted = rows_of([request("a", 5.0, NAN, NAN, NAN, 10, 0, finished=False)])
    assert summarise(nothing_emitted)["unfinished"] == 1


def test_json_has_null_where_there_is_no_number():
    text = dump_json(summarise(empty_rows()))
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["mean_itl_ms"] is None


def test_latencies_keep_the_index_and_have_no_tpot_of_one_token():
    table = latencies(rows_of(THREE).requests.iloc[1:])
    assert table.index.tolist() == [1, 2]
    assert np.isnan(table["tpot_s"][1]) and table["tpot_s"][2] == pytest.approx(0.9)
    assert table["normalized_s"][2] == pytest.approx(2 / 3)


def test_the_order_of_rows_does_not_change_a_count_or_a_percentile():
    rows = toy_rows(group_size=3)
    shuffled = RunRows(
        *(frame.sample(frac=1, random_state=1) for frame in (rows.requests, rows.steps, rows.gaps)),
        kv_total_blocks=rows.kv_total_blocks,
    )
    one, two = summarise(rows), summarise(shuffled)
    assert {k: v for k, v in one.items() if k.startswith("p")} == {
        k: v for k, v in two.items() if k.startswith("p")
    }
    assert one["scheduler"]["steps_by_kind"] == two["scheduler"]["steps_by_kind"]


@pytest.mark.slow
def test_no_row_of_a_hundred_thousand_requests_is_a_call():
    small = toy_rows(200)
    n, k = 100_000, 500_000

    def many(frame, size):
        return frame.iloc[np.arange(size) % len(frame)].reset_index(drop=True)

    big = RunRows(many(small.requests, n), many(small.steps, k), many(small.gaps, k), 600)
    assert calls(lambda: summarise(big)) < 5000


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["ttft:500", "tpot:50"], {"ttft": 500.0, "tpot": 50.0}),
        (["ttft:500 e2el:2.5e3"], {"ttft": 500.0, "e2el": 2500.0}),
        (["tpot:50,ttft:0"], {"tpot": 50.0, "ttft": 0.0}),
    ],
)
def test_pairs_are_read(given, read):
    assert parse_goodput(given) == read


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "no objective; write NAME:MILLISECONDS"),
        (" , ", "no objective; write NAME:MILLISECONDS"),
        ("tttf:500", "did you mean ttft?"),
        ("TPOT:500", "did you mean tpot?"),
        ("itl:500", "did you mean tpot?"),
        ("e2e:500", "did you mean e2el?"),
        ("xyzzy:500", "there are ttft, tpot, e2el"),
        ("ttft=500", "write NAME:MILLISECONDS"),
        ("ttft:", "no number"),
        ("ttft:0.5s", "no number"),
        ("ttft:-1", "0 or more"),
        ("ttft:nan", "finite"),
        ("ttft:1 ttft:2", "given twice"),
    ],
)
def test_an_error_is_one_line_that_helps(given, says):
    with pytest.raises(GoodputError) as raised:
        parse_goodput([given])
    message = str(raised.value)
    assert says in message and message.startswith("--goodput") and "\n" not in message


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
