"""Sweeps from the command line: what is written, kept, gone on with, and what fails."""

import json
import shutil
import sys
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path

import pandas as pd
import pytest

from tests.commands import status
from twinserve.sim.cli.main import main
from twinserve.sim.report.static import new_figure
from twinserve.sim.results.files import dump_json
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.error_bars import add_error_bars
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_each, run_policy
from twinserve.sim.sweep import draw, one
from twinserve.sim.sweep.executors import InThisProcess, completed, local, processes
from twinserve.sim.sweep.one import flat
from twinserve.sim.sweep.output import write_results
from twinserve.sim.sweep.points import KEPT
from twinserve.sim.sweep.sweep import digest_of, spread
from twinserve.traces.workload import WorkloadError

BASE = {"--trace": "fixed:40,4", "--requests": "6", "--workers": "1"}
PROFILE = "llama-3.1-8b@h100"
GRID = "--grid policy=vllm,bros --grid rate=10,20 --seeds 2".split()
FILES = ("runs.parquet", "table.csv", "sweep.json", "plot.png", "plot.svg", "plot.pdf")


def sweep(out: Path, *words: str) -> int:
    """Its exit status; settings of BASE where `words` have none of their own."""
    base = [part for flag, value in BASE.items() if flag not in words for part in (flag, value)]
    return status(main, ["sweep", *base, "--profile", PROFILE, "--out", str(out), *words])


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    """What is drawn is the matter of test_sweep_plots.py."""
    monkeypatch.setattr(draw, "plot", lambda *_: new_figure(1, 1))


@pytest.fixture(autouse=True)
def _undivided(monkeypatch):
    """One worker is this process, for speed; a sweep of a user's starts one even then."""
    monkeypatch.setattr("twinserve.sim.sweep.executors.processes", local)


@pytest.fixture
def ran(monkeypatch) -> list:
    """Settings of the runs that are run, not taken from what is kept."""
    found: list[dict] = []

    def counted(config, *args, **kwargs):
        found.append(config.model_dump())
        return resolve(config, *args, **kwargs)

    monkeypatch.setattr(one, "resolve", counted)
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A folder of the whole grid, for tests that only look at it."""
    folder = tmp_path_factory.mktemp("swept")
    assert sweep(folder, *GRID) == 0
    return folder


@pytest.fixture
def swept_before(swept, tmp_path) -> Path:
    """A folder of one's own with what that sweep left."""
    return shutil.copytree(swept, tmp_path / "swept")


@pytest.mark.slow
def test_a_row_holds_every_number_of_the_runs_summary(swept):
    frame = pd.read_parquet(swept / "runs.parquet")
    assert list(zip(frame.policy, frame.rate, frame.seed, strict=True)) == [
        (p, r, s) for p in ("vllm", "bros") for r in (10, 20) for s in (0, 1)
    ]
    config = SimulationConfig(
        policy=("bros",), trace="fixed:40,4", requests=6, profile=PROFILE, rate=20, seed=1
    )
    inputs = resolve(config)
    summary = flat(json.loads(dump_json(run_policy(inputs, inputs.policies[0]).summary)))
    last = frame.iloc[-1].to_dict()
    for name, value in summary.items():
        assert last[name] == value or (value is None and pd.isna(last[name])), name
    assert {"classes.rt.p99_ttft_ms", "kv.preemptions.swap", "output_throughput"} <= set(summary)


@pytest.mark.slow
def test_the_table_has_means_and_intervals_over_seeds(swept):
    frame = pd.read_parquet(swept / "runs.parquet")
    table = pd.read_csv(swept / "table.csv")
    assert len(table) == 4 and set(table.seeds) == {2}
    first = frame.mean_ttft_ms[:2]
    assert table.mean_ttft_ms[0] == pytest.approx(first.mean())
    # of two values: t of one degree of freedom, 12.706, times half of their distance
    assert table.mean_ttft_ms_ci[0] == pytest.approx(12.7062 * abs(first[0] - first[1]) / 2)


