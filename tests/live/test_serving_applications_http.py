"""`vllm serve` with policy justitia, over HTTP: requests of one application are served together,
and clients are told what they must say of one."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.live.serve_http import Server, write_served_model

pytestmark = [pytest.mark.nightly, pytest.mark.live]

SMALL = {"app": "small", "app_class": "CC", "app_text": "w1 w2 w3", "app_requests": 3}
LARGE = {"app": "large", "app_class": "MRS"}
FIRST_TOKENS = 1500  # eleven seconds
ARGUMENTS = ["--max-model-len", "4096", "--max-num-seqs", "1", "--max-num-batched-tokens", "256"]


@pytest.fixture(scope="module")
def server(vllm, tmp_path_factory) -> Iterator[Server]:
    """It has one seat, so that requests are served one by one."""
    folder = tmp_path_factory.mktemp("served")
    options = {
        "policy": "justitia:predictor=class-mean",
        "clients": "trusted",
        "strict": True,
        "stats_path": str(folder / "stats.json"),
    }
    model = write_served_model(folder / "model")
    arguments = [*ARGUMENTS, "--num-gpu-blocks-override", "300"]
    served = Server(folder, model, options, arguments, emulated=True)
    try:
        served.wait()
        yield served
    finally:
        served.stop()


def requests(server: Server, state: str) -> int:
    """Of vLLM's own count; state: running or waiting."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        found = re.search(
            rf"^vllm:num_requests_{state}\{{.*\}} (\S+)$", answer.read().decode(), re.M
        )
    return int(float(found[1]))


def until(what, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def test_applications_are_served_one_after_the_other(server):
    """A request has the only seat while five of two applications come."""

    def send(attributes: dict | None, name: str, tokens: int = 20) -> None:
        status, answer = server.complete(
            "w1 w2 w3", name=name, max_tokens=tokens, vllm_xargs=attributes
        )
        assert status == 200, answer

    others = [(LARGE, "L1"), (SMALL, "S1"), (LARGE, "L2"), (SMALL, "S2")]
    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(send, None, "first", FIRST_TOKENS)]
        until(lambda: requests(server, "running") == 1)
        for attributes, name in [*others, ({**SMALL, "stage": 1}, "S3")]:
            work.append(pool.submit(send, attributes, name))
        until(lambda: requests(server, "waiting") == 5)
        for one in work:
            one.result()
    answered = server.answered()
    assert answered[0] == "first" and [name[0] for name in answered[1:]] == list("SSSLL")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"app": "other"}, "app_class is missing"),
        ({"app": "other", "app_class": "cc"}, "class 'cc' is unknown; name one of ALFWI, CC"),
        ({"app_text": "w1"}, "name it with app"),
    ],
)
def test_what_the_policy_lacks_is_said_to_the_client(server, attributes, said):
    status, answer = server.complete("w1 w2 w3", vllm_xargs=attributes)
    assert status == 400
    assert said in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_what_only_the_scheduler_can_know_is_a_server_error(server):
    """The class of an open application. Others are served on, and nothing was decided that vLLM did
    not do."""
    assert server.complete("w1 w2 w3", vllm_xargs={"app": "third", "app_class": "EV"})[0] == 200
    assert server.complete("w1 w2 w3", vllm_xargs={"app": "third", "app_class": "CC"})[0] == 500
    assert "application 'third' began as 'EV'" in server.said()
    assert (
        server.complete(
            "w1 w2 w3", vllm_xargs={"app": "third", "app_class": "EV", "app_requests": 2}
        )[0]
        == 200
    )
    # the third has ended
    assert server.complete("w1 w2 w3", vllm_xargs={"app": "third", "app_class": "CC"})[0] == 200
    stats = server.log.parent / "stats.json"
    until(lambda: json.loads(stats.read_text())["finished"] >= 3)
    counted = json.loads(stats.read_text())
    assert (counted["refused"], counted["drift"], counted["restarts"]) == (1, 0, 0)
