"""An emulated GPU as far as no vLLM is needed: what its steps cost, what it answers, how it is
started."""

import json
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from twinserve.backends.live.emulate import serve as serving
from twinserve.backends.live.emulate.serve import check_port, engine_arguments
from twinserve.backends.live.emulate.settings import (
    KEY,
    emulated,
    read_emulated,
    with_absolute_path,
)
from twinserve.backends.live.emulate.steps import EmulatedSteps, TokenRange, WallPace
from twinserve.backends.live.serving.options import read_options
from twinserve.backends.live.versions import LiveEngineError
from twinserve.errors import TwinserveError
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

PROFILE = "llama-3.1-8b@h100"
WORDS = TokenRange.of_vocab(8192)


class Priced(StepTimeModel):
    """A second a step, and keeps what it is asked for."""

    watches_churn = True

    def __init__(self) -> None:
        self.asked: list = []

    def step_seconds(self, work) -> float:
        self.asked.append(work)
        return 1.0

    def decode_run_seconds(self, n, context, context_max, steps) -> np.ndarray:
        return np.ones(steps)


def scheduled(grants, new=(), cached=(), finished=(), resumed=()):
    """A SchedulerOutput: new (name, prompt, computed), cached (name, computed, outputs)."""
    names, computed, outputs = zip(*cached, strict=True) if cached else ((), (), ())
    return SimpleNamespace(
        num_scheduled_tokens=grants,
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=prompt, num_computed_tokens=n)
            for name, prompt, n in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(names),
            num_computed_tokens=list(computed),
            num_output_tokens=list(outputs),
            resumed_req_ids=set(resumed),
        ),
    )


def test_a_step_is_priced_by_its_chunks_prefixes_and_decodes():
    model = Priced()
    steps = EmulatedSteps(model, WORDS, cold_start_s=2.0)
    first = steps.take(scheduled({"a": 40, "b": 20}, new=[("a", [5] * 40, 0), ("b", [6] * 50, 16)]))
    assert first.seconds == 3.0 and not first.goes_on  # the first one is cold
    assert model.asked[0].prefill_new.tolist() == [40, 20]
    assert model.asked[0].prefill_resident.tolist() == [0, 16]
    assert [len(tokens) for tokens in first.tokens] == [1, 0]  # the chunk of b is not its last
    second = steps.take(scheduled({"a": 1, "b": 14}, cached=[("a", 40, 1), ("b", 36, 0)]))
    assert second.seconds == 1.0 and second.goes_on
    work = model.asked[1]
    assert (work.decode_requests, work.decode_context, work.decode_context_max) == (1, 40, 40)
    assert work.prefill_new.tolist() == [14] and work.churn.changed
    third = steps.take(scheduled({"b": 1}, cached=[("b", 50, 1)], finished=["a"]))
    assert model.asked[2].decode_requests == 1 and not len(model.asked[2].prefill_new)
    assert third.names == ["b"] and third.computed == [50]
    assert steps.take(scheduled({}, finished=["b"])).seconds == 0.0 and len(model.asked) == 3


def test_a_preempted_request_is_a_prompt_again_and_goes_on_with_the_same_tokens():
    whole, broken = EmulatedSteps(Priced(), WORDS), EmulatedSteps(Priced(), WORDS)
    start = scheduled({"a": 8}, new=[("a", list(range(8)), 0)])
    assert whole.take(start).tokens == broken.take(start).tokens
    expected = whole.take(scheduled({"a": 1}, cached=[("a", 8, 1)])).tokens
    again = scheduled({"a": 9}, cached=[("a", 0, 1)], resumed=["a"])
    assert broken.take(again).tokens == expected
    assert broken.model.asked[-1].prefill_new.tolist() == [9]
    assert broken.model.asked[-1].churn.joined == 1
    # newer runners get it as a new request, with all that is known of it
    anew = scheduled({"a": 9}, new=[("a", list(range(8)), 0)])
    anew.scheduled_new_reqs[0].prefill_token_ids = list(range(9))
    assert broken.take(anew).tokens == expected


def test_made_up_tokens_follow_the_prompt_or_the_name():
    def first(name, prompt, named):
        steps = EmulatedSteps(Priced(), TokenRange.of_vocab(8192, named))
        return steps.take(scheduled({name: 4}, new=[(name, prompt, 0)])).tokens

    assert first("a", [1, 2, 3, 4], False) == first("b", [1, 2, 3, 4], False)
    assert first("a", [1, 2, 3, 4], False) != first("a", [1, 2, 3, 5], False)
    assert first("a", [1, 2, 3, 4], True) == first("a", [9, 9, 9, 9], True)
    assert first("a", [1, 2, 3, 4], True) != first("b", [1, 2, 3, 4], True)
    ((token,),) = first("a", [1, 2, 3, 4], False)
    assert 1000 <= token < 8192 * 7 // 8


