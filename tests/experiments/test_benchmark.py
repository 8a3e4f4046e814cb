"""The benchmark runs and says what it must; no figure is judged: that depends on the machine."""

import math
import os
import sys

import pandas as pd
import pytest

from tests.experiments.study_checks import quick_run, table
from tests.identity.originals import python_with
from twinserve.experiments.benchmark import main as benchmark
from twinserve.experiments.benchmark.measure import BenchmarkError, one_core, run_process
from twinserve.experiments.study.study import Scale
from twinserve.sim.setup.config import SettingsError

out = quick_run(benchmark.STUDY)


@pytest.mark.nightly
def test_every_figure_is_in_the_report(out):
    report = (out / "tables.md").read_text()
    assert report.count("\n## ") == len(benchmark.FIGURES) and "not run" not in report
    (machine,) = table(out, "machine").to_dict("records")
    assert machine["cpu"] in report and machine["python"].count(".") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("figure", ["process", "fleets", "dynamo"])
def test_whole_processes_are_measured_from_outside(out, figure):
    found = table(out, figure)
    assert (found.wall_s > 0).all() and (found.cpu_s > 0).all()
    # an interpreter with numpy in it: a wrong unit would be off by 1024
    assert found.peak_mb.between(30, 3000).all()


@pytest.mark.nightly
def test_every_size_and_policy_is_there(out):
    for figure in ("growth",):
        found = table(out, figure)
        assert len(found) == 4 and list(found.policy.unique()) == list(benchmark.POLICIES)
        assert (found.steps >= found.decisions / 2).all() and (found.decision_us > 0).all()
    pool = table(out, "process")
    assert list(pool.policy) == ["vllm", "bros"]


@pytest.mark.nightly
def test_both_simulators_are_measured_in_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSERVE_DYNAMO", python_with("dynamo.replay"))
    benchmark.STUDY.run(("dynamo",), Scale(quick=True, seeds=(0, 1)), tmp_path, workers=1)
    found = pd.read_csv(tmp_path / "dynamo" / "points.csv")
    assert found.simulator.tolist() == ["twinserve", "dynamo.replay"] * 4
    assert found.replicas.tolist() == [1] * 4 + [8] * 4 and (found.cpu_s > 0).all()


def test_limits_stand_beside_our_figures():
    points = [
        {"simulator": name, "replicas": n, "seed": seed, "cpu_s": cpu_s, "peak_mb": peak}
        for name, n, seed, cpu_s, peak in (
            *(("twinserve", 1, 0, 2.8, 300.0), ("twinserve", 1, 1, 2.0, 300.0)),
            *(("twinserve", 8, 0, 4.0, 400.0), ("dynamo.replay", 1, 0, 3.0, 600.0)),
            ("dynamo.replay", 8, 0, 3.0, 600.0),
        )
    ]
    found = benchmark.with_limits(pd.DataFrame(points))
    ours, theirs = found[:2], found[2:]
    assert ours.cpu_s.tolist() == [2.4, 4.0] and ours.cpu_over.round(2).tolist() == [0.67, 1.33]
    assert ours.cpu_limit.tolist() == [0.7, 0.95] and ours.peak_over.round(2).tolist() == [
        0.5,
        0.67,
    ]
    assert theirs[["cpu_over", "peak_limit"]].isna().all(axis=None)
    alone = benchmark.with_limits(pd.DataFrame(points[:3]))
    assert alone.cpu_over.isna().all()  # nothing to compare with


def test_measured_commands_keep_their_bytecode(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    said = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    _, printed = run_process([sys.executable, "-c", said])
    off, folder = printed.decode().split()
    assert off == "False" and os.path.isdir(folder)


def test_only_some_points(tmp_path):
    """And figures of which none is left are not run."""
    scale, only = Scale(quick=True, seeds=(0,)), ("policy=bros", "requests=1000", "requests=2")
    benchmark.STUDY.run(("growth", "fleets"), scale, tmp_path, 1, only=only)
    (row,) = table(tmp_path, "growth").to_dict("records")
    assert (row["policy"], row["requests"], row["done"]) == ("bros", 1000, 20)
    assert not (tmp_path / "fleets").exists()
    with pytest.raises(SettingsError, match="--only policy=none: no point"):
        benchmark.STUDY.run((), scale, tmp_path, 1, only=("policy=none",))


@pytest.mark.slow
def test_a_command_that_fails_is_an_error_and_one_that_does_not_end_has_no_figures():
    with pytest.raises(BenchmarkError, match="exit code 3: no such thing"):
        run_process([sys.executable, "-c", "print('no such thing'); exit(3)"])
    found, _ = run_process([sys.executable, "-c", "while True: pass"], limit_s=1)
    assert all(map(math.isnan, found.values()))


def test_one_core_is_given_back():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system pins no processes")
    before = os.sched_getaffinity(0)
    with one_core() as core:
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
