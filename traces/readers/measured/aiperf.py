"""Records of aiperf, one JSON object a request: profile_export.jsonl.

    {"metadata": {"x_request_id": "7609...", "x_correlation_id": "32ee...", "turn_index": 0,
                  "request_start_ns": 1759813207532900363, "request_end_ns": ...,
                  "benchmark_phase": "profiling", "was_cancelled": false},
     "metrics": {"input_sequence_length": {"value": 550, "unit": "tokens"},
                 "output_sequence_length": {"value": 9, "unit": "tokens"},
                 "time_to_first_token": {"value": 255.9, "unit": "ms"},
                 "request_latency": {"value": 297.5, "unit": "ms"},
                 "inter_token_latency": {"value": 5.2, "unit": "ms"},
                 "inter_chunk_latency": {"value": [4.9, ...], "unit": "ms"}},
     "error": null}

Source: docs/tutorials/working-with-profile-exports.md of aiperf (nvda-ci/aiperf at 8e6a033, a copy
of ai-dynamo/aiperf). A metric says its unit. Rows of another phase than `profiling` are a warm-up.
"""

from twinserve.traces.measurement import Measurement
from twinserve.traces.readers import jsonl
from twinserve.traces.readers.columns import shown, unused
from twinserve.traces.readers.measured.document import at
from twinserve.traces.readers.measured.rows import Field, measured
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "aiperf"
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
METRICS = (
    "input_sequence_length",
    "output_sequence_length",
    "time_to_first_token",
    "ttft",  # its name in aiperf 0.2
    "request_latency",
    "inter_token_latency",
    "inter_chunk_latency",
)


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Measurement:
    """The measurement in a record file. Raises WorkloadError."""
    rows, where = jsonl.parse(data, path)
    profiled = [i for i, row in enumerate(rows) if _phase(row) == "profiling"]
    notices = []
    if len(profiled) < len(rows):
        notices.append(f"{len(rows) - len(profiled)} requests of the warm-up left out")
    if not profiled:
        raise WorkloadError(f"{path}: no request of phase 'profiling': give profile_export.jsonl")
    rows, where = [rows[i] for i in profiled], where.kept(profiled)
    names = [name for row in rows for name in _metrics(row)]
    notices += unused(names, METRICS)
    remedy = "run aiperf with a tokenizer and --streaming, and give profile_export.jsonl"
    starts = [_either(row, "metadata", "request_start_ns", "timestamp_ns") for row in rows]
    first = min((start for start in starts if type(start) is int and start >= 0), default=0)
    since = [start - first if type(start) is int else start for start in starts]
    sessions = [at(row, "metadata", "x_correlation_id") for row in rows]
    turns = [at(row, "metadata", "turn_index") for row in rows]
    return measured(
        NAME,
        where,
        arrival_s=Field("request_start_ns", since, 1e-9),
        prompt_tokens=_counts(rows, "input_sequence_length", remedy),
        output_tokens=_counts(rows, "output_sequence_length", remedy),
        ttft_s=_times(rows, "time_to_first_token", "ttft"),
        e2el_s=_times(rows, "request_latency"),
        tpot_s=_times(rows, "inter_token_latency"),
        gaps_s=_times(rows, "inter_chunk_latency"),
        errors=[_error(row) for row in rows],
        session=Field("x_correlation_id", sessions),
        turn=Field("turn_index", turns),
        notices=notices,
    )


def _metrics(row: dict) -> dict:
    return row["metrics"] if type(row.get("metrics")) is dict else {}


def _phase(row: dict) -> str:
    return _either(row, "metadata", "benchmark_phase", "credit_phase") or "profiling"


def _either(row: dict, part: str, name: str, former: str):
    """A value by the name of today, else by that of aiperf 0.2."""
    value = at(row, part, name)
    return at(row, part, former) if value is None else value


def _error(row: dict) -> str:
    if row.get("error") is not None:
        return str(at(row, "error", "type") or at(row, "error", "message") or "error")
    return "cancelled" if at(row, "metadata", "was_cancelled") else ""


def _counts(rows: list[dict], name: str, remedy: str) -> Field:
    return Field(name, [at(row, "metrics", name, "value") for row in rows], remedy=remedy)


def _times(rows: list[dict], name: str, former: str = "") -> Field:
    return Field(name, [_seconds(_either(row, "metrics", name, former)) for row in rows])


def _seconds(metric: dict | None):
    """A time, or a list of times. Whatever is no number, or has no unit, stays as it is."""
    value, unit = at(metric, "value"), at(metric, "unit")
    values = value if type(value) is list else [value]
    if not all(type(each) in (int, float) for each in values):
        return value
    if not isinstance(unit, str) or unit not in SECONDS:
        return f"{shown(value)} of the unit {shown(unit)}"
    try:
        scaled = [each * SECONDS[unit] for each in values]
    except OverflowError:
        return value
    return scaled if values is value else scaled[0]
