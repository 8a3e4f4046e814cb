"""Reports of guidellm: benchmarks.json.

    {"benchmarks": [{"config": ..., "metrics": ..., "requests": {
        "successful": [{"request_id": "...", "prompt_tokens": 512, "output_tokens": 128,
                        "request_start_time": 1761.2, "request_latency": 2.9,
                        "time_to_first_token_ms": 85.0, "inter_token_latency_ms": 22.2,
                        "info": {"timings": {...}, "conversation_id": null, ...}}, ...],
        "incomplete": [...], "errored": [...]}}]}

Source: GenerativeRequestStats (src/guidellm/schemas/request_stats.py at 06cef29) and
GenerativeBenchmark (src/guidellm/benchmark/schemas at 03820eb) of vllm-project/guidellm. Their TPOT
divides the whole time by all tokens; the inter-token latency is what is called TPOT here. A report
may hold a sample of the requests only.
"""

from __future__ import annotations

import numpy as np

from twinserve.traces.measurement import Measurement, measured
from twinserve.traces.readers.columns import MAX_SECONDS, Rows, shown
from twinserve.traces.readers.measured.document import at, document, listed, whole_or_zero
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "guidellm"
ENDS = {"successful": "", "incomplete": "incomplete", "errored": "errored"}


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a report of one benchmark. Raises WorkloadError."""
    content = document(data, path, "give each a file of its own")
    benchmarks = content.get("benchmarks")
    if type(benchmarks) is not list or not benchmarks:
        raise WorkloadError(f"{path}: field 'benchmarks' is no list of results: check the format")
    if len(benchmarks) > 1:
        raise WorkloadError(
            f"{path}: holds {len(benchmarks)} benchmarks, as a sweep writes: keep one in "
            "'benchmarks', each has a load of its own"
        )
    rows, errors = _rows(benchmarks[0], path)
    where = Rows(path, range(1, len(rows) + 1), "request")
    latency = _seconds(where, rows, "request_latency", 1)
    sessions = [at(row, "info", "conversation_id") for row in rows]
    return measured(
        NAME,
        path,
        len(rows),
        arrival_s=_seconds(where, rows, "request_start_time", 1),
        prompt_tokens=_lengths(where, rows, errors, "prompt_tokens", "input_metrics"),
        output_tokens=_lengths(where, rows, errors, "output_tokens", "output_metrics"),
        ttft_s=_seconds(where, rows, "time_to_first_token_ms", 1e-3),
        e2el_s=latency,
        tpot_s=_seconds(where, rows, "inter_token_latency_ms", 1e-3),
        errors=errors,
        session=where.texts("conversation_id", sessions),
        turn=whole_or_zero(where, "turn_index", [at(row, "info", "turn_index") for row in rows]),
        notices=_sampled(benchmarks[0], len(rows)),
    )


def _rows(benchmark: dict, path: str) -> tuple[list[dict], list[str]]:
    requests = at(benchmark, "requests")
    if type(requests) is not dict or type(requests.get("successful")) is not list:
        raise WorkloadError(
            f"{path}: field 'requests' has no list 'successful': write the report as JSON with all "
            "requests"
        )
    rows: list[dict] = []
    errors: list[str] = []
    for end, failure in ENDS.items():
        for row in listed(requests.get(end)):
            if type(row) is not dict:
                raise WorkloadError(f"{path}: 'requests.{end}' holds {shown(row)}: not a request")
            rows.append(row)
            said = at(row, "info", "error")
            errors.append(str(said) if failure and said else failure)
    if not rows:
        raise WorkloadError(f"{path}: no requests in it: run guidellm with all requests kept")
    return rows, errors


def _seconds(where: Rows, rows: list[dict], name: str, scale: float) -> np.ndarray:
    values = [row.get(name) for row in rows]
    return where.number(name, values, high=MAX_SECONDS * 1e3, optional=True) * scale


def _lengths(where: Rows, rows, errors, name: str, usage: str) -> np.ndarray:
    """Tokens by the row's own count, else by the sum of its usage; failed ones may have none."""
    values = []
    for row, error in zip(rows, errors, strict=True):
        value = row.get(name)
        value = at(row, usage, "text_tokens") if value is None else value
        values.append(0 if value is None and error else value)
    return where.whole(name, values)


def _sampled(benchmark: dict, n: int) -> list[str]:
    total = at(benchmark, "metrics", "request_totals", "total")
    if total is None:
        total = at(benchmark, "request_totals", "total")  # as in earlier reports
    if type(total) is int and total > n:
        return [f"the report holds a sample of {n} of {total} requests"]
    return []
