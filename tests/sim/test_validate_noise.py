"""`twinserve validate` where others disturb the machine, and where its time is up: what is run
again, what is said, what is kept. The engine is a stand-in that takes what was predicted, times
what others make of it; tests/live has real ones."""

import contextlib
import copy
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.commands import status
from twinserve.backends.live.versions import LiveEngineError
from twinserve.profiles.profile import Profile
from twinserve.sim.cli.main import main
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy, simulate
from twinserve.sim.twin import validate as validating
from twinserve.sim.twin.limit import TimeLimit, TimeUp
from twinserve.sim.twin.replay import LockedReplay, together
from twinserve.sim.twin.validate import KeptSteps, Validation, validate_policy
from twinserve.sim.twin.validate_report import metric_lines, page

CONFIG = SimulationConfig(
    policy=("vllm",), trace="poisson", rate=40.0, requests=12, cap_length=40, num_blocks=200,
    async_scheduling=False,
)  # fmt: skip


class Machine:
    """A clock that runs with its steps. slow(run): how many times a step takes what was predicted
    in the run-th of all runs; lost: because the core was taken."""

    on_one_core = True

    def __init__(self, slow=lambda run: 1.0, lost: bool = True) -> None:
        self.slow, self.lost, self.runs, self.now = slow, lost, [], 0.0
        self.vocab, self.settings = 99, SimpleNamespace(block_tokens=16, physical=False)
        self.scheduler = SimpleNamespace(forget_counts=lambda: None)
        self._rng = np.random.default_rng(0)

    def forget_prefixes(self) -> None:
        """There are none."""

    def take(self, kind: str, predicted: np.ndarray, report) -> tuple[np.ndarray, np.ndarray]:
        """Measured seconds, and of these off the core, of each step."""
        factor = self.slow(len(self.runs))
        self.runs.append(kind)
        usual = predicted * self._rng.lognormal(0, 0.03, len(predicted))
        for seconds in usual * factor:
            self.now += seconds
            if report is not None:
                report(1, 2)
        return usual * factor, usual * (factor - 1) * self.lost


@pytest.fixture
def validated(monkeypatch, request):
    """validate_policy on a Machine."""
    inputs = resolve(getattr(request, "param", CONFIG))

    def replay_locked(log, engine, texts, report):
        predicted = np.array([step.seconds for step in log.steps])
        seconds, off = engine.take("locked", predicted, report)
        times = {"predicted_s": predicted, "measured_s": seconds, "off_core_s": off}
        starts = [step.start_s for step in log.steps]
        rest = {"moved": False, "drift": False, "prefill_tokens": 1, "start_s": starts}
        return LockedReplay(pd.DataFrame({**times, **rest}), {}, "", 0, [])

    class LiveRun:
        def __init__(self, inputs, spec, engine, report, wall, texts):
            self.engine, self.report = engine, report
            self.simulated = run_policy(inputs, spec)
            self.backend = SimpleNamespace(steps=[])
            self.engines = [SimpleNamespace(core=SimpleNamespace(plan=None))]

        def run(self) -> RunResult:
            steps = self.simulated.rows.steps
            predicted = (steps["end_s"] - steps["start_s"]).to_numpy(np.float64)
            seconds, off = self.engine.take("live", predicted, self.report)
            times = {"predicted_s": predicted, "measured_s": seconds, "off_core_s": off}
            table = pd.DataFrame({**times, "moved": False, "start_s": 0.0})
            for row in table.to_dict("records"):
                self.backend.steps.append(SimpleNamespace(row=lambda row=row: row))
            result = copy.deepcopy(self.simulated)
            factor = seconds.sum() / predicted.sum()
            for name in result.summary:
                if name.endswith("_ms") and result.summary[name] is not None:
                    result.summary[name] *= factor
            return result

        def described(self) -> dict:
            return {"parted": "", "drift": 0, "not_made": {}}

    monkeypatch.setattr(validating, "replay_locked", replay_locked)
    monkeypatch.setattr(validating, "LiveRun", LiveRun)
    usual = validating.run_simulation
    monkeypatch.setattr(
        validating,
        "run_simulation",
        lambda run: run.run() if isinstance(run, LiveRun) else usual(run),
    )

    def validated(machine: Machine, repeats: int = 3, limit_s: float | None = None, **more):
        limit = TimeLimit(limit_s, now=lambda: machine.now)
        (spec,) = inputs.policies
        return validate_policy(inputs, spec, machine, repeats, True, limit=limit, **more)

    return validated


