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

from __future__ import annotations

import json

import numpy as np

from twinserve.traces.measurement import Measurement, measured
from twinserve.traces.readers.columns import Rows, shown, unused
from twinserve.traces.readers.jsonl import decode_text
from twinserve.traces.readers.measured.document import at
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "inference-perf"
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
        if type(row) is not dict or type(row.get("info")) is not dict:
            if type(row) is dict and row.get("error") is not None:
                row["info"] = {}
                continue
            where.fail(i, "info", "is missing", "give per_request_lifecycle_metrics.json")
    errors = [_error(row) for row in rows]
    served = np.array([not error for error in errors], bool)
    times = [_token_times(where, i, row) for i, row in enumerate(rows)]
    start = where.number("start_time", [row.get("start_time") for row in rows])
    end = where.number("end_time", [row.get("end_time") for row in rows])
    first = np.array([row[0] if row else np.nan for row in times])
    last = np.array([row[-1] if row else np.nan for row in times])
    gaps = [np.diff(row) for row, ok in zip(times, served, strict=True) if ok and len(row) > 1]
    stop = np.where(np.isnan(last), end, last)
    return measured(
        NAME,
        path,
        len(rows),
        arrival_s=start,
        prompt_tokens=where.whole("input_tokens", list(map(_prompt, rows, errors))),
        output_tokens=where.whole("output_tokens", list(map(_output, rows, errors))),
        ttft_s=np.where(served, first - start, np.nan),
        e2el_s=np.where(served, stop - start, np.nan),
        gaps_s=np.concatenate(gaps) if gaps else None,
        errors=errors,
        session=where.texts("session_id", [row.get("session_id") for row in rows]),
        notices=unused([name for row in rows for name in row], FIELDS),
    )


def _error(row: dict) -> str:
    if row.get("error") is None:
        return ""
    return str(at(row, "error", "error_type") or at(row, "error", "error_msg") or "error")


def _prompt(row: dict, error: str):
    info = row["info"]
    value = at(info, "request_metrics", "text", "input_tokens")
    value = info.get("input_tokens") if value is None else value
    return 0 if value is None and error else value


def _output(row: dict, error: str):
    info = row["info"]
    for value in (
        at(info, "response_metrics", "server_usage", "completion_tokens"),
        at(info, "response_metrics", "output_tokens"),
        info.get("output_tokens"),
    ):
        if value is not None:
            return value
    return 0 if error else None


def _token_times(where: Rows, i: int, row: dict) -> list[float]:
    times = at(row, "info", "response_metrics", "output_token_times")
    times = at(row, "info", "output_token_times") if times is None else times
    if times is None:
        return []
    if type(times) is not list:
        where.fail(i, "output_token_times", f"is {shown(times)}, not a list of seconds")
    one = Rows(where.path, [where.lines[i]] * len(times), where.unit)
    return one.number("output_token_times", times).tolist()
