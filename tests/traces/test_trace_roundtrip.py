"""Writing a workload and reading it back changes nothing."""

import errno
import hashlib
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.commands import status
from tests.examples import examples
from tests.traces.workload_strategies import assert_same, workloads
from twinserve.sim.cli.main import main
from twinserve.traces import catalog
from twinserve.traces.anonymise import anonymise, kept
from twinserve.traces.generators.synth import synth
from twinserve.traces.load import load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import read_file
from twinserve.traces.readers.mooncake import Exact, seconds
from twinserve.traces.readers.sidecar import path_of
from twinserve.traces.stats import statistics
from twinserve.traces.transform import with_pool
from twinserve.traces.verbs import convert
from twinserve.traces.workload import BestEffortPool, Workload, WorkloadError
from twinserve.traces.write import milliseconds, write_trace


@pytest.mark.slow
@given(workloads())
@examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_workload_survives_the_disk(tmp_path, w):
    check_workload(w)
    path = tmp_path / "t.jsonl"
    write_trace(w, path)
    back = read_file(path)
    assert_same(w, back)
    assert back.provenance.name == w.provenance.name
    assert back.provenance.transforms == w.provenance.transforms
    first = path.read_bytes(), path_of(path).read_bytes()
    write_trace(w, path)
    assert first == (path.read_bytes(), path_of(path).read_bytes())


@given(st.floats(0, 2.0**31, allow_subnormal=True))
@examples(1000)
def test_milliseconds_keep_every_bit_of_the_seconds(s):
    text = milliseconds(s)
    value = json.loads(text, parse_float=Exact)
    assert seconds(value) == s
    assert math.isclose(float(text), s * 1000, rel_tol=1e-15, abs_tol=1e-320)


def test_rows_are_what_other_tools_read(tmp_path):
    # aiperf takes exactly one kind of input a row; vLLM and Dynamo want hash_ids, enough for the
    # whole prompt.
    path = write_trace(synth("fixed:1025,7", rate=2, count=5), tmp_path / "t.jsonl")
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert set(row) == {"timestamp", "input_length", "output_length", "hash_ids"}
        assert len(row["hash_ids"]) == 3
    assert read_file(path).prefix is None  # the sidecar knows that these ids are made up
    path_of(path).unlink()
    assert read_file(path).prefix.distinct == 15


