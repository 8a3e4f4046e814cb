"""Writing a workload and reading it back changes nothing."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.traces.workload_strategies import assert_same, workloads
from twinserve.traces import catalog
from twinserve.traces.generators.synth import synth
from twinserve.traces.load import load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import read_file
from twinserve.traces.readers.mooncake import Exact, seconds
from twinserve.traces.readers.sidecar import path_of
from twinserve.traces.verbs import convert
from twinserve.traces.workload import Workload, WorkloadError
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
