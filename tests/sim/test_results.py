"""Results on disk: what is written is read, twice the same, and whole or not at all. A run as
`vllm bench serve` writes one."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.commands import status
from tests.sim.test_results_rows import toy_rows
from twinserve.sim.cli.main import BAD_INPUT, main
from twinserve.sim.results.columns import GAPS, REQUESTS, STEPS
from twinserve.sim.results.export import write_bench
from twinserve.sim.results.files import (
    ResultsError,
    RunResult,
    dump_json,
    plain,
    read_run,
    write_run,
)
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.versions import RENAMED
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate
from twinserve.sim.twin.served import of_measurement, of_run
from twinserve.traces.readers.formats import detect_format, read_measurement

FILES = {
    "placements.parquet", "replicas.parquet", "run.json", "summary.json", "timing.json",
    "requests.parquet", "steps.parquet", "gaps.parquet",
}  # fmt: skip


def a_run(wall_s: float = 1.5, **options) -> RunResult:
    rows = toy_rows(**options)
    config = {"policy": "fcfs", "options": options, "rate": float("inf")}
    return RunResult(rows, config, {"wall_s": wall_s}, summarise(rows))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_number(folder: Path) -> None:
    """As folders were written before they had versions."""
    document = json.loads((folder / "run.json").read_text())
    del document["version"]
    (folder / "run.json").write_text(json.dumps(document))


def one_line(raised) -> str:
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = a_run(group_size=3)
    run.rows.requests.loc[4, "group"] = None
    run.summary = summarise(run.rows)
    folder = write_run(tmp_path / "new" / "run", run)
    assert {path.name for path in folder.iterdir()} == FILES
    back = read_run(folder)
    for name, schema in (("requests", REQUESTS), ("steps", STEPS), ("gaps", GAPS)):
        ours, theirs = getattr(run.rows, name), getattr(back.rows, name)
        assert list(theirs) == list(schema)
        pd.testing.assert_frame_equal(theirs, ours, check_dtype=False)
    assert back.rows.kv_total_blocks == run.rows.kv_total_blocks
    assert back.config == run.config | {"rate": None}
    assert (back.timing, back.summary) == (run.timing, run.summary)
    assert summarise(back.rows) == run.summary


def test_columns_under_a_former_name_are_read(tmp_path):
    """docs/metrics.md has the table of names."""
    write_run(tmp_path / "run", a_run())
    expected = read_run(tmp_path / "run").rows
    before = {now: then for then, now in RENAMED.items()}
    for table in ("requests", "gaps"):
        path = tmp_path / "run" / f"{table}.parquet"
        kept = pq.read_table(path)
        pq.write_table(kept.rename_columns([before.get(n, n) for n in kept.column_names]), path)
        assert "klass" in pq.read_schema(path).names
    without_number(tmp_path / "run")
    found = read_run(tmp_path / "run").rows
    pd.testing.assert_frame_equal(found.requests, expected.requests)
    pd.testing.assert_frame_equal(found.gaps, expected.gaps)


def test_requests_that_do_not_say_how_they_ended_are_read(tmp_path):
    """As those of version 0: nobody could leave, so whoever finished was served to the end."""
    write_run(tmp_path / "run", a_run())
    expected = read_run(tmp_path / "run").rows.requests
    path, added = tmp_path / "run" / "requests.parquet", ["outcome", "ended_s", "computed_tokens"]
    pq.write_table(pq.read_table(path).drop_columns(added), path)
    with pytest.raises(ResultsError, match="no column outcome, ended_s, computed_tokens"):
        read_run(tmp_path / "run")  # of a version that has them: somebody took them away
    without_number(tmp_path / "run")
    found = read_run(tmp_path / "run").rows.requests
    assert set(found["outcome"][found["finished"]]) == {"completed"}
    pd.testing.assert_frame_equal(found.drop(columns=added), expected.drop(columns=added))


def test_bytes_do_not_depend_on_column_order_or_on_the_kind_of_text(tmp_path):
    run = a_run()
    one = content(write_run(tmp_path / "one", run))
    run.rows.requests = run.rows.requests[sorted(REQUESTS)].astype({"service_class": "category"})
    run.rows.requests["stage"] = run.rows.requests["stage"].astype(np.int8)
    assert content(write_run(tmp_path / "two", run)) == one


@pytest.mark.slow
@pytest.mark.parametrize("at", ["summary.json", "steps.parquet", "the rename"])
@pytest.mark.parametrize("former", [False, True])
def test_an_interrupted_write_leaves_nothing_or_the_former_run(tmp_path, monkeypatch, at, former):
    out = tmp_path / "run"
    if former:
        write_run(out, a_run())
    before = content(out) if former else None

    def breaks(real, is_it):
        def wrapper(*args, **kwargs):
            if is_it(*args):
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return wrapper

    if at == "summary.json":
        hit = breaks(Path.write_text, lambda path, *_: path.name == at)
        monkeypatch.setattr(Path, "write_text", hit)
    elif at == "steps.parquet":
        hit = breaks(pq.ParquetWriter, lambda path, *_: path.name == at)
        monkeypatch.setattr(pq, "ParquetWriter", hit)
    else:
        hit = breaks(os.rename, lambda source, target: Path(target) == out)
        real, calls = os.rename, []

        def only_the_first(source, target):
            if Path(target) == out and not calls:
                calls.append(target)
                return hit(source, target)
            return real(source, target)

        monkeypatch.setattr(os, "rename", only_the_first)
    with pytest.raises(KeyboardInterrupt):
        write_run(out, a_run(seed=1), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if former else [])
    if former:
        assert content(out) == before


def test_a_former_run_is_replaced_only_if_asked(tmp_path):
    out = write_run(tmp_path / "run", a_run(), timeline=True)
    with pytest.raises(ResultsError) as raised:
        write_run(out, a_run(seed=1))
    assert "already holds a run; name another folder, or replace it with --overwrite" in one_line(
        raised
    )
    new = a_run(seed=1)
    write_run(out, new, overwrite=True)
    assert read_run(out).summary == new.summary
    assert {path.name for path in out.iterdir()} == FILES  # the old timeline is gone
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ResultsError) as raised:
        write_run(tmp_path, a_run(), overwrite=True)
    assert "thesis.tex" in one_line(raised)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write_run(tmp_path / "link", a_run())
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in (tmp_path / "empty").iterdir()} == FILES


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError) as raised:
        write_run(tmp_path / "file", a_run())
    assert "is a file" in one_line(raised)
    with pytest.raises(ResultsError) as raised:
        write_run(tmp_path / "file" / "run", a_run())
    assert "part of the path is a file" in one_line(raised)

    def refused(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(ResultsError) as raised:
        write_run(tmp_path / "run", a_run())
    assert "no permission" in one_line(raised)


def test_rows_that_are_wrong_are_found_before_anything_is_written(tmp_path):
    run = a_run()
    del run.rows.steps["waiting"]
    with pytest.raises(ResultsError, match=r"steps.parquet: no column waiting"):
        write_run(tmp_path / "run", run)
    run = a_run()
    run.rows.requests["stage"] = "third"
    with pytest.raises(ResultsError, match=r"requests.parquet: column stage is not int64"):
        write_run(tmp_path / "run", run)
    with pytest.raises(ResultsError, match=r"run.json.options.model: a object cannot be written"):
        write_run(tmp_path / "run", RunResult(toy_rows(), {"options": {"model": object()}}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FILES))
def test_missing_and_torn_files_are_named(tmp_path, name):
    path = write_run(tmp_path / "run", a_run()) / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResultsError) as raised:
        read_run(tmp_path / "run")
    assert name in one_line(raised) and "torn" in one_line(raised)
    path.unlink()
    with pytest.raises(ResultsError) as raised:
        read_run(tmp_path / "run")
    assert name in one_line(raised) and "missing" in one_line(raised)


def test_reading_what_is_no_run_says_so(tmp_path):
    with pytest.raises(ResultsError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match="holds no run"):
        read_run(tmp_path)


def test_json_is_sorted_and_takes_what_configurations_hold():
    @dataclass(frozen=True)
    class Options:
        path: Path
        limits: tuple[int, ...]

    value = {
        "b": np.float64("inf"),
        "a": Options(Path("x") / "y", (1, 2)),
        "c": np.array([1.5, np.nan]),
        "d": np.int64(7),
        "e": np.bool_(True),
    }
    text = dump_json(value)
    assert type(plain(np.float64(0.5))) is float
    assert json.loads(text) == {
        "a": {"path": os.path.join("x", "y"), "limits": [1, 2]},
        "b": None,
        "c": [1.5, None],
        "d": 7,
        "e": True,
    }
    assert text == dump_json(dict(reversed(value.items()))) and text.endswith("}\n")


LOAD = {"trace": "fixed:300,20", "rate": 30.0, "requests": 40, "slo": "none"}


@pytest.fixture(scope="module")
def runs():
    return simulate(SimulationConfig(policy=("vllm", "tgi"), **LOAD))


def test_what_is_written_reads_as_the_run(runs, tmp_path):
    file = tmp_path / "bench.json"
    write_bench(file, {"vllm": runs["vllm"]})
    assert detect_format(file.read_bytes(), "f") == "vllm-bench"
    found = read_measurement(file)
    ours, theirs = of_run("run", runs["vllm"]), of_measurement(found)
    for name in ("ttft", "tpot", "e2el"):
        assert theirs.latencies[name] == pytest.approx(ours.latencies[name])
    assert np.array_equal(theirs.prompt_tokens, ours.prompt_tokens)
    assert theirs.arrival_s == pytest.approx(ours.arrival_s)
    assert found.stated["mean_ttft_ms"] == runs["vllm"].summary["mean_ttft_ms"]
    assert found.gaps_s is None and "even" in found.notices[0]  # of a request, in the file


def test_several_policies_and_sweeps_are_a_list(runs, tmp_path):
    write_bench(tmp_path / "both.json", runs)
    assert [one["policy"] for one in json.loads((tmp_path / "both.json").read_text())] == list(runs)
    write_bench(tmp_path / "summary.json", {"vllm": runs["vllm"]})
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 1


def test_the_command_writes_it_and_replaces_nothing_unasked(tmp_path, capsys):
    words = "simulate -t fixed:300,20 --rate 30 --requests 10 -q --bench-json".split()
    file = tmp_path / "bench.json"
    for further, code in (([], 0), ([], BAD_INPUT), (["--overwrite"], 0)):
        assert status(main, [*words, file, *further]) == code
    assert "bench.json" in capsys.readouterr().err
    assert len(read_measurement(file)) == 10
