"""What tools measured: each one's file gives the same three requests, as workload and as
measurement, and says what is not in it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.traces import measured_files
from tests.traces.measured_files import FILES
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.twin import compare
from twinserve.sim.twin.served import of_measurement
from twinserve.traces.load import load_trace
from twinserve.traces.measurement import SERVER, workload_of
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import detect_format, read_bytes, read_measurement
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError


@pytest.fixture
def measure(tmp_path):
    """A function from a file's text to its measurement."""

    def read(text, format=None, **options):
        path = tmp_path / "file"
        path.write_text(text)
        return read_measurement(path, format, ReadOptions(**options))

    return read


def said(notices) -> str:
    return " | ".join(notices)


@pytest.mark.parametrize("name", FILES)
def test_the_tool_is_told_by_the_content(name):
    assert detect_format(FILES[name]().encode(), "f") == name


@pytest.mark.parametrize("name", FILES)
def test_requests_that_were_served_become_a_workload(name):
    w = read_bytes(FILES[name]().encode(), "f")
    check_workload(w)
    assert w.prompt_tokens.tolist() == [10, 20] and w.output_tokens.tolist() == [3, 2]
    later = {"vllm-log": 1.0, "aiperf": np.nan}.get(name, 0.5)
    assert w.arrival_s.tolist() == pytest.approx([0.0, later], nan_ok=True)
    assert "prompts share no blocks" in said(w.provenance.notices)


@pytest.mark.parametrize("name", [name for name in FILES if name != "vllm-log"])
def test_latencies_are_those_of_the_file(name, measure):
    found = measure(FILES[name]())
    assert found.ttft_s[:2].tolist() == pytest.approx([0.2, 0.3])
    assert found.e2el_s[:2].tolist() == pytest.approx([0.4, 0.35])
    assert found.tpot_s[:2].tolist() == pytest.approx([0.1, 0.05])
    if found.gaps_s is not None:
        assert sorted(found.gaps_s) == pytest.approx([0.05, 0.1, 0.1])


@pytest.mark.parametrize("name", [name for name in FILES if name != "otel"])
def test_a_failed_request_is_counted_and_has_no_latency(name, measure):
    found = measure(FILES[name]())
    assert len(found) == 3 and found.failed == 1
    assert np.isnan(found.ttft_s[2]) and np.isnan(found.e2el_s[2])
    assert "1 of 3 requests failed" in said(found.notices)
    w = read_bytes(FILES[name]().encode(), "f")
    assert "1 of 3 requests failed" in said(w.provenance.notices)


# Of each tool's first request: its first token, in its file, and after 0 s and after 0.9 s; and its
# prompt, and without it.
TABLE = "ts,model,in,out,first_ms,all_ms,err\n1000,x,10,3,200,400,\n1500,x,20,2,300,350,\n"
TABLE += "1750,x,30,,,,boom\n"
COLUMNS = "arrival=ts:ms,prompt=in,output=out,ttft=first_ms:ms,e2el=all_ms:ms,error=err"
OTEL = '"gen_ai.latency.time_to_first_token", "value": {"doubleValue": '
PERF = "[81.%d, 81.3, 81.4]"
ODD = {
    "vllm-bench": (('"ttfts": [0.2', '"ttfts": [0.0', '"ttfts": [0.9'), ('s": [10,', 's": [-1,')),
    "aiperf": (('"value": 200,', '"value": 0,', '"value": 900,'), ('{"value": 10,', '{"no": 10,')),
    "guidellm": (('_ms": 200.0', '_ms": 0.0', '_ms": 900.0'), ('tokens": 10', 'tokens": null')),
    "inference-perf": ((PERF % 2, PERF % 0, PERF % 9), ('input_tokens": 10', 'input_tokens": "x"')),
    "otel": ((OTEL + "0.2", OTEL + "0", OTEL + "0.9"), ('"intValue": "10"', '"intValue": "1.5"')),
    "csv": (("3,200", "3,0", "3,900"), ("1000,x,10", "1000,x,")),
}


@pytest.fixture(params=ODD)
def odd(request, measure):
    """A function that reads a tool's file after a change, and what can be changed in it."""
    name = request.param
    text, options = (TABLE, {"columns": COLUMNS}) if name == "csv" else (FILES[name](), {})

    def read(old, new):
        assert old in text
        return measure(text.replace(old, new), **options)

    return read, ODD[name]


