"""Requests of inference-perf: per_request_lifecycle_metrics.json, an array.

    [{"start_time": 81.2, "end_time": 83.9, "request": "{...}", "response": "...",
      "info": {"input_tokens": 512, "request_metrics": {"text": {"input_tokens": 512}},
               "response_metrics": {"output_tokens": 128, "output_token_times": [81.4, ...],
                                    "server_usage": {"completion_tokens": 128}}},
      "error": null}]

Source: inference_perf/reportgen/base.py at 010d12f and RequestLifecycleMetric of
inference_perf/apis/base.py at 03e89d4, kubernetes-sigs/inference-perf. In earlier files
`output_tokens` and `output_token_times` stand in `info` itself. Times are seconds of a clock
without a date. Where the server says how many tokens it gave, that count is taken.
"""

import json
import math
from itertools import pairwise

from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.columns import Rows, unused
from twinserve.traces.readers.jsonl import decode_text
from twinserve.traces.readers.measured.document import at
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "inference-perf"
REMEDY = "give per_request_lifecycle_metrics.json"
FIELDS = ("start_time", "end_time", "request", "response", "info", "error", "session_id")


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a file of requests. Raises WorkloadError."""
    try:
        rows = json.loads(decode_text(data, path))
    except (ValueError, RecursionError):
        raise WorkloadError(f"{path}: torn or not JSON: copy the file again") from None
    if type(rows) is not list or not rows:
        raise WorkloadError(f"{path}: no array of requests: check the path and the format")
    where = Rows(path, range(1, len(rows) + 1), "item")
    for i, row in enumerate(rows):
        if type(row) is not dict:
            where.fail(i, "info", "is missing", REMEDY)
        if type(row.get("info")) is not dict:
            row["info"] = {}
    start = [row.get("start_time") for row in rows]
    times = list(map(_token_times, rows))
    ends = [row.get("end_time") for row in rows]
    lasts = [row[-1] if row else end for row, end in zip(times, ends, strict=True)]
    return measured(
        NAME,
        where,
        arrival_s=Field("start_time", start),
        prompt_tokens=Field("input_tokens", list(map(_prompt, rows)), remedy=REMEDY),
        output_tokens=Field("output_tokens", list(map(_output, rows)), remedy=REMEDY),
        ttft_s=Field(
            "output_token_times",
            [_between(at, row[0] if row else None) for at, row in zip(start, times, strict=True)],
        ),
        e2el_s=Field("end_time", list(map(_between, start, lasts))),
        gaps_s=Field("output_token_times", list(map(_gaps, times))),
        errors=list(map(_error, rows)),
        session=Field("session_id", [row.get("session_id") for row in rows]),
        notices=unused([name for row in rows for name in row], FIELDS),
    )


def _error(row: dict) -> str:
    if row.get("error") is None:
        return ""
    return str(at(row, "error", "error_type") or at(row, "error", "error_msg") or "error")


def _prompt(row: dict):
    value = at(row["info"], "request_metrics", "text", "input_tokens")
    return row["info"].get("input_tokens") if value is None else value


def _output(row: dict):
    info = row["info"]
    for value in (
        at(info, "response_metrics", "server_usage", "completion_tokens"),
        at(info, "response_metrics", "output_tokens"),
        info.get("output_tokens"),
    ):
        if value is not None:
            return value
    return None


def _token_times(row: dict):
    """A list, or what stands in its place."""
    times = at(row, "info", "response_metrics", "output_token_times")
    times = at(row, "info", "output_token_times") if times is None else times
    return [] if times is None else times if type(times) is list else [times]


def _between(start, end):
    """Seconds. Whatever is no time stays as it is."""
    odd = [value for value in (start, end) if type(value) not in (int, float)]
    try:
        return odd[0] if odd else end - start
    except OverflowError:
        return math.inf


def _gaps(times: list):
    try:
        return [float(after - before) for before, after in pairwise(times)]
    except (TypeError, OverflowError):
        return times
