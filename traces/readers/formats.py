"""Which reader a file needs, told from its content; and reading one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from twinserve.traces.readers import azure as read_azure
from twinserve.traces.readers import bailian as read_bailian
from twinserve.traces.readers import burstgpt as read_burstgpt
from twinserve.traces.readers import mooncake as read_mooncake
from twinserve.traces.readers import sidecar
from twinserve.traces.readers import text as read_text
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import Workload, WorkloadError

READERS: dict[str, Callable[[bytes, str, ReadOptions], Workload]] = {
    "mooncake": read_mooncake.read,
    "bailian": read_bailian.read,
    "azure": read_azure.read,
    "burstgpt": read_burstgpt.read,
    "sharegpt": read_text.read_sharegpt,
    "custom": read_text.read_custom,
}
# Which formats leave open what a caller can set.
OVERRIDES = {"time_unit": ("mooncake", "custom"), "block_tokens": ("mooncake", "bailian")}
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
    line = head.split("\n", 1)[0].strip()
    found = None
    if head.startswith("["):
        found = "sharegpt"
    elif head.startswith("{"):
        found = _by_keys(data.decode("utf-8-sig", "replace").lstrip().split("\n", 1)[0])
    else:
        names = {name.strip().strip('"').strip().lower() for name in line.split(",")}
        if {"contexttokens", "generatedtokens"} <= names:
            found = "azure"
        elif {"request tokens", "response tokens"} <= names:
            found = "burstgpt"
    if found is None:
        known = ", ".join(READERS)
        raise WorkloadError(
            f"{path}: line 1: not the start of any known trace format ({known}): "
            "check the file, or name its format (--format)"
        )
    return found


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
    if "input_length" in row or "input_tokens" in row or "hash_ids" in row:
        return "mooncake"
    return "custom" if "prompt" in row else None


def read_bytes(
    data: bytes, path: str, format: str | None = None, options: ReadOptions = ReadOptions()
) -> Workload:
    """The workload of a file's bytes; `path` is for messages. Raises WorkloadError."""
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
    name = format or detect_format(data, path)
    if options.rate is not None and name not in (read_text.SHAREGPT, read_text.CUSTOM):
        raise WorkloadError(f"{path}: {read_text.HAS_ARRIVALS}")
    for option, formats in OVERRIDES.items():
        given = getattr(options, option)
        if given is not None and name not in formats:
            takes = " and ".join(formats)
            raise WorkloadError(
                f"{path}: {option} ({given}) is for {takes} files, this one is {name}: leave it out"
            )
    return READERS[name](data, path, options)


def read_file(
    path: str | Path, format: str | None = None, options: ReadOptions = ReadOptions()
) -> Workload:
    """The workload of a trace file, with what its sidecar adds. Raises WorkloadError."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        reason = e.strerror or str(e)
        raise WorkloadError(f"{path}: cannot be read ({reason}): check the path") from None
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