def test_a_first_token_that_cannot_be_is_unknown_and_said(odd):
    read, ((good, zero, late), _) = odd
    found = read(good, zero)
    n, place = len(found), r"\(first (request|line|span|item) [12]: "
    assert np.isnan(found.ttft_s[0]) and np.isnan(found.tpot_s[0])
    assert found.ttft_s[1] == pytest.approx(0.3) and found.e2el_s[0] == pytest.approx(0.4)
    what = f"1 of {n} requests have their first token after 0 s {place}"
    assert re.search(what, said(found.notices))
    found = read(good, late)
    assert np.isnan([found.ttft_s[0], found.e2el_s[0], found.tpot_s[0]]).all()
    assert f"1 of {n} requests have their first token after their last one" in said(found.notices)
    assert "0.9 s and '" in said(found.notices) and found.served[:2].all()


def test_a_request_without_its_length_is_left_out_and_said(odd):
    read, (_, change) = odd
    found = read(*change)
    assert found.served[:2].tolist() == [False, True] and found.failed == len(found) - 2
    assert re.search(r"1 of \d requests have no usable '.*: left out", said(found.notices))
    assert "no possible" not in said(found.notices)  # a value is told once
    assert workload_of(found).prompt_tokens.tolist() == [20]


def test_records_of_aiperf_0_2_are_read_by_their_names_of_then(measure):
    text = FILES["aiperf"]()
    for now, then in (
        ("request_start_ns", "timestamp_ns"),
        ("benchmark_phase", "credit_phase"),
        ("time_to_first_token", "ttft"),
    ):
        assert now in text
        text = text.replace(now, then)
    new, old = measure(FILES["aiperf"]()), measure(text)
    assert old.ttft_s.tolist() == pytest.approx(new.ttft_s.tolist(), nan_ok=True)
    assert old.arrival_s.tolist() == pytest.approx(new.arrival_s.tolist(), nan_ok=True)
    assert old.errors == new.errors and old.notices == new.notices


def test_a_file_is_refused_if_no_request_can_be_used(measure):
    text = measured_files.vllm_bench(output_lens=[0, 0, 0], input_lens=[1, 1, 1])
    with pytest.raises(WorkloadError, match="none of 3 requests can be used: .*2 x 'no tokens'"):
        measure(text)


def test_answers_in_one_piece_have_no_first_token(measure):
    found = measure(measured_files.vllm_bench(ttfts=[0.4, 0.3, 0.0]))
    assert np.isnan([found.ttft_s[0], found.tpot_s[0]]).all() and found.e2el_s[0] == 0.4
    assert "'ttfts' is 0.4 s and 'latencies' is 0.4 s" in said(found.notices)


@pytest.mark.parametrize("name", ["vllm-bench", "aiperf", "inference-perf"])
def test_gaps_between_chunks_are_no_gaps_between_tokens(name, measure):
    found = measure(FILES[name]().replace("[0.1, 0.1]", "[0.2]").replace("[100.0, 100.0]", "[200]"))
    if name == "inference-perf":
        times = FILES[name]().replace("81.2, 81.3, 81.4", "81.2, 81.4")
        found = measure(times)
    assert found.gaps_s == pytest.approx([0.05])
    assert "1 of 3 requests came in chunks of several tokens" in said(found.notices)
    assert "1 gaps, 3 tokens" in said(found.notices)


def test_a_bench_result_without_details_has_only_its_own_numbers(measure):
    content = json.loads(measured_files.vllm_bench())
    short = {k: v for k, v in content.items() if not isinstance(v, list)}
    found = measure(json.dumps(short))
    assert len(found) == 0 and found.stated["mean_ttft_ms"] == 250.0
    with pytest.raises(WorkloadError, match="--save-detailed"):
        read_bytes(json.dumps(short).encode(), "f")


def test_a_bench_result_without_latencies_ends_with_its_last_gap(measure):
    content = json.loads(measured_files.vllm_bench())
    del content["latencies"]
    assert measure(json.dumps(content)).e2el_s[:2].tolist() == pytest.approx([0.4, 0.35])
    content["ttfts"][0], content["itls"] = -0.1, [[0.1, 0.2], [0.5, -0.05], []]
    found = measure(json.dumps(content))
    assert np.isnan(found.e2el_s).all() and found.gaps_s.tolist() == [0.1, 0.2]
    assert "1 of 3 requests have no possible 'itls' (first request 2: " in said(found.notices)
    assert "field 'itls' holds -0.05, no list of times" in said(found.notices)


