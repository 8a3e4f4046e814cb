"""Each format: what its rows mean, and that it is recognised by its content."""

import json

import numpy as np
import pytest

from tests.sim.call_count import calls
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import detect_format, read_bytes, read_file
from twinserve.traces.readers.measured import table
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.readers.text import estimate_tokens
from twinserve.traces.workload import WorkloadError

BURST_6 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_8 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


def read(text, format=None, **options):
    data = text if isinstance(text, bytes) else text.encode()
    w = read_bytes(data, "f", format, ReadOptions(**options))
    check_workload(w)
    return w


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def mooncake(**fields):
    return {"timestamp": 0, "input_length": 5, "output_length": 2, **fields}


def test_mooncake_is_in_milliseconds_and_512_token_blocks():
    rows = (
        mooncake(timestamp=27482.2, input_length=900, hash_ids=[46, 47]),
        mooncake(timestamp=30535, input_length=513, hash_ids=[46, 2**64 - 1]),
    )
    w = read(jsonl(*rows))
    assert w.arrival_s.tolist() == [27.4822, 30.535]
    assert w.prompt_tokens.tolist() == [900, 513] and w.output_tokens.tolist() == [2, 2]
    assert w.prefix.block_tokens == 512
    assert w.prefix.of(0).tolist() == [0, 1] and w.prefix.of(1).tolist() == [0, 2]
    assert w.provenance.notices == ()


def test_ids_of_64_bits_stay_apart():
    # Truncated to 32 bits, or taken through a double, these four would be one.
    ids = [2**40, 2**40 + 2**32, 2**63 + 1, 2**63 + 2]
    w = read(jsonl(*(mooncake(hash_ids=[i]) for i in ids)))
    assert w.prefix.distinct == 4
    w = read(jsonl(*(mooncake(hash_ids=[i]) for i in [-1, 2**64 - 1, -(2**63), -1])))
    assert [w.prefix.of(i)[0] for i in range(4)] == [1, 2, 0, 1]


def test_ids_that_name_single_blocks_are_chained():
    # Equal text after different beginnings is not a shared prefix.
    rows = [mooncake(input_length=1024, hash_ids=h) for h in ([1, 9], [2, 9], [1, 9], [7, 7])]
    w = read(jsonl(*rows))
    assert w.prefix.of(0).tolist() == w.prefix.of(2).tolist()
    assert w.prefix.of(0)[1] != w.prefix.of(1)[1]
    assert w.prefix.distinct == 6
    assert any("converted" in n for n in w.provenance.notices)


def test_mooncake_sessions_are_closed_loops():
    w = read(
        jsonl(
            mooncake(session_id="a", timestamp=1000),
            mooncake(session_id="b", timestamp=500),
            {"session_id": "a", "delay": 2500, "input_length": 8, "output_length": 1},
            mooncake(session_id="b", timestamp=4000),  # Dynamo: the difference of the timestamps
            {"session_id": "b", "input_length": 9, "output_length": 1, "priority": -4},
            mooncake(timestamp=700),
        )
    )
    assert w.group_names == ["a", "b"]
    assert w.arrival_s[:3].tolist() == [0.5, 0.7, 1.0] and np.isnan(w.arrival_s[3:]).all()
    assert w.group.tolist() == [1, -1, 0, 0, 1, 1]
    assert w.stage.tolist() == [0, 0, 0, 1, 1, 2]
    assert w.delay_s.tolist() == [0, 0, 0, 2.5, 3.5, 0]
    assert w.priority.tolist() == [0, 0, 0, 0, 0, -4]
    assert any("sorted" in n for n in w.provenance.notices)


def staged(stage, at, **more):
    return {
        "input_length": 3, "output_length": 1, "group": "app", "stage": stage, "timestamp": at,
        **more,
    }  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 1, 3, 0)])
def test_a_stage_waits_for_the_latest_timestamp_of_the_stage_before(order):
    """Not for the row before it in the file: that may be of its own stage."""
    rows = [
        staged(0, 0),
        staged(1, 10_000),
        staged(1, 20_000),
        staged(2, 25_000),
        staged(2, 30_000, delay=700),
    ]
    rows = [{**row, "request_id": f"q{i}"} for i, row in enumerate(rows)]
    w = read(jsonl(*(rows[i] for i in order)))
    delays = dict(zip(w.ids, w.delay_s.tolist(), strict=True))
    assert delays == {"q0": 0, "q1": 10, "q2": 20, "q3": 5, "q4": 0.7}
    with pytest.raises(
        WorkloadError, match="line 4: field 'timestamp' is before that of the turn before"
    ):
        read(jsonl(*rows[:3], staged(2, 19_999)))


