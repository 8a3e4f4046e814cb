"""Whatever is wrong with a file, the user gets one line: file, line, field, what to do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.traces.measured_files import FILES
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import READERS, read_bytes, read_file
from twinserve.traces.workload import WorkloadError

GOOD = {
    "mooncake": (
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2], '
        '"session_id": "s", "priority": 1, "class": "rt", "slo_ttft_s": 1.5, "request_id": "q"}\n'
        '{"delay": 10.5, "input_length": 600, "output_length": 2, "hash_ids": [1, 3], '
        '"session_id": "s"}\n'
        '{"timestamp": 7, "input_length": 5, "output_length": 2, "hash_ids": [9], "group": "g", '
        '"stage": 0}\n'
    ),
    "bailian": (
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 6.5, "input_length": 17, '
        '"output_length": 3, "type": "text", "turn": 1, "hash_ids": [5, 6]}\n'
        '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 8, "input_length": 3, '
        '"output_length": 3, "type": "text", "turn": 2, "hash_ids": [5]}\n'
    ),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109"
    ),
    "burstgpt": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n5.5,3,1.25,ChatGPT,472,18,490,Conversation log\n9,3,1,GPT-4,1,1,2,API log\n"
    ),
    "sharegpt": (
        '[{"id": "a", "conversations": [{"from": "human", "value": "hello there"}, '
        '{"from": "gpt", "value": "hi"}]}, {"prompt_tokens": 3, "output_tokens": 4}]'
    ),
    "custom": (
        '{"prompt": "hello", "output_tokens": 3, "timestamp": 1}\n'
        '{"prompt": "x", "output_tokens": 4, "timestamp": 2.5}\n'
    ),
    **{name: make() for name, make in FILES.items()},
}


def line_for(data, format=None):
    data = data if isinstance(data, bytes) else data.encode()
    with pytest.raises(WorkloadError) as e:
        read_bytes(data, "some/file", format)
    text = str(e.value)
    assert "\n" not in text and "some/file" in text and len(text) < 400
    assert text.count(": ") >= 2  # where, what, what to do
    return text


def rows(*changes):
    """Mooncake lines from changes to a good row; a change to None drops the field."""
    out = []
    for change in changes:
        row = {"timestamp": 0, "input_length": 5, "output_length": 2, **change}
        out.append(json.dumps({k: v for k, v in row.items() if v is not None}))
    return "\n".join(out) + "\n"


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"input_length": -3}, "input_length", "is -3"),
        ({"input_length": None}, "input_length", "missing"),
        ({"input_length": "7"}, "input_length", "is the text '7', not a number"),
        ({"input_length": 9e19}, "input_length", "is 9e+19, outside"),
        ({"input_length": True}, "input_length", "True, not a number"),
        ({"input_length": 7.5}, "input_length", "not a whole number"),
        ({"input_length": 2**31}, "input_length", "outside 0 .. 2147483647"),
        ({"input_length": 10**30}, "input_length", "outside"),
        ({"input_length": [1]}, "input_length", "not a number"),
        ({"output_length": {"a": 1}}, "output_length", "not a number"),
        ({"timestamp": -0.5}, "timestamp", "is -0.5"),
        ({"timestamp": 1e300}, "timestamp", "not within"),
        ({"timestamp": 10**400}, "timestamp", "not within"),
        ({"timestamp": None}, "timestamp", "missing"),
        ({"timestamp": "2023"}, "timestamp", "not a number"),
        ({"hash_ids": []}, "hash_ids", "has 0 ids, but 5 prompt tokens are 1 blocks"),
        ({"hash_ids": [1, 2]}, "hash_ids", "has 2 ids"),
        ({"hash_ids": [1.5]}, "hash_ids", "64-bit"),
        ({"hash_ids": [True]}, "hash_ids", "64-bit"),
        ({"hash_ids": [2**64]}, "hash_ids", "64-bit"),
        ({"hash_ids": ["a"]}, "hash_ids", "64-bit"),
        ({"hash_ids": 5}, "hash_ids", "not a list"),
        ({"class": "gold"}, "class", "not one of rt, be"),
        ({"class": ["rt"]}, "class", "not one of"),
        ({"priority": 1.5}, "priority", "whole"),
        ({"slo_ttft_s": 0}, "slo_ttft_s", "not within"),
        ({"request_id": "r0"}, "request id", "as on line 1"),
        ({"session_id": "s", "group": "g", "stage": 0}, "group", "beside session_id"),
        ({"group": "g"}, "stage", "missing"),
        ({"group": "g", "stage": 1}, "stage", "no stage 0"),
        ({"session_id": "s", "delay": 5}, "delay", "first turn"),
        ({"session_id": 1.5}, "session_id", "not text"),
        ({"block_size": 0}, "block_size", "outside"),
    ],
)
def test_a_bad_field_is_named_with_its_line(change, field, says):
    text = line_for(rows({}, change))
    assert "line 2" in text and f"'{field}'" in text and says in text


def test_block_sizes_must_agree():
    assert "line 2: field 'block_size' is 32, that of the first row is 16" in line_for(
        rows({"block_size": 16}, {"block_size": 32})
    )


@pytest.mark.parametrize("swap", [False, True])
def test_a_session_and_an_application_cannot_share_a_name(swap):
    session, group = {"session_id": "x"}, {"group": "x", "stage": 0}
    first, second = (group, session) if swap else (session, group)
    text = line_for(rows(first, {"session_id": "other"}, second))
    kinds = ("session_id", "group") if swap else ("group", "session_id")
    assert (
        f"line 3: field '{kinds[0]}' is 'x', which is a {kinds[1]} in an earlier row: rename"
        in text
    )


def test_turns_cannot_go_back_in_time_or_be_empty():
    turn = {"session_id": "s"}
    assert "before that of the turn" in line_for(
        rows({**turn, "timestamp": 9}, {**turn, "timestamp": 5})
    )
    assert "later turns wait" in line_for(rows({**turn, "output_length": 0}, {**turn, "delay": 1}))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PAR1\x00", "parquet"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x00\x01\x02\xff", "not the start of any known"),
        (b"a,b,c\n1,2,3\n", "not the start of any known"),
        (b'{"text_input": "hello"}\n', "not the start of any known"),
        (b"[]", "not a list of conversations"),
        (b'[{"conversations": [', "ends in the middle"),
        (b'[{"a": NaN}]', "NaN"),
        (b'[{"conversations": [{"from": "human", "value": "a"}]}]', "no conversation with"),
        (b'{"text_input": [], "output_length": 1}\n', "line 1: field 'text_input' is [], not text"),
        (rows({}, {})[:-20].encode(), "line 2: the last line is torn"),
        (rows({}).encode() + b"[1]\n", "line 2: not a JSON object"),
        (rows({}).encode() + b"\n\noops\n" + rows({}).encode(), "line 4: not JSON"),
        (rows({}).encode() + b'{"timestamp": NaN}\n', "line 2: not JSON (NaN"),
        (
            rows({}).encode() + b"[" * 100_000 + b"\n{}",
            "line 2: not JSON (too many nested brackets",
        ),
        (b"[" * 100_000, "not JSON (too many nested brackets)"),
        (rows({}).encode() + b"\xff\xfe\n", "line 2: byte"),
        (rows({"output_length": 0}).encode(), "no usable rows"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
        (GOOD["azure"].encode()[:-5], "line 3: the last line is torn"),
        (GOOD["azure"].encode().replace(b"396", b"x"), "line 3: field 'ContextTokens' is x"),
        (GOOD["azure"].encode().replace(b"396", b""), "line 3: field 'ContextTokens' is missing"),
        (GOOD["azure"].encode().replace(b"396", b"-1"), "line 3: field 'ContextTokens' is -1"),
        (GOOD["azure"].encode().replace(b"396", b"nan"), "line 3: field 'ContextTokens' is nan"),
        (GOOD["azure"].encode().replace(b"396", b"1e12"), "line 3: field 'ContextTokens' is"),
        (GOOD["azure"].encode().replace(b"11-16", b"13-16"), "line 2: field 'TIMESTAMP'"),
        (GOOD["azure"].encode() + b"\r\n\r\n\r\n1,2,3", "line 6: field 'TIMESTAMP' is 1"),
        (GOOD["azure"].encode().replace(b"396,", b""), "line 3: the last line is torn"),
        (GOOD["burstgpt"].encode().replace(b"9,3", b"inf,3"), "line 3: field 'Timestamp' is inf"),
        (GOOD["burstgpt"].encode().replace(b"Model", b"Session ID"), "name is repeated"),
    ],
)
def test_bad_files(data, says):
    assert says in line_for(data)


def test_columns_missing_from_a_forced_format():
    assert "no column 'Request tokens'" in line_for(GOOD["azure"], "burstgpt")


def test_paths_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(WorkloadError, match="cannot be read"):
            read_file(path)


def test_duplicate_chat_ids():
    twice = GOOD["bailian"].replace('"chat_id": 2', '"chat_id": 1')
    assert "line 2: field 'request id' is '1', as on line 1" in line_for(twice)


def survives(data, format):
    """Either a valid workload or one WorkloadError line: nothing else may come out."""
    try:
        w = read_bytes(data, "f", format)
    except WorkloadError as e:
        assert "\n" not in str(e) and str(e).isprintable()
    else:
        check_workload(w)
        assert len(w) > 0


@given(st.binary(max_size=200), st.sampled_from([None, *READERS]))
@examples(300)
def test_arbitrary_bytes(data, format):
    survives(data, format)


ODD = st.sampled_from(
    [
        *("-1", "0", "1.0", "1e999", "-0.0", "1e-400", "NaN", "null", "true", '""', '"\\ud800"'),
        *("[]", "[[]]", "{}", "9" * 30, "1e18", "18446744073709551616", "[1,2]", "\u2028", '"a"'),
        *(",", "\n", "\r", '"', "\x00", "\ufeff", "2023-11-16 18:15:46", "[" * 60, "\\"),
    ]
)


@pytest.mark.nightly
@pytest.mark.parametrize("format", GOOD)
@given(data=st.data())
@examples(150)
def test_mutated_files(format, data):
    text = GOOD[format]
    for _ in range(data.draw(st.integers(1, 3))):
        low = data.draw(st.integers(0, len(text)))
        high = min(len(text), low + data.draw(st.integers(0, 12)))
        text = text[:low] + data.draw(ODD | st.text(max_size=3)) + text[high:]
    survives(text.encode("utf-8", "surrogatepass"), data.draw(st.sampled_from([None, format])))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("format", ["mooncake", "bailian", "custom"])
@given(data=st.data())
@examples(200)
def test_rows_with_any_value_in_any_field(format, data):
    lines = [json.loads(line) for line in GOOD[format].splitlines()]
    fields = sorted(
        {key for row in lines for key in row} | {"stage", "block_size", "delay", "group"}
    )
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.sampled_from(lines))
        row[data.draw(st.sampled_from(fields))] = data.draw(VALUES)
    survives("\n".join(map(json.dumps, lines)).encode(), format)


def test_every_reader_has_a_good_file():
    assert set(READERS) - set(GOOD) == {"csv"}  # that one needs its columns named


@pytest.mark.parametrize("format", GOOD)
def test_the_good_files_are_good(format):
    check_workload(read_bytes(GOOD[format].encode(), "f"))