@pytest.mark.slow
def test_the_same_command_runs_nothing_and_writes_the_same_bytes(tmp_path, ran, capsys):
    sweep(tmp_path, *GRID)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    assert len(ran) == 8
    capsys.readouterr()
    sweep(tmp_path, *GRID, "--json", "--baseline", "policy=vllm")
    found, kept = json.loads(capsys.readouterr().out), pd.read_csv(tmp_path / "table.csv")
    assert found["version"] == 1 and found["objectives"][1] == "rt: TPOT < 200 ms"
    assert isinstance(found["notices"], list)
    assert [(r["policy"], r["rate"]) for r in found["runs"]] == [
        *zip(kept.policy, kept.rate, strict=True)
    ]
    assert found["runs"][3]["label"] == "bros, rate=20"
    assert [r["mean_ttft_ms_ci"] for r in found["runs"]] == pytest.approx(kept.mean_ttft_ms_ci)
    assert {r["policy"] for r in found["differences"]} == {"bros"}
    assert len(ran) == 8
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


@pytest.mark.slow
def test_only_what_is_missing_or_damaged_is_run_again(swept_before, ran):
    gone, torn, _, other, text, broken, *_ = sorted((swept_before / KEPT).glob("*.json"))
    gone.unlink()
    torn.write_bytes(torn.read_bytes()[:-20])
    other.write_text(json.dumps(json.loads(other.read_text()) | {"sources": "other"}))
    for file, value in ((text, "hello"), (broken, "\ud800")):  # edited by hand
        kept = json.loads(file.read_text())
        kept["rows"][0]["mean_ttft_ms"] = value
        file.write_text(json.dumps(kept))
    before = (swept_before / "runs.parquet").read_bytes()
    sweep(swept_before, *GRID)
    assert len(ran) == 5
    assert (swept_before / "runs.parquet").read_bytes() == before


def test_rows_that_do_not_fit_each_other_are_one_line(tmp_path):
    for odd in ("hello", "\ud800"):
        frame = pd.DataFrame({"ttft": pd.Series([1.0, odd], dtype=object)})
        with pytest.raises(WorkloadError, match="kept rows do not fit each other .*remove that"):
            write_results(tmp_path, frame, frame, frame, {})


def test_earlier_results_stay_until_others_are_written(tmp_path, monkeypatch):
    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    frame = pd.DataFrame({"seed": [0]})
    good = frame, frame, frame[:0], {}
    write_results(tmp_path, *good)
    (tmp_path / "differences.csv").touch()
    before = files()
    write_results(tmp_path, frame[:0], frame[:0], frame, {"runs": 1})  # all failed
    assert files() == before | {"failures.csv": b"seed\n0\n"}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("twinserve.sim.sweep.output.write_together", lambda _: 1 / 0)
        write_results(tmp_path, *good)
    assert before.items() <= files().items()
    write_results(tmp_path, *good)
    assert files().keys() == {"runs.parquet", "table.csv", "sweep.json"}


@pytest.mark.slow
def test_a_larger_sweep_adds_its_own_runs_only(tmp_path, ran):
    sweep(tmp_path, "--grid", "rate=10", "--seeds", "1")
    sweep(tmp_path, "--grid", "rate=5,10", "--seeds", "2")
    assert sorted((run["rate"], run["seed"]) for run in ran) == [(5, 0), (5, 1), (10, 0), (10, 1)]


@pytest.fixture
def long_request(tmp_path) -> Path:
    """A trace whose request needs more than 3 blocks of memory."""
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5}\n')
    return trace


def test_a_run_that_fails_is_told_apart_and_the_rest_is_complete(tmp_path, long_request, capsys):
    words = ["--trace", str(long_request), "--grid", "num-blocks=3,4000", "--seeds", "2"]
    out = tmp_path / "out"
    assert sweep(out, *words) == 1
    failures = pd.read_csv(out / "failures.csv")
    assert failures.num_blocks.tolist() == [3, 3] and failures.seed.tolist() == [0, 1]
    assert all("tokens" in line and "\n" not in line for line in failures.error)
    assert "2 of 4 runs failed, the first with: " + failures.error[0] in capsys.readouterr().err
    assert pd.read_parquet(out / "runs.parquet").num_blocks.tolist() == [4000, 4000]


