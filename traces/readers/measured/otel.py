"""OpenTelemetry spans of vLLM (--otlp-traces-endpoint), as a collector or Jaeger exports them.

    {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "llm_request",
        "startTimeUnixNano": "1761...", "endTimeUnixNano": "1761...", "attributes": [
            {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "512"}},
            {"key": "gen_ai.latency.time_to_first_token",
             "value": {"doubleValue": 0.2}}, ...]}]}]}]}

Source: `do_tracing` of vllm/v1/engine/output_processor.py and vllm/tracing/utils.py, vLLM 0.32.0;
the envelope is OTLP's JSON encoding (one document, or one a line as the collector's file exporter
writes), or Jaeger's {"data": [{"spans": [...]}]}. A span begins when the engine got the request, so
latencies are the server's. Other spans of a file are counted in a notice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinserve.traces.measurement import SERVER, Measurement, measured
from twinserve.traces.readers.columns import MAX_SECONDS, Rows
from twinserve.traces.readers.measured.document import at, documents, listed
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "otel"
SPAN = "llm_request"
PROMPT, OUTPUT = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"
TTFT = "gen_ai.latency.time_to_first_token"
E2EL = "gen_ai.latency.e2e"
QUEUED = "gen_ai.latency.time_in_queue"
DECODE = "gen_ai.latency.time_in_model_decode"
REQUEST_ID = "gen_ai.request.id"


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in exported spans. Raises WorkloadError."""
    spans, others = [], 0
    for content in documents(data, path):
        for name, start_s, attributes in (*_otlp(content, path), *_jaeger(content, path)):
            if name == SPAN or PROMPT in attributes:
                spans.append((start_s, attributes))
            else:
                others += 1
    if not spans:
        raise WorkloadError(
            f"{path}: no span '{SPAN}' among {others}: start vLLM with --otlp-traces-endpoint"
        )
    spans.sort(key=lambda span: span[0])
    where = Rows(path, range(1, len(spans) + 1), "span")
    rows = [attributes for _, attributes in spans]
    ids = where.texts(REQUEST_ID, [row.get(REQUEST_ID) for row in rows])
    known = all(ids) and len(set(ids)) == len(ids)
    output = where.whole(OUTPUT, [row.get(OUTPUT) for row in rows])
    decode = _seconds(where, rows, DECODE)
    return measured(
        NAME,
        path,
        len(rows),
        arrival_s=[start_s for start_s, _ in spans],
        prompt_tokens=where.whole(PROMPT, [row.get(PROMPT) for row in rows]),
        output_tokens=output,
        ttft_s=_seconds(where, rows, TTFT),
        e2el_s=_seconds(where, rows, E2EL),
        tpot_s=np.where(output > 1, decode / np.maximum(output - 1, 1), np.nan),
        queued_s=_seconds(where, rows, QUEUED),
        errors=["" if tokens else "no tokens" for tokens in output],
        ids=ids if known else (),
        where=SERVER,
        notices=[f"{others} spans of other kinds not used"] if others else [],
    )


def _seconds(where: Rows, rows: list[dict], name: str) -> np.ndarray:
    return where.number(name, [row.get(name) for row in rows], optional=True)


def _otlp(content: dict, path: str) -> Iterator[tuple[str, float, dict]]:
    """Name, start in seconds and attributes of each span."""
    for resource in listed(content.get("resourceSpans")):
        for scope in listed(at(resource, "scopeSpans")):
            for span in listed(at(scope, "spans")):
                attributes = {
                    str(at(item, "key")): _value(at(item, "value"))
                    for item in listed(at(span, "attributes"))
                }
                start_s = _start(at(span, "startTimeUnixNano"), 1e-9, path)
                yield at(span, "name"), start_s, attributes


def _jaeger(content: dict, path: str) -> Iterator[tuple[str, float, dict]]:
    for trace in listed(content.get("data")):
        for span in listed(at(trace, "spans")):
            tags = {str(at(tag, "key")): at(tag, "value") for tag in listed(at(span, "tags"))}
            yield at(span, "operationName"), _start(at(span, "startTime"), 1e-6, path), tags


def _start(stamp, unit_s: float, path: str) -> float:
    try:
        seconds = int(stamp) * unit_s
        if not 0 <= seconds <= MAX_SECONDS:
            raise ValueError
        return seconds
    except (TypeError, ValueError, OverflowError):
        raise WorkloadError(
            f"{path}: a span has no start time: export it as OTLP or Jaeger JSON"
        ) from None


def _value(value):
    """Of OTLP's {"intValue": "5"}: 64-bit integers are text there."""
    if type(value) is not dict or not value:
        return None
    kind, content = next(iter(value.items()))
    if kind == "intValue" and isinstance(content, str) and content.isascii() and content.isdigit():
        return int(content[:20])
    return content
