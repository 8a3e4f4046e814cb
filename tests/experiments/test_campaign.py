"""The campaign's stages: what is written survives being killed, and a second call goes on from
there."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinserve.experiments.campaign import kernel as campaign_kernel
from twinserve.experiments.campaign import main as campaign
from twinserve.experiments.campaign import needs
from twinserve.experiments.campaign import runs as campaign_runs
from twinserve.experiments.campaign import steps as campaign_steps
from twinserve.experiments.campaign.report import table, write_report
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
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.measured.profile import model_spec
from twinserve.profiles.measured.samples import (
    Measurement,
    StepSample,
    SwapSample,
    read_samples,
    write_samples,
)
from twinserve.profiles.profile import load_profile
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.replay import LockedReplay

TRACE = "\n".join(
    json.dumps(
        {
            "timestamp": 250 * i,
            "input_length": 40 + 13 * (i % 9),
            "output_length": 4 + i % 7,
            "hash_ids": [i],
        }
    )
    for i in range(40)
)


@pytest.fixture
def traces(tmp_path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "mooncake_part.jsonl").write_text(TRACE + "\n")
    return folder


def seconds(work: StepComposition) -> float:
    """A made-up engine: 2 ms a step, 20 us a prompt token, 0.1 ms a decode, 1 us a context
    token."""
    return (
        2e-3
        + 2e-5 * int(work.prefill_new.sum())
        + 1e-4 * work.decode_requests
        + 1e-6 * work.decode_context
    )


def sample(
    kind: str, point: int, number: int, decodes: int, context: int, new: tuple[int, ...] = ()
) -> StepSample:
    fresh = np.array(new, np.int64)
    work = StepComposition(
        decodes, decodes * context, context * (decodes > 0), fresh, np.zeros(len(new), np.int64)
    )
    took = seconds(work) * (1 + 0.01 * (number % 3))
    return StepSample(kind, point, number, work, took, exec_s=0.8 * took)


def measured() -> Measurement:
    steps, point = [], 0
    for decodes in (1, 2, 4, 8):
        for context in (16, 64, 256):
            steps += [sample("decode", point, i, decodes, context) for i in range(4)]
            point += 1
    for new in ((16,), (64,), (128,), (64, 64)):
        steps += [
            sample("prefill" if len(new) == 1 else "prefills", point, i, 0, 0, new)
            for i in range(4)
        ]
        point += 1
    for decodes in (2, 6):
        steps += [sample("mixed", point, i, decodes, 64, (64,)) for i in range(4)]
        point += 1
        steps += [sample("check", point, i, decodes, 100, (32,)) for i in range(4)]
        point += 1
    facts = {
        "device": "Made up",
        "device_type": "cpu",
        "memory_bytes": 8e9,
        "matmul_flops": 1e11,
        "memory_bytes_per_s": 2e10,
        "link_bytes_per_s": 1e10,
        "vllm": "0.25.1",
        "torch": "2.11.0",
        "python": "3.12",
        "date": "2026-01-01",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "dtype": "float32",
        "num_blocks": 160,
        "block_tokens": 32,
        "seed": 0,
        "rounds": 4,
        "elapsed_s": 1.0,
        "empty_s": 1e-4,
        "submit_s": 5e-5,
        "settings": {
            "graphs": False,
            "threads": 1,
            "prefix_caching": True,
            "max_num_seqs": 8,
            "max_step_tokens": 256,
            "max_model_len": 512,
        },
    }
    return Measurement(steps, [], facts)


@pytest.fixture
def store(tmp_path) -> Store:
    """A campaign whose steps are there."""
    found = Store(tmp_path / "out")
    facts = measured().provenance
    write_samples(measured(), campaign_steps.raw_path(found, "tiny", False))
    swaps = [
        SwapSample(way, n, 512 * n, 1e-4 + 1e-7 * n)
        for way in ("swap_out", "swap_in")
        for n in (32, 64, 128)
    ]
    write_samples(
        Measurement([], swaps, facts), campaign_steps.raw_path(found, "tiny", False, "-swap")
    )
    found.write(
        {name: facts[name] for name in facts if name != "settings"}, "steps", "machine.json"
    )
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["steps,nothing"], "'nothing' is no stage"),
        (["steps:fast"], "write NAME or NAME:SECONDS"),
        (["validate"], "need a folder with .jsonl or .csv traces"),
        (["steps", "--engine-arg", "threads"], "give NAME=VALUE"),
        (["report", "--policies", "vlm"], "no policy 'vlm' (did you mean 'vllm'?)"),
        (["report", "--policies", "bros:chnk=8"], "has no option 'chnk'"),
    ],
)
def test_wrong_arguments_get_one_line(tmp_path, capsys, arguments, said):
    assert campaign.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "package"),
    [("profile", "scipy.optimize"), ("report", "matplotlib"), ("steps", "torch")],
)
def test_a_missing_package_stops_the_campaign_at_once(
    tmp_path, monkeypatch, capsys, stage, package
):
    monkeypatch.setitem(sys.modules, package, None)
    assert campaign.main([stage, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: stage {stage} needs {package}") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_campaign_that_cannot_be_imported_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "twinserve.experiments.campaign.needs", None)
    assert campaign.main(["steps", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "cannot be imported" in error and error.count("\n") == 1


def test_a_checkout_that_is_not_installed_is_told_so(tmp_path, monkeypatch, capsys, traces):
    """Every run writes the version of the distribution, and would fail after the engine's start."""

    def version(name):
        raise needs.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(needs.metadata, "version", version)
    arguments = ["plan", "--out", str(tmp_path / "out"), "--traces", str(traces)]
    assert campaign.main(arguments) == 2
    assert "stage plan needs the installed distribution twinserve" in capsys.readouterr().err