@pytest.mark.slow
def test_what_failed_is_run_again_only_where_that_is_asked_for(tmp_path, monkeypatch):
    fails, calls = {1}, []

    def brittle(config, *args, **kwargs):
        calls.append(config.seed)
        if config.seed in fails:
            raise MemoryError("no\nroom")
        return resolve(config, *args, **kwargs)

    monkeypatch.setattr(one, "resolve", brittle)
    assert sweep(tmp_path, "--seeds", "3") == 1
    (error,) = pd.read_csv(tmp_path / "failures.csv").error
    assert error.startswith("MemoryError: no room (test_sweep.py, line ")
    assert sweep(tmp_path, "--seeds", "3") == 1 and sorted(calls) == [0, 1, 2]
    fails.clear()
    assert sweep(tmp_path, "--seeds", "3", "--retry-failed") == 0 and calls[3:] == [1]
    assert not (tmp_path / "failures.csv").exists()
    assert pd.read_parquet(tmp_path / "runs.parquet").seed.tolist() == [0, 1, 2]


def test_a_failure_of_other_code_is_run_again(tmp_path, monkeypatch, ran):
    monkeypatch.setattr(one, "run_each", lambda *_, **__: 1 / 0)
    assert sweep(tmp_path, "--seeds", "1") == 1
    (file,) = (tmp_path / KEPT).glob("*.json")
    assert json.loads(file.read_text())["failed"].startswith("ZeroDivisionError: division by zero")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sources": "other"}))
    monkeypatch.setattr(one, "run_each", run_each)
    assert sweep(tmp_path, "--seeds", "1") == 0 and len(ran) == 2


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path, capsys):
    assert sweep(tmp_path / "out", *GRID, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1: policy=vllm rate=10 seed=0" and len(lines) == 9
    assert lines[-1] == "8 runs, 8 of them still to be run"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid lod=1", "--grid lod=1: no setting 'lod'"),
        ("--grid rate=1 --grid load=1", "with --grid load=1: --load and --rate both"),
        ("--grid policy=vllm,brso", "--grid policy=brso: no policy 'brso'"),
        ("--grid router=nope", "--grid router=nope: no router"),
        ("--grid trace=nope", "--grid trace=nope: unknown trace 'nope'"),
        ("--grid load=1,1", "is the same run as"),
        ("--params nowhere.json", "there is no such file"),
        ("--seeds 0", "must be from 1"),
        ("--grid load=1 --plot x=rate", "--plot x=rate: no combination names it"),
        ("--grid load=1 --plot z=1", "--plot z=1: write x=SETTING"),
        ("-p vllm -p bros --grid policy=vllm", "policy is set by --policy as well"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_run(tmp_path, words, said, capsys, ran):
    assert sweep(tmp_path / "out", *words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1
    assert not ran and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_is_asked_of_the_metrics_is_part_of_a_run(tmp_path, ran):
    sweep(tmp_path, "--seeds", "1")
    sweep(tmp_path, "--seeds", "1", "--percentiles", "50,75", "--goodput", "ttft:1000")
    found = pd.read_parquet(tmp_path / "runs.parquet")
    assert len(ran) == 2 and found.request_goodput[0] > 0 and "p75_ttft_ms" in found


def test_two_sweeps_at_once_in_one_folder_are_refused(tmp_path, capsys):
    from twinserve.sim.sweep.sweep import _alone_in

    (tmp_path / KEPT).mkdir()
    with _alone_in(tmp_path / KEPT):
        assert sweep(tmp_path, "--seeds", "1") == 2
    assert "another sweep is running there" in capsys.readouterr().err
    assert sweep(tmp_path, "--seeds", "1") == 0


# -- digests ---------------------------------------------------------------------------------------
def test_a_digest_covers_every_setting():
    plain = digest_of(SimulationConfig())
    assert plain == digest_of(SimulationConfig(policy=("vllm",)))
    for other in ({"seed": 1}, {"policy": ("bros",)}, {"load": 0.7}, {"replicas": 2}):
        assert digest_of(SimulationConfig(**other)) != plain


@pytest.mark.parametrize(
    ("setting", "file"),
    [
        ({"trace": "{}"}, "t.jsonl"),
        ({"trace": "{}"}, "t.jsonl.meta.json"),
        ({"profile": "{}"}, "p.json"),
        ({"policy": ("{}:Mine:x=1",)}, "mine.py"),
        ({"policy": ("justitia:training={},x=2",)}, "train.csv"),
    ],
)
def test_a_digest_covers_the_content_of_files(tmp_path, setting, file):
    path = tmp_path / file
    named = str(path).removesuffix(".meta.json")

    def filled(value):
        return (value[0].format(named),) if isinstance(value, tuple) else value.format(named)

    config = SimulationConfig(**{name: filled(value) for name, value in setting.items()})
    found = [digest_of(config)]
    for content in ("1", "2", "1"):
        path.write_text(content)
        found.append(digest_of(config))
    assert found[1] == found[3] and len(set(found)) == 3


@pytest.mark.slow
def test_a_changed_policy_file_is_run_again(tmp_path, ran):
    policy = tmp_path / "mine.py"
    text = (
        "from twinserve.policies.baselines.vllm import VllmPolicy\n"
        "class Mine(VllmPolicy):\n    name = 'mine'\n"
    )
    for content, runs in ((text, 1), (text, 1), (text + "# another\n", 2)):
        policy.write_text(content)
        assert sweep(tmp_path / "out", "-p", f"{policy}:Mine") == 0
        assert len(ran) == runs


# -- executors -------------------------------------------------------------------------------------
class Breaking(InThisProcess):
    """A pool that breaks whenever it is asked for the call 3, and loses all that is under way."""

    window = 4

    def __init__(self) -> None:
        self.waiting: list[Future] = []
        self.broken, self.restarts, self.together = False, 0, True

    def submit(self, fn, /, *args, **kwargs) -> Future:
        if self.broken:
            raise BrokenExecutor("broken")
        future: Future = Future()
        if args == (3,):
            self.broken = True
            for lost in self.waiting:
                lost.set_exception(BrokenExecutor("lost"))
            self.waiting.clear()
            future.set_exception(BrokenExecutor("ended"))
        elif self.together:
            self.waiting.append(future)
        else:
            future.set_result(fn(*args))
        return future

    def restart(self) -> None:
        self.broken, self.together = False, False
        self.restarts += 1


def test_a_call_that_ends_its_worker_is_the_only_one_lost():
    workers = Breaking()
    found = dict(completed(workers, str, {n: (n,) for n in range(6)}))
    assert isinstance(found.pop(3).exception(), BrokenExecutor) and workers.restarts >= 1
    assert {n: future.result() for n, future in found.items()} == {n: str(n) for n in found}
    assert set(found) == {0, 1, 2, 4, 5}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.nightly)])
