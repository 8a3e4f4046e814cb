"""`twinserve route` before real `vllm serve`: streams, views of /metrics, and servers that are
stopped or killed in the middle of answers."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.live.serve_http import NAME, Server, write_served_model
from twinserve.backends.live.serving.client import bench

pytestmark = [pytest.mark.nightly, pytest.mark.live]

ARGUMENTS = ["--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
ARGUMENTS += ["--num-gpu-blocks-override", "513"]
COMMAND = [sys.executable, "-c", "from twinserve.sim.cli.main import main; main()", "route"]
TOKENS = 300
LONG = 1900  # an answer that is not over when eight have begun
TRIES = 5
QUIET_S = 1.0  # for what has been sent to come
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Route:
    """The command before some servers, as a process of its own."""

    def __init__(self, servers: list[Server], router: str) -> None:
        arguments = ["--router", router, "--port", "0", "--health-interval", "0.2"]
        arguments += ["--health-timeout", "30"]  # a busy machine is no dead one
        for server in servers:
            arguments += ["--worker", server.url]
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        for _ in range(100):
            if self.metric("twinserve_route_worker_up").count(1.0) == len(servers):
                return
            time.sleep(0.1)
        raise AssertionError("not all workers came up")

    def metric(self, name: str) -> list[float]:
        """All samples of a metric."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        return [float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line)]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def servers(vllm, tmp_path_factory) -> Iterator[list[Server]]:
    """Three of vLLM's own: two that go away, each in a test, and one that stays."""
    pytest.importorskip("aiohttp")
    folder = tmp_path_factory.mktemp("routed")
    model = write_served_model(folder / "model")
    (folder / "chat.jinja").write_text(CHAT)
    arguments = [*ARGUMENTS, "--chat-template", str(folder / "chat.jinja")]
    started: list[Server] = []
    try:
        for i in range(3):
            (folder / str(i)).mkdir()
            started.append(Server(folder / str(i), model, None, arguments))
        for server in started:
            server.wait(420)  # all at once, on a machine that may do other things
        yield started
    finally:
        for server in started:
            server.stop()


