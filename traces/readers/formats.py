"""Find the reader of a file by its content, and read the file."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from twinserve.errors import worded
from twinserve.traces.measurement import Measurement, workload_of
from twinserve.traces.readers import azure as read_azure
from twinserve.traces.readers import bailian as read_bailian
from twinserve.traces.readers import burstgpt as read_burstgpt
from twinserve.traces.readers import csvfile, sidecar
from twinserve.traces.readers import mooncake as read_mooncake
from twinserve.traces.readers import text as read_text
from twinserve.traces.readers.columns import shown
from twinserve.traces.readers.measured import (
    aiperf,
    guidellm,
    inference_perf,
    otel,
    prometheus,
    table,
    vllm_bench,
    vllm_log,
)
from twinserve.traces.readers.options import ReadOptions, TraceReader, own_reader
from twinserve.traces.workload import Workload, WorkloadError

MEASURED: dict[str, Callable[[bytes, str, ReadOptions], Measurement]] = {
    module.NAME: module.read
    for module in (vllm_bench, aiperf, guidellm, inference_perf, vllm_log, otel, prometheus, table)
}


def _workload_of(
    read: Callable[[bytes, str, ReadOptions], Measurement],
) -> Callable[[bytes, str, ReadOptions], Workload]:
    return lambda data, path, options: workload_of(read(data, path, options))


READERS: dict[str, Callable[[bytes, str, ReadOptions], Workload]] = {
    "mooncake": read_mooncake.read,
    "bailian": read_bailian.read,
    "azure": read_azure.read,
    "burstgpt": read_burstgpt.read,
    "sharegpt": read_text.read_sharegpt,
    "custom": read_text.read_custom,
    **{name: _workload_of(read) for name, read in MEASURED.items() if name != prometheus.NAME},
}
# Formats whose files may have no times: a rate gives them arrivals. Others have their own.
GET_ARRIVALS = (read_text.SHAREGPT, read_text.CUSTOM, read_mooncake.NAME)
# Which formats leave open what a caller can set.
OVERRIDES = {
    "time_unit": ("mooncake", "custom"),
    "block_tokens": ("mooncake", "bailian"),
    "columns": (table.NAME,),
    "benchmark": (guidellm.NAME,),
}
MAGIC = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
HEAD_BYTES = 1 << 16


def detect_format(data: bytes, path: str) -> str:
    """The format's name, by the header or the first row's keys; WorkloadError if none fits."""
    for magic, kind in MAGIC.items():
        if data.startswith(magic):
            raise WorkloadError(f"{path}: a {kind} file: unpack it first")
    head = data[:HEAD_BYTES].decode("utf-8-sig", "replace").lstrip()
    if not head:
        raise WorkloadError(f"{path}: the file is empty: check the path, or fetch it again")
    if head.startswith("version https://git-lfs"):
        raise WorkloadError(f"{path}: a Git LFS pointer, not the trace: run 'git lfs pull' there")
    if head.startswith("["):
        found = _by_item(head)
    elif head.startswith("{"):
        first = data.decode("utf-8-sig", "replace").lstrip().split("\n", 1)[0]
        found = _by_keys(first) or _by_document(data)
        if found is None and b'"input_config"' in data and b'"request_latency"' in data:
            raise WorkloadError(
                f"{path}: the summary of an aiperf run, without its requests: give "
                "profile_export.jsonl of the same folder"
            )
    else:
        found = _by_header(head)
    if found is None:
        if path.endswith((".csv", ".tsv")) and (names := csvfile.header_names(head))[1:]:
            have = ", ".join(map(shown, names))
            raise WorkloadError(
                f"{path}: line 1: a table with the columns {have}: name them, as --columns "
                "arrival=COLUMN,prompt=COLUMN,output=COLUMN"
            )
        known = ", ".join(READERS)
        raise WorkloadError(
            f"{path}: line 1: not the start of any known trace format ({known}): "
            "check the file, name its format (--format), or the columns of a CSV file (--columns)"
        )
    return found


def _by_header(head: str) -> str | None:
    names = {name.lower() for name in csvfile.header_names(head)}
    if {"contexttokens", "generatedtokens"} <= names:
        return "azure"
    if {"request tokens", "response tokens"} <= names:
        return "burstgpt"
    if prometheus.EXPOSED.search(head):
        return prometheus.NAME
    return vllm_log.NAME if vllm_log.RECEIVED.search(head) else None


def _by_item(head: str) -> str | None:
    """An array's format, by the keys of its first item, which may be longer than the head."""
    if '"conversations"' in head or '"conversation"' in head:
        return "sharegpt"
    if '"start_time"' in head and '"info"' in head:
        return inference_perf.NAME
    keys = {key for key in ("chat_id", "timestamp", "hash_ids", "delay") if f'"{key}"' in head}
    if "chat_id" in keys:
        return "bailian"
    if keys and ('"input_length"' in head or '"input_tokens"' in head):
        return "mooncake"
    return "custom" if "timestamp" in keys and '"prompt"' in head else "sharegpt"


def _by_document(data: bytes) -> str | None:
    """A tool's result that is one JSON object over many lines, by names that stand in it."""
    if b'"resourceSpans"' in data or (b'"spans"' in data and b'"traceID"' in data):
        return otel.NAME
    if b'"resultType"' in data:
        return prometheus.NAME
    if b'"benchmarks"' in data:
        return guidellm.NAME
    named = b'"total_output_tokens"' in data and b'"request_throughput"' in data
    if named or b'"mean_ttft_ms"' in data:
        return vllm_bench.NAME
    return None