def test_the_mirror_holds_packed_parts_and_no_models(tmp_path):
    store = Store(tmp_path / "out", tmp_path / "mirror")
    store.write({"a": 1}, "runs", "one", "cell.json")
    store.path("models", "m", "config.json").write_text("{}")
    store.path("runs", ".partial").write_text("torn")
    store.saved("runs")
    store.saved("models")
    store.say("hello")
    store.saved("log.txt")
    assert sorted(p.name for p in (tmp_path / "mirror").iterdir()) == ["log.txt", "runs.tar.gz"]
    with tarfile.open(tmp_path / "mirror" / "runs.tar.gz") as archive:
        files = [m.name for m in archive.getmembers() if m.isfile()]
    assert files == ["runs/one/cell.json"]
    # a new call on the same folder fills an empty mirror at once
    Store(tmp_path / "out", tmp_path / "other")
    assert (tmp_path / "other" / "runs.tar.gz").exists()


def test_a_bare_machine_goes_on_from_the_mirror(tmp_path):
    first = Store(tmp_path / "out", tmp_path / "mirror")
    first.write({"a": 1}, "runs", "one", "cell.json")
    first.write({"a": 1}, "steps", "machine.json")
    first.say("hello")
    first.saved("log.txt")
    second = Store(tmp_path / "bare", tmp_path / "again", tmp_path / "mirror")
    assert second.read("runs", "one", "cell.json") == {"a": 1}
    assert "hello" in (second.folder / "log.txt").read_text()
    # what it hands back holds all of it: one mirror is enough to go on from
    assert {p.name for p in (tmp_path / "again").iterdir()} == {
        "log.txt",
        "runs.tar.gz",
        "steps.tar.gz",
    }
    time.sleep(0.01)
    second.write({"a": 2}, "steps", "machine.json")  # newer than the mirror, and kept
    time.sleep(0.01)
    first.write({"a": 3}, "runs", "one", "cell.json")  # planned anew elsewhere
    third = Store(tmp_path / "bare", restore=tmp_path / "mirror")
    assert third.read("steps", "machine.json") == {"a": 2}
    assert third.read("runs", "one", "cell.json") == {"a": 3}


