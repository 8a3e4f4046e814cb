"""The campaign's plans and limits: what runs is decided beforehand, and nothing starts that cannot
end in time; and its report."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.experiments.campaign_cases import TRACE, sample, seconds
from twinserve.experiments.campaign import main as campaign
from twinserve.experiments.campaign import runs as campaign_runs
from twinserve.experiments.campaign import steps as campaign_steps
from twinserve.experiments.campaign.free import with_loop
from twinserve.experiments.campaign.report import write_report
from twinserve.experiments.campaign.runs import Cell, Plan, inputs_of
from twinserve.experiments.campaign.setup import (
    MODEL_SIZES,
    Deadline,
    Engines,
    OutOfTime,
    StageError,
    Store,
    default_policies,
    model_folder,
)
from twinserve.policies.requests import RequestClass
from twinserve.profiles.composition import StepComposition, decode_work
from twinserve.profiles.measured.profile import model_spec
from twinserve.profiles.measured.samples import Measurement, StepSample, write_samples
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.cli.simulate import headline
from twinserve.sim.results.decisions import read_log
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.replay import LockedReplay
from twinserve.sim.twin.validate import with_loop_time

ROOT = Path(__file__).resolve().parents[2]


# -- plans -----------------------------------------------------------------------------------------
def plan_of(traces: Path, *policies: str) -> Plan:
    return Plan({"mooncake": traces / "mooncake_part.jsonl"}, (0.8,), policies, 0.2, 1)


def cell_folder(store: Store, policy: str) -> Path:
    return store.folder / "runs" / "tiny-eager" / Cell("mooncake", 0.8, policy, 0.2).name


def cell_files(store: Store, policy: str) -> set[str]:
    return {path.name for path in cell_folder(store, policy).glob("*")}


@pytest.mark.slow
def test_every_policy_has_a_plan_that_the_engine_has_room_for(store, traces):
    policies = default_policies("tiny")
    assert {text.partition(":")[0] for text in policies} >= {"vllm", "bros", "layerkv"}
    campaign_steps.make_profile(store, "tiny", False)
    campaign_runs.plan_runs(store, "tiny", False, plan_of(traces, *policies))
    for policy in policies:
        assert cell_files(store, policy) >= {"cell.json", "profile.json", "decisions.jsonl.gz"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "most"), [("bros", ""), ("bros:chunk=9000", "of 17192 tokens"), ("layerkv", "")]
)
def test_steps_that_the_engine_has_no_room_for_are_refused_before(tmp_path, traces, policy, most):
    long = [json.loads(line) | {"input_length": 12_000} for line in TRACE.splitlines()]
    for number, entry in enumerate(long):
        entry["hash_ids"] = [24 * number + block for block in range(24)]
    (traces / "mooncake_part.jsonl").write_text("\n".join(map(json.dumps, long)) + "\n")
    store = Store(tmp_path / "out")
    with pytest.raises(StageError, match=r"room for 16384") as raised:
        campaign_runs.plan_runs(store, "8b", True, plan_of(traces, policy))
    assert most in str(raised.value)
    assert not list((store.folder / "runs").rglob("cell.json"))
    campaign_runs.plan_runs(store, "8b", True, plan_of(traces, *default_policies("8b")))
    assert len(list((store.folder / "runs").rglob("cell.json"))) == 5


@pytest.mark.slow
def test_a_plan_follows_the_profile_until_it_has_run(store, traces):
    plan = plan_of(traces, "vllm", "sarathi")
    campaign_runs.plan_runs(store, "tiny", False, plan)  # nothing is measured: a shipped profile
    names = {cell.policy: (campaign_runs.RUNS, "tiny-eager", cell.name) for cell in plan.cells()}
    shipped = store.read(*names["vllm"], "cell.json")["planned_on"]
    assert MODEL_SIZES["tiny"].shipped[0] in shipped
    store.write({}, *names["sarathi"], "locked.json")
    campaign_steps.make_profile(store, "tiny", False)
    campaign_runs.plan_runs(store, "tiny", False, plan)
    assert "measured" in store.read(*names["vllm"], "cell.json")["planned_on"]
    assert store.read(*names["sarathi"], "cell.json")["planned_on"] == shipped


def test_nothing_is_simulated_and_no_engine_started_without_a_plan(store, traces, monkeypatch):
    monkeypatch.setattr(campaign_runs, "run_policy", None)
    engines = Engines(store)
    monkeypatch.setattr(engines, "get", None)
    with pytest.raises(StageError, match="no run is planned: run stage plan"):
        where = store, engines, "tiny", False, Deadline(60.0)
        campaign_runs.validate(*where, plan_of(traces, "vllm"))


def test_a_stage_of_failed_runs_has_failed(store, traces, monkeypatch, capsys):
    campaign_steps.make_profile(store, "tiny", False)
    campaign_runs.plan_runs(store, "tiny", False, plan_of(traces, "vllm", "sarathi"))

    class Broken:
        version, vocab = "0.25.1", 512
        scheduler = type("Scheduler", (), {"can_adopt": True})

        def warm_up(self):
            pass

    def broken(*rest):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(campaign_runs, "clear", lambda engine: None)
    monkeypatch.setattr(campaign_runs, "_Prepared", broken)
    engines = Engines(store)
    monkeypatch.setattr(engines, "get", lambda *rest: Broken())
    with pytest.raises(StageError, match="all 4 runs failed; the first: no kernel"):
        where = store, engines, "tiny", False, Deadline(60.0)
        campaign_runs.validate(*where, plan_of(traces, "vllm", "sarathi"))


# -- limits ----------------------------------------------------------------------------------------
def test_no_engine_is_started_that_leaves_no_time_to_use_it(store, monkeypatch):
    engines = Engines(store)
    store.write(
        {"starts": [{"start_s": 90.0}, {"start_s": 70.0}]}, "steps", "8b-graphs-starts.json"
    )
    for swap in (False, True):
        with pytest.raises(OutOfTime, match="60 s are left, but an engine takes 70 s to start"):
            engines.get("8b", True, swap, {}, Deadline(60.4))
    with pytest.raises(OutOfTime, match="an engine takes 75 s"):  # none is known of this one
        engines.get("14b", True, False, {}, Deadline(60.4))
    with pytest.raises(OutOfTime, match="an engine takes 40 s"):
        engines.get("14b", False, False, {}, Deadline(44.0))


def test_a_stage_without_time_is_no_failure(tmp_path, monkeypatch, capsys):
    def late(*rest):
        raise OutOfTime("3 s are left")

    monkeypatch.setattr(campaign, "_check", lambda *rest: None)
    monkeypatch.setattr(campaign, "_run", late)
    assert campaign.main(["steps", "--out", str(tmp_path / "out")]) == 0
    assert "steps: 3 s are left" in capsys.readouterr().out


def test_warming_up_and_swapping_look_at_the_deadline():
    measure = pytest.importorskip("twinserve.backends.live.measure.measure")

    def late(share, text):
        raise OutOfTime

    run = object.__new__(measure._Run)
    run.progress, run.items, run.swaps, run.seed = late, [(0, None)], [], 0
    run.effort, run.limits = measure.Effort(), type("Limits", (), {"fits": lambda *a: True})
    settings = type("Settings", (), {"swap_blocks": 8})
    run.bench = type(
        "Bench", (), {"block_tokens": 16, "engine": type("E", (), {"settings": settings})}
    )
    for begun in (run._warm_up, run._swap):
        with pytest.raises(OutOfTime):
            begun()


def test_the_shapes_are_those_that_profiles_know(tmp_path):
    from twinserve.profiles.catalog import MODELS

    store = Store(tmp_path / "out")
    for key in ("8b", "14b"):
        name = MODEL_SIZES[key].name
        assert model_spec(model_folder(store, key), name) == MODELS[name]
        for shipped in MODEL_SIZES[key].shipped:
            profile = load_profile(shipped)
            assert profile.llm.name == name
            assert (
                2 * MODEL_SIZES[key].ledger_blocks + MODEL_SIZES[key].seats < profile.num_gpu_blocks
            )


def test_a_cell_has_the_load_it_names_and_both_classes(store, traces):
    profile = campaign_steps.make_profile(store, "tiny", False)
    (trace,) = traces.iterdir()
    from twinserve.sim.setup.offered_load import service_seconds

    for load in (0.5, 1.1):
        cell = Cell("mooncake", load, "vllm", 0.2)
        inputs = inputs_of("tiny", cell, trace, str(profile))
        workload = inputs.workload
        assert service_seconds(workload, inputs.hardware) / workload.span_s == pytest.approx(
            load, rel=0.02
        )
        assert (workload.service_class == RequestClass.BEST_EFFORT).mean() == pytest.approx(
            1 / 3, abs=0.05
        )
        again = inputs_of(
            "tiny", cell, trace, str(profile), inputs.config.rate_scale, inputs.config.requests
        )
        assert np.array_equal(again.workload.arrival_s, workload.arrival_s)


def test_the_profile_takes_steps_and_swaps_together(store):
    profile = load_profile(campaign_steps.make_profile(store, "tiny", False))
    work = StepComposition(4, 4 * 64, 64)
    assert profile.model(8).step_seconds(work) == pytest.approx(1.01 * seconds(work), rel=0.02)
    assert profile.pcie_bytes_per_s == pytest.approx(512 / 1e-7, rel=0.01)


def test_the_profile_takes_what_asynchronous_scheduling_hides(store):
    path = campaign_steps.make_profile(store, "tiny", False)
    config = SimulationConfig(profile=str(path), trace="fixed:5,5")
    assert "the profile's steps are synchronous" in headline(resolve(config))
    rows = [{"batch": batch, "median_s": 0.0015 + batch * 1e-4} for batch in (1, 4)]
    store.write({"async": {"context": 64, "rows": rows}}, "steps", "tiny-eager-host.json")
    without = load_profile(path)
    assert campaign_steps.make_profile(store, "tiny", False) == path
    assert "synchronous" not in headline(resolve(config))
    work, profile = decode_work(4, 64 + 40), load_profile(path)  # its median step
    assert profile.scheduled(True).model().step_seconds(work) == pytest.approx(0.0019)
    times = [p.model().step_seconds(work) for p in (profile, profile.scheduled(False), without)]
    assert len(set(times)) == 1 and times[0] > 0.0019


def test_no_profile_without_steps(tmp_path):
    with pytest.raises(StageError, match="run stage steps first"):
        campaign_steps.make_profile(Store(tmp_path / "out"), "tiny", False)


@pytest.mark.nightly
def test_the_report_has_every_part_that_was_measured(store, traces):
    """Live runs are stood in for by simulated ones of an engine that is slower by a tenth."""
    profile = campaign_steps.make_profile(store, "tiny", False)
    (trace,) = traces.iterdir()
    cell = Cell("mooncake", 0.8, "vllm", 0.2)
    inputs = inputs_of("tiny", cell, trace, str(profile))
    names = (campaign_runs.RUNS, "tiny-eager", cell.name)
    chosen = {"rate_scale": inputs.config.rate_scale, "requests": inputs.config.requests}
    store.write({**cell.__dict__, **chosen}, *names, "cell.json")
    simulated = run_policy(inputs, inputs.policies[0], decisions=True)
    write_run(store.path(*names, "simulated"), replace(simulated, decisions=None))
    store.path(*names, "decisions.jsonl.gz").write_bytes(simulated.decisions)
    for number, factor in ((1, 1.1), (2, 1.2)):
        live = run_policy(inputs, inputs.policies[0])
        live.config["live"] = {"drift": 0}
        live.summary = {
            k: v * factor if isinstance(v, float) else v for k, v in live.summary.items()
        }
        write_run(store.path(*names, f"live-{number}"), live)
    steps = simulated.rows.steps
    took = steps["end_s"] - steps["start_s"]
    columns = {
        "start_s": steps["start_s"],
        "predicted_s": took,
        "measured_s": took / 0.9,
        "moved": False,
        "drift": False,
    }
    locked = LockedReplay(
        steps[["prefill_tokens", "decode_requests"]].assign(**columns), {}, "", 0, []
    )
    locked.steps.to_parquet(store.path(*names, "locked.parquet"))
    store.write({"first_drift": "", "evictions": 0, "drift": 0}, *names, "locked.json")
    rows = [{"batch": 4, "median_s": 0.0025}]
    host = {way: {"context": 64, "rows": rows} for way in ("async", "sync")}
    store.write(host, "steps", "tiny-eager-host.json")

    page = write_report(store).read_text()
    assert "| mooncake-80-vllm | " in page
    assert "| 10.0 %, -10.0 % | 0 |" in page  # predicted is a tenth below measured
    assert "-13.0 % (4.3)" in page  # 1 / 1.15, and repeats at 1.1 and 1.2
    # 2 ms + 4 x 0.1 ms + 256 x 1 us, four samples between 0 and 2 % more, a fifth of it the host's
    assert "| decode 4 x 64 | 2.67 | 0.534 | 2.5 | 2.5 | 2.6" in page
    assert "| 128 tokens | 0.113 | 0.6 | 0.113 | 0.6 |" in page


def test_free_runs_say_what_the_loop_takes_between_two_steps(store, traces, capsys):
    """Stand-ins for live runs are simulations whose profile has the loop. With it measured, the
    profile says it itself."""
    path = campaign_steps.make_profile(store, "tiny", False)
    measured = load_profile(path)
    (trace,) = traces.iterdir()
    for policy in ("vllm", "sarathi"):
        cell = Cell("mooncake", 0.8, policy, 0.2)
        save_profile(with_loop(measured, 7e-4), store.path("looped.json"))
        inputs = with_loop_time(inputs_of("tiny", cell, trace, str(store.path("looped.json"))))
        names = (campaign_runs.RUNS, "tiny-eager", cell.name)
        chosen = {"rate_scale": inputs.config.rate_scale, "requests": inputs.config.requests}
        store.write({**cell.__dict__, **chosen}, *names, "cell.json")
        summary = run_policy(inputs, inputs.policies[0]).summary
        store.write(summary, *names, "live-1", "summary.json")
    arguments = ["--out", str(store.folder), "--model", "tiny", "--traces", str(traces)]
    assert campaign.main(["free", *arguments, "--eager"]) == 0
    page = store.path("report", "free.md").read_text()
    assert "| measured, and 0.70 ms a step (mooncake-80-vllm) |" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| mooncake")]
    assert rows.pop()[1] == "1.00"  # of the other table: the policies do the same here
    errors = [float(error) for row in rows for error in row[-1].strip(" |").split(" / ")]
    assert len(errors) == 6 and max(map(abs, errors)) < 0.2
    assert all(float(row[2].split(" / ")[1]) < -5 for row in rows)  # TPOT, steps alone

    # a run that cannot be compared is named, and the others stay
    live = cell_folder(store, "sarathi") / "live-1" / "summary.json"
    whole = live.read_text()
    live.write_text(whole.replace('"mean_tpot_ms"', '"tpot"'))
    other = store.path("runs", "14b-graphs", "mooncake-80-vllm", "cell.json")  # of another model
    shutil.copytree(cell_folder(store, "vllm"), other.parent, dirs_exist_ok=True)
    assert campaign.main(["free", *arguments, "--eager"]) == 0
    assert "mooncake-80-sarathi: left out: cell.json or a summary.json" in capsys.readouterr().out
    assert store.path("report", "free.md").read_text().count("| mooncake") == 1
    live.write_text(whole)

    work = sample("decode", 0, 0, 4, 64).work
    steps = [StepSample("traffic", 10**6, 1, work, seconds(work) + 3e-4)] * 8
    facts = store.read("steps", "machine.json") | {"loop_s": 7e-4, "rounds": 3}
    write_samples(
        Measurement(steps, [], facts), campaign_steps.raw_path(store, "tiny", False, "-traffic")
    )
    assert campaign.main(["profile,free", *arguments, "--eager"]) == 0
    known = load_profile(path)
    assert known.loop_s == 7e-4 and known.step_model.fit.traffic_steps == 8
    assert "a step (" not in store.path("report", "free.md").read_text()

    # a plan has the loop between its steps, and a locked replay does without
    for policy in ("vllm", "sarathi"):
        shutil.rmtree(cell_folder(store, policy))
    campaign_runs.plan_runs(store, "tiny", False, plan_of(traces, "vllm"))
    folder = cell_folder(store, "vllm")
    facts, log = (
        json.loads((folder / "cell.json").read_text()),
        read_log(folder / "decisions.jsonl.gz"),
    )
    taken = [step.seconds for step in log.steps]
    assert facts["planned_busy_s"] == pytest.approx(sum(taken) - 7e-4 * len(taken))
    replay = LockedReplay(pd.DataFrame({"predicted_s": taken}), {}, "", 0, [])
    assert replay.without_loop(facts["loop_s"]).steps["predicted_s"].sum() == pytest.approx(
        facts["planned_busy_s"]
    )
    assert campaign.main(["free", *arguments, "--eager"]) == 1
    assert "no free run of this model" in capsys.readouterr().out


def test_the_page_has_the_kept_free_runs():
    page = (ROOT / "docs/calibrate.md").read_text()
    named = {"h200": "H200", "h200-14b": "H200, 14B", "h100": "H100"}
    count = 0
    for folder, card in named.items():
        cells: dict[str, list[list[str]]] = {}
        for line in (
            (ROOT / f"docs/results/campaign/{folder}/report/free.md").read_text().split("\n")
        ):
            name, *row = line.strip("| ").split(" | ")
            if name.startswith(("azure", "moon")):
                cells.setdefault(name, []).append(row)
        for name, ((*_, measured, looped), *shares) in cells.items():
            trace, load, policy = name.split("-")[:3]
            policy = "vllm" if policy == "vllm" else "bros:chunk=fit"
            found = f"| {card}, {trace.title()} {load} %, `{policy}` | {measured} | {looped}"
            live, simulated = (shares[0][0], shares[0][-1]) if shares else ("", "")
            (row,) = [line for line in page.split("\n") if line.startswith(found)]
            assert row.endswith(f" | {live} | {simulated} |"), name
            count += 1
    assert count == 15


def test_a_report_of_nothing(tmp_path):
    assert write_report(Store(tmp_path / "out")).read_text().startswith("# Campaign")