def _by_keys(line: str) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        # Perhaps a torn file of one line: the reader says where it breaks.
        row = {}
        for key in ("chat_id", "input_length", "prompt"):
            if f'"{key}"' in line:
                row[key] = None
    if type(row) is not dict:
        return None
    if "chat_id" in row:
        return "bailian"
    if "metadata" in row and "metrics" in row:
        return aiperf.NAME
    if "input_length" in row or "input_tokens" in row or "hash_ids" in row:
        return "mooncake"
    if "text_input" in row and ("output_length" in row or "output_tokens" in row):
        return "mooncake"
    return "custom" if "prompt" in row else None


def read_bytes(
    data: bytes,
    path: str,
    format: str | type[TraceReader] | None = None,
    options: ReadOptions = ReadOptions(),
) -> Workload:
    """The workload of a file's bytes; `path` is for messages. format: a name, `FILE.py:Class`, or a
    reader's class. Raises WorkloadError."""
    own = None if format in (None, *READERS) else own_reader(format)
    if own is not None:
        return _own_workload(own, data, path, options)
    if format is not None and format not in READERS:
        near = get_close_matches(str(format), READERS, 1)
        hint = f"did you mean {near[0]}" if near else f"choose from {', '.join(READERS)}"
        raise WorkloadError(f"unknown trace format '{format}': {hint}")
    if options.time_unit not in (None, "ms", "s"):
        raise WorkloadError(f"unknown time unit '{options.time_unit}': choose ms or s")
    if options.block_tokens is not None and options.block_tokens < 1:
        raise WorkloadError(f"block size {options.block_tokens} is below 1: give tokens a block")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        raise WorkloadError(
            f"rate {options.rate} is not a finite number above 0: give requests a second"
        )
    name = format or _detected(data, path, options)
    _check_options(options, name, path)
    if name == prometheus.NAME:
        raise WorkloadError(f"{path}: histograms have no single requests: use twinserve compare")
    return READERS[name](data, path, options)


def _own_workload(reader: TraceReader, data: bytes, path: str, options: ReadOptions) -> Workload:
    """What a reader of another package, or of a file, makes of it."""
    found = reader.read(data, path, options)
    if isinstance(found, Measurement):
        found = workload_of(found)
    if not isinstance(found, Workload):
        raise WorkloadError(
            f"{path}: reader {reader.name!r} gave a {type(found).__name__}: give a Workload or a "
            "Measurement"
        )
    if not len(found):
        raise WorkloadError(f"{path}: no requests: check the file and its format")
    arrival, said = found.arrival_s[found.stage == 0], f"{path}: reader {reader.name!r}"
    if not np.isfinite(arrival).all() or (np.diff(arrival) < 0).any() or arrival.min() < 0:
        raise WorkloadError(f"{said}: arrivals do not rise from 0 s on: sort the rows")
    if min(found.prompt_tokens.min(), found.output_tokens.min()) < 1:
        raise WorkloadError(f"{said}: requests without prompt or output tokens: leave them out")
    return replace(found, provenance=replace(found.provenance, name=reader.name, path=path))


def _detected(data: bytes, path: str, options: ReadOptions) -> str:
    return table.NAME if options.columns is not None else detect_format(data, path)


def _check_options(options: ReadOptions, name: str, path: str) -> None:
    """Raises WorkloadError for an option that the format has no use for."""
    if options.rate is not None and name not in GET_ARRIVALS:
        raise WorkloadError(f"{path}: {read_text.HAS_ARRIVALS}")
    for option, formats in OVERRIDES.items():
        given = getattr(options, option)
        if given is not None and name not in formats:
            takes = " and ".join(formats)
            raise WorkloadError(
                f"{path}: {option} ({given}) is for {takes} files, this one is {name}: leave it out"
            )


def read_measurement(
    path: str | Path, format: str | None = None, options: ReadOptions = ReadOptions()
) -> Measurement:
    """Read a file's served requests. Raises WorkloadError, also if it has only what was asked."""
    data = _content(path)
    name = format or _detected(data, str(path), options)
    own = None if name in READERS else own_reader(name)
    if own is not None and isinstance(found := own.read(data, str(path), options), Measurement):
        return found
    if options.benchmark is not None:
        _check_options(options, name, str(path))
    if name not in MEASURED:
        raise WorkloadError(
            f"{path}: a {shown(name)} file has requests, but no measured latencies: give one of "
            f"{', '.join(MEASURED)}"
        )
    return MEASURED[name](data, str(path), options)


def _content(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        reason = e.strerror or worded(e)
        raise WorkloadError(f"{path}: cannot be read ({reason}): check the path") from None


def read_file(
    path: str | Path, format: str | None = None, options: ReadOptions = ReadOptions()
) -> Workload:
    """The workload of a trace file, with what its sidecar adds. Raises WorkloadError."""
    data = _content(path)
    digest = hashlib.sha256(data).hexdigest()
    meta = sidecar.load(path)
    if meta is not None and format in (None, "mooncake"):
        options = replace(
            options,
            block_tokens=options.block_tokens or meta.block_size,
            time_unit=options.time_unit or meta.time_unit,
        )
    else:
        meta = None
    w = read_bytes(data, str(path), format, options)
    w = replace(w, provenance=replace(w.provenance, sha256=digest))
    return w if meta is None else sidecar.apply(w, meta, digest)