def errors(found: Validation) -> list[float]:
    return [row["error_pct"] for row in found.table().to_dict("records") if row["metric"] == "tpot"]


def test_on_a_quiet_machine_nothing_is_run_again_and_nothing_said(validated):
    machine = Machine()
    found = validated(machine)
    assert machine.runs == ["locked", "live"] * 3  # by turns
    assert found.noise() == [] and found.partial == "" and found.set_aside == 0
    assert found.locked.error()["disturbed_pct"] < 1
    ours, live = found.schedule.simulated, found.schedule.live
    assert len(live) == 3 and {part.steps for part in live} == {ours.steps}
    assert all(part.work == pytest.approx(1) for part in live)  # the same steps
    assert all(part.engine == pytest.approx(1, abs=0.03) for part in live)
    assert [part.outside for part in live] == pytest.approx([1] * 3, abs=0.03)
    assert found.schedule.stable and found.schedule.simulated.idle_seats == 0
    assert found.schedule.verdict() == "the step times are right; the schedule is the simulated one"
    said = dict(metric_lines(found))
    assert said["verdict"] == found.schedule.verdict() and said["verdict"] in page([found], "0")


CLOSED = SimulationConfig(  # the same steps, however long these take
    policy=("vllm",),
    trace="closed:concurrency=3,requests=9,input=30,output=9",
    num_blocks=200,
    async_scheduling=False,
)


@pytest.mark.parametrize("validated", [CLOSED], indirect=True)
def test_in_wall_time_the_simulation_has_the_time_of_our_own_loop(validated, monkeypatch):
    with pytest.raises(SettingsError, match="decision-time profile: .* lacks the times around"):
        simulate(CONFIG.model_copy(update={"decision_time": "profile"}))
    monkeypatch.setattr(Profile, "loop_s", 2e-3)
    usual = simulate(CLOSED)["vllm"].rows.steps
    found = validated(Machine(), repeats=1)
    steps = found.simulated.rows.steps
    assert len(steps) == len(usual)
    took, before = (t["end_s"] - t["start_s"] for t in (steps, usual))
    assert (took - before).tolist() == pytest.approx([2e-3] * len(steps))
    # the live run of this test has no loop
    (part,) = found.schedule.live
    assert part.work == pytest.approx(1)
    expected = before.sum() / took.sum()
    assert expected < 0.9 and part.outside == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [True, False], ids=["without the core", "slowed on it"])
def test_disturbed_live_runs_are_run_again_and_the_calm_ones_compared(validated, lost):
    machine = Machine(lambda run: 5.0 if run in (1, 3) else 1.0, lost)
    found = validated(machine)
    assert machine.runs.count("live") == 5 and len(found.live) == 3 and found.set_aside == 2
    assert max(map(abs, errors(found))) < 3
    assert "2 live runs were disturbed more, and set aside" in found.noise()


@pytest.mark.slow
def test_disturbed_locked_steps_are_replayed_again(validated):
    machine = Machine(lambda run: 6.0 if run < 5 else 1.0)  # all of the first three
    found = validated(machine)
    assert machine.runs.count("locked") > 3
    error = found.locked.error()
    assert error["never_calm_pct"] == 0 and error["mean_absolute_error_pct"] < 5
    assert error["disturbed_pct"] > 50


@pytest.mark.slow
def test_where_others_never_cease_the_errors_come_with_a_word(validated):
    """Errors of -95 % are the machine's."""
    machine = Machine(lambda run: 20.0)
    found = validated(machine, repeats=2)
    assert machine.runs.count("locked") == machine.runs.count("live") == 4
    assert max(errors(found)) < -90
    said = "\n".join(found.noise())
    assert "2 of 2 live runs" in said and "latencies say nothing of the simulation" in said
    assert "100 % of the steps have no other" in said
    for text in (str(metric_lines(found)), page([found], "0.0"), str(found.summary()["notes"])):
        assert "other programs disturbed 2 of 2 live runs" in text
    # of what has no calm repeat, the time on the core is taken, as a calibration does
    assert found.locked.error()["mean_absolute_error_pct"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1.5, 2.5, 4.5])
