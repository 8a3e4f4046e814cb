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

from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.columns import Rows, shown
from twinserve.traces.readers.measured.document import at, document, listed
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "guidellm"
ENDS = {"successful": "", "incomplete": "incomplete", "errored": "errored"}


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """Return the measurement of a report's only or chosen benchmark. Raises WorkloadError."""
    content = document(data, path, "write each into its own file")
    benchmarks = content.get("benchmarks")
    if type(benchmarks) is not list or not benchmarks:
        raise WorkloadError(f"{path}: field 'benchmarks' is no list of results: check the format")
    chosen = _chosen(benchmarks, options.benchmark, path)
    rows, errors = _rows(chosen, path)
    where = Rows(path, range(1, len(rows) + 1), "request")
    sessions = [at(row, "info", "conversation_id") for row in rows]
    return measured(
        NAME,
        where,
        arrival_s=_field(rows, "request_start_time", 1),
        prompt_tokens=_lengths(rows, "prompt_tokens", "input_metrics"),
        output_tokens=_lengths(rows, "output_tokens", "output_metrics"),
        ttft_s=_field(rows, "time_to_first_token_ms", 1e-3),
        e2el_s=_field(rows, "request_latency", 1),
        tpot_s=_field(rows, "inter_token_latency_ms", 1e-3),
        errors=errors,
        session=Field("conversation_id", sessions),
        turn=Field("turn_index", [at(row, "info", "turn_index") for row in rows]),
        notices=_sampled(chosen, len(rows)),
    )


def _chosen(benchmarks: list, number: int | None, path: str) -> dict:
    """The benchmark that is asked for, or the only one. Raises WorkloadError."""
    n = len(benchmarks)
    if number is None and n > 1:
        raise WorkloadError(
            f"{path}: holds {n} benchmarks, as a sweep writes, each with a load of its own: name "
            f"one with --benchmark 1 to {n}"
        )
    if number is not None and not 1 <= number <= n:
        raise WorkloadError(f"{path}: holds {n} benchmarks: --benchmark {number} is none of them")
    return benchmarks[(number or 1) - 1]


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


def _field(rows: list[dict], name: str, unit_s: float) -> Field:
    return Field(name, [row.get(name) for row in rows], unit_s)


def _lengths(rows: list[dict], name: str, usage: str) -> Field:
    """Tokens by the row's own count, else by the sum of its usage."""
    own = [row.get(name) for row in rows]
    summed = [at(row, usage, "text_tokens") for row in rows]
    values = [theirs if mine is None else mine for mine, theirs in zip(own, summed, strict=True)]
    return Field(name, values)


def _sampled(benchmark: dict, n: int) -> list[str]:
    total = at(benchmark, "metrics", "request_totals", "total")
    if total is None:
        total = at(benchmark, "request_totals", "total")  # as in earlier reports
    if type(total) is int and total > n:
        return [f"the report holds a sample of {n} of {total} requests"]
    return []