def test_a_pace_makes_up_for_its_host_and_says_where_it_cannot(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace = WallPace()
    assert pace.launch(0.010, False) == pytest.approx(100.010)
    now = 100.014  # the host took 4 ms for the next step: it has had them
    assert pace.launch(0.010, True) == pytest.approx(100.020)
    assert pace.lateness.late == 0
    now = 100.050  # 30 ms: more than a step
    assert pace.launch(0.010, True) == pytest.approx(100.050)
    assert pace.lateness.late == 1 and pace.lateness.late_s == pytest.approx(0.020)
    now = 107.0  # nothing to do: no fault of the host's
    assert pace.launch(0.010, False) == pytest.approx(107.010)
    line = pace.lateness.line()
    assert "4 steps, 0.0 s; 25.0 % of them ended late (1), by 0.02 s" in line


def test_the_server_gets_the_profiles_memory_and_limits():
    config = SimulationConfig(profile=PROFILE, num_blocks=9000, async_scheduling=False)
    hardware = resolve_hardware(config)
    words = engine_arguments(config, hardware, "bros:chunk=fit", ["--api-key", "k"])
    said = dict(zip(words, words[1:], strict=False))
    assert said["--max-num-seqs"] == str(hardware.limits.max_num_seqs)
    assert said["--max-model-len"] == str(hardware.limits.max_model_len)
    assert said["--scheduler-cls"].endswith("serving.scheduler.PolicyScheduler")
    assert words[-2:] == ["--api-key", "k"]
    options = json.loads(said["--additional-config"])
    assert options["policy"] == "bros:chunk=fit" and options["profile"] == PROFILE
    gpu = read_emulated(options)
    assert gpu == emulated(config, hardware)
    assert gpu.num_blocks == 9000 and gpu.kv_bytes_per_token == hardware.limits.kv_bytes_per_token
    same = resolve_hardware(gpu.config)
    assert same.limits == hardware.limits and not gpu.config.async_scheduling
    assert read_options(options).policy == "bros:chunk=fit"  # our scheduler minds its own keys


def test_an_engine_in_another_folder_finds_the_profiles_file(tmp_path, monkeypatch):
    save_profile(load_profile(PROFILE), tmp_path / "mine.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = SimulationConfig(profile="mine.json", num_blocks=100)
    arguments = engine_arguments(config, resolve_hardware(config), "bros:chunk=fit", [])
    options = json.loads(arguments[arguments.index("--additional-config") + 1])
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_emulated(options).model().step_seconds(StepComposition(1, 99, 99)) > 0
    assert load_profile(options["profile"])
    assert (
        with_absolute_path("cfg/config.json@h100:tp2")
        == f"{tmp_path}/elsewhere/cfg/config.json@h100:tp2"
    )
    assert with_absolute_path(PROFILE) == PROFILE


def test_options_of_the_scheduler_may_be_given_beside():
    config = SimulationConfig(profile=PROFILE)
    hardware = resolve_hardware(config)
    for given in (
        ["--additional-config", '{"strict": true}'],
        ['--additional-config={"strict": true}'],
    ):
        words = engine_arguments(config, hardware, "vllm", given)
        assert words.count("--additional-config") == 1
        options = json.loads(words[words.index("--additional-config") + 1])
        assert options["strict"] and options["policy"] == "vllm" and KEY in options
    with pytest.raises(LiveEngineError, match="no JSON object; write one"):
        engine_arguments(config, hardware, "vllm", ["--additional-config", "[1]"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"profile": "llama-3.1-8b@h100:pp2"}, "an emulated GPU has no pipeline stages"),
        ({"profile": PROFILE, "speculate": "k=3,method=eagle,acceptance=0.7"}, "makes no drafts"),
    ],
)
def test_hardware_that_one_worker_cannot_stand_for_is_refused(settings, said):
    config = SimulationConfig(**settings)
    with pytest.raises(LiveEngineError, match=said):
        emulated(config, resolve_hardware(config))


def test_a_worker_that_was_started_otherwise_says_so_in_one_line():
    for given in (None, {}, {KEY: {"num_blocks": 3}}):
        with pytest.raises(LiveEngineError, match="start it with twinserve emulate") as failure:
            read_emulated(given)
        assert "\n" not in str(failure.value)


def test_a_port_that_is_taken_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LiveEngineError, match=f"--port {port} of 127.0.0.1: .*choose another"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)
    with pytest.raises(LiveEngineError, match="--port 99999"):
        check_port("127.0.0.1", 99999)


def test_compositions_are_whole_arrays():
    steps = EmulatedSteps(Priced(), WORDS)
    work = steps.take(scheduled({"a": 3}, new=[("a", [1, 2, 3], 0)])).work
    assert work.prefill_new.dtype == np.int64


def test_a_fleet_is_servers_and_a_front_before_them(monkeypatch):
    started, become = [], []
    monkeypatch.setattr(serving, "check_port", lambda host, port: None)
    monkeypatch.setattr(serving, "require", lambda *uses: None)
    monkeypatch.setattr(serving, "installed_vllm", lambda: "0.32.0")
    monkeypatch.setattr(serving, "named_vllm", lambda folder: folder)
    monkeypatch.setattr(serving, "write_model", lambda *args: None)
    monkeypatch.setattr(serving.subprocess, "Popen", lambda words, **_: started.append(words))
    monkeypatch.setattr(serving.os, "execv", lambda file, words: become.append(words))
    monkeypatch.setattr(serving.os, "environ", {})
    config = SimulationConfig(profile=PROFILE, replicas=2, router="round-robin")
    serving.serve(config, "0.0.0.0", 8000)
    assert [words[words.index("--port") + 1] for words in started] == ["8001", "8002"]
    assert all("127.0.0.1" in words and "serve" in words for words in started)
    (front,) = become
    assert "route" in front and "round-robin" in front and front[-1] == "8000"
    workers = [after for word, after in zip(front, front[1:], strict=False) if word == "--worker"]
    assert workers == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    with pytest.raises(TwinserveError, match="decides by KV events"):
        serving.serve(config.model_copy(update={"router": "dynamo-kv"}), "127.0.0.1", 8000)
    assert len(started) == 2