def test_a_time_limit_leaves_what_has_ended_and_says_so(validated, runs):
    whole = Machine()
    validated(whole, repeats=1)
    machine = Machine()
    found = validated(machine, repeats=3, limit_s=runs * whole.now / 2)
    ended = [machine.runs[: int(runs)].count(kind) for kind in ("locked", "live")]
    assert [found.locked.repeats, len(found.live)] == ended
    said = f"{ended[0]} of 3 locked replays, {ended[1]} of 3 live runs"
    assert found.partial == said and f"partial, as the time was up: {said}" in found.noise()
    assert len(found.table()) > 0 or not found.live
    assert f"{said}" in page([found], "0.0")


def test_where_the_time_is_up_before_anything_ended_that_is_said(validated):
    with pytest.raises(TimeUp):
        validated(Machine(), limit_s=0.0)


def test_the_steps_of_each_run_are_kept_as_it_ends(validated, tmp_path, capsys):
    kept = KeptSteps(tmp_path / "v")

    class Broken(Machine):
        def take(self, kind, predicted, report):
            if len(self.runs) == 3:
                raise KeyboardInterrupt
            return super().take(kind, predicted, report)

    with pytest.raises(KeyboardInterrupt), kept.told_where():
        validated(Broken(), keep=kept.keep)
    names = ["vllm-live-1.parquet", "vllm-locked-1.parquet", "vllm-locked-2.parquet"]
    assert sorted(path.name for path in (tmp_path / "v.steps").iterdir()) == names
    steps = pd.read_parquet(tmp_path / "v.steps" / names[0])
    assert {"measured_s", "off_core_s", "predicted_s", "disturbed"} <= set(steps)
    assert str(tmp_path / "v.steps") in capsys.readouterr().err
    kept.drop()
    assert list(tmp_path.iterdir()) == []


def test_policies_that_share_a_folder_name_keep_their_own_steps(tmp_path):
    kept = KeptSteps(tmp_path / "v")
    for number, label in enumerate(("a/b", "a_b")):
        kept.keep(label, "live", 1, pd.DataFrame({"number": [number]}))
    assert [pd.read_parquet(path)["number"][0] for path in kept.files] == [0, 1]


def test_the_parts_of_a_limit_are_even():
    now = [0.0]
    limit = TimeLimit(90.0, now=lambda: now[0])
    first = limit.share(3)
    now[0] = 29.0
    assert not first.up()
    now[0] = 30.0
    assert first.up() and not limit.share(2).up()
    now[0] = 100.0
    assert limit.share(1).up() and not TimeLimit().up()


def test_what_prepares_runs_does_not_count():
    now = [0.0]
    limit = TimeLimit(10.0, now=lambda: now[0])
    with limit.stopped():
        now[0] = 500.0
    assert not limit.up()
    now[0] = 510.0
    assert limit.up()


def replays(*measured, off_core=None) -> LockedReplay:
    off = off_core or [np.zeros(len(m)) for m in measured]
    rest = {"predicted_s": 1.0, "moved": False, "drift": False}
    tables = [
        pd.DataFrame({"measured_s": m, "off_core_s": o, **rest})
        for m, o in zip(measured, off, strict=True)
    ]
    return together([LockedReplay(table, {}, "", 0, []) for table in tables])


def test_a_stretch_in_which_most_repeats_were_slowed_does_not_move_a_step():
    rng = np.random.default_rng(0)
    measured = [rng.lognormal(0, 0.03, 400) for _ in range(3)]
    for slowed in measured[1:]:
        slowed[100:200] *= 3
    found = replays(*measured).steps
    assert np.abs(found["measured_s"] - 1).max() < 0.15
    assert found["calm"][105:195].max() == 1 and found["calm"][:90].min() == 3
    assert found["spread_s"].max() < 0.15


def test_one_replay_alone_is_taken_on_its_core():
    found = replays(np.array([1.0, 3.0, 1.0]), off_core=[np.array([0.0, 2.0, 0.01])])
    assert found.steps["measured_s"].tolist() == [1, 1, 1]
    assert found.noise()["never_calm_pct"] == pytest.approx(100 / 3)
    assert "repeat_error_pct" not in found.error()


