"""Mooncake+ JSONL: the fields that vLLM, aiperf, Dynamo and guidellm read, and fields that they
ignore.

A workload written and read back is equal bit by bit. Arrivals are decimal digits of milliseconds,
shifted from the shortest digits of the seconds, so nothing is rounded on either way.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path

import numpy as np

from twinserve.formats import whole_file
from twinserve.traces import prefix as blocks
from twinserve.traces.readers import sidecar
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.mooncake import BLOCK_TOKENS
from twinserve.traces.workload import CLASS_NAMES, REAL_TIME, Workload, WorkloadError


def milliseconds(seconds: float) -> str:
    """A JSON number of milliseconds that `readers.mooncake.seconds` turns back into exactly these
    seconds.
    """
    value = Decimal(repr(seconds)).scaleb(3)
    return format(value, "f") if -12 < value.adjusted() < 18 else str(value)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write all of `data`, or leave the old content. Raises WorkloadError."""
    write_together([(path, data)])


def write_together(files: Sequence[tuple[str | Path, bytes]]) -> None:
    """Write all files or none: if one cannot be written, all keep their old content, and no new
    folder stays. They are put in place in their order. Raises WorkloadError."""
    path = Path()
    try:
        with ExitStack() as stack:
            for path, data in reversed([(Path(file), data) for file, data in files]):
                stack.enter_context(whole_file(path)).write_bytes(data)
    except OSError as e:
        raise WorkloadError(
            f"{path}: cannot be written ({e.strerror}): check the folder and the free space"
        ) from None


def check_free(file: Path, overwrite: bool, error: type[Exception] = WorkloadError) -> None:
    """Raises `error` where `file` is a folder, or is there already and `overwrite` is not set."""
    if file.is_dir():
        raise error(f"{file}: is a folder; name a file")
    if file.exists() and not overwrite:
        raise error(f"{file}: is there already: name another file, or replace it with --overwrite")


def check_target(
    path: str | Path, overwrite: bool = False, source: str | Path | None = None
) -> None:
    """Raise WorkloadError if `write_trace` would replace a file against `overwrite`: another file
    or its sidecar without `overwrite`, and always `source`, whose rows are read."""
    for target in (Path(path), sidecar.path_of(path)):
        known = source is not None and Path(source).exists() and target.exists()
        if known and target.samefile(source):
            raise WorkloadError(
                f"{path}: would replace the trace that is read ({source}): name another file"
            )
        check_free(target, overwrite)


def write_trace(w: Workload, path: str | Path) -> Path:
    """Writes `path` and `path`.meta.json; returns the path. Raises WorkloadError.

    Rows of groups go out as aiperf's and Dynamo's sessions where every stage is one row, and with
    our own `group` and `stage` otherwise. Prompts without prefix blocks get ids that share nothing,
    as vLLM and Dynamo want some; the sidecar remembers that they are made up.
    """
    check_workload(w)
    if not len(w):
        raise WorkloadError(f"{path}: the workload has no rows: nothing to write")
    shared = w.prefix or blocks.unshared(w.prompt_tokens, BLOCK_TOKENS)
    lines = _lines(w, shared)
    data = "".join(lines).encode()
    order = list(dict.fromkeys(w.group[w.group >= 0].tolist()))
    meta = sidecar.describe(
        w, hashlib.sha256(data).hexdigest(), shared.block_tokens, [w.group_names[g] for g in order]
    )
    # The sidecar first: with its hash it cannot be taken for that of an older file.
    write_together([(sidecar.path_of(path), sidecar.dump(meta)), (path, data)])
    return Path(path)


def _sessions(w: Workload) -> set[int]:
    """Groups whose rows are turns: stage k is the k-th row of the group."""
    rows = np.flatnonzero(w.group >= 0)
    rows = rows[np.argsort(w.group[rows], kind="stable")]
    group, stage = w.group[rows], w.stage[rows]
    first = np.r_[True, group[1:] != group[:-1]][: len(group)]
    turn = np.arange(len(rows)) - np.maximum.accumulate(np.where(first, np.arange(len(rows)), 0))
    other = np.unique(group[stage != turn])
    return set(np.setdiff1d(group, other).tolist())


def _lines(w: Workload, shared) -> list[str]:
    sessions = _sessions(w)
    bounds, ids = shared.offsets.tolist(), shared.ids.tolist()
    arrival, delay = w.arrival_s.tolist(), w.delay_s.tolist()
    prompt, output = w.prompt_tokens.tolist(), w.output_tokens.tolist()
    group, stage = w.group.tolist(), w.stage.tolist()
    service_class, priority = w.service_class.tolist(), w.priority.tolist()
    ttft, tpot = w.slo_ttft_s.tolist(), w.slo_tpot_s.tolist()
    lines = []
    for row, name in enumerate(w.ids):
        parts = []
        if not math.isnan(arrival[row]):
            parts.append(f'"timestamp": {milliseconds(arrival[row])}')
        parts.append(f'"input_length": {prompt[row]}, "output_length": {output[row]}')
        parts.append(f'"hash_ids": {ids[bounds[row] : bounds[row + 1]]}')
        if group[row] >= 0:
            label = json.dumps(w.group_names[group[row]])
            if group[row] in sessions:
                parts.append(f'"session_id": {label}')
            else:
                parts.append(f'"group": {label}, "stage": {stage[row]}')
        if math.isnan(arrival[row]):
            parts.append(f'"delay": {milliseconds(delay[row])}')
        if name != f"r{row}":
            parts.append(f'"request_id": {json.dumps(name)}')
        if service_class[row] != REAL_TIME:
            parts.append(f'"class": "{CLASS_NAMES[service_class[row]]}"')
        if priority[row]:
            parts.append(f'"priority": {priority[row]}')
        for field, value in (("slo_ttft_s", ttft[row]), ("slo_tpot_s", tpot[row])):
            if not math.isnan(value):
                parts.append(f'"{field}": {value!r}')
        lines.append("{" + ", ".join(parts) + "}\n")
    return lines
