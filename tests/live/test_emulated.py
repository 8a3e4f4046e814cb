"""A real vLLM on an emulated GPU: in virtual time it decides what the simulation does, to the last
bit; as a server it answers, repeats itself, and leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.backends.live.emulate.model import one_token_words, write_tokenizer
from twinserve.backends.live.versions import installed_vllm
from twinserve.sim.results.decisions import parse_log
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_simulation

pytestmark = [pytest.mark.live]
ROOT = Path(__file__).parents[2]
H100 = {
    "profile": "llama-3.1-8b@h100", "trace": "poisson", "slo": "ttft=1,tpot=0.05", "host_blocks": 0,
}  # fmt: skip
TIGHT = H100 | {"num_blocks": 560, "max_model_len": 8192, "cap_length": 8000}
RUNS = {
    "vllm, no memory to spare": TIGHT | {"load": 1.3, "requests": 80},
    "vllm, one step at a time": TIGHT | {"load": 1.3, "requests": 80, "async_scheduling": False},
    "vllm, launched": H100
    | {"trace": "vllm:num_prompts=150,request_rate=50,random_input_len=200,random_output_len=2"},
    "vllm, measured": H100  # a client asks again when its answer ends, which leaves the GPU idle
    | {
        "profile": str(ROOT / "docs/results/campaign/h100/profile.json"),
        "trace": "vllm:num_prompts=30,max_concurrency=1,random_input_len=200,random_output_len=8",
    },
    "vllm, prefixes": H100 | {"trace": "mooncake", "load": 1.0, "requests": 30},
    "vllm, four GPUs and a pool": H100
    | {"profile": "llama-3.1-70b@h100:tp4", "load": 0.7, "requests": 40, "pool": 8},
    "bros:chunk=fit,kv=paged": H100 | {"load": 0.9, "requests": 80},
    "bros:chunk=fit,kv=paged, prefixes": H100
    | {"trace": "mooncake", "load": 1.0, "requests": 30, "prefix_caching": True},
    "echo": H100 | {"load": 0.9, "requests": 60, "pool": 8, "async_scheduling": False},
    "bros:chunk=fit,kv=paged, no memory to spare": TIGHT | {"load": 1.3, "requests": 60},
    "justitia": H100 | {"load": 1.1, "requests": 60},
    "vllm, clients that leave": TIGHT | {"load": 1.3, "requests": 60, "client_timeout": 2.0},
}
START = "from twinserve.sim.cli.entry import twinserve; twinserve()"


@pytest.mark.parametrize("name", RUNS)
def test_vllm_in_virtual_time_is_the_simulation(vllm, name):
    from twinserve.sim.twin.emulated import EmulatedRun, emulated_engine

    settings = RUNS[name] | {"engine_version": installed_vllm()}
    inputs = resolve(SimulationConfig(policy=(name.partition(", ")[0],), **settings))
    (spec,) = inputs.policies
    launch_s = 0.0025 if "launched" in name else 0.0  # until an idle engine plans its second step

    def run(simulation):
        simulation.engines[0].launch_s = launch_s
        return run_simulation(simulation)

    simulated = run(Simulation(inputs, spec, decisions=True))
    if launch_s:
        assert run_simulation(Simulation(inputs, spec)).summary != simulated.summary
    with emulated_engine(inputs, spec) as engine:
        real = run(EmulatedRun(inputs, spec, engine))
        assert getattr(engine.scheduler, "drift", 0) == 0
    ours, theirs = parse_log(simulated.decisions).steps, parse_log(real.decisions).steps
    assert len(ours) > 100
    assert theirs == ours  # grants, hits, preemptions, free blocks, times
    if "leave" in name:
        assert real.summary["timed_out"] == simulated.summary["timed_out"] > 5
    if "no memory" in name:
        assert sum(len(step.preempted) for step in ours) > 5
    if "prefixes" in name:
        assert sum(sum(step.admitted.values()) for step in ours) > 1000
    # a client that leaves gets no token of the step under way; the simulation counts its gap
    for metric in ("ttft", "tpot", *(["itl"] * ("leave" not in name)), "e2el"):
        for statistic in ("mean", "p99"):
            key = f"{statistic}_{metric}_ms"
            assert real.summary[key] == simulated.summary[key], key


@pytest.mark.parametrize(
    "policy", mostly_nightly(["vllm", "bros:chunk=fit,kv=paged"], "bros:chunk=fit,kv=paged")
)
def test_a_server_in_wall_time_is_compared_with_the_simulation(vllm, policy):
    from twinserve.sim.twin.validate_emulated import compare_emulated

    loop = "vllm:num_prompts=8,max_concurrency=3,random_input_len=300,random_output_len=60"
    settings = H100 | {"profile": "llama-3.1-70b@h100:tp4", "requests": 8}
    settings |= {"trace": loop} if policy == "vllm" else {"rate": 4.0}
    settings |= {"engine_version": installed_vllm(), "front_end": "vllm"}
    inputs = resolve(SimulationConfig(policy=(policy,), cap_length=200, **settings))
    found = compare_emulated(inputs, inputs.policies[0], served=True)
    server = found.served
    assert not found.fault and server.lateness.steps > 50
    means, parts = server.means(found.arrived, found.fronted), server.mean_parts(found.fronted)
    assert np.sum(list(parts.values()), axis=0) == pytest.approx(means["client", "ttft"])
    assert all((seconds > -1e-4).all() for seconds in server.parts.values())


def test_prompts_of_words_have_as_many_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path)
    words = one_token_words(tmp_path)
    text = "".join(np.random.default_rng(0).choice(words, 3000))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(words) > 1000 and len(tokenizer.encode(text).ids) == 3000


class Served:
    """`twinserve emulate` as a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        command = [sys.executable, "-c", START, "emulate", "--port", str(self.port), *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=folder
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, path: str, body: dict | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def wait(self, seconds: float = 180.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.ask("/health")
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(self.said()[-3000:])


def engines_of(parent: int) -> list[int]:
    """Processes that this one started."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_server_answers_repeats_itself_and_leaves_nothing_behind(vllm, tmp_path):
    served = Served(tmp_path, "--profile", "llama-3.1-8b@h100", "-p", "bros:chunk=fit")
    try:
        served.wait()
        again = subprocess.run(
            [sys.executable, "-c", START, "emulate", "--port", str(served.port)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert again.returncode == 2 and again.stderr.count("\n") == 1
        assert "in use; choose another one" in again.stderr
        body = {"model": "llama-3.1-8b", "prompt": "Once upon a time", "max_tokens": 60}
        started = time.monotonic()
        first = json.loads(served.ask("/v1/completions", body))
        took = time.monotonic() - started
        assert first["usage"]["completion_tokens"] == 60
        assert took > 60 * 0.006  # a token is 7 ms on this GPU
        assert json.loads(served.ask("/v1/completions", body))["choices"] == first["choices"]
        streaming = {"stream": True, "max_tokens": 5, "stream_options": {"include_usage": True}}
        streamed = served.ask("/v1/completions", body | streaming)
        assert b'"completion_tokens":5' in streamed  # a busy host sends several in one piece
        word = first["choices"][0]["text"].split()[2]
        stopped = json.loads(served.ask("/v1/completions", body | {"stop": [word]}))
        assert stopped["choices"][0]["finish_reason"] == "stop"
        chat = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "Hi"}]}
        said = json.loads(served.ask("/v1/chat/completions", chat | {"max_tokens": 3}))
        assert said["usage"]["completion_tokens"] == 3
        assert b"vllm:generation_tokens_total" in served.ask("/metrics")
        engines = engines_of(served.process.pid)
        assert engines
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait()
        until(lambda: not any(map(alive, engines)))
    finally:
        if served.process.poll() is None:
            os.killpg(served.process.pid, signal.SIGKILL)


@pytest.mark.nightly
def test_a_fleet_outlives_a_server_and_ends_with_its_front(vllm, tmp_path):
    arguments = ("--profile", "llama-3.1-70b@h100:tp4", "--replicas", "2", "-r", "round-robin")
    served = Served(tmp_path, *arguments)
    ask = {"model": "llama-3.1-70b", "prompt": "Once", "max_tokens": 4}
    try:
        served.wait(600.0)
        until(lambda: len(re.findall(rb"worker_up\{.*\} 1\.0", served.ask("/metrics"))) == 2)
        servers = engines_of(served.process.pid)
        assert len(servers) == 2
        said = [json.loads(served.ask("/v1/completions", ask)) for _ in range(4)]
        assert len({one["choices"][0]["text"] for one in said}) == 1
        picks = re.findall(rb"picks_total\{.*\} (\S+)", served.ask("/metrics"))
        assert [float(count) for count in picks] == [2.0, 2.0]
        left, killed = ([one, *engines_of(one)] for one in servers)
        assert min(len(left), len(killed)) > 1
        os.kill(servers[1], signal.SIGKILL)  # its engine ends, and the front goes on
        until(lambda: not any(map(alive, killed)))
        again = [json.loads(served.ask("/v1/completions", ask)) for _ in range(4)]
        assert [one["choices"] for one in again] == [said[0]["choices"]] * 4
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(120) == 0
        until(lambda: not any(map(alive, left)))
    finally:
        if served.process.poll() is None:
            os.killpg(served.process.pid, signal.SIGKILL)


def until(holds, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