def test_a_mirror_that_is_not_there_is_told(tmp_path, capsys):
    arguments = ["report", "--out", str(tmp_path / "out"), "--restore", str(tmp_path / "no")]
    assert campaign.main(arguments) == 2
    assert "no part of a campaign is there" in capsys.readouterr().err


def test_a_torn_mirror_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "runs.tar.gz").write_bytes(b"torn")
    arguments = ["report", "--out", str(tmp_path / "out"), "--restore", str(tmp_path / "mirror")]
    assert campaign.main(arguments) == 2
    error = capsys.readouterr().err
    assert "runs.tar.gz: no part of a mirror" in error and error.count("\n") == 1


def test_a_failing_stage_leaves_the_others_their_turn(tmp_path, monkeypatch):
    seen = []

    def stage(name, *rest):
        seen.append(name)
        if name == "steps":
            raise RuntimeError("no\nGPU")

    monkeypatch.setattr(campaign, "_run", stage)
    monkeypatch.setattr(campaign, "_check", lambda *rest: None)
    assert campaign.main(["steps,profile", "--out", str(tmp_path / "out")]) == 1
    assert seen == ["steps", "profile"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "steps failed: RuntimeError: no GPU" in log and "Traceback" in log


def test_what_hangs_is_ended(tmp_path):
    """Also where no signal is heard: the host would end the call, and what follows in it."""
    hung = """
import sys, time
from twinserve.experiments.campaign import main as campaign
campaign.GRACE_S, campaign._check, campaign._run = 0.5, lambda *a: None, lambda *a: time.sleep(60)
sys.exit(campaign.main(["report", "--time-limit", "5.5", "--out", sys.argv[1]]))
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", hung, tmp_path / "out"], capture_output=True)
    assert done.returncode == 1 and time.monotonic() - began < 30
    assert b"Timeout" in done.stderr


def test_units_come_in_order_of_worth():
    policies = ("vllm", "bros", "echo")
    plan = Plan({"a": Path("a"), "b": Path("b")}, (0.8, 1.1, 0.5), policies, 10.0, 2)
    units = [(cell.load, part) for cell, part in plan.units() if cell.policy != "echo"]
    assert len(plan.units()) == len(set(plan.units())) == 2 * 3 * 3 * 3
    order = list(dict.fromkeys(units))
    assert order[:5] == [
        (0.8, "locked"),
        (0.8, "live-1"),
        (1.1, "locked"),
        (1.1, "live-1"),
        (0.8, "live-2"),
    ]
    assert order[-1] == (0.5, "live-2")
    # one locked replay of what vLLM itself does comes before everything else
    assert plan.units()[0] == (Cell("a", 0.8, "vllm", 10.0), "locked")
    # a third policy waits until the first two have run at all loads
    third = [number for number, (cell, _) in enumerate(plan.units()) if cell.policy == "echo"]
    ran = {(cell.policy, cell.load) for cell, _ in plan.units()[: third[0]]}
    assert ran == {(policy, load) for policy in ("vllm", "bros") for load in plan.loads}
    assert len(plan.cells()) == len(set(plan.cells())) == 2 * 3 * 3


# -- plans -----------------------------------------------------------------------------------------
def plan_of(traces: Path, *policies: str) -> Plan:
    return Plan({"mooncake": traces / "mooncake_part.jsonl"}, (0.8,), policies, 0.2, 1)


def cell_files(store: Store, policy: str) -> set[str]:
    folder = store.folder / "runs" / "tiny-eager" / Cell("mooncake", 0.8, policy, 0.2).name
    return {path.name for path in folder.glob("*")}


def test_every_policy_has_a_plan_that_the_engine_has_room_for(store, traces):
    policies = default_policies("tiny")
    assert {text.partition(":")[0] for text in policies} >= {"vllm", "bros", "layerkv"}
    campaign_steps.make_profile(store, "tiny", False)
    campaign_runs.plan_runs(store, "tiny", False, plan_of(traces, *policies))
    for policy in policies:
        assert cell_files(store, policy) >= {"cell.json", "profile.json", "decisions.jsonl.gz"}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("bros", "chunk=8192 is the largest"),
        ("bros:chunk=9000", "bros:chunk=9000 may plan steps of 17192 tokens"),
        ("layerkv", "max_num_batched_tokens=16384 is the largest"),
    ],
)
def test_steps_that_the_engine_has_no_room_for_are_refused_before(tmp_path, traces, policy, said):
    long = [json.loads(line) | {"input_length": 12_000} for line in TRACE.splitlines()]
    for number, entry in enumerate(long):
        entry["hash_ids"] = [24 * number + block for block in range(24)]
    (traces / "mooncake_part.jsonl").write_text("\n".join(map(json.dumps, long)) + "\n")
    store = Store(tmp_path / "out")
    with pytest.raises(StageError, match=r"room for 16384") as raised:
        campaign_runs.plan_runs(store, "8b", True, plan_of(traces, policy))
    assert said in str(raised.value)
    assert not list((store.folder / "runs").rglob("cell.json"))
    campaign_runs.plan_runs(store, "8b", True, plan_of(traces, *default_policies("8b")))
    assert len(list((store.folder / "runs").rglob("cell.json"))) == 5


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


def test_the_work_of_a_logged_step_is_what_the_simulator_timed(store, traces):
    profile = load_profile(campaign_steps.make_profile(store, "tiny", False))
    for policy in ("vllm", "bros:chunk=128"):
        cell = Cell("mooncake", 1.5, policy, 2.0)
        trace = traces / "mooncake_part.jsonl"
        inputs = inputs_of("tiny", cell, trace, str(store.folder / "profiles" / "tiny-eager.json"))
        log = parse_log(run_policy(inputs, inputs.policies[0], decisions=True).decisions)
        model = profile.model(inputs.hardware.limits.max_num_seqs)
        still = [
            (step.seconds, model.step_seconds(work))
            for step, work in zip(log.steps, campaign_runs.compositions(log), strict=True)
            if not (step.swapped_in or step.preempted)
        ]
        assert len(still) > 20
        timed, ours = np.array(still).T
        assert np.median(np.abs(ours / timed - 1)) < 1e-6


def test_nothing_is_simulated_and_no_engine_started_without_a_plan(store, traces, monkeypatch):
    monkeypatch.setattr(campaign_runs, "run_policy", None)
    engines = Engines(store)
    monkeypatch.setattr(engines, "get", None)
    with pytest.raises(StageError, match="no run is planned: stage plan"):
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
        with pytest.raises(OutOfTime, match="60 s are left, and an engine takes 70 s to start"):
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


def test_kernels_that_measure_nothing_have_failed(tmp_path, monkeypatch):
    assert importlib.util.find_spec(f"{campaign_kernel.COMMAND[-1]}.__main__") is not None
    code = "import sys; print('no GPU here'); sys.exit(2)"
    monkeypatch.setattr(campaign_kernel, "COMMAND", (sys.executable, "-c", code))
    store = Store(tmp_path / "out")
    with pytest.raises(StageError, match="tiny: nothing was measured; no GPU here"):
        campaign_kernel.measure_kernels(store, Engines(store), "tiny", Deadline(30.0))


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
    from twinserve.sim.setup.inputs import service_seconds

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


def test_no_profile_without_steps(tmp_path):
    with pytest.raises(StageError, match="run stage steps first"):
        campaign_steps.make_profile(Store(tmp_path / "out"), "tiny", False)


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
    case = {"shape": "tiny", "kind": "decode", "sequences": 1, "context": 40, "new_tokens": 1}
    times = [{**case, "kernel": "ours_half", "median_us": 12.0}]
    rows = [{"batch": 4, "median_s": 0.0025}]
    host = {way: {"context": 256, "rows": rows} for way in ("async", "sync")}
    store.write(host, "steps", "tiny-eager-host.json")
    kernel = {
        "device": "none",
        "checks": [{"fine": True}, {"fine": False}],
        "tuning": [],
        "times": times,
    }
    store.write(kernel, "kernel", "tiny", "attention_kernel.json")

    page = write_report(store, traces).read_text()
    assert "| mooncake-80-vllm | " in page
    assert (
        "| 10.0 %, -10.0 % | 10.0 %, -10.0 % | 0 |" in page
    )  # predicted is a tenth below measured
    assert "-13.0 % (4.3)" in page  # 1 / 1.15, and repeats at 1.1 and 1.2
    assert "| decode 4 x 256 | 2.5 | 2.5 | 3.4" in page  # 2 ms + 4 x 0.1 ms + 1024 x 1 us
    assert "| 128 tokens | 0.113 | 0.6 | 0.113 | 0.6 |" in page
    assert "2 checks, 1 wrong" in page and "| decode 1 x 40, 1 new | 12 |" in page
    images = [line.split("(")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")]
    assert len(images) == 3
    assert all(
        (store.folder / "report" / name).read_bytes().startswith(b"\x89PNG") for name in images
    )


def test_a_table_is_markdown():
    assert table(("a", "b"), [("x", 1)]) == "| a | b |\n|---|---:|\n| x | 1 |\n"


def test_a_report_of_nothing(tmp_path):
    assert write_report(Store(tmp_path / "out")).read_text().startswith("# Campaign")


# -- on an engine ----------------------------------------------------------------------------------
def _command(out: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "twinserve.experiments.campaign",
        *arguments,
        "--out",
        str(out),
        "--model",
        "tiny",
        "--eager",
    ]


@pytest.mark.live
@pytest.mark.slow
def test_killed_and_called_again_it_goes_on(tmp_path, traces):
    pytest.importorskip("vllm")
    out, mirror = tmp_path / "out", tmp_path / "mirror"
    raw = out / "steps" / "tiny-eager.parquet"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(
        _command(out, "steps", "--mirror", str(mirror), "--rounds", "100000"),
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while not raw.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = read_samples(raw)
    assert first.steps and first.provenance["rounds"] >= 1
    with tarfile.open(mirror / "steps.tar.gz") as archive:
        assert "steps/tiny-eager.parquet" in archive.getnames()

    rounds = first.provenance["rounds"] + 2
    stages = "steps,swap,host,profile,plan,validate,report"
    policies = ["--loads", "0.8", "--seconds", "0.4", "--repeats", "1"]
    arguments = [
        *policies,
        "--rounds",
        str(rounds),
        "--traces",
        str(traces),
        "--mirror",
        str(mirror),
    ]
    done = subprocess.run(
        _command(out, stages, *arguments),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    second = read_samples(raw)
    assert second.provenance["rounds"] == rounds
    assert [s.seconds for s in second.steps[: len(first.steps)]] == [s.seconds for s in first.steps]
    assert len(second.steps) > len(first.steps)
    assert read_samples(out / "steps" / "tiny-eager-swap.parquet").swaps
    store = Store(out)
    found = campaign_runs.finished(store, "tiny", False)
    assert {one.cell["policy"] for one in found} == set(default_policies("tiny"))
    assert all(
        len(one.live) == 1 and one.locked is not None and one.locked.drift == 0 for one in found
    )
    page = (out / "report" / "campaign.md").read_text()
    assert "| mooncake-80-vllm | " in page and "| decode 8 x 256 | " in page
    with tarfile.open(mirror / "runs.tar.gz") as archive:
        assert "runs/tiny-eager/mooncake-80-vllm/live-1/summary.json" in archive.getnames()

    # a third call finds everything done and starts no engine
    store.say = lambda text: None
    engines = Engines(store)
    campaign_steps.measure_steps(store, engines, "tiny", False, Deadline(60.0), rounds)
    campaign_steps.measure_swaps(store, engines, "tiny", False, Deadline(60.0))
    plan = Plan(
        {"mooncake": traces / "mooncake_part.jsonl"}, (0.8,), default_policies("tiny"), 0.4, 1
    )
    campaign_runs.validate(store, engines, "tiny", False, Deadline(60.0), plan)
    assert engines._engine is None


IMPORTS = """
import sys
from twinserve.experiments.campaign import main as campaign, setup

late, started = set(), False


class Watch:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame and "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame else ""
        ours = name.startswith("twinserve") or importer.startswith("twinserve")
        if started and ours and not name.startswith(tuple(f"{n}." for n in sys.modules)):
            late.add(name)
        if started and name.startswith("twinserve"):
            late.add(name)


start = setup.Engines.start


def first(*rest):
    global started
    started = True
    return start(*rest)


setup.Engines.start = first
sys.meta_path.insert(0, Watch())
code = campaign.main(sys.argv[1:])
print("LATE", sorted(late))
sys.exit(code or (0 if started else 3))
"""


@pytest.mark.live
@pytest.mark.slow
def test_all_that_the_stages_import_is_there_before_the_first_engine(tmp_path, traces):
    """What we import, that is; an engine has its own."""
    pytest.importorskip("vllm")
    stages = "plan,steps:60,validate,swap,host,kernel,profile,report"
    arguments = ["--model", "tiny", "--eager", "--loads", "0.8", "--seconds", "0.4", "--rounds"]
    arguments += ["2", "--repeats", "1", "--traces", str(traces), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, stages, *arguments],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "LATE []" in done.stdout
    # and none of it puts our attention in place of vLLM's own
    (start, *_) = json.loads((tmp_path / "out" / "steps" / "tiny-eager-starts.json").read_text())[
        "starts"
    ]
    assert start["attention"] and "BidirectionalImpl" not in start["attention"]


@pytest.mark.live
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("gpu-memory-utilisation=0.8", "nearest: gpu_memory_utilization"),
        ("enforce_eager=true", "say it with --eager"),
        ("max_num_seqs=4", "say it with the sizes in experiments/campaign/setup.py"),
    ],
)
def test_engine_arguments_are_those_of_the_installed_vllm(tmp_path, capsys, argument, said):
    pytest.importorskip("vllm")
    arguments = ["--model", "tiny", "--eager", "--engine-arg", argument]
    assert campaign.main(["steps", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.live
@pytest.mark.slow
def test_a_first_round_is_coarse_and_in_order_of_worth(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setitem(MODEL_SIZES, "tiny", replace(MODEL_SIZES["tiny"], quick=False))
    store = Store(tmp_path / "out")
    engines = Engines(store)
    try:
        campaign_steps.measure_steps(store, engines, "tiny", False, Deadline(120.0), rounds=1)
    finally:
        engines.close()
    steps = read_samples(campaign_steps.raw_path(store, "tiny", False)).steps
    coarse, full = ([s for s in steps if (s.point >= 5000) is early] for early in (True, False))
    kinds = list(dict.fromkeys(s.kind for s in coarse))
    assert kinds[:3] == ["decode", "prefill", "chunk"] and len(kinds) >= 6
    assert [s.kind for s in coarse] == sorted((s.kind for s in coarse), key=kinds.index)
    assert {s.round for s in coarse} == {0} and {s.round for s in full} == {1}
    assert len({s.point for s in coarse}) < len({s.point for s in full})
    measured = json.loads((store.folder / "steps" / "tiny-eager-starts.json").read_text())
    assert measured["starts"][0]["num_blocks"] == 160 and measured["starts"][0]["repeatable"]