def post(url: str, path: str, **body) -> tuple[int, dict]:
    given = {"model": NAME, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **body}
    request = urllib.request.Request(
        url + path, json.dumps(given).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stream(url: str, path: str, tokens: int = TOKENS, seen=None, **body) -> tuple[str, list[dict]]:
    """Text of an answer, and its events; seen: called with each of these."""
    given = {"model": NAME, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    given |= {"stream": True, "stream_options": {"include_usage": True}, **body}
    request = urllib.request.Request(
        url + path, json.dumps(given).encode(), {"Content-Type": "application/json"}
    )
    text, events = "", []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or b"[DONE]" in line:
                continue
            events.append(json.loads(line[6:]))
            for choice in events[-1].get("choices", []):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if seen is not None:
                seen()
    return text, events


def fields(events: list[dict]) -> set[str]:
    """Of the choices of all events."""
    return {name for event in events for choice in event["choices"] for name in choice}


def asked(i: int) -> tuple[str, dict]:
    """Path and prompt of one of several answers, every third of them a chat."""
    words = " ".join(f"w{(7 * i + j) % 400 + 5}" for j in range(40 + i))
    if i % 3 == 2:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}
    return "/v1/completions", {"prompt": words}


def test_answers_are_those_of_the_servers(servers):
    route = Route(servers[:2], "vllm-dp")
    try:
        for i in range(6):
            path, body = asked(i)
            direct, through = (stream(url, path, 30, **body) for url in (servers[0].url, route.url))
            assert through[0] == direct[0]
            assert through[1][-1]["usage"] == direct[1][-1]["usage"]
            # a busy machine sends several tokens in one event: their number may differ
            assert set().union(*through[1]) == set().union(*direct[1])
            assert fields(through[1]) == fields(direct[1])
            status, whole = post(route.url, path, max_tokens=30, **body)
            said = whole["choices"][0]
            assert status == 200
            assert (said["text"] if "text" in said else said["message"]["content"]) == direct[0]
        for wrong in ({"prompt": "w1", "max_tokens": -1}, {"prompt": "w1", "model": "other"}):
            direct = post(servers[0].url, "/v1/completions", **wrong)
            assert post(route.url, "/v1/completions", **wrong)[0] == direct[0] >= 400
        with urllib.request.urlopen(f"{route.url}/v1/models", timeout=60) as models:
            assert json.load(models)["data"][0]["id"] == NAME
        assert sum(route.metric("twinserve_route_picks_total")) == 14
    finally:
        assert route.stop() == 0


def test_the_benchmark_of_vllm_through_the_front(servers):
    route = Route(servers[:2], "least-requests")
    try:
        client = servers[0]
        load = {"num_prompts": 60, "random_input_len": 60, "random_output_len": 20}
        load |= {"request_rate": "inf", "num_warmups": 0, "base_url": route.url}
        result = json.loads(bench(client, client.log.parent / "bench.json", load, 1).read_text())
        assert (result["completed"], result.get("failed", 0)) == (60, 0)
        assert result["total_output_tokens"] == 60 * 20
        picks = route.metric("twinserve_route_picks_total")
        assert sum(picks) >= 60 and min(picks) > 15
        assert sum(route.metric("twinserve_route_retries_total")) == 0
    finally:
        assert route.stop() == 0


def begin(pool: ThreadPoolExecutor, url: str) -> list[Future[tuple[str, list[dict]]]]:
    """Eight long answers, of each of which a part has come."""
    begun = [threading.Event() for _ in range(8)]
    answers = []
    for i in range(8):
        path, body = asked(i)
        answers.append(pool.submit(stream, url, path, LONG, begun[i].set, **body))
    for one in begun:
        assert one.wait(timeout=120)
    return answers


def stopped_within(server: Server, answers: list[Future[tuple[str, list[dict]]]]) -> bool:
    """Whether the server stands still with two of its answers begun; else it goes on, and all end.

    Only while it stands still is that certain: clients that a busy machine lets wait read tokens
    seconds after they were sent."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    end = time.monotonic() + 120
    while sum(answer.done() for answer in answers) < 4:  # those of the other server
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(QUIET_S)
    if sum(not answer.done() for answer in answers) >= 2:
        return True
    os.killpg(server.process.pid, signal.SIGCONT)
    for answer in answers:
        answer.result()
    return False


@pytest.mark.alone  # the answers must not be over before the server goes
@pytest.mark.parametrize(("number", "kill"), [(2, signal.SIGTERM), (1, signal.SIGKILL)])
def test_a_server_goes_in_the_middle_of_answers(servers, number, kill):
    """Stopped, it ends its answers as aborted; killed, it says nothing. The last tests: they leave
    one server."""
    wanted = [stream(servers[0].url, asked(i)[0], LONG, **asked(i)[1])[0] for i in range(8)]
    victim = servers[number]
    for i in (0, 2):  # a server's first completion, and its first chat, take long
        stream(victim.url, asked(i)[0], **asked(i)[1])
    route = Route([servers[0], victim], "round-robin")
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(TRIES):
                answers = begin(pool, route.url)
                if stopped_within(victim, answers):
                    break
            else:
                raise AssertionError("answers were over before all had begun, each time")
            os.killpg(victim.process.pid, kill)
            os.killpg(victim.process.pid, signal.SIGCONT)
            found = [answer.result() for answer in answers]
        migrations = sum(route.metric("twinserve_route_migrations_total"))
        assert migrations >= 2  # of the four that were there
        for i, (text, events) in enumerate(found):
            assert "error" not in events[-1], events[-1]
            assert text == wanted[i], i
            assert events[-1]["usage"]["completion_tokens"] == LONG
            assert len({event["id"] for event in events}) == 1
        assert victim.process.wait(60) is not None
        assert sorted(route.metric("twinserve_route_worker_up")) == [0.0, 1.0]
        path, body = asked(0)
        assert stream(route.url, path, LONG, **body)[0] == wanted[0]
    finally:
        assert route.stop() == 0
