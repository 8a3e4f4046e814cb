"""Access logs of gateways, whose columns the caller names."""

import json

import numpy as np
import pytest

from twinserve.traces.readers.formats import read_bytes
from twinserve.traces.readers.measured import table
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

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
