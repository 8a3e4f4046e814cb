"""The benchmark runs and says what it must; no figure is judged: that depends on the machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from tests.identity.originals import python_with
from twinserve.experiments.benchmark import beside, growth
from twinserve.experiments.benchmark import main as benchmark
from twinserve.experiments.benchmark import measure as bench_measure
from twinserve.experiments.benchmark.tables import markdown_tables, rich_tables, tables
from twinserve.sim.setup.config import SimulationConfig


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("benchmark") / "figures.json"
    with contextlib.suppress(SystemExit):  # how a command ends
        benchmark.main(["--quick", "--offline", "--out", str(out)])
    assert [path.name for path in out.parent.iterdir()] == ["figures.json"]
    return json.loads(out.read_text())


@pytest.mark.nightly
def test_says_where_it_ran_and_on_what(report):
    assert report["machine"]["cpu"] and report["machine"]["python"].count(".") == 2
    assert report["trace"]["name"] == "mooncake:conversation"
    assert report["trace"]["source"] in ("original", "embedded replica")


@pytest.mark.nightly
def test_whole_processes_are_measured_from_outside(report):
    vllm, bros = report["process"]
    assert vllm["command"].startswith("simulate --policy vllm --trace mooncake")
    assert "--pool 16" in bros["command"]
    for run in (vllm, bros):
        assert len(run["runs"]) == benchmark.QUICK.repeats
        for figure in ("wall_s", "cpu_s", "peak_rss_bytes"):
            assert 0 < run[figure]["min"] <= run[figure]["median"] <= run[figure]["max"]
        # an interpreter with numpy in it: a wrong unit would be off by 1024
        assert 30e6 < run["peak_rss_bytes"]["min"] < 3e9


@pytest.mark.nightly
def test_the_start_of_a_command_is_measured_by_itself(report):
    assert [run["command"] for run in report["pages"]] == ["simulate --version", "simulate --help"]
    for run in report["pages"]:
        assert len(run["runs"]) == benchmark.QUICK.pages and 0 < run["wall_s"]["min"]


@pytest.mark.nightly
def test_large_fleets_are_measured_from_outside(report):
    found = [(run["policy"], run["replicas"]) for run in report["fleets"]]
    assert found == [(p, n) for p in benchmark.POLICIES for n in (benchmark.QUICK.fleet, 8)]
    for run in report["fleets"]:
        assert 30e6 < run["peak_rss_bytes"] < 3e9 and run["cpu_s"] > 0


@pytest.mark.nightly
def test_every_size_and_policy_is_there(report):
    def sizes(section):
        return [(run["policy"], run["requests"]) for run in report[section]]

    assert sizes("growth") == [(p, n) for p in benchmark.POLICIES for n in benchmark.QUICK.growth]
    assert sizes("queue") == [(p, n) for p in benchmark.POLICIES for n in benchmark.QUICK.queues]
    assert sizes("paths") == [(p, benchmark.QUICK.paths) for p in benchmark.POLICIES]
    for run in (*report["speed"], *report["growth"], *report["queue"]):
        assert run["steps"] >= run["decisions"] / 2 > 0
        assert 0 < run["decision_mean_s"] and 0 < run["steps_per_s"]


def test_a_request_list_submitted_at_once_waits_in_the_queue():
    config = SimulationConfig(trace="sharegpt", requests=30, max_num_seqs=4)
    inputs, result = bench_measure.timed_run(config, at_once=True)
    assert (result.rows.requests["arrival_s"] == 0).all()
    assert result.summary["scheduler"]["max_waiting"] == 30 - 4
    assert inputs.workload.arrival_s.max() == 0


@pytest.mark.nightly
def test_tables_show_all_figures(report):
    text = markdown_tables(report)
    assert report["machine"]["cpu"] in text and report["trace"]["source"] in text
    for table in tables(report):
        assert table.title in text
        assert all(len(row) == len(table.header) for row in table.rows)
    console = Console(width=80, record=True, file=io.StringIO())
    rich_tables(report, console)
    shown = console.export_text()
    assert all(cell in shown for table in tables(report) for row in table.rows for cell in row)


@pytest.mark.nightly
def test_a_command_that_fails_is_an_error():
    with pytest.raises(bench_measure.BenchmarkError, match="exit code 2: error: .*no-such"):
        bench_measure.run_command(["--policy", "no-such"])


def test_results_that_differ_are_noticed():
    _, one = bench_measure.timed_run(SimulationConfig(trace="sharegpt", requests=5))
    _, same = bench_measure.timed_run(SimulationConfig(trace="sharegpt", requests=5, exact=True))
    _, other = bench_measure.timed_run(SimulationConfig(trace="sharegpt", requests=5, seed=1))
    assert bench_measure.same_results(one, same)
    assert not bench_measure.same_results(one, other)


def test_bad_input_is_one_line(tmp_path, capsys):
    for arguments in (["--bogus"], ["--out", str(tmp_path / "no" / "f.json")], ["--repeats", "0"]):
        with pytest.raises(SystemExit) as stop:
            benchmark.main(arguments)
        said = capsys.readouterr().err
        assert stop.value.code == 2
        assert said.startswith("error: ") and said.count("\n") == 1


def test_one_core_is_given_back():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system pins no processes")
    before = os.sched_getaffinity(0)
    with bench_measure.one_core() as core:
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_an_exponent_is_that_of_the_work_alone(power):
    sizes = [10, 100, 1_000, 10_000]
    values = [0.5 + 1e-3 * size**power for size in sizes]
    assert growth.exponent(sizes, values, 0.5, 3.0) == pytest.approx(power)
    assert growth.exponent(sizes[:2], values[:2], 0.5, 3.0) is None  # start-up is most of it


def test_work_that_grows_faster_is_told_from_time_that_does():
    """Stays grow with the square of the size, time in proportion to them."""
    empty = {"cpu_s": 1.0, "peak_rss_bytes": 1e6}
    found = {
        size: {"cpu_s": 1.0 + 1e-3 * size**2, "stays": size**2, "peak_rss_bytes": 1e6 * size}
        for size in (10, 100, 1_000, 10_000)
    }
    series = growth._series("together", "vllm", found, empty)
    assert series["cpu_s_exponent"] == pytest.approx(2.0)
    assert series["stays_exponent"] == pytest.approx(2.0)
    assert series["cpu_s_over_stays_exponent"] == pytest.approx(1.0)
    (table,) = growth.tables({"series": [series]})
    assert table.rows[0][-4:-1] == ("2.00", "2.00", "1.00")


@pytest.mark.nightly
def test_growth_is_measured_along_every_axis(tmp_path, capsys):
    out = tmp_path / "growth.json"
    with contextlib.suppress(SystemExit):
        growth.main(["--quick", "--policy", "vllm", "--markdown", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [series["axis"] for series in report["series"]] == list(growth.AXES)
    for series in report["series"]:
        assert [point["size"] for point in series["points"]] == list(growth.QUICK["requests"])
        assert all(point["cpu_s"] > 0 < point["peak_rss_bytes"] for point in series["points"])
        assert all(point["steps"] > 0 for point in series["points"])
    stays = {each["axis"]: [p["stays"] for p in each["points"]] for each in report["series"]}
    quick = list(growth.QUICK["requests"])  # nobody is preempted
    assert stays["requests"] == stays["together"] == quick
    assert stays["replicas"] == [10 * size for size in quick]
    assert all(n >= 40 + size for n, size in zip(stays["pool"], quick, strict=True))
    said = capsys.readouterr().out
    assert said.count("| vllm |") == len(growth.AXES) and "exponent of time" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--axis", "seeds"], "--axis seeds: there are requests, together"),
        (["--largest", "1"], "--largest 1: at least 2"),
    ],
)
def test_growth_says_what_it_cannot_do(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        growth.main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


# -- beside Dynamo's simulator ---------------------------------------------------------------------
def _requests(folder, count: int):
    lines = [
        {"timestamp": 10 * i, "input_length": 700, "output_length": 5, "hash_ids": [0, i + 1]}
        for i in range(count)
    ]
    file = folder / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


@pytest.mark.nightly
def test_both_simulators_are_measured_on_the_same_trace(tmp_path, capsys):
    out, trace = tmp_path / "beside.json", _requests(tmp_path, 20)
    asked = ["--trace", str(trace), "--repeats", "1", "--markdown", "--out", str(out)]
    with contextlib.suppress(SystemExit):
        beside.main([*asked, "--dynamo", python_with("dynamo.replay")])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["simulator"], row["replicas"]) for row in rows] == [
        ("twinserve", 1), ("dynamo.replay", 1), ("twinserve", 8), ("dynamo.replay", 8)
    ]  # fmt: skip
    assert all(row["cpu_s"] > 0 < row["peak_rss_bytes"] for row in rows)
    printed = capsys.readouterr().out
    assert printed.count("| dynamo.replay |") == 2 and printed.count("| peak memory |") == 2


def test_limits_say_which_are_kept():
    def row(name: str, replicas: int, cpu_s: float, peak: float) -> dict:
        return {
            "simulator": name, "replicas": replicas, "wall_s": 9.0, "cpu_s": cpu_s,
            "peak_rss_bytes": peak,
        }  # fmt: skip

    ours = [row("twinserve", 1, s, 3e8) for s in (2.8, 2.0)] + [row("twinserve", 8, 4.0, 4e8)] * 2
    theirs = [row("dynamo.replay", n, 3.0, 6e8) for n in (1, 1, 8, 8)]
    figures, limits = beside.tables([*ours, *theirs])
    assert figures.rows[0][2:] == ("2.00", "2.40", "2.80", "300")
    assert limits.rows == [
        ("CPU min", "1", "0.67", "0.70", "yes"),
        ("peak memory", "1", "0.50", "0.50", "yes"),
        ("CPU min", "8", "1.33", "0.95", "no"),
        ("peak memory", "8", "0.67", "0.50", "no"),
    ]
    assert len(beside.tables(ours)) == 1  # nothing to compare with


def test_measured_commands_keep_their_bytecode(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    with bench_measure.kept_bytecode():
        assert "PYTHONDONTWRITEBYTECODE" not in os.environ
        assert Path(os.environ["PYTHONPYCACHEPREFIX"]).is_dir()
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"
    assert "PYTHONPYCACHEPREFIX" not in os.environ


def test_a_simulator_that_is_not_there_ends_as_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        beside.main(["--trace", str(tmp_path / "none.jsonl")])
    assert end.value.code == 2
    assert "there is no such file" in capsys.readouterr().err