def test_a_summary_that_cannot_be_is_refused(measure):
    for changes, says in (
        ({"median_tpot_ms": 9.0, "p99_tpot_ms": 1.0}, "'median_tpot_ms' is 9, above 'p99_tpot_ms'"),
        ({"completed": 500}, "field 'completed' is 500, above 'num_prompts', 3: measure again"),
        ({"duration": 0.25}, "'duration' is 0.25 s, shorter than the 0.5 s of 'start_times'"),
    ):
        with pytest.raises(WorkloadError, match=says):
            measure(measured_files.vllm_bench(**changes))


def test_throughput_is_over_the_time_of_the_requests_that_are_kept(measure):
    late = {"ttfts": [0.2, 0.05, -1], "latencies": [0.4, 0.1, None]}
    for lengths, rate, changes in (
        ([3, 2, 4], 9 / 1.25, {}),
        ([-1, 2, 4], 6 / 0.75, {}),
        ([3, -1, 4], np.nan, {}),
        ([3, 2, 4], np.nan, late),
    ):
        given = {"errors": [""] * 3, "output_lens": lengths, "latencies": [0.4, 0.35, 0.5]}
        found = measure(measured_files.vllm_bench(**given | changes))
        seen = compare.number(of_measurement(found), "throughput", "")
        assert seen == pytest.approx(rate, nan_ok=True)
        assert ("so throughput is unknown" in said(found.notices)) == np.isnan(rate)


def test_a_bench_result_says_what_a_missing_field_takes_away(measure):
    content = json.loads(measured_files.vllm_bench())
    del content["output_lens"]
    found = measure(json.dumps(content))
    assert "no output_lens: TPOT and throughput are unknown; measure again" in said(found.notices)
    with pytest.raises(WorkloadError, match="field 'output_lens' is missing: measure again with"):
        workload_of(found)


def test_a_closed_loop_of_a_bench_stays_one_without_queue_times():
    w = read_bytes(measured_files.vllm_bench(max_concurrency=8).encode(), "f")
    assert w.concurrency == 8 and w.arrival_s.tolist() == [0.0, 0.5]  # as this server let them
    assert "--max-concurrency 8" in said(w.provenance.notices)
    w = read_bytes(measured_files.vllm_bench(max_concurrency=8, request_rate="inf").encode(), "f")
    assert w.concurrency == 8 and w.arrival_s.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("clients, seen", [(1, True), (3, True), (None, False)])
def test_clients_in_a_loop_that_no_file_names_are_noticed(clients, seen):
    rng = np.random.default_rng(1)
    took = rng.uniform(0.8, 1.2, 40)
    if clients is None:
        start = np.cumsum(rng.exponential(0.4, 40))
    else:
        free, start = np.zeros(clients), np.zeros(40)
        for row in range(40):
            start[row] = free.min() + 0.001
            free[free.argmin()] = start[row] + took[row]
    table = "at,in,out,took\n" + "".join(
        f"{a:.4f},9,5,{b:.4f}\n" for a, b in zip(start, took, strict=True)
    )
    options = ReadOptions(columns="arrival=at,prompt=in,output=out,e2el=took")
    w = read_bytes(table.encode(), "f", None, options)
    assert (f"as from {clients} clients in a loop" in said(w.provenance.notices)) == seen


def test_several_results_in_one_file_are_refused():
    twice = measured_files.vllm_bench() + "\n" + measured_files.vllm_bench()
    with pytest.raises(WorkloadError, match="holds 2 results: --append-result wrote them"):
        read_bytes(twice.encode(), "f")


def test_turns_of_a_measured_session_wait_for_each_other():
    w = read_bytes(FILES["aiperf"]().encode(), "f")
    assert w.stage.tolist() == [0, 1] and np.isnan(w.arrival_s[1])
    assert w.delay_s[1] == pytest.approx(0.5)  # sent 0.9 s after a turn that took 0.4 s
    assert "1 requests of the warm-up left out" in said(w.provenance.notices)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_sample_of_requests_is_said_to_be_one(earlier, measure):
    report = json.loads(FILES["guidellm"]())
    totals = {"request_totals": {"successful": 80, "total": 90}}
    report["benchmarks"][0] |= totals if earlier else {"metrics": totals}
    assert "a sample of 3 of 90 requests" in said(measure(json.dumps(report)).notices)


