"""`vllm serve` with our scheduler, in processes of its own, over HTTP: attributes, bad ones,
hang-ups, and `vllm bench serve` past saturation."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.live.serve_http import Server, write_served_model
from twinserve.backends.live.serving.client import ahead_of_others, bench, keep_ahead

pytestmark = [pytest.mark.slow, pytest.mark.live]

ARGUMENTS = ["--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
BROS = {"profile": "llama-3.1-8b@h100", "slo_ttft_s": 0.4, "slo_tpot_s": 0.2}
POLICIES = {
    "bros": {"policy": "bros:chunk=64", **BROS},
    "fit": {"policy": "bros:chunk=fit", **BROS},
    "vllm": {"policy": "vllm"},
    "unserved": {"policy": "bros"},  # step times of what?
}


@contextlib.contextmanager
def serving(folder: Path, *names: str) -> Iterator[dict[str, Server]]:
    """All are started at once: that is what takes time."""
    model = write_served_model(folder / "model")
    started: dict[str, Server] = {}
    try:
        for name in names:
            options = POLICIES[name]
            own = folder / name
            own.mkdir()
            given = {**options, "strict": True, "stats_path": str(own / "stats.json")}
            # vLLM's null block counted; 48 are half of what 16 seats could fill
            blocks = 129 if name == "fit" else 49
            started[name] = Server(
                own, model, given, [*ARGUMENTS, "--num-gpu-blocks-override", str(blocks)]
            )
        for name, server in started.items():
            server.process.wait(420) if name == "unserved" else server.wait(420)
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(scope="module")
def server(vllm, tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served"), "bros") as started:
        yield started["bros"]


@pytest.fixture(scope="module")
def others(vllm, tmp_path_factory) -> Iterator[dict[str, Server]]:
    with serving(tmp_path_factory.mktemp("others"), "fit", "vllm", "unserved") as started:
        yield started


def stats(server: Server, ended: int) -> dict:
    """The server's file, once it counts `ended` requests."""
    path = Path(server.log.parent) / "stats.json"
    for _ in range(1200):  # 120 s
        found = json.loads(path.read_text()) if path.exists() else {}
        if found and found["finished"] + found["aborted"] + found["refused"] >= ended:
            return found
        time.sleep(0.1)
    raise AssertionError(f"the server counts other requests: {found}")


def test_attributes_reach_the_policy_and_bad_ones_the_client(server):
    for attributes in (
        {"class": "rt", "slo_ttft_s": 0.3, "app": "agent", "stage": 1},
        {"class": "be", "priority": 2},
        None,
    ):
        status, answer = server.complete("w1 w2 w3", vllm_xargs=attributes)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 8
    for attributes, said in (
        ({"class": "gold"}, "vllm_xargs.class"),
        ({"slo_ttft_s": -1}, "slo_ttft_s"),
        ({"clas": "be"}, "'class'"),
    ):
        status, answer = server.complete("w1 w2 w3", vllm_xargs=attributes)
        assert status == 400
        assert said in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]
    counted = stats(server, 3)
    assert (counted["arrived"], counted["finished"], counted["refused"]) == (3, 3, 0)


def hang_up(server: Server) -> tuple[dict, dict]:
    """Four requests whose clients leave among twenty others; the server's counts before and
    after."""
    server.complete("w1", max_tokens=1)  # its file is there from its first request
    before = stats(server, 1)
    with ThreadPoolExecutor(24) as pool:
        leaving = [
            pool.submit(server.leave_early, [5 + i] * 300, 200, 0.1 + 0.02 * i) for i in range(4)
        ]
        staying = [pool.submit(server.complete, [7 + i] * 150, max_tokens=30) for i in range(20)]
        assert [answer.result()[0] for answer in staying] == [200] * 20
        for one in leaving:
            one.result()
    # A client that leaves at once may be gone before the scheduler hears of its request.
    counted = stats(server, before["arrived"] + 20)
    for _ in range(100):
        time.sleep(0.3)
        earlier, counted = counted, stats(server, before["arrived"] + 20)
        ended = counted["finished"] + counted["aborted"] + counted["refused"]
        if ended == counted["arrived"] and counted["steps"] == earlier["steps"]:
            break
    return before, counted