def test_a_worker_that_dies_fails_its_own_run_alone(tmp_path, monkeypatch, workers):
    """The real pool: a policy that ends its process."""
    policy = tmp_path / "deadly.py"
    policy.write_text(
        "import os\nfrom twinserve.policies.baselines.vllm import VllmPolicy\n"
        "class Deadly(VllmPolicy):\n    name = 'deadly'\n"
        "    def plan(self, view, ledger):\n        os._exit(9)\n"
    )
    out = tmp_path / "out"
    monkeypatch.setattr("twinserve.sim.sweep.executors.processes", processes)
    words = ["--workers", workers, "--seeds", "4", "-p", "vllm", "-p", f"{policy}:Deadly"]
    assert sweep(out, *words) == 1
    assert len(pd.read_parquet(out / "runs.parquet")) == 4
    failures = pd.read_csv(out / "failures.csv")
    assert len(failures) == 4 and all("worker ended" in line for line in failures.error)


@pytest.mark.slow
def test_two_processes_give_the_same_bytes_as_one(tmp_path):
    assert sweep(tmp_path / "one", *GRID) == 0
    assert sweep(tmp_path / "two", *GRID, "--workers", "2") == 0
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_ray_that_is_missing_is_said_with_what_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert sweep(tmp_path, "--executor", "ray") == 2
    assert "pip install 'twinserve[ray]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_bytes(tmp_path, monkeypatch, long_request):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["--trace", str(long_request), "--grid", "num-blocks=3,4000", "--seeds", "2"]
    words += ["--grid", "policy=vllm,bros:kv=paged"]
    assert sweep(tmp_path / "local", *words) == 1
    assert sweep(tmp_path / "ray", *words, "--executor", "ray", "--workers", "2") == 1
    for name in (*FILES, "failures.csv"):
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()