def test_a_log_over_new_year_goes_on(measure):
    found = measure(FILES["vllm-log"]())
    assert found.arrival_s.tolist() == [0.0, 1.0, 5.0] and found.where == SERVER
    assert found.e2el_s[:2].tolist() == [3.0, 3.0]
    assert "whole seconds" in said(found.notices)


def test_a_log_without_token_ids_says_at_which_level_to_log():
    lines = [line for line in FILES["vllm-log"]().splitlines() if not line.startswith("DEBUG")]
    with pytest.raises(WorkloadError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read_bytes("\n".join(lines).encode(), "f")


def test_outputs_that_a_log_lacks_are_said_to_be_the_most_they_can_be(measure):
    lines = [line for line in FILES["vllm-log"]().splitlines() if "Generated" not in line]
    found = measure("\n".join(lines))
    assert found.output_tokens.tolist() == [9, 9, 9] and found.failed == 0
    assert "3 output lengths are max_tokens" in said(found.notices)


def test_spans_of_jaeger_are_those_of_otlp(measure):
    spans = json.loads(FILES["otel"]())["resourceSpans"][0]["scopeSpans"][0]["spans"]
    rows = [
        {
            "operationName": span["name"],
            "startTime": int(span["startTimeUnixNano"]) // 1000,
            "tags": [
                {"key": a["key"], "value": float(*a["value"].values())} for a in span["attributes"]
            ],
        }
        for span in spans
    ]
    jaeger = measure(json.dumps({"data": [{"traceID": "1", "spans": rows}]}))
    otlp = measure(FILES["otel"]())
    assert jaeger.ttft_s.tolist() == otlp.ttft_s.tolist() == [0.2, 0.3]
    assert jaeger.arrival_s.tolist() == pytest.approx(otlp.arrival_s.tolist())
    assert "1 spans of other kinds not used" in said(otlp.notices)


def test_histograms_are_what_the_counters_grew_by(measure):
    found = measure(measured_files.prometheus()).histograms["ttft"]
    assert found.times_s.tolist() == [0.0, 60.0, 120.0]
    # 3 and 2 new values, then a restart: 2 and 2
    assert found.counts.tolist() == [[3.0, 2.0, 0.0], [2.0, 2.0, 0.0]]
    assert found.count == 9 and found.mean() == pytest.approx((1.5 + 0.8) / 9)
    assert found.share_below().tolist() == pytest.approx([5 / 9, 1, 1])


def test_histograms_are_no_workload():
    with pytest.raises(WorkloadError, match="no single requests"):
        read_bytes(measured_files.prometheus().encode(), "f")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "error", "error": "bad query"}, "bad query"),
        ({"data": {"resultType": "vector", "result": []}}, "query_range"),
        ({"data": {"resultType": "matrix", "result": []}}, "no histogram of vLLM"),
        (
            {"data": {"resultType": "matrix", "result": [{"metric": {}, "values": []}]}},
            "without rate|__name__",
        ),
    ],
)
def test_an_answer_that_is_no_histogram_says_what_to_query(change, says, measure):
    content = json.loads(measured_files.prometheus()) | change
    with pytest.raises(WorkloadError, match=says):
        measure(json.dumps(content), "prometheus")


SCRAPE = """# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="a}}b"}} {0}.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="a}}b"}} {1}.0
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="a}}b"}} {2}
vllm:num_requests_running{{engine="0"}} 3
"""