def test_a_turn_without_a_timestamp_leaves_the_last_one_standing():
    rows = [mooncake(session_id="a", timestamp=at) for at in (1000, None, 4000)]
    del rows[1]["timestamp"]
    assert read(jsonl(*rows)).delay_s.tolist() == [0, 0, 3]


def test_our_fields_on_mooncake_rows():
    w = read(
        jsonl(
            mooncake(**{"class": "be"}, slo_ttft_s=0.5, request_id="x", group="app", stage=0),
            mooncake(slo_tpot_s=0.1, block_size=512, slo_ttft_s=None),
            {"input_length": 3, "output_length": 1, "group": "app", "stage": 1, "delay": 1},
            {"input_length": 3, "output_length": 1, "group": "app", "stage": 1},
        )
    )
    assert w.service_class.tolist() == [1, 0, 0, 0]
    assert w.ids == ["x", "r1", "r2", "r3"]
    assert w.slo_ttft_s[0] == 0.5 and np.isnan(w.slo_ttft_s[1:]).all() and w.slo_tpot_s[1] == 0.1
    assert w.stage.tolist() == [0, 0, 1, 1] and w.group.tolist() == [0, -1, 0, 0]
    assert w.delay_s.tolist() == [0, 0, 0.001, 0]


def test_units_can_be_told():
    row = mooncake(timestamp=1.5, input_length=33, hash_ids=[1, 2, 3])
    w = read(jsonl(row), block_tokens=16, time_unit="s")
    assert w.arrival_s.tolist() == [1.5] and w.prefix.block_tokens == 16
    with pytest.raises(WorkloadError, match="line 1: field 'hash_ids' has 3 ids.*block_size"):
        read(jsonl(row))


REFUSED = {
    "time_unit": ("bailian", "azure", "burstgpt", "sharegpt"),
    "block_tokens": ("azure", "burstgpt", "sharegpt", "custom"),
}


@pytest.mark.parametrize(
    ("option", "name"), [(option, name) for option, names in REFUSED.items() for name in names]
)
def test_units_that_a_format_has_no_use_for_are_refused(option, name):
    value = {"time_unit": "ms", "block_tokens": 16}[option]
    with pytest.raises(
        WorkloadError,
        match=rf"{option} \({value}\) is for .* files, this one is {name}: leave it out",
    ):
        read("", name, **{option: value})


def test_a_time_unit_without_timestamps_is_refused():
    row = {"prompt": "x", "output_tokens": 5}
    assert read(jsonl({**row, "timestamp": 1500}), time_unit="ms").arrival_s.tolist() == [1.5]
    with pytest.raises(WorkloadError, match="has no timestamps and would ignore a time_unit"):
        read(jsonl(row), time_unit="ms")


def test_one_row_may_name_the_block_size():
    rows = (mooncake(input_length=33, hash_ids=[1, 2, 3], block_size=16), mooncake(hash_ids=[1]))
    w = read(jsonl(*rows))
    assert w.prefix.block_tokens == 16 and w.prefix.of(1).tolist() == w.prefix.of(0)[:1].tolist()


def test_a_rate_is_refused_where_it_would_be_ignored():
    for text in (jsonl(mooncake()), jsonl({"prompt": "x", "output_tokens": 5, "timestamp": 1})):
        with pytest.raises(WorkloadError, match="has its own arrivals"):
            read(text, rate=2.0)