def test_requests_that_were_cut_in_some_runs_are_told(tmp_path, capsys):
    """On less memory the same trace is cut: rows side by side are then of different requests."""
    words = ["--trace", "sharegpt", "--requests", "40", "--rate", "5"]
    assert sweep(tmp_path, *words, "--grid", "num-blocks=30,5000") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note (1 of 2 runs): " in out and "cut to that length" in out
    frame = pd.read_parquet(tmp_path / "runs.parquet")
    assert "cut to that length" in frame.notices[0] and pd.isna(frame.notices[1])


# -- what runs say of their requests ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "slo=fast,none"], "--slo 'fast'"),
        (["--grid", "front-end=vlm"], "no front end 'vlm'"),
        (["--grid", "warmup=5"], "no setting 'warmup' that may vary"),
        (["--seeds", "0"], "--seeds 0: must be from 1 to 1000"),
        (["--workers", "9999"], "--workers 9999: must be from 1 to 1000"),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_run(tmp_path, capsys, ran, words, said):
    assert sweep(tmp_path / "out", *words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not ran and not (tmp_path / "out").exists()


def test_a_sweep_does_not_go_into_the_folder_of_a_run(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert sweep(tmp_path, "--grid", "rate=5,10") == 2
    assert "is the folder of a run; name another one" in capsys.readouterr().err


def test_a_defect_in_a_policy_is_told_with_its_place(tmp_path, capsys):
    policy = tmp_path / "broken.py"
    policy.write_text(
        "from twinserve.policies.baselines.vllm import VllmPolicy\n"
        "class Broken(VllmPolicy):\n    name = 'broken'\n"
        "    def plan(self, view, ledger):\n        return 1 / 0\n"
    )
    assert sweep(tmp_path / "out", "--grid", f"policy=vllm,{policy}:Broken") == 1
    (error,) = pd.read_csv(tmp_path / "out" / "failures.csv").error
    assert error.endswith("/broken.py:5: ZeroDivisionError: division by zero")


@pytest.mark.slow
def test_error_bars_of_a_sweep_are_those_of_its_runs(tmp_path, capsys):
    """Each number with an error bar lies within it, and its ends are what `simulate` finds."""
    words = ["--trace", "sharegpt", "--requests", "20", "--rate", "20", "--seeds", "2"]
    assert sweep(tmp_path / "out", *words, "--error-bars") == 0
    runs = pd.read_parquet(tmp_path / "out" / "runs.parquet")
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    found = [name.removesuffix(".low") for name in runs if name.endswith(".low")]
    assert "classes.rt.mean_ttft_ms" in found and "output_throughput" in found
    for name in found:
        assert (runs[f"{name}.low"] <= runs[name]).all() and (
            runs[name] <= runs[f"{name}.high"]
        ).all()
        assert table[f"{name}.low"].iloc[0] == pytest.approx(
            runs[f"{name}.low"].mean(), nan_ok=True
        )
    inputs = resolve(
        SimulationConfig(trace="sharegpt", requests=20, rate=20.0, profile=PROFILE, seed=1)
    )
    (spec,) = inputs.policies
    result = run_policy(inputs, spec)
    add_error_bars(inputs, spec, result)
    low, high = result.summary["error_bars"]["classes.rt.mean_ttft_ms"]
    row = runs[runs["seed"] == 1].iloc[0]
    assert (row["classes.rt.mean_ttft_ms.low"], row["classes.rt.mean_ttft_ms.high"]) == (low, high)
    printed = capsys.readouterr().out
    assert "[low, high]: step times off by the expected error" in printed
    assert printed.count("[") > 3


@pytest.mark.slow
def test_runs_without_error_bars_are_not_taken_for_runs_with_them(tmp_path, ran):
    words = ["--requests", "3"]
    assert sweep(tmp_path, *words) == 0
    assert sweep(tmp_path, *words, "--error-bars") == 0
    assert len(ran) == 2
    assert sweep(tmp_path, *words) == 0 and sweep(tmp_path, *words, "--error-bars") == 0
    assert len(ran) == 2


def test_runs_are_spread_over_the_list_so_that_the_first_ones_are_like_the_others():
    assert spread(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert all(sorted(spread(range(n))) == list(range(n)) for n in (1, 2, 5, 64))
