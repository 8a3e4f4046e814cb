"""What stands beside a trace is checked as its rows are, and goes with them or not at all."""

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from twinserve.traces.load import load_trace
from twinserve.traces.readers.sidecar import path_of
from twinserve.traces.transform import with_pool
from twinserve.traces.workload import BestEffortPool, Workload, WorkloadError
from twinserve.traces.write import write_trace


def written(folder, rows=5):
    w = Workload.build(np.arange(float(rows)), np.full(rows, 40), np.full(rows, 4))
    return write_trace(with_pool(w, BestEffortPool(4, until_s=3.0)), folder / "t.jsonl")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("until_s", float("inf")),
        ("until_s", float("nan")),
        ("until_s", 1e18),
        ("until_s", -1.0),
        ("until_s", "soon"),
        ("prompt_tokens", [0, 0]),
        ("prompt_tokens", [-5, 3]),
        ("output_tokens", [9, 3]),
        ("output_tokens", [1, 2**40]),
        ("batch", 0),
        ("batch", 10**9),
    ],
)
def test_a_pool_that_could_not_be_run_is_refused_in_a_line(tmp_path, field, value):
    trace = written(tmp_path)
    beside = Path(path_of(trace))
    meta = json.loads(beside.read_text())
    meta["pool"][field] = value
    beside.write_text(json.dumps(meta))
    with pytest.raises(WorkloadError) as error:
        load_trace(trace)
    said = str(error.value)
    assert f"{beside.name}: field 'pool.{field}" in said and "\n" not in said
    assert "remove it or write the trace again" in said


def test_a_pool_is_read_as_it_was_written(tmp_path):
    assert load_trace(written(tmp_path)).pool == BestEffortPool(4, until_s=3.0)


@pytest.mark.parametrize(
    ("call", "full_at"), [("tempfile.mkstemp", 0), ("tempfile.mkstemp", 1), ("os.replace", 0)]
)
def test_a_failed_overwrite_leaves_trace_and_sidecar_as_they_were(
    tmp_path, monkeypatch, call, full_at
):
    trace = written(tmp_path)
    files = {path: path.read_bytes() for path in (trace, Path(path_of(trace)))}
    room, calls = {"tempfile.mkstemp": tempfile.mkstemp, "os.replace": os.replace}[call], []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return room(*args, **kwargs)

    monkeypatch.setattr(call, full)
    with pytest.raises(WorkloadError, match="cannot be written .No space left"):
        written(tmp_path, rows=9)
    assert {path: path.read_bytes() for path in files} == files
    assert set(tmp_path.iterdir()) == set(files)  # nothing else is left behind
