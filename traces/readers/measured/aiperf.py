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

from __future__ import annotations

import numpy as np

from twinserve.traces.measurement import Measurement, measured
from twinserve.traces.readers import jsonl
from twinserve.traces.readers.columns import MAX_SECONDS, Rows, shown, unused
from twinserve.traces.readers.measured.document import at, whole_or_zero
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import WorkloadError

NAME = "aiperf"
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
METRICS = (
    "input_sequence_length",
    "output_sequence_length",
    "time_to_first_token",
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
    for i, row in enumerate(rows):
        if type(row.get("metrics")) is not dict and row.get("error") is None:
            where.fail(i, "metrics", "is missing", "give profile_export.jsonl")
    names = [name for row in rows for name in _metrics(row)]
    notices += unused(names, METRICS)
    errors = [_error(row) for row in rows]
    lengths = {
        name: [_count(where, i, row, name, errors[i]) for i, row in enumerate(rows)]
        for name in ("input_sequence_length", "output_sequence_length")
    }
    starts = [at(row, "metadata", "request_start_ns") for row in rows]
    where.number("request_start_ns", starts, high=MAX_SECONDS * 1e9)
    first = min(starts)
    sessions = [at(row, "metadata", "x_correlation_id") for row in rows]
    turns = [at(row, "metadata", "turn_index") for row in rows]
    gaps = [gap for i, row in enumerate(rows) if not errors[i] for gap in _gaps(where, i, row)]
    return measured(
        NAME,
        path,
        len(rows),
        arrival_s=[(start - first) * 1e-9 for start in starts],
        prompt_tokens=lengths["input_sequence_length"],
        output_tokens=lengths["output_sequence_length"],
        ttft_s=_seconds(where, rows, "time_to_first_token"),
        e2el_s=_seconds(where, rows, "request_latency"),
        tpot_s=_seconds(where, rows, "inter_token_latency"),
        gaps_s=np.array(gaps) if gaps else None,
        errors=errors,
        session=where.texts("x_correlation_id", sessions),
        turn=whole_or_zero(where, "turn_index", turns),
        notices=notices,
    )


def _metrics(row: dict) -> dict:
    return row["metrics"] if type(row.get("metrics")) is dict else {}


def _phase(row: dict) -> str:
    return at(row, "metadata", "benchmark_phase") or "profiling"


def _error(row: dict) -> str:
    if row.get("error") is not None:
        return str(at(row, "error", "type") or at(row, "error", "message") or "error")
    return "cancelled" if at(row, "metadata", "was_cancelled") else ""


def _count(where: Rows, row: int, record: dict, name: str, error: str) -> int:
    value = at(record, "metrics", name, "value")
    if value is None:
        if error:
            return 0
        where.fail(row, name, "is missing", "run aiperf with a tokenizer and --streaming")
    return int(where.kept([row]).whole(name, [value])[0])


def _scale(where: Rows, row: int, record: dict, name: str) -> float:
    unit = at(record, "metrics", name, "unit")
    if not isinstance(unit, str) or unit not in SECONDS:
        where.fail(row, name, f"has the unit {shown(unit)}, none of {', '.join(SECONDS)}")
    return SECONDS[unit]


def _seconds(where: Rows, rows: list[dict], name: str) -> np.ndarray:
    out = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        value = at(row, "metrics", name, "value")
        if value is not None:
            out[i] = where.kept([i]).number(name, [value], high=MAX_SECONDS * 1e9)[0] * _scale(
                where, i, row, name
            )
    return out


def _gaps(where: Rows, i: int, row: dict) -> list[float]:
    values = at(row, "metrics", "inter_chunk_latency", "value")
    if values is None:
        return []
    scale = _scale(where, i, row, "inter_chunk_latency")
    if type(values) is not list:
        where.fail(i, "inter_chunk_latency", f"is {shown(values)}, not a list of times")
    one = Rows(where.path, [where.lines[i]] * len(values), where.unit)
    return (one.number("inter_chunk_latency", values, high=MAX_SECONDS * 1e9) * scale).tolist()
