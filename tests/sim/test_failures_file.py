"""Files of failures: what they may say; whatever is wrong is one line with file, row and field."""

import json
import os

import pytest

import twinserve as ts
from tests.commands import status
from twinserve.errors import TwinserveError
from twinserve.sim.cli.main import main
from twinserve.sim.fleet.faults import Fault, Kind
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.error_bars import with_one_more
from twinserve.sim.setup.failures import read_failures, resolve_failures
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.sweep.sweep import check_names

TWO = [
    Fault(Kind.CRASH, 0, 20.0, 40.0),
    Fault(Kind.SLOW, 1, 10.0, 30.0, 3.0),
    Fault(Kind.DRAIN, 1, 50.0, grace_s=5.0),
]
YAML = """
- {replica: 0, kind: crash, at_s: 20, until_s: 40}
- {replica: 1, kind: slow, at_s: 10, until_s: 30, factor: 3}
- {replica: 1, kind: drain, at_s: 50, grace_s: 5}
"""
CSV = """replica,kind,at_s,until_s,factor,grace_s
0,crash,20,40,,
1,slow,10,30,3,
1, drain, 50,,,5
"""


@pytest.mark.parametrize(("name", "text"), [("f.yaml", YAML), ("f.csv", CSV)])
def test_a_file_says_what_fails_and_its_content_says_the_same(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = SimulationConfig(failures=str(tmp_path / name), replicas=2, start_up=7.0, seed=3)
    kept, found = resolve_failures(config, 2, False)
    assert list(found.faults) == TWO and (found.start_up_s, found.seed) == (7.0, 3)
    json.loads(kept.failures)
    assert resolve_failures(kept, 2, False) == (kept, found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no list of failures"),
        ("{a: 1}", "holds no list of failures"),
        ("- {replica: 0, at_s: 1}\n- crash", "row 2: 'crash' is no failure"),
        ("- {replica: 0}", "row 1: at_s: is missing"),
        ("- {replica: 9, at_s: 1}", "row 1: replica: there is no 9; the fleet has 3"),
        ("- {replica: -1, at_s: 1}", "row 1: replica: .* -1"),
        ("- {replica: 0, at_s: soon}", "row 1: at_s: .*'soon'"),
        ("- {replica: true, at_s: 5}", "row 1: replica: is true or false;.*True"),
        ("- {replica: 0, at_s: yes}", "row 1: at_s: is true or false;.*True"),
        ("- {replica: 0, at_s: 5, until_s: off}", "row 1: until_s: is true or false;.*False"),
        ("- {replica: 0, at_s: .inf}", "row 1: at_s: "),
        ("- {replica: 0, at_s: 5, until_s: 5}", "row 1: until_s: 5 is not after at_s"),
        ("- {replica: 0, at_s: 5, kind: crush}", "row 1: kind: .*'crush'.*crash"),
        ("- {replica: 0, at_s: 5, kind: slow}", "row 1: factor: is missing"),
        ("- {replica: 0, at_s: 5, factor: 2}", "row 1: factor: is for the kind slow"),
        ("- {replica: 0, at_s: 5, kind: slow, factor: 1}", "row 1: factor: "),
        ("- {replica: 0, at_s: 5, grace_s: 1}", "row 1: grace_s: is for the kind drain"),
        ("- {replica: 0, at_s: 5, utill_s: 7}", "row 1: utill_s: there is no such field.*until_s"),
        ("- {replica: 0, at_s: 5}\n- {replica: 0, at_s: 9}", "row 2: at_s: .* row 1 for ever"),
        (
            "- {replica: 0, at_s: 5, until_s: 9}\n- {replica: 0, kind: drain, at_s: 8}",
            "row 2: at_s: .* row 1 until 9 s",
        ),
        ("- {replica: 0, at_s: 5", "this is not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, said):
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=said) as error:
        resolve_failures(SimulationConfig(failures=str(file)), 3, False)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_csv_file_with_too_many_fields_is_refused(tmp_path):
    file = tmp_path / "f.csv"
    file.write_text("replica,at_s\n0,5,crash\n")
    with pytest.raises(SettingsError, match="row 1: has more fields"):
        read_failures(str(file))
    file.write_text(f"replica,at_s\n0,{'5' * 200_000}\n")
    with pytest.raises(SettingsError, match="f.csv: this is not CSV: field larger"):
        read_failures(str(file))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mttf": 5.0}, "--mttf needs --mttr"),
        ({"mttr": 5.0}, "--mttr needs --mttf"),
        ({"failures": "[]", "mttf": 5.0, "mttr": 1.0}, "--failures and --mttf both"),
        ({"on_failure": "retry"}, "--on-failure: nothing fails"),
        ({"detection": 2.0}, "--detection: nothing fails"),
        ({"detection": 2.0, "autoscale": "fixed", "grace": 1.0}, "--detection: nothing fails"),
        ({"retries": 5}, "--retries: nothing fails"),
        ({"start_up": 5.0}, "--start-up: nothing fails and nothing scales"),
        ({"grace": 5.0}, "--grace: nothing scales"),
        ({"min_replicas": 2}, "--min-replicas: nothing scales"),
        ({"max_replicas": 2}, "--max-replicas: nothing scales"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(SettingsError, match=said):
        SimulationConfig(**settings)


def test_ranks_that_share_experts_are_refused():
    config = SimulationConfig(mttf=5.0, mttr=1.0)
    with pytest.raises(SettingsError, match="--mttf: failures of data-parallel ranks"):
        resolve_failures(config, 2, True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"failures": "nope.yaml"}, "no such file"), ({"autoscale": "wav"}, "no autoscaler 'wav'")],
)
def test_a_sweep_finds_out_before_its_runs(settings, said):
    with pytest.raises(TwinserveError, match=said):
        check_names(SimulationConfig(**settings))