def test_sessions_use_the_common_field_names(tmp_path):
    w = Workload.build(
        [0.5, np.nan],
        [10, 20],
        [1, 2],
        group=np.array([0, 0]),
        stage=np.array([0, 1]),
        delay_s=np.array([0, 1.25]),
        group_names=["chat"],
    )
    first, second = write_trace(w, tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(first)["session_id"] == json.loads(second)["session_id"] == "chat"
    assert json.loads(first)["timestamp"] == 500 and "delay" not in json.loads(first)
    assert json.loads(second)["delay"] == 1250 and "timestamp" not in json.loads(second)


def test_an_edited_file_keeps_its_units_and_says_so(tmp_path):
    path = write_trace(synth("fixed:100,7", rate=2, count=5), tmp_path / "t.jsonl")
    path.write_text("".join(path.read_text().splitlines(True)[:3]))
    w = read_file(path)
    assert len(w) == 3
    assert any("changed after" in n for n in w.provenance.notices)


@pytest.mark.parametrize(
    "text", ["", "{", '{"format": "mooncake+", "block_size": 0}', '{"format": "mooncake+"}']
)
def test_a_broken_sidecar_is_one_clear_line(tmp_path, text):
    path = write_trace(synth("fixed:100,7", rate=2, count=5), tmp_path / "t.jsonl")
    path_of(path).write_text(text)
    with pytest.raises(WorkloadError, match=r"t.jsonl.meta.json: .*remove it") as e:
        read_file(path)
    assert "\n" not in str(e.value)


def test_a_foreign_sidecar_is_left_alone(tmp_path):
    path = write_trace(synth("fixed:100,7", rate=2, count=5), tmp_path / "t.jsonl")
    path_of(path).write_text('{"created_by": "another tool"}')
    assert len(read_file(path)) == 5


def test_invalid_workloads_are_not_written(tmp_path):
    with pytest.raises(WorkloadError, match="sorted"):
        write_trace(Workload.build([2.0, 1.0], [1, 1], [1, 1]), tmp_path / "t.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_converted_trace_replays_as_the_run_did(original, tmp_path):
    source = original("mooncake")
    ran = load_trace(source, seed=3)
    convert(source, tmp_path / "t.jsonl", seed=3)
    assert_same(ran, load_trace(tmp_path / "t.jsonl", seed=99))


@pytest.mark.parametrize("overwrite", [False, True])
def test_convert_never_replaces_what_it_reads(tmp_path, monkeypatch, overwrite):
    path = write_trace(synth("fixed:100,7", rate=2, count=5), tmp_path / "t.jsonl")
    before = path.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(path)
    for target in (path, tmp_path / "link.jsonl"):
        with pytest.raises(WorkloadError, match="would replace the trace that is read"):
            convert(path, target, overwrite=overwrite)
    # The target's sidecar may be the source too, and a name may stand for a file.
    source = write_trace(synth("fixed:100,7", rate=2, count=5), tmp_path / "x.meta.json")
    with pytest.raises(WorkloadError, match="would replace"):
        convert(source, tmp_path / "x", overwrite=overwrite)
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"
    digest = hashlib.sha256(rows.encode()).hexdigest()
    info = replace(catalog.BY_NAME["azure-2023:code"], sha256=digest)
    monkeypatch.setitem(catalog.BY_NAME, info.name, info)
    copy = tmp_path / info.files[0]
    copy.write_text(rows)
    with pytest.raises(WorkloadError, match="would replace" if overwrite else "is there already"):
        convert("azure-2023:code", copy, search_path=tmp_path, overwrite=overwrite)
    assert path.read_bytes() == before and copy.read_text().startswith("TIMESTAMP")


def test_convert_replaces_another_file_only_if_told_to(tmp_path):
    source = write_trace(synth("fixed:100,7", rate=2, count=5), tmp_path / "source.jsonl")
    target = tmp_path / "target.jsonl"
    for there in (target, tmp_path / "target.jsonl.meta.json"):
        there.write_text("{}")
        with pytest.raises(WorkloadError, match=f"{there.name}: is there already: .*--overwrite"):
            convert(source, target)
        assert there.read_text() == "{}"
        there.unlink()
    target.write_text("{}")
    convert(source, target, overwrite=True)
    assert len(load_trace(target)) == 5


# -- what stands beside a trace is checked as its rows are, and goes with them or not at all -------
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


# A trace that can be shared: nothing of whose it is stays, all that a simulation needs does.
SECRET = "acme-corp"


@pytest.fixture
def secret_trace(tmp_path):
    """A file of sessions that share blocks, stamped with the time of day and full of names."""
    w = load_trace("agents:sessions=12,turns=4,groups=2", seed=2)
    file = write_trace(w, tmp_path / f"{SECRET}.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["request_id"] = f"{SECRET}-{number}"
        row["session_id"] = f"{SECRET}-{row['session_id']}"
        if "timestamp" in row:
            row["timestamp"] += 1_761_000_000_000
        row["customer"] = SECRET
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_no_name_and_no_date_is_left(secret_trace, tmp_path, capsys):
    target = tmp_path / "out" / "shared.jsonl"
    assert not status(main, ["trace", "anonymise", secret_trace, target, "--jitter", "0.5"])
    written = target.read_text() + path_of(target).read_text()
    assert SECRET not in written and "17610000" not in written
    assert load_trace(target).arrival_s[0] == 0.0
    shown = capsys.readouterr().out
    assert "lru_hit_rate unlimited" in shown and "kept" in shown


def test_without_jitter_every_statistic_is_kept(secret_trace):
    w = load_trace(secret_trace)
    shared = anonymise(w)
    check_workload(shared)
    for name, before, after in kept(w, shared):
        exact = name not in ("first_arrival_s", "gap_cv", "rate_per_s", "span_s")
        assert after == before if exact else after == pytest.approx(before, abs=1e-5), name


def test_who_shares_which_blocks_is_kept_under_other_ids(secret_trace):
    w = load_trace(secret_trace)
    shared = anonymise(w, salt="a")
    assert (w.prefix.ids != shared.prefix.ids).mean() > 0.9
    pairs = set(zip(w.prefix.ids.tolist(), shared.prefix.ids.tolist(), strict=True))
    assert len(pairs) == w.prefix.distinct == shared.prefix.distinct


def test_a_salt_gives_the_same_trace_again_and_none_another_one(secret_trace):
    w = load_trace(secret_trace)
    one, two = (anonymise(w, salt="a", jitter_s=1.0) for _ in range(2))
    assert np.array_equal(one.arrival_s, two.arrival_s, equal_nan=True)
    assert one.prefix.ids.tolist() == two.prefix.ids.tolist()
    assert anonymise(w).prefix.ids.tolist() != anonymise(w).prefix.ids.tolist()


def test_jitter_moves_arrivals_and_delays_by_no_more_than_it_says():
    w = load_trace("stages:2x200,input=10,output=5")
    shared = anonymise(w, salt="a", jitter_s=0.25)
    check_workload(shared)
    moved = np.abs(np.sort(w.arrival_s) - w.arrival_s[0] - shared.arrival_s)
    assert 0.01 < moved.mean() and moved.max() <= 0.5 + 1e-9  # the first one moved too
    assert statistics(shared)["rate_per_s"] == pytest.approx(statistics(w)["rate_per_s"], rel=0.01)
    turns = Workload.build(
        [0.0, np.nan], [9, 9], [1, 1], group=np.array([0, 0]), stage=np.array([0, 1]),
        delay_s=np.array([0.0, 5.0]), group_names=["a"],
    )  # fmt: skip
    assert 0 < abs(anonymise(turns, salt="a", jitter_s=0.25).delay_s[1] - 5.0) <= 0.25


@pytest.mark.parametrize("jitter", [-1.0, float("inf"), float("nan")])
def test_a_jitter_that_cannot_be_is_refused(jitter):
    with pytest.raises(WorkloadError, match="jitter"):
        anonymise(load_trace("stages:2x20"), jitter_s=jitter)