def test_hanging_up_over_http(server):
    """A busy machine may notice a client's leaving when its request has ended: then once more."""
    for _ in range(10):
        before, counted = hang_up(server)
        assert counted["finished"] >= before["finished"] + 20
        assert (counted["drift"], counted["restarts"]) == (0, 0)
        if counted["aborted"] > before["aborted"]:
            return
    raise AssertionError("nobody left before the answer had ended")


@pytest.mark.nightly
def test_the_benchmark_past_saturation(server):
    before = stats(server, 0)["arrived"]
    load = {"num_prompts": 80, "random_input_len": 150, "random_output_len": 40}
    load |= {"request_rate": "inf", "num_warmups": 0}
    result = json.loads(bench(server, server.log.parent / "bench.json", load, 1).read_text())
    assert (result["completed"], result.get("failed", 0)) == (80, 0)
    counted = stats(server, before + 80)
    assert (counted["drift"], counted["restarts"]) == (0, 0), counted["first_drift"]
    assert counted["preempted"] > 0
    # one long pause may put the mean above the p99
    assert counted["decision_mean_s"] > 0 and counted["decision_p99_s"] > 0
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    assert f"twinserve_preempted_total {float(counted['preempted'])}" in lines
    assert 'twinserve_waiting{class="be"} 0.0' in lines and "twinserve_drift_total 0.0" in lines
    assert any(line.startswith("vllm:num_requests_running") for line in lines)


@pytest.mark.nightly  # judges by wall time
def test_a_flood_of_best_effort_requests_is_served_behind_real_time_ones(others):
    """Sixty at once, and real-time requests that come when the first of them is answered: while one
    of these is served less than half of the flood ends. First come, first served, all the rest of
    the flood would. Counted, not timed: a busy machine slows both."""
    server = others["fit"]

    def status(prompt: list[int], service_class: str, tokens: int) -> int:
        attributes = {"class": service_class}
        return server.complete(prompt, max_tokens=tokens, vllm_xargs=attributes)[0]

    # clients of a machine of their own: one that is woken late sees the flood after it has ended
    with ahead_of_others(), ThreadPoolExecutor(60, initializer=keep_ahead) as pool:
        flood = [pool.submit(status, [5 + i] * 300, "be", 150) for i in range(60)]
        wait(flood, return_when=FIRST_COMPLETED)
        ended, urgent = [sum(one.done() for one in flood)], []
        for i in range(3):
            urgent.append(status([70 + i] * 100, "rt", 40))
            ended.append(sum(one.done() for one in flood))
        answers = [one.result() for one in flood]
    assert [*answers, *urgent] == [200] * 63
    assert ended[0] < 30 and max(b - a for a, b in zip(ended, ended[1:], strict=False)) < 30, ended
    counted = stats(server, 63)
    assert (counted["drift"], counted["restarts"]) == (0, 0), counted["first_drift"]


@pytest.mark.nightly
def test_policy_vllm_on_the_engines_own_pool(others):
    """48 blocks and its prefix cache, to the block: anything else would be drift, and stop the
    strict server."""
    server = others["vllm"]
    shared = [3 + i % 400 for i in range(96)]

    def turn(i: int) -> list[int]:
        status, answer = server.complete(
            [*shared[: 32 * (i % 4)], *[20 + i] * (90 + i)], max_tokens=60, logprobs=0
        )
        assert status == 200, answer
        return status

    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(turn, range(60))) == [200] * 60
    counted = stats(server, 60)
    assert (counted["num_blocks"], counted["engine_blocks"], counted["prefix_caching"]) == (
        48,
        48,
        True,
    )
    assert (counted["drift"], counted["restarts"], counted["finished"]) == (0, 0, 60), counted[
        "first_drift"
    ]
    assert counted["preempted"] > 0
    assert counted["hit_tokens"] > 0


def test_the_log_names_the_policy(server):
    assert "policy bros:chunk=64 on the paged ledger: 48 of 48 KV blocks" in server.said()


@pytest.mark.nightly
def test_a_server_that_cannot_be_does_not_start(others):
    server = others["unserved"]
    assert server.process.poll() not in (None, 0)
    (line,) = [line for line in server.said().splitlines() if 'say whose with "profile"' in line]
    assert "ERROR" in line
