"""The campaign's stages: what is written survives being killed, and a second call goes on from there."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from twinserve.experiments import campaign, campaign_runs, campaign_steps
from twinserve.experiments.campaign_report import table, write_report
from twinserve.experiments.campaign_runs import Cell, Plan, inputs_of
from twinserve.experiments.campaign_setup import MODEL_SIZES, Deadline, Engines, Store, model_folder
from twinserve.policies.requests import RequestClass
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.measured_profile import model_spec
from twinserve.profiles.measured_samples import Measurement, StepSample, SwapSample, read_samples, write_samples
from twinserve.profiles.profile import load_profile
from twinserve.sim.replay import LockedReplay
from twinserve.sim.results import write_run
from twinserve.sim.run import run_policy

TRACE = "\n".join(
    json.dumps({"timestamp": 250 * i, "input_length": 40 + 13 * (i % 9), "output_length": 4 + i % 7, "hash_ids": [i]})
    for i in range(40)
)


@pytest.fixture
def traces(tmp_path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "mooncake_part.jsonl").write_text(TRACE + "\n")
    return folder


def seconds(work: StepComposition) -> float:
    """A made-up engine: 2 ms a step, 20 us a prompt token, 0.1 ms a decode, 1 us a context token."""
    return 2e-3 + 2e-5 * int(work.prefill_new.sum()) + 1e-4 * work.decode_requests + 1e-6 * work.decode_context


def sample(kind: str, point: int, number: int, decodes: int, context: int, new: tuple[int, ...] = ()) -> StepSample:
    fresh = np.array(new, np.int64)
    work = StepComposition(decodes, decodes * context, context * (decodes > 0), fresh, np.zeros(len(new), np.int64))
    took = seconds(work) * (1 + 0.01 * (number % 3))
    return StepSample(kind, point, number, work, took, exec_s=0.8 * took)


def measured() -> Measurement:
    steps, point = [], 0
    for decodes in (1, 2, 4, 8):
        for context in (16, 64, 256):
            steps += [sample("decode", point, i, decodes, context) for i in range(4)]
            point += 1
    for new in ((16,), (64,), (128,), (64, 64)):
        steps += [sample("prefill" if len(new) == 1 else "prefills", point, i, 0, 0, new) for i in range(4)]
        point += 1
    for decodes in (2, 6):
        steps += [sample("mixed", point, i, decodes, 64, (64,)) for i in range(4)]
        point += 1
        steps += [sample("check", point, i, decodes, 100, (32,)) for i in range(4)]
        point += 1
    facts = {
        "device": "Made up", "device_type": "cpu", "memory_bytes": 8e9, "matmul_flops": 1e11, "memory_bytes_per_s": 2e10,
        "link_bytes_per_s": 1e10, "vllm": "0.25.1", "torch": "2.11.0", "python": "3.12", "date": "2026-01-01",
        "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "dtype": "float32", "num_blocks": 160, "block_tokens": 32,
        "seed": 0, "rounds": 4, "elapsed_s": 1.0, "empty_s": 1e-4, "submit_s": 5e-5,
        "settings": {"graphs": False, "threads": 1, "prefix_caching": True, "max_num_seqs": 8, "max_step_tokens": 256,
                     "max_model_len": 512},
    }  # fmt: skip
    return Measurement(steps, [], facts)


@pytest.fixture
def store(tmp_path) -> Store:
    """A campaign whose steps are there."""
    found = Store(tmp_path / "out")
    facts = measured().provenance
    write_samples(measured(), campaign_steps.raw_path(found, "tiny", False))
    swaps = [SwapSample(way, n, 512 * n, 1e-4 + 1e-7 * n) for way in ("swap_out", "swap_in") for n in (32, 64, 128)]
    write_samples(Measurement([], swaps, facts), campaign_steps.raw_path(found, "tiny", False, "-swap"))
    found.write({name: facts[name] for name in facts if name != "settings"}, campaign_steps.STEPS, "machine.json")
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["steps,nothing"], "'nothing' is no stage"),
        (["steps:fast"], "write NAME or NAME:SECONDS"),
        (["validate"], "needs a folder with .jsonl or .csv traces"),
        (["steps", "--engine-arg", "threads"], "give NAME=VALUE"),
    ],
)
def test_wrong_arguments_get_one_line(tmp_path, capsys, arguments, said):
    assert campaign.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_mirror_holds_whole_tars_of_each_part_and_no_models(tmp_path):
    store = Store(tmp_path / "out", tmp_path / "mirror")
    store.write({"a": 1}, "runs", "one", "cell.json")
    store.path("models", "m", "config.json").write_text("{}")
    store.path("runs", ".partial").write_text("torn")
    store.saved("runs")
    store.saved("models")
    store.say("hello")
    store.saved("log.txt")
    assert sorted(p.name for p in (tmp_path / "mirror").iterdir()) == ["log.txt", "runs.tar"]
    with tarfile.open(tmp_path / "mirror" / "runs.tar") as archive:
        files = [m.name for m in archive.getmembers() if m.isfile()]
    assert files == ["runs/one/cell.json"]
    # a new call on the same folder fills an empty mirror at once
    Store(tmp_path / "out", tmp_path / "other")
    assert (tmp_path / "other" / "runs.tar").exists()


def test_a_failing_stage_leaves_the_others_their_turn(tmp_path, monkeypatch):
    seen = []

    def stage(name, *rest):
        seen.append(name)
        if name == "steps":
            raise RuntimeError("no\nGPU")

    monkeypatch.setattr(campaign, "_run", stage)
    assert campaign.main(["steps,profile", "--out", str(tmp_path / "out")]) == 1
    assert seen == ["steps", "profile"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "steps failed: RuntimeError: no GPU" in log and "Traceback" in log


def test_units_come_in_order_of_worth():
    plan = Plan({"a": Path("a"), "b": Path("b")}, (0.8, 1.1, 0.5), ("vllm", "bros"), 10.0, 2)
    units = [(cell.load, part) for cell, part in plan.units()]
    assert len(units) == len(set(plan.units())) == 2 * 2 * 3 * 3
    order = list(dict.fromkeys(units))
    assert order[:5] == [(0.8, "locked"), (0.8, "live-1"), (1.1, "locked"), (1.1, "live-1"), (0.8, "live-2")]
    assert order[-1] == (0.5, "live-2")


def test_the_shapes_are_those_that_profiles_know(tmp_path):
    from twinserve.profiles.catalog import MODELS

    store = Store(tmp_path / "out")
    for key in ("8b", "14b"):
        name = MODEL_SIZES[key].name
        assert model_spec(model_folder(store, key), name) == MODELS[name]
        for shipped in MODEL_SIZES[key].shipped:
            profile = load_profile(shipped)
            assert profile.llm.name == name
            assert 2 * MODEL_SIZES[key].ledger_blocks + MODEL_SIZES[key].seats < profile.num_gpu_blocks


def test_a_cell_has_the_load_it_names_and_both_classes(store, traces):
    profile = campaign_steps.make_profile(store, "tiny", False)
    (trace,) = traces.iterdir()
    from twinserve.sim.inputs import service_seconds

    for load in (0.5, 1.1):
        cell = Cell("mooncake", load, "vllm", 0.2)
        inputs = inputs_of("tiny", cell, trace, str(profile))
        workload = inputs.workload
        assert service_seconds(workload, inputs.hardware) / workload.span_s == pytest.approx(load, rel=0.02)
        assert (workload.klass == RequestClass.BEST_EFFORT).mean() == pytest.approx(1 / 3, abs=0.05)
        again = inputs_of("tiny", cell, trace, str(profile), inputs.config.rate_scale, inputs.config.requests)
        assert np.array_equal(again.workload.arrival_s, workload.arrival_s)


def test_the_profile_takes_steps_and_swaps_together(store):
    profile = load_profile(campaign_steps.make_profile(store, "tiny", False))
    work = StepComposition(4, 4 * 64, 64)
    assert profile.model(8).step_seconds(work) == pytest.approx(1.01 * seconds(work), rel=0.02)
    assert profile.pcie_bytes_per_s == pytest.approx(512 / 1e-7, rel=0.01)


def test_no_profile_without_steps(tmp_path):
    store = Store(tmp_path / "out")
    assert campaign_steps.make_profile(store, "tiny", False) is None
    assert "run stage steps first" in (tmp_path / "out" / "log.txt").read_text()


def test_the_report_has_every_part_that_was_measured(store, traces):
    """Live runs are stood in for by simulated ones of an engine that is slower by a tenth."""
    profile = campaign_steps.make_profile(store, "tiny", False)
    (trace,) = traces.iterdir()
    cell = Cell("mooncake", 0.8, "vllm", 0.2)
    inputs = inputs_of("tiny", cell, trace, str(profile))
    names = (campaign_runs.RUNS, "tiny-eager", cell.name)
    chosen = {"rate_scale": inputs.config.rate_scale, "requests": inputs.config.requests}
    store.write({**cell.__dict__, **chosen}, *names, "cell.json")
    simulated = run_policy(inputs, inputs.policies[0])
    write_run(store.path(*names, "simulated"), simulated)
    for number, factor in ((1, 1.1), (2, 1.2)):
        live = run_policy(inputs, inputs.policies[0])
        live.config["live"] = {"drift": 0}
        live.summary = {k: v * factor if isinstance(v, float) else v for k, v in live.summary.items()}
        write_run(store.path(*names, f"live-{number}"), live)
    steps = simulated.rows.steps
    took = steps["end_s"] - steps["start_s"]
    columns = {"start_s": steps["start_s"], "predicted_s": took, "measured_s": took / 0.9, "moved": False, "drift": False}
    locked = LockedReplay(steps[["prefill_tokens", "decode_requests"]].assign(**columns), {}, "", 0, [])
    locked.steps.to_parquet(store.path(*names, "locked.parquet"))
    store.write({"first_drift": "", "evictions": 0, "drift": 0}, *names, "locked.json")
    case = {"shape": "tiny", "kind": "decode", "sequences": 1, "context": 40, "new_tokens": 1}
    times = [{**case, "kernel": "ours_half", "median_us": 12.0}]
    kernel = {"device": "none", "checks": [{"fine": True}, {"fine": False}], "tuning": [], "times": times}
    store.write(kernel, "kernel", "tiny", "attention_kernel.json")

    page = write_report(store, traces).read_text()
    assert "| mooncake-80-vllm | " in page
    assert "| 10.0 %, -10.0 % | 0 |" in page  # predicted is a tenth below measured
    assert "-13.0 % (4.3)" in page  # 1 / 1.15, and repeats at 1.1 and 1.2
    assert "| 128 tokens | 0.113 | 0.6 | 0.113 | 0.6 |" in page
    assert "2 checks, 1 wrong" in page and "| decode 1 x 40, 1 new | 12 |" in page
    images = [line.split("(")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")]
    assert len(images) == 3
    assert all((store.folder / "report" / name).read_bytes().startswith(b"\x89PNG") for name in images)


def test_a_table_is_markdown():
    assert table(("a", "b"), [("x", 1)]) == "| a | b |\n|---|---:|\n| x | 1 |\n"


def test_a_report_of_nothing(tmp_path):
    assert write_report(Store(tmp_path / "out")).read_text().startswith("# Campaign")


# -- on an engine -----------------------------------------------------------------------------------------------------
def _command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "twinserve.experiments.campaign", *arguments, "--out", str(out), "--model", "tiny", "--eager"]


@pytest.mark.live
@pytest.mark.slow
def test_killed_and_called_again_it_goes_on(tmp_path, traces):
    pytest.importorskip("vllm")
    out, mirror = tmp_path / "out", tmp_path / "mirror"
    raw = out / "steps" / "tiny-eager.parquet"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(
        _command(out, "steps", "--mirror", str(mirror), "--rounds", "100000"), env=environment, stdout=subprocess.DEVNULL
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
    with tarfile.open(mirror / "steps.tar") as archive:
        assert "steps/tiny-eager.parquet" in archive.getnames()

    rounds = first.provenance["rounds"] + 2
    stages = "steps,swap,profile,validate,report"
    policies = ["--policies", "vllm", "bros:chunk=128", "--loads", "0.8", "--seconds", "0.4", "--repeats", "1"]
    arguments = [*policies, "--rounds", str(rounds), "--traces", str(traces), "--mirror", str(mirror)]
    done = subprocess.run(_command(out, stages, *arguments), env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    second = read_samples(raw)
    assert second.provenance["rounds"] == rounds
    assert [s.seconds for s in second.steps[: len(first.steps)]] == [s.seconds for s in first.steps]
    assert len(second.steps) > len(first.steps)
    assert read_samples(out / "steps" / "tiny-eager-swap.parquet").swaps
    store = Store(out)
    found = campaign_runs.finished(store, "tiny", False)
    assert sorted(one.cell["policy"] for one in found) == ["bros:chunk=128", "vllm"]
    assert all(len(one.live) == 1 and one.locked is not None and one.locked.drift == 0 for one in found)
    assert "| mooncake-80-vllm | " in (out / "report" / "campaign.md").read_text()
    with tarfile.open(mirror / "runs.tar") as archive:
        assert "runs/tiny-eager/mooncake-80-vllm/live-1/summary.json" in archive.getnames()

    # a third call finds everything done and starts no engine
    store.say = lambda text: None
    engines = Engines(store)
    campaign_steps.measure_steps(store, engines, "tiny", False, Deadline(60.0), rounds)
    campaign_steps.measure_swaps(store, engines, "tiny", False, Deadline(60.0))
    plan = Plan({"mooncake": traces / "mooncake_part.jsonl"}, (0.8,), ("vllm", "bros:chunk=128"), 0.4, 1)
    campaign_runs.validate(store, engines, "tiny", False, Deadline(60.0), plan)
    assert engines._engine is None