def test_mooncake_rows_without_any_timestamp_come_at_a_rate():
    row = {"input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    turn = {**row, "session_id": "s"}
    stage = {**row, "group": "g", "stage": 0}
    w = read(jsonl(row, turn, {**turn, "delay": 500}, stage, stage), rate=2.0)
    check_workload(w)
    known = w.known_arrivals_s
    assert len(known) == 4 and known[2] == known[3] and known[0] > 0  # a stage comes together
    assert w.delay_s[-1] == 0.5 and "at 2 requests/s" in " ".join(w.provenance.notices)
    told = read(jsonl({"text_input": "x" * 40, "output_length": 2}))
    assert told.prompt_tokens.tolist() == [10]
    assert "prompt tokens estimated" in told.provenance.notices[0]


def test_rows_without_ids_share_nothing():
    w = read(jsonl(mooncake(hash_ids=[3]), mooncake(input_length=600), mooncake(hash_ids=[3])))
    assert w.prefix.of(1).tolist() == [1, 2]
    assert w.prefix.of(0).tolist() == w.prefix.of(2).tolist() == [0]


def test_bailian_is_in_seconds_and_16_token_blocks():
    root = {
        **{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 32},
        **{"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090]},
    }
    turn = {**root, "chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "turn": 2}
    turn.update(input_length=40, hash_ids=[1089, 1090])  # the partial third block has no id
    w = read(jsonl(root, turn))
    assert w.arrival_s.tolist() == [61.114, 62.5]  # as recorded, not a closed loop
    assert w.ids == ["159", "160"] and (w.group == -1).all()
    assert w.prefix.block_tokens == 16
    assert w.prefix.of(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("end", ["", "\r\n"])
def test_azure_2023(end):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109" + end
    )
    w = read(text)
    assert w.arrival_s.tolist() == [0.0, 4.314579]
    assert w.prompt_tokens.tolist() == [374, 396] and w.output_tokens.tolist() == [44, 109]


def test_azure_2024_has_zones_and_whole_seconds():
    w = read(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,1,2\n"
        "2024-05-10 00:00:01.009930+00:00,3,4\n"
    )
    assert w.arrival_s.tolist() == [0.0, 1.00993]
    late_first = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:03,1,2\n"
    assert read(late_first + "2024-05-10 00:00:01,3,4\n").arrival_s.tolist() == [0.0, 2.0]


def test_burstgpt_in_both_layouts():
    six = read(BURST_6 + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,0,10,API log\n")
    eight = read(BURST_8 + "5.5,3,1.25,ChatGPT,472,18,490,Conversation log\n")
    assert six.arrival_s.tolist() == [5.0] and eight.arrival_s.tolist() == [5.5]
    assert six.prompt_tokens.tolist() == eight.prompt_tokens.tolist() == [472]
    assert six.output_tokens.tolist() == eight.output_tokens.tolist() == [18]
    dropped = "1 rows without prompt or output tokens dropped"
    assert six.provenance.notices == ("fields not used: Model, Log Type", dropped)


def test_sharegpt_takes_the_first_prompt_and_its_answer():
    talk = [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "x" * 9}]
    talk += [{"from": "gpt", "value": "y" * 4}, {"from": "human", "value": "more"}]
    talks = [{"id": "a", "conversations": talk}, {"conversations": []}]
    talks += [{"conversations": talk, "prompt_tokens": 70, "output_tokens": 80}]
    w = read(json.dumps(talks, indent=1), rate=4.0, seed=7)
    assert w.prompt_tokens.tolist() == [3, 70] and w.output_tokens.tolist() == [1, 80]
    said = " ".join(w.provenance.notices)
    assert "estimated" in said and "4 requests/s, seed 7" in said and "1 conversations" in said
    again = read(json.dumps(talks), rate=4.0, seed=7)
    assert again.arrival_s.tolist() == w.arrival_s.tolist()


def test_token_estimate_counts_bytes():
    assert estimate_tokens("") == 0
    assert estimate_tokens("hello") == 2
    assert estimate_tokens("你好") == 2


def test_custom():
    w = read(jsonl({"prompt": "x" * 40, "output_tokens": 5}, {"prompt": "y", "output_tokens": 6}))
    assert w.prompt_tokens.tolist() == [10, 1] and w.output_tokens.tolist() == [5, 6]
    w = read(jsonl({"prompt": "x", "output_tokens": 5, "timestamp": 1.5, "prompt_tokens": 99}))
    assert w.arrival_s.tolist() == [1.5] and w.prompt_tokens.tolist() == [99]
    assert w.provenance.notices == ()


@pytest.mark.parametrize(
    ("text", "format"),
    [
        (jsonl(mooncake()), "mooncake"),
        ("\ufeff\n" + jsonl(mooncake()), "mooncake"),
        (jsonl({"chat_id": 1, **mooncake()}), "bailian"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ("generatedtokens, TIMESTAMP ,ContextTokens\r\n", "azure"),
        (BURST_6, "burstgpt"),
        (BURST_8, "burstgpt"),
        ('[{"conversations": []}]', "sharegpt"),
        (jsonl({"prompt": "a", "output_tokens": 1}), "custom"),
    ],
)
def test_detection(text, format):
    assert detect_format(text.encode(), "f") == format


def test_the_format_can_be_forced():
    row = {"chat_id": 1, **mooncake(timestamp=1000)}
    assert read(jsonl(row)).arrival_s[0] == 1000
    assert read(jsonl(row), "mooncake").arrival_s[0] == 1
    with pytest.raises(WorkloadError, match="did you mean mooncake"):
        read(jsonl(row), "moncake")


@pytest.mark.slow
@pytest.mark.traces
def test_the_original_mooncake_trace(original):
    path = original("mooncake")
    w = read_file(path)
    check_workload(w)
    assert len(w) == 12_031 and w.prefix.distinct == 182_790 and len(w.prefix.ids) == 288_500
    assert w.last_arrival_s == 3536.999
    assert w.provenance.notices == ()
    assert calls(lambda: read_file(path)) < 500  # none of them a row


@pytest.mark.traces
def test_the_original_azure_trace(original):
    w = read_file(original("azure-2023:conv"))
    check_workload(w)
    assert len(w) == 19_366 and w.prefix is None
    assert w.last_arrival_s == pytest.approx(3501.722, abs=1e-3)
    assert w.prompt_tokens.mean() == pytest.approx(1154.7, abs=0.1)


# -- access logs of gateways, whose columns the caller names ---------------------------------------
# As LiteLLM's table of spend has them: moments, and a word for what came of it.
LITELLM = """\
request_id,startTime,endTime,completionStartTime,prompt_tokens,completion_tokens,status
r1,2026-01-05 10:00:00.100+00:00,2026-01-05 10:00:02.100+00:00,2026-01-05T10:00:00.400Z,500,101,success
r2,2026-01-05 11:00:01.100+01:00,2026-01-05 10:00:04.100+00:00,,600,120,success
r3,2026-01-05 10:00:02.100+00:00,2026-01-05 10:00:02.200+00:00,,500,0,failure
"""  # noqa: E501
OF_LITELLM = (
    "id=request_id,arrival=startTime,first=completionStartTime,end=endTime,prompt=prompt_tokens,"
    "output=completion_tokens,status=status"
)
OF_ENVOY = "arrival=start_time,e2el=duration:ms,prompt=llm.in,output=llm.out,status=response_code"


def envoy(*rows: tuple) -> bytes:
    """As an access log of Envoy's AI gateway in JSON: a line a request."""
    names = ("start_time", "duration", "response_code", "llm")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows).encode()


def test_moments_tell_latencies_and_a_word_tells_what_failed():
    found = table.read(LITELLM.encode(), "f", ReadOptions(columns=OF_LITELLM))
    np.testing.assert_allclose(found.arrival_s, [0, 1, 2])
    np.testing.assert_allclose(found.ttft_s, [0.3, np.nan, np.nan])
    np.testing.assert_allclose(found.e2el_s, [2, 3, np.nan])
    assert list(found.errors) == ["", "", "status failure"]
    assert any("1 of 3 requests failed (1 x 'status failure')" in line for line in found.notices)


def test_json_lines_are_a_table_and_codes_of_http_are_words():
    tokens = {"in": 300, "out": 40}
    data = envoy(
        ("2026-01-05T10:00:00Z", 1500, 200, tokens),
        ("2026-01-05T10:00:01Z", 20, 503, tokens),
        ("2026-01-05T10:00:02.5Z", 900, "201 Created", {"in": "310", "out": 45}),
    )
    found = table.read(data, "f", ReadOptions(columns=OF_ENVOY))
    np.testing.assert_allclose(found.arrival_s, [0, 1, 2.5])
    np.testing.assert_allclose(found.e2el_s, [1.5, np.nan, 0.9])
    assert found.prompt_tokens.tolist() == [300, 300, 310]
    assert list(found.errors) == ["", "status 503", ""]


def test_moments_may_be_seconds_since_the_epoch():
    rows = [{"a": 1767607200 + i, "b": 1767607200.5 + i, "in": 10, "out": 5} for i in range(3)]
    columns = "arrival=a,end=b,prompt=in,output=out"
    found = table.read(json.dumps(rows).encode(), "f", ReadOptions(columns=columns))
    np.testing.assert_allclose(found.e2el_s, 0.5)
    workload = read_bytes(json.dumps(rows).encode(), "f", None, ReadOptions(columns=columns))
    assert len(workload) == 3


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("arrival=start_time,end=duration,e2el=duration", "end and e2el say the same: keep one"),
        ("first=start_time,prompt=llm.in", "first is counted from an arrival"),
        ("arrival=start_time,prompt=llm.inn", "did you mean 'llm.in'"),
    ],
)
def test_columns_that_do_not_fit_are_one_line(columns, says):
    data = envoy(("2026-01-05T10:00:00Z", 1500, 200, {"in": 300, "out": 40}))
    with pytest.raises(WorkloadError, match=says) as error:
        table.read(data, "f", ReadOptions(columns=columns))
    assert "\n" not in str(error.value)