@pytest.mark.parametrize("limit", ["0", "-3", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(limit, capsys):
    status(main, ["validate", "-t", "poisson", "--limit", limit])
    assert "--limit" in capsys.readouterr().err


# `twinserve validate` where a policy fails: the others end, their results are kept, and the
# command fails with a line. The engine and what runs on it are stand-ins here; tests/live has
# real ones.
PARTED = "locked replay 1: the engine parted from its plans at step 7: b0 got 3 tokens"


class StandIn:
    def warm_up(self) -> None:
        """There is nothing to warm up."""


@pytest.fixture
def engines(monkeypatch) -> list[str]:
    """Policies whose engines were closed. That of vllm parts from its plans, that of sarathi breaks
    in an unforeseen way."""
    closed: list[str] = []
    ours = "twinserve.sim.cli.validate"

    @contextlib.contextmanager
    def live_engine(settings, model):
        try:
            yield StandIn()
        finally:
            closed.append(model)

    def validate_policy(inputs, spec, *_):
        if spec.name == "vllm":
            raise LiveEngineError(PARTED)
        if spec.name == "sarathi":
            raise KeyError("b0")
        simulated = run_policy(inputs, spec)
        times = {"predicted_s": [0.1, 0.2], "measured_s": [0.1, 0.2], "start_s": [0.0, 0.1]}
        steps = pd.DataFrame({**times, "drift": False, "moved": False, "prefill_tokens": [9, 0]})
        simulated.config["live"] = {"not_made": {}}
        replay = LockedReplay(steps, {}, "", 0, [])
        return Validation(spec, simulated, replay, [simulated], 0, {})

    monkeypatch.setattr(f"{ours}.live_engine", live_engine)
    monkeypatch.setattr("twinserve.sim.twin.validate.validate_policy", validate_policy)
    monkeypatch.setattr("twinserve.backends.live.versions.installed_vllm", lambda: "0.0")
    monkeypatch.setattr("twinserve.sim.twin.validate_report.figures", lambda validation: {})
    return closed


def run(*arguments: str) -> int:
    load = "-t fixed:8,2 --rate 50 --requests 4 --num-blocks 90 --quiet".split()
    return status(main, ["validate", *load, *arguments])


@pytest.mark.slow
def test_the_others_end_and_their_results_are_kept(engines, tmp_path, capsys):
    out = tmp_path / "v"
    policies = ("-p", "vllm", "-p", "bros", "-p", "sarathi", "-p", "tgi")
    assert run(*policies, "--out", str(out)) != 0
    assert len(engines) == 4
    said = capsys.readouterr()
    assert said.err.startswith("error: 2 of 4 policies failed: vllm: ")
    assert said.err.count("\n") == 1 and PARTED in said.err and "KeyError" in said.err
    assert "bros: simulated against" in said.out and "tgi: simulated against" in said.out
    found = json.loads((out / "validation.json").read_text())
    assert "<h2>Validation" in write_report([out], tmp_path / "page.html").read_text()
    assert [policy["policy"] for policy in found["policies"]] == ["bros", "tgi"]
    assert found["failed"]["vllm"] == PARTED and set(found["failed"]) == {"vllm", "sarathi"}
    assert PARTED in (out / "validation.md").read_text()
    assert (out / "bros" / "live-1" / "run.json").exists() and not (out / "vllm").exists()


def test_where_all_fail_nothing_is_written(engines, tmp_path, capsys):
    out = tmp_path / "v"
    assert run("-p", "vllm", "--out", str(out)) != 0
    assert "1 of 1 policies failed" in capsys.readouterr().err and not out.exists()


def test_drawn_drafts_are_refused_before_an_engine_is_built(engines, capsys):
    assert run("-p", "vllm", "--speculate", "k=3,method=ngram,acceptance=0.5") != 0
    said = capsys.readouterr().err
    assert said.startswith("error: --speculate: the engine executes") and said.count("\n") == 1
    assert engines == []


def test_where_none_fails_the_command_does_not(engines, tmp_path):
    out = tmp_path / "v"
    assert run("-p", "bros", "--out", str(out)) == 0
    assert json.loads((out / "validation.json").read_text())["failed"] == {}
