"""Failures of simulated fleets: whatever fails, whenever, under any policy and router, every
request ends exactly once, and nothing is lost or kept (docs/fleet.md)."""

import json
import math
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import twinserve as ts
from tests.commands import status
from tests.examples import examples
from tests.parameters import SOME_POLICIES, mostly_nightly
from tests.sim.troubled import TABLES, Audited, conserving
from twinserve.errors import TwinserveError
from twinserve.policies.registry import parse_policy, policy_names
from twinserve.policies.requests import End
from twinserve.sim.cli.main import main
from twinserve.sim.fleet.faults import Fault, Kind, Schedule
from twinserve.sim.fleet.routers.registry import router_names
from twinserve.sim.results.files import RunRows
from twinserve.sim.results.metrics_fleet import describe_failures
from twinserve.sim.setup.audit import CROWDED, crowd
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.error_bars import with_one_more
from twinserve.sim.setup.failures import read_failures, resolve_failures
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.run import Simulation, run_policy
from twinserve.sim.sweep.sweep import check_names
from twinserve.traces.workload import Workload

ACTIONS = ("error", "retry", "migrate")
NOTHING = Schedule((Fault(Kind.CRASH, 0, 1e6),))  # long after the last request


class Failing(Audited):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, inputs.policies[0])


def run_of(failures: Schedule | None, workload: Workload, **settings) -> Failing:
    config = CROWDED.model_copy(update=settings)
    specs = (parse_policy("vllm"),)
    hardware = resolve_hardware(config)
    run = Failing(Inputs(config, workload, hardware, specs, (), failures=failures))
    run.run()
    return run


def schedule(seed: int, count: int, replicas: int) -> Schedule:
    """So many failures of all kinds, at random times while requests are there."""
    rng = np.random.default_rng([seed, 17])
    busy_s: dict[tuple[int, bool], float] = {}
    faults = []
    for at_s in np.sort(rng.exponential(0.25, count)).tolist():
        kind, replica = list(Kind)[rng.integers(len(Kind))], int(rng.integers(replicas))
        lasts = rng.random() < 0.2
        until_s = math.inf if lasts else at_s + float(rng.exponential(0.1)) + 1e-3
        slot = replica, kind in (Kind.CRASH, Kind.DRAIN)
        if at_s < busy_s.get(slot, 0.0):
            continue
        busy_s[slot] = until_s
        grace_s = float(rng.exponential(0.1)) if rng.random() < 0.5 else None
        faults.append(Fault(kind, replica, at_s, until_s, 1.0 + rng.exponential(3.0), grace_s))
    if seed % 5 == 0:  # draws of its own instead
        return Schedule((), 0.2, 0.1, seed, start_up_s=0.05)
    return Schedule(tuple(faults), start_up_s=float(rng.exponential(0.05)) * (seed % 2))


def inputs_of(policy: str, seed: int, failures: Schedule | None, **settings) -> Inputs:
    """Of a crowd of requests with little memory."""
    replicas = 1 + seed % 3
    config = CROWDED.model_copy(update={"exact": True, "replicas": replicas, **settings})
    hardware, spec = resolve_hardware(config), parse_policy(policy)
    return Inputs(config, crowd(seed), hardware, (spec,), (), failures=failures)


def failing(policy: str, seed: int, count: int = 8, **settings) -> tuple[Failing, RunRows]:
    """A run as `conserving` makes it."""
    settings = {"async_scheduling": False, "on_failure": ACTIONS[seed % 3], **settings}
    settings.setdefault("detection", 0.0 if seed % 4 == 0 else 0.03)
    inputs = inputs_of(policy, seed, schedule(seed, count, 1 + seed % 3), **settings)
    run, rows = conserving(Failing, inputs, (*TABLES, "failures"))
    counted(run, rows)
    return run, rows


def counted(run: Failing, rows: RunRows) -> None:
    """What was hit has failed, was placed again, or its client left, and nobody more than once too
    often."""
    table, most = rows.failures, run.inputs.config.retries
    ends = table[["failed", "retried", "migrated", "left"]].sum(axis=1)
    assert (ends == table["requests"]).all() and (table[["failed", "left"]] >= 0).all().all()
    hit = table["requests"].sum()
    lost = sum(request.failures for request in run.fleet.requests)
    by_error = run.inputs.config.on_failure == "error"
    assert table["left"].sum() + lost == hit or by_error and lost <= hit
    assert all(r.failures <= most + 1 for r in run.fleet.requests)
    for request in run.fleet.requests:
        if run.inputs.config.on_failure != "retry":
            assert not request.discarded_tokens
    seen = table["seen_s"] - table["at_s"]
    assert (seen[table["kind"] == "crash"] >= 0).all()
    assert ((table["recovered_s"] >= table["at_s"]) | table["recovered_s"].isna()).all()


