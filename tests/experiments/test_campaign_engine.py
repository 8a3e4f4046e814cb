"""The campaign on vLLM's CPU engine: killed and called again, with all that its stages import."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinserve.experiments.campaign import main as campaign
from twinserve.experiments.campaign import runs as campaign_runs
from twinserve.experiments.campaign import steps as campaign_steps
from twinserve.experiments.campaign.runs import Plan
from twinserve.experiments.campaign.setup import Deadline, Engines, Store, default_policies
from twinserve.profiles.measured.samples import read_samples
from twinserve.profiles.profile import load_profile


def _command(out: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "twinserve.experiments.campaign", *arguments, "--out", str(out),
        "--model", "tiny", "--eager",
    ]  # fmt: skip


@pytest.mark.live
@pytest.mark.nightly
def test_killed_and_called_again_it_goes_on(tmp_path, traces):
    pytest.importorskip("vllm")
    out = tmp_path / "out"
    raw = out / "steps" / "tiny-eager.parquet"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(
        _command(out, "steps", "--rounds", "100000"), env=environment, stdout=subprocess.DEVNULL
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
    assert first.steps

    rounds = first.provenance["rounds"] + 2
    stages = "steps,traffic,swap,host,profile,plan,validate,report,free"
    policies = ["--loads", "0.8", "--seconds", "0.4", "--repeats", "1"]
    arguments = [*policies, "--rounds", str(rounds), "--traces", str(traces)]
    done = subprocess.run(
        _command(out, stages, *arguments),
        env=environment,
        capture_output=True,
        text=True,
        timeout=360,
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
    assert "| mooncake-80-vllm | " in page and "| decode 4 x 64 | " in page
    profile = load_profile(out / "profiles" / "tiny-eager.json")
    assert profile.loop_s > 0 and profile.step_model.fit.traffic_steps > 100
    assert "| mooncake-80-vllm | " in (out / "report" / "free.md").read_text()

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
@pytest.mark.nightly
def test_all_that_the_stages_import_is_there_before_the_first_engine(tmp_path, traces):
    """What we import, that is; an engine has its own."""
    pytest.importorskip("vllm")
    stages = "plan,steps:60,traffic,validate,swap,host,profile,report,free"
    arguments = ["--model", "tiny", "--eager", "--loads", "0.8", "--seconds", "0.4", "--rounds"]
    arguments += ["2", "--repeats", "1", "--traces", str(traces), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, stages, *arguments],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=400,
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
