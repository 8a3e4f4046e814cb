"""vLLM's histograms: what /api/v1/query_range of Prometheus answers, or the text of /metrics.

    {"status": "success", "data": {"resultType": "matrix", "result": [
        {"metric": {"__name__": "vllm:time_to_first_token_seconds_bucket", "le": "0.1", ...},
         "values": [[1761000000, "12"], [1761000060, "31"]]}, ...]}}

Or what `curl HOST:8000/metrics` prints: counts since the server's start. Several of these in one
file, one after the other, are scrapes in their order, and what grew between them counts.

Query the counters themselves ({__name__=~"vllm:time_to_first_token_seconds.*"}), without rate():
differences are taken here, and a counter that begins anew with its server is seen. Several answers
may stand in one file, one a line. Series of several servers are added.

Source: names of vllm/v1/metrics/loggers.py, vLLM 0.32.0; the envelope is the HTTP API of
Prometheus, the text its exposition format 0.0.4.
"""

import math
import re
from collections.abc import Iterator

import numpy as np

from twinserve.traces.measurement import SERVER, Histogram, Measurement
from twinserve.traces.readers.columns import Rows, shown
from twinserve.traces.readers.jsonl import decode_text
from twinserve.traces.readers.measured.document import at, documents, listed
from twinserve.traces.readers.measured.rows import measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "prometheus"
METRICS = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:time_per_output_token_seconds": "itl",  # its former name
    "vllm:e2e_request_latency_seconds": "e2el",
    "vllm:request_queue_time_seconds": "queued",
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "output_tokens",
}
# How the text of /metrics begins, a line of it, and its labels.
EXPOSED = re.compile(r"# (HELP|TYPE) \S+ |vllm:\w+(\{[^\n]*\})? \S+\s*(\n|$)")
_LINE = re.compile(r'(vllm:\w+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SUFFIX = re.compile(r"_(bucket|sum|count)$")
_HEAD = 1 << 12
Series = tuple[str, dict, list]  # name, labels, [[time, value], ...]


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in answers to range queries. Raises WorkloadError."""
    buckets: dict[str, list[tuple[float, np.ndarray, np.ndarray]]] = {}
    sums: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    other: list[str] = []
    exposed = EXPOSED.match(data[:_HEAD].decode("utf-8-sig", "replace").lstrip()) is not None
    series, since = _scraped(data, path) if exposed else (_series(data, path), "")
    for name, labels, values in series:
        base, part = SUFFIX.sub("", name), SUFFIX.search(name)
        if base not in METRICS or part is None:
            other.append(name)
            continue
        times, counter = _samples(values, name, path)
        if part[1] == "bucket":
            edge = _edge(labels.get("le"), name, path)
            buckets.setdefault(METRICS[base], []).append((edge, times, counter))
        elif part[1] == "sum":
            sums.setdefault(METRICS[base], []).append((times, counter))
    if not buckets:
        seen = f" (found {shown(', '.join(sorted(set(other))))})" if other else ""
        raise WorkloadError(
            f"{path}: no histogram of vLLM, such as vllm:time_to_first_token_seconds_bucket{seen}: "
            "query the counters themselves, without rate()"
        )
    found = {
        metric: _histogram(rows, sums.get(metric, []), metric, path)
        for metric, rows in buckets.items()
    }
    notices = ["histograms over time: no single requests", *[since] * exposed]
    if other and not exposed:  # a server has hundreds
        notices.append(f"series not used: {shown(', '.join(sorted(set(other))))}")
    missing = [metric for metric in found if metric not in sums]
    if missing:
        notices.append(f"no _sum of {', '.join(missing)}: means are not known")
    return measured(NAME, Rows(path, []), measured_by=SERVER, histograms=found, notices=notices)


def _scraped(data: bytes, path: str) -> tuple[list[Series], str]:
    """The histograms in the text of one scrape or several, and what they count since. A series that
    comes again begins the next scrape; one that is not in the first was 0 then. Seconds are not
    known: a scrape is at 0, 1, ..."""
    found: dict[tuple[str, str], tuple[dict, dict[int, str]]] = {}
    number = 0
    for line in decode_text(data, path).splitlines():
        said = _LINE.match(line)
        if said is None or SUFFIX.sub("", said[1]) not in METRICS:
            continue
        labels = dict(_LABEL.findall(said[2] or ""))
        _, values = found.setdefault((said[1], said[2] or ""), (labels, {}))
        number += number in values
        values[number] = said[3]
    begins = [0.0] if number == 0 else []  # a server begins with nothing
    scrapes = range(number + 1)
    rows = [
        (name, labels, [*enumerate([*begins, *(values.get(i, "0") for i in scrapes)])])
        for (name, _), (labels, values) in found.items()
    ]
    return rows, (
        f"growth between the first and the last of {number + 1} scrapes"
        if number
        else "counts since the server's start: append a later scrape to the file for a difference"
    )


def _series(data: bytes, path: str) -> Iterator[Series]:
    for content in documents(data, path):
        if content.get("status") != "success":
            raise WorkloadError(
                f"{path}: field 'status' is {shown(content.get('status'))}, not success: "
                f"{shown(str(content.get('error', 'query again')))}"
            )
        if at(content, "data", "resultType") != "matrix":
            kind = shown(at(content, "data", "resultType"))
            raise WorkloadError(
                f"{path}: field 'resultType' is {kind}, not matrix: use /api/v1/query_range"
            )
        for series in listed(at(content, "data", "result")):
            labels = at(series, "metric")
            if type(at(labels, "__name__")) is not str:
                raise WorkloadError(
                    f"{path}: a series has no __name__, as after rate(): query the counters "
                    "themselves"
                )
            yield labels["__name__"], labels, listed(series.get("values"))


def _samples(values: list, name: str, path: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        table = np.array([[float(time), float(value)] for time, value in values])
    except (TypeError, ValueError, OverflowError):
        table = np.zeros((0, 2))
    if len(table) < 2 or not np.isfinite(table).all():
        raise WorkloadError(
            f"{path}: series '{name}' has fewer than two samples of time and number: "
            "query a longer range"
        )
    return table[:, 0], table[:, 1]


def _edge(le: str | None, name: str, path: str) -> float:
    try:
        return float(le)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WorkloadError(
            f"{path}: series '{name}' has the label le={shown(le)}, not a number: keep the label"
        ) from None


def _histogram(rows: list, sums: list, metric: str, path: str) -> Histogram:
    times = np.unique(np.concatenate([times for _, times, _ in rows]))
    edges = np.unique([edge for edge, _, _ in rows])
    if not math.isinf(edges[-1]):
        raise WorkloadError(f"{path}: {metric} lacks the bucket le=+Inf: query all buckets")
    cumulated = np.zeros((len(times) - 1, len(edges)))
    for edge, own, counter in rows:
        cumulated[:, np.searchsorted(edges, edge)] += _grown(times, own, counter)
    counts = np.diff(cumulated, axis=1, prepend=0.0)
    if (counts < -1e-6).any():
        raise WorkloadError(
            f"{path}: the buckets of {metric} do not grow with le: query them all in one range"
        )
    total = np.full(len(times) - 1, np.nan) if not sums else np.zeros(len(times) - 1)
    for own, counter in sums:
        total += _grown(times, own, counter)
    return Histogram(times - times[0], edges, np.maximum(counts, 0.0), total)


def _grown(times: np.ndarray, own: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """By how much a counter grew in each window; one that fell began anew from 0. A server that is
    not there at a sample keeps what it had."""
    steps = np.diff(counter)
    steps = np.where(steps < 0, counter[1:], steps)
    at_each = np.interp(times, own, np.concatenate([[0.0], np.cumsum(steps)]))
    return np.diff(at_each)