OF_POLICIES = [(policy, action) for policy in policy_names() for action in ACTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "action"), mostly_nightly(OF_POLICIES, ("vllm", "retry"), ("mlfq", "error"))
)
def test_a_failing_fleet_of_any_policy(policy, action):
    failing(policy, 5 if action == "retry" else 8, on_failure=action)


def test_a_replica_may_fail_in_the_last_step_of_a_run():
    load = Workload.build(np.zeros(1), [16], [12])

    def steps(failures: Schedule | None, exact: bool = False):
        inputs = inputs_of("vllm", 0, failures, exact=exact, async_scheduling=True)
        run = Failing(replace(inputs, workload=load))
        run.run()
        return run.rows().steps

    whole = steps(None)
    crash = Schedule((Fault(Kind.CRASH, 0, float(whole["end_s"].iloc[-2:].mean())),))
    assert steps(crash).equals(whole.iloc[:-1]) and steps(crash, exact=True).equals(steps(crash))


OF_ROUTERS = [(name, action) for name in router_names() for action in ACTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "action"), mostly_nightly(OF_ROUTERS, ("llm-d", "retry")))
def test_a_failing_fleet_of_any_router(name, action):
    more = {"router": name, "prefix_caching": True, "async_scheduling": True}
    failing("vllm", 7, on_failure=action, **more)


@pytest.mark.nightly
@examples(20)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 20))
def test_random_schedules_of_failures(seed, count):
    names = policy_names()
    timeout_s = 0.2 if seed % 7 == 0 else None
    more = {"client_timeout": timeout_s, "front_end": "vllm" if seed % 2 else "none"}
    failing(names[seed % len(names)], seed, count, retries=seed % 4, **more)


@pytest.mark.parametrize("planned_ahead", [False, True])
def test_clients_see_no_token_of_a_void_step(planned_ahead):
    failing("vllm", 5, on_failure="error", front_end="vllm", async_scheduling=planned_ahead)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_kind_of_failure_happens_to_those_that_wait_run_and_are_sent():
    happened, outcomes, hit = Counter(), Counter(), 0
    for seed in range(30, 50):
        _, rows = failing("vllm", seed, client_timeout=0.3 if seed % 2 else None)
        happened.update(rows.failures["kind"])
        outcomes.update(rows.requests["outcome"])
        hit += rows.failures["requests"].sum()
    assert happened.keys() == {kind.value for kind in Kind}
    assert {"completed", "failed", "timed_out"} <= outcomes.keys() and hit > 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", mostly_nightly(SOME_POLICIES, "vllm"))
def test_a_schedule_in_which_nothing_comes_to_pass_changes_nothing(policy):
    without = Failing(inputs_of(policy, 7, None))
    without.run()
    beside = Failing(inputs_of(policy, 7, NOTHING, on_failure="migrate"))
    beside.run()
    for table in TABLES:
        assert getattr(without.rows(), table).equals(getattr(beside.rows(), table))
    assert not len(beside.rows().failures)


def test_the_same_seed_gives_the_same_failures_and_another_one_others():
    def crashes(seed: int) -> list[float]:
        failures = Schedule((), 0.2, 0.1, seed)
        run = Failing(inputs_of("vllm", 5, failures, on_failure="retry", exact=False))
        run.run()
        found, ended_s = run.rows().failures, run.rows().requests["ended_s"].max()
        # each replica draws its own, and none when the last request has ended
        first = found.groupby("replica")["at_s"].min()
        assert len(first) > 1 and first.is_unique and found["at_s"].max() <= ended_s
        return found["at_s"].tolist()

    assert crashes(1) == crashes(1) != crashes(2)


def one_request(action: str, *faults: Fault, detection: float = 0.0) -> Failing:
    """Of 50 and 80 tokens, on the first of two replicas."""
    settings = {"replicas": 2, "on_failure": action, "detection": detection, "num_blocks": 200}
    workload = Workload.build([0.0], [50], [80])
    return run_of(Schedule(faults), workload, **settings, async_scheduling=False)