def test_the_text_of_metrics_counts_since_the_start_or_between_scrapes(measure):
    found = measure(SCRAPE.format(30, 100, 17.5))
    assert found.histograms["ttft"].counts.tolist() == [[30.0, 70.0]]
    assert found.histograms["ttft"].mean() == pytest.approx(0.175)
    assert "since the server's start" in said(found.notices)
    text = SCRAPE.format(30, 100, 17.5) + SCRAPE.format(50, 130, 20.5)
    found = measure(text)
    assert found.histograms["ttft"].counts.tolist() == [[20.0, 10.0]]
    assert found.histograms["ttft"].mean() == pytest.approx(0.1)
    assert "between the first and the last of 2 scrapes" in said(found.notices)
    restarted = measure(text + SCRAPE.format(4, 5, 0.5)).histograms["ttft"]
    assert restarted.counts.tolist() == [[20.0, 10.0], [4.0, 1.0]]
    with pytest.raises(WorkloadError, match="no histogram of vLLM"):
        measure("# HELP python_info x\n# TYPE python_info gauge\npython_info 1\n")


def span(start_s: float, last_s: float, attributes: dict, **further) -> dict:
    def value(v):
        return {"intValue": str(v)} if isinstance(v, int) else {"stringValue": v}

    listed = [{"key": k, "value": value(v)} for k, v in attributes.items()]
    ends = {"startTimeUnixNano": start_s, "endTimeUnixNano": start_s + last_s}
    stamps = {name: str(round(1e18 + at * 1e9)) for name, at in ends.items()}
    return {"name": "chat m", "attributes": listed, **stamps, **further}


GENAI = {"gen_ai.usage.input_tokens": 412, "gen_ai.usage.output_tokens": 57}
INFERENCE = {"llm.token_count.prompt": 412, "llm.token_count.completion": 57}


@pytest.mark.parametrize(
    ("counts", "model", "other"),
    [
        (GENAI, {"gen_ai.operation.name": "chat"}, {"gen_ai.operation.name": "invoke_agent"}),
        (INFERENCE, {"openinference.span.kind": "LLM"}, {"openinference.span.kind": "AGENT"}),
        (GENAI, {}, {"gen_ai.operation.name": "embeddings"}),
    ],
)
def test_spans_of_clients_and_gateways_are_requests(counts, model, other, measure):
    first = {"name": "First Token Stream Event", "timeUnixNano": str(round(1e18 + 2.25e9))}
    spans = [
        span(0.0, 9.0, counts | other, spanId="a"),
        span(2.0, 1.0, counts | model, spanId="b", parentSpanId="a", events=[first]),
        span(2.1, 0.8, counts | model, spanId="c", parentSpanId="b"),  # the gateway's, of the same
        span(0.5, 0.9, counts | model, spanId="d", parentSpanId="a"),
        span(4.0, 0.1, counts | model, spanId="e", status={"code": 2}),
    ]
    found = measure(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))
    assert found.where == "client" and found.failed == 1
    assert found.arrival_s.tolist() == pytest.approx([0.0, 1.5, 3.5])
    assert found.e2el_s[:2].tolist() == pytest.approx([0.9, 1.0], abs=1e-6)
    assert np.isnan(found.ttft_s[0]) and found.ttft_s[1] == pytest.approx(0.25, abs=1e-6)
    assert found.prompt_tokens[:2].tolist() == [412, 412]
    assert found.output_tokens[:2].tolist() == [57, 57]
    assert "2 spans of other kinds not used" in said(found.notices)


def test_of_a_report_with_several_loads_one_is_named(tmp_path, measure):
    report = json.loads(FILES["guidellm"]())
    other = json.loads(FILES["guidellm"]().replace('"prompt_tokens": 10', '"prompt_tokens": 11'))
    report["benchmarks"] += other["benchmarks"]
    with pytest.raises(WorkloadError, match="--benchmark 1 to 2"):
        measure(json.dumps(report))
    for number, first in ((1, 10), (2, 11)):
        found = measure(json.dumps(report), benchmark=number)
        assert found.prompt_tokens.tolist()[0] == first
    with pytest.raises(WorkloadError, match="--benchmark 3 is none of them"):
        measure(json.dumps(report), benchmark=3)
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert load_trace(tmp_path / "r.json", benchmark=2).prompt_tokens.tolist()[0] == 11
    with pytest.raises(WorkloadError, match="is for guidellm files"):
        measure(FILES["aiperf"](), benchmark=1)


