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

import math
from collections.abc import Iterator

from twinserve.traces.measurement import SERVER, Measurement
from twinserve.traces.readers.columns import MAX_SECONDS, Rows
from twinserve.traces.readers.measured.document import at, documents, listed
from twinserve.traces.readers.measured.rows import Field, measured
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
        for name, start_s, attributes in (*_otlp(content), *_jaeger(content)):
            if name == SPAN or PROMPT in attributes:
                spans.append((start_s, attributes))
            else:
                others += 1
    if not spans:
        raise WorkloadError(
            f"{path}: no span '{SPAN}' among {others}: start vLLM with --otlp-traces-endpoint"
        )
    spans.sort(key=lambda span: math.inf if span[0] is None else span[0])
    rows = [attributes for _, attributes in spans]
    output, decode = _field(rows, OUTPUT), _field(rows, DECODE)
    return measured(
        NAME,
        Rows(path, range(1, len(spans) + 1), "span"),
        arrival_s=Field("startTimeUnixNano", [start_s for start_s, _ in spans]),
        prompt_tokens=_field(rows, PROMPT),
        output_tokens=output,
        ttft_s=_field(rows, TTFT),
        e2el_s=_field(rows, E2EL),
        tpot_s=Field(DECODE, list(map(_a_token, decode.values, output.values))),
        queued_s=_field(rows, QUEUED),
        ids=_field(rows, REQUEST_ID),
        measured_by=SERVER,
        notices=[f"{others} spans of other kinds not used"] if others else [],
    )


def _field(rows: list[dict], name: str) -> Field:
    return Field(name, [row.get(name) for row in rows])


def _a_token(decode, output):
    """Seconds a token after the first. Whatever is no number stays as it is."""
    if type(decode) not in (int, float) or type(output) not in (int, float):
        return decode
    try:
        return decode / (output - 1) if output > 1 else None
    except OverflowError:
        return decode


def _otlp(content: dict) -> Iterator[tuple[str, float | None, dict]]:
    """Name, start in seconds and attributes of each span."""
    for resource in listed(content.get("resourceSpans")):
        for scope in listed(at(resource, "scopeSpans")):
            for span in listed(at(scope, "spans")):
                attributes = {
                    str(at(item, "key")): _value(at(item, "value"))
                    for item in listed(at(span, "attributes"))
                }
                start_s = _start(at(span, "startTimeUnixNano"), 1e-9)
                yield at(span, "name"), start_s, attributes


def _jaeger(content: dict) -> Iterator[tuple[str, float | None, dict]]:
    for trace in listed(content.get("data")):
        for span in listed(at(trace, "spans")):
            tags = {str(at(tag, "key")): at(tag, "value") for tag in listed(at(span, "tags"))}
            yield at(span, "operationName"), _start(at(span, "startTime"), 1e-6), tags


def _start(stamp, unit_s: float) -> float | None:
    """Seconds; None of a span without a start."""
    try:
        seconds = int(stamp) * unit_s
        return seconds if 0 <= seconds <= MAX_SECONDS else None
    except (TypeError, ValueError, OverflowError):
        return None


def _value(value):
    """Of OTLP's {"intValue": "5"}: 64-bit integers are text there."""
    if type(value) is not dict or not value:
        return None
    kind, content = next(iter(value.items()))
    if kind == "intValue" and isinstance(content, str) and content.isascii() and content.isdigit():
        return int(content[:20])
    return content