@pytest.mark.parametrize("settings", [{"on_failure": "error"}, {"retries": 0}])
def test_an_application_fails_once_with_those_on_the_dead_and_those_sent_there(settings):
    settings = {"replicas": 1, "detection": 1.0, "on_failure": "retry", **settings}
    graph = {"group": [0] * 3, "group_names": ["graph"], "delay_s": [0.0] * 3}
    workload = Workload.build([0.0, 0.5, 0.6], [50] * 3, [50] * 3, **graph)
    run = run_of(Schedule((Fault(Kind.CRASH, 0, 0.1),)), workload, **settings)
    assert [(r.end, r.ended_s) for r in run.fleet.requests] == [(End.FAILED, 1.1)] * 3
    assert run.rows().failures[["requests", "failed"]].values.tolist() == [[3, 3]]


def test_a_fleet_in_which_no_replica_is_up_has_not_recovered():
    crashes = (Fault(Kind.CRASH, 0, 5.0), Fault(Kind.CRASH, 1, 5.0, 7.0))
    workload = Workload.build([0.0, 9.0], [50, 50], [5, 5])
    lasts = (Fault(Kind.SLOW, 0, 1.0, factor=2.0),)
    late = (Fault(Kind.CRASH, 0, 5.0, 1e3),)
    cases = (crashes[:1], [5.0]), (crashes, [8.0, 8.0]), (lasts, [math.nan]), (late, [math.nan])
    for faults, recovered in cases:
        failures = Schedule(faults, start_up_s=1.0)
        run = run_of(failures, workload, replicas=2, on_failure="retry")
        found = run.rows().failures["recovered_s"]
        np.testing.assert_array_equal(found, recovered)


def test_tokens_that_a_drain_throws_away_are_counted():
    whole = float(one_request("retry").rows().requests["ended_s"][0])
    run = one_request("retry", Fault(Kind.DRAIN, 0, whole / 2, grace_s=0.0))
    rows, (request,) = run.rows(), run.fleet.requests
    assert request.end is End.COMPLETED and request.discarded_tokens > 0
    assert rows.requests["discarded_tokens"].tolist() == [request.discarded_tokens]
    found = describe_failures(rows)["failures"]["discarded_output_tokens"]
    assert found == request.discarded_tokens


def test_a_router_that_hears_nothing_goes_by_what_it_heard_last():
    config = CROWDED.model_copy(update={"replicas": 2, "exact": False})
    failures = Schedule((Fault(Kind.SIGNALS, 0, 0.5, 1.5),))
    workload = Workload.build(np.arange(20) / 10, [50] * 20, [50] * 20)
    specs = (parse_policy("vllm"),)
    run = Failing(Inputs(config, workload, resolve_hardware(config), specs, (), failures=failures))
    for now, measured in ((0.4, 0.4), (1.0, 0.5), (1.4, 0.5), (1.6, 1.6)):
        run.clock.run(now)
        view = run.fleet.router.view
        view.now = now
        assert view.measured_s(0) == measured and view.measured_s(1) == now
        assert view.load(0).at_s <= measured


@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": False}, {}, {"profile": "qwen2.5-7b@a100-80g:pp2"}],
    ids=["synchronous", "asynchronous", "stages"],
)
def test_what_a_replica_showed_until_it_died_is_seen_after_its_death(settings):
    """Routers that do not know of the death yet ask for any instant before it."""
    config = CROWDED.model_copy(update={"replicas": 1, "exact": False, **settings})
    specs = (parse_policy("vllm"),)
    void = 0
    for seed in range(4):
        inputs = Inputs(config, crowd(seed), resolve_hardware(config), specs, ())
        run = Simulation(inputs, specs[0])
        dies_s = float(np.random.default_rng(seed).uniform(0.2, 1.2))
        run.clock.run(dies_s)
        (engine,) = run.engines
        times = [*np.linspace(dies_s - 0.2, dies_s, 50).tolist(), dies_s]
        before = [engine.load(at_s) for at_s in times]
        run.fleet.fail(0)
        assert [engine.load(at_s) for at_s in times] == before
        void += len(engine._void_loads)
    assert void > 2


# Files of failures: what they may say; whatever is wrong is one line with file, row and field.
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
    for asked, count in ((inputs, 3), (with_one_more(inputs), 5)):
        rows = run_policy(asked, asked.policies[0]).rows
        assert rows.replicas.loc[rows.replicas["failed"], "pool"].tolist() == ["b"]
        assert len(rows.replicas) == count