def test_a_table_may_have_semicolons_and_times_of_any_zone():
    text = (
        b"When;In;Out;Who\n2025-01-01T02:00:02,5+02:00;5;6;a\n2025-01-01 00:00:03Z;7;8;b\n"
        b"2024-12-31T18:30:04.25-0530;9;9;c\n2025-01-01 00:00:05Z;9,0;9;d\n"
    )
    options = ReadOptions(columns="arrival=when,prompt=in,output=out")
    w = read_bytes(text, "f", None, options)
    assert w.arrival_s.tolist() == [0.0, 0.5, 1.75, 2.5]
    assert w.prompt_tokens.tolist() == [5, 7, 9, 9]
    assert "fields not used: Who" in w.provenance.notices
    tabs = read_bytes(text.replace(b";", b"\t"), "f", None, options)
    assert tabs.arrival_s.tolist() == w.arrival_s.tolist()
    with pytest.raises(WorkloadError, match="line 5: field 'when' has no zone.*, or none$"):
        read_bytes(text.replace(b"05Z", b"05"), "f", None, options)
    near = replace(options, columns="arrival=whn,prompt=in,output=out")
    with pytest.raises(WorkloadError, match="no column 'whn' .*: did you mean 'When'"):
        read_bytes(text, "f", None, near)
    with pytest.raises(WorkloadError, match="with the columns When, In, Out, Who: name them, as"):
        read_bytes(text, "f.csv")


def test_a_number_of_a_table_is_shown_as_the_table_has_it(measure):
    said_of = said(measure(TABLE.replace("10,3,200", "10,4.5,-200"), columns=COLUMNS).notices)
    assert "no usable 'out' (first line 2: field 'out' is 4.5, not a whole" in said_of
    assert "np." not in said_of


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("arrival", "'?arrival'? is not understood"),
        ("when=ts", "write FIELD=COLUMN"),
        ("prompt=in,prompt=out", "prompt is given twice"),
        ("arrival=ts,prompt=inn,output=out", "no column 'inn'"),
        (
            "arrival=model,prompt=in,output=out",
            "line 2: field 'model' is the text 'x', not a number",
        ),
        (
            "arrival=ts:ms,prompt=in,output=err",
            "3 of 3 requests have no usable 'err' .first line 2",
        ),
        ("arrival=ts:ms,prompt=in,error=err", "output tokens' is missing"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns, says):
    with pytest.raises(WorkloadError, match=says):
        read_bytes(TABLE.encode(), "f", None, ReadOptions(columns=columns))


def test_an_array_of_mooncake_rows_keeps_their_arrivals():
    rows = [
        {"timestamp": 5, "input_length": 3, "output_length": 4},
        {"timestamp": 9, "input_length": 6, "output_length": 2},
    ]
    w = read_bytes(json.dumps(rows).encode(), "f")
    assert w.provenance.name == "mooncake" and w.arrival_s.tolist() == [0.005, 0.009]
    rows[1]["output_length"] = -1
    with pytest.raises(WorkloadError, match="item 2: field 'output_length' is -1"):
        read_bytes(json.dumps(rows).encode(), "f")


def test_images_of_azure_requests_are_counted_not_dropped():
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-01 00:00:00,3,374,44\n"
    w = read_bytes(text.encode(), "f")
    assert "3 images in 1 requests (NumImages)" in said(w.provenance.notices)


def test_fields_that_no_reader_uses_are_named():
    row = {"timestamp": 5, "input_length": 3, "output_length": 4, "tenant": "x"}
    w = read_bytes(json.dumps(row).encode(), "f")
    assert said(w.provenance.notices) == "fields not used: tenant"


def test_what_was_only_sent_is_no_measurement(measure):
    with pytest.raises(WorkloadError, match="has requests, but no measured latencies"):
        measure('{"timestamp": 5, "input_length": 3, "output_length": 4}\n')


def test_a_run_takes_a_table_with_its_columns_named(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("ts,in,out\n0,10,3\n500,20,2\n")
    columns = "arrival=ts:ms,prompt=in,output=out"
    given = {"trace": str(file), "slo": "none"}
    w = resolve(SimulationConfig(**given, columns=columns)).workload
    assert (w.arrival_s.tolist(), w.prompt_tokens.tolist()) == ([0.0, 0.5], [10, 20])
    with pytest.raises(WorkloadError, match="--columns"):
        resolve(SimulationConfig(**given))
    for generated in ("sharegpt", "mooncake"):
        with pytest.raises((SettingsError, WorkloadError), match="columns"):
            resolve(SimulationConfig(trace=generated, offline=True, columns=columns))
