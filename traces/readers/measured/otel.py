"""OpenTelemetry spans of vLLM (--otlp-traces-endpoint), or of clients and gateways with the names
of the GenAI conventions or of OpenInference, as a collector or Jaeger exports them.

    {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "llm_request",
        "startTimeUnixNano": "1761...", "endTimeUnixNano": "1761...", "attributes": [
            {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "512"}},
            {"key": "gen_ai.latency.time_to_first_token",
             "value": {"doubleValue": 0.2}}, ...]}]}]}]}

Source: `do_tracing` of vllm/v1/engine/output_processor.py and vllm/tracing/utils.py, vLLM 0.32.0;
"Semantic conventions for generative client AI spans" of OpenTelemetry; "Semantic conventions" of
Arize-ai/openinference. The envelope is OTLP's JSON encoding (one document, or one a line as the
collector's file exporter writes), or Jaeger's {"data": [{"spans": [...]}]}. vLLM's span begins when
the engine got the request, so latencies are the server's. If a file has none of those, requests are
the other spans with token counts, and latencies are the client's; of two such spans within each
other the outer one counts. Other spans of a file are counted in a notice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twinserve.traces.measurement import CLIENT, SERVER, Measurement
from twinserve.traces.readers.columns import MAX_SECONDS, Rows
from twinserve.traces.readers.measured.document import at, documents, listed
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "otel"
SPAN = "llm_request"
# Names of vLLM and of GenAI's beginnings, of GenAI today, of OpenInference.
PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens", "llm.token_count.prompt")
OUTPUT = (
    *("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"),
    "llm.token_count.completion",
)
TTFT = "gen_ai.latency.time_to_first_token"
E2EL = "gen_ai.latency.e2e"
QUEUED = "gen_ai.latency.time_in_queue"
DECODE = "gen_ai.latency.time_in_model_decode"
REQUEST_ID = ("gen_ai.request.id", "gen_ai.response.id")
# Spans of models among those of agents, chains, tools and embeddings, which repeat the counts.
OPERATION, MODELS = "gen_ai.operation.name", ("chat", "text_completion", "generate_content")
KIND, LLM = "openinference.span.kind", "LLM"
FIRST = "First Token Stream Event"  # of OpenInference's instrumentors


@dataclass(frozen=True)
class Span:
    """start_s, end_s: seconds, None if not known; first_s: of the first token's event; own, outer:
    ids of the span and of that around it."""

    name: Any
    start_s: float | None
    attributes: dict
    end_s: float | None = None
    first_s: float | None = None
    own: Any = None
    outer: Any = None
    failed: bool = False

    def value(self, names: tuple[str, ...]) -> Any:
        return next((self.attributes[n] for n in names if n in self.attributes), None)

    @property
    def of_vllm(self) -> bool:
        return self.name == SPAN or E2EL in self.attributes

    @property
    def of_model(self) -> bool:
        """A request to a model, by its counts and by what it says of itself."""
        operation, kind = self.attributes.get(OPERATION), self.attributes.get(KIND)
        said = operation in MODELS or kind == LLM
        other = (operation is not None or kind is not None) and not said
        return not other and (self.value(PROMPT) is not None or (said and self.failed))

    def since(self, moment: float | None) -> float | None:
        return None if moment is None or self.start_s is None else moment - self.start_s


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in exported spans. Raises WorkloadError."""
    every = [
        span for content in documents(data, path) for span in (*_otlp(content), *_jaeger(content))
    ]
    spans, server = [span for span in every if span.of_vllm], True
    if not spans:
        spans, server = _outermost([span for span in every if span.of_model]), False
    others = len(every) - len(spans)
    if not spans:
        raise WorkloadError(
            f"{path}: no span '{SPAN}' among {others}, and none with {PROMPT[1]} or {PROMPT[2]}: "
            "start vLLM with --otlp-traces-endpoint, or export the client's spans with token counts"
        )
    spans.sort(key=lambda span: math.inf if span.start_s is None else span.start_s)
    output = Field(OUTPUT[not server], [span.value(OUTPUT) for span in spans])
    decode = _field(spans, DECODE)
    e2el, ttft = _field(spans, E2EL), _field(spans, TTFT)
    if not server:
        e2el = Field("endTimeUnixNano", [span.since(span.end_s) for span in spans])
        ttft = Field(FIRST, [span.since(span.first_s) for span in spans])
    return measured(
        NAME,
        Rows(path, range(1, len(spans) + 1), "span"),
        arrival_s=Field("startTimeUnixNano", [span.start_s for span in spans]),
        prompt_tokens=Field(PROMPT[not server], [span.value(PROMPT) for span in spans]),
        output_tokens=output,
        ttft_s=ttft,
        e2el_s=e2el,
        tpot_s=Field(DECODE, list(map(_a_token, decode.values, output.values))),
        queued_s=_field(spans, QUEUED),
        ids=Field(REQUEST_ID[not server], [span.value(REQUEST_ID) for span in spans]),
        errors=["error" if span.failed and not server else "" for span in spans],
        measured_by=SERVER if server else CLIENT,
        notices=[f"{others} spans of other kinds not used"] if others else [],
    )


def _outermost(spans: list[Span]) -> list[Span]:
    """Return spans that are not directly within another: gateway's and client's of one request."""
    ids = {str(span.own) for span in spans if span.own}
    return [span for span in spans if not span.outer or str(span.outer) not in ids]


def _field(spans: list[Span], name: str) -> Field:
    return Field(name, [span.attributes.get(name) for span in spans])


def _a_token(decode, output):
    """Seconds a token after the first. Whatever is no number stays as it is."""
    if type(decode) not in (int, float) or type(output) not in (int, float):
        return decode
    try:
        return decode / (output - 1) if output > 1 else None
    except OverflowError:
        return decode


def _otlp(content: dict) -> Iterator[Span]:
    for resource in listed(content.get("resourceSpans")):
        for scope in listed(at(resource, "scopeSpans")):
            for span in listed(at(scope, "spans")):
                attributes = {
                    str(at(item, "key")): _value(at(item, "value"))
                    for item in listed(at(span, "attributes"))
                }
                yield Span(
                    at(span, "name"),
                    _start(at(span, "startTimeUnixNano"), 1e-9),
                    attributes,
                    _start(at(span, "endTimeUnixNano"), 1e-9),
                    _first(span),
                    at(span, "spanId"),
                    at(span, "parentSpanId"),
                    at(span, "status", "code") in (2, "STATUS_CODE_ERROR"),
                )


def _first(span: dict) -> float | None:
    stamps = [
        at(event, "timeUnixNano")
        for event in listed(at(span, "events"))
        if at(event, "name") == FIRST
    ]
    return _start(stamps[0], 1e-9) if stamps else None


def _jaeger(content: dict) -> Iterator[Span]:
    for trace in listed(content.get("data")):
        for span in listed(at(trace, "spans")):
            tags = {str(at(tag, "key")): at(tag, "value") for tag in listed(at(span, "tags"))}
            start_s, lasted = (
                _start(at(span, "startTime"), 1e-6),
                _start(at(span, "duration"), 1e-6),
            )
            end_s = None if start_s is None or lasted is None else start_s + lasted
            outer = [at(one, "spanID") for one in listed(at(span, "references"))]
            failed = tags.get("error") is True or tags.get("otel.status_code") == "ERROR"
            name, own = at(span, "operationName"), at(span, "spanID")
            yield Span(name, start_s, tags, end_s, None, own, (outer or [None])[0], failed)


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