def test_more_crashes_than_a_run_gets_through_are_refused():
    often = {"mttf": 1e-6, "mttr": 0.0, "start_up": 0.0}
    with pytest.raises(SettingsError, match="--mttf 1e-06: means .* crashes"):
        resolve(SimulationConfig(trace="sharegpt", requests=5, rate=5.0, **often))


def test_a_file_that_can_be_read_once_is_read_once():
    read, write = os.pipe()
    os.write(write, b"- {replica: 0, at_s: 1}")
    os.close(write)
    config = SimulationConfig(trace="sharegpt", requests=2, failures=f"/dev/fd/{read}")
    (fault,) = resolve(config).failures.faults
    os.close(read)
    assert (fault.replica, fault.at_s) == (0, 1.0)


def run(words: list[str]) -> int:
    """Its exit status."""
    return status(main, words)


RUN = "simulate -t sharegpt --rate 20 --requests 40 --replicas 2 --quiet --json"


@pytest.mark.slow
def test_the_command_tells_what_failures_cost(capsys):
    failing = '[{"replica": 0, "at_s": 0.5, "until_s": 1.0}]'
    words = [*RUN.split(), "--failures", failing, "--on-failure", "retry", "--start-up", "0.5"]
    assert run([*words, "--spare"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]["failures"]
    assert found["crashes"] == 1 and found["requests"] == found["retried"] > 0
    assert found["discarded_output_tokens"] > 0 and found["failed"] == 0
    beside = found["beside"]
    assert beside.keys() == {"one_more_replica", "this_run", "without_failures"}
    assert all(run["completed"] == 40 for run in beside.values())
    ttft = {name: run["mean_ttft_ms"] for name, run in beside.items()}
    assert ttft["without_failures"] < ttft["this_run"]
    asked = {"rate": 20.0, "requests": 40, "replicas": 2, "on_failure": "retry", "start_up": 0.5}
    same = ts.simulate("vllm", "sharegpt", failures=failing, spare=True, **asked)
    assert same.summary["failures"]["beside"] == beside
    with pytest.raises(SettingsError, match="nothing fails"):
        ts.simulate("vllm", "sharegpt", requests=2, spare=True)


@pytest.mark.slow
def test_results_with_failures_are_written_and_read(tmp_path, capsys):
    from twinserve.sim.results.files import read_run
    from twinserve.sim.results.metrics import summarise

    words = [*RUN.split(), "--mttf", "1", "--mttr", "0.2", "--start-up", "0.1"]
    assert run([*words, "--out", str(tmp_path / "run"), "--timeline"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    rows = read_run(tmp_path / "run").rows
    assert summarise(rows)["failures"] == shown["failures"]
    assert len(rows.failures) == shown["failures"]["crashes"] > 0
    assert run(["simulate", "--config", str(tmp_path / "run" / "run.json"), "-q", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [shown]


def test_spare_without_failures_is_refused(capsys):
    assert run([*RUN.split(), "--spare"]) != 0
    assert "--spare: nothing fails" in capsys.readouterr().err
    scaling = ["--autoscale", "fixed", "--mttf", "5", "--mttr", "1"]
    assert run([*RUN.split(), "--spare", *scaling]) != 0
    assert "--spare: an autoscaler sets" in capsys.readouterr().err


def test_a_spare_replica_of_each_pool_leaves_the_failures_where_they_are(tmp_path):
    fleet, crash = tmp_path / "fleet.yaml", '[{"replica": 1, "at_s": 0.5}]'
    fleet.write_text("pools: [{name: a, replicas: 1}, {name: b, replicas: 2}]\n")
    config = SimulationConfig(
        trace="sharegpt", requests=20, rate=20.0, fleet=str(fleet), failures=crash
    )
    inputs = resolve(config)
    for given, count in ((inputs, 3), (with_one_more(inputs), 5)):
        rows = run_policy(given, given.policies[0]).rows
        assert rows.replicas.loc[rows.replicas["failed"], "pool"].tolist() == ["b"]
        assert len(rows.replicas) == count
