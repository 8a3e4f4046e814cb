"""`vllm serve` over HTTP: a greedy and an honest client side by side, known by their API keys; and
with policy justitia, requests of one application that are served together."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from tests.live.serve_http import Server, write_served_model

pytestmark = [pytest.mark.nightly, pytest.mark.live]

CLIENTS = ("greedy", "honest")
SMALL = {"app": "small", "app_class": "CC", "app_text": "w1 w2 w3", "app_requests": 3}
LARGE = {"app": "large", "app_class": "MRS"}
FIRST_TOKENS = 1500  # eleven seconds
ARGUMENTS = [
    "--max-model-len", "4096", "--max-num-seqs", "1", "--max-num-batched-tokens", "256",
    "--num-gpu-blocks-override", "300",
]  # fmt: skip


@pytest.fixture(scope="module")
def servers(vllm, tmp_path_factory) -> Iterator[dict[str, Server]]:
    """Each has one seat, so that requests are served one by one."""
    folder = tmp_path_factory.mktemp("served")
    listed = {name: {"key_sha256": [sha256(name.encode()).hexdigest()]} for name in CLIENTS}
    (folder / "clients.yaml").write_text(json.dumps({"clients": listed}))
    model = write_served_model(folder / "model")
    started: dict[str, Server] = {}
    try:
        for policy, clients, more in (
            ("vtc", str(folder / "clients.yaml"), ["--api-key", *CLIENTS, "other"]),
            ("justitia:predictor=class-mean", "trusted", []),
        ):
            own = folder / policy[:4]
            own.mkdir()
            options = {"policy": policy, "clients": clients, "strict": True}
            options["stats_path"] = str(own / "stats.json")
            started[policy[:4]] = Server(own, model, options, ARGUMENTS + more, emulated=True)
        for server in started.values():
            server.wait(420)
        yield started
    finally:
        for server in started.values():
            server.stop()


def send(server: Server, name: str, said: dict | None, tokens: int = 20, key=None) -> None:
    status, answer = server.complete(
        "w1 w2 w3", name=name, key=key, max_tokens=tokens, vllm_xargs=said
    )
    assert status == 200, answer


def stats(server: Server) -> dict:
    return json.loads((server.log.parent / "stats.json").read_text())


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


def test_a_greedy_client_does_not_keep_an_honest_one_waiting(servers):
    """Thirty requests of the greedy client, each in an application of its own and of the smallest
    priority, and then four of the honest one: these are among the first nine, as they take turns.
    """
    server = servers["vtc"]
    with ThreadPoolExecutor(40) as pool:
        work = [pool.submit(send, server, "first", None, FIRST_TOKENS, "greedy")]
        until(lambda: requests(server, "running") == 1)
        for i in range(30):
            said = {"app": f"app-{i}", "priority": -1000, "slo_ttft_s": 0.001}
            work.append(pool.submit(send, server, f"greedy{i}", said, 20, "greedy"))
        until(lambda: requests(server, "waiting") == 30)
        for i in range(4):
            work.append(pool.submit(send, server, f"honest{i}", None, 20, "honest"))
        for one in work:
            one.result()
    names = server.answered()
    places = [place for place, name in enumerate(names) if name.startswith("honest")]
    assert len(names) == 35
    assert max(places) < 10, names
    counted = stats(server)
    assert (counted["drift"], counted["restarts"], counted["refused"]) == (0, 0, 0)


def test_a_client_is_told_at_once_and_known_by_its_key(servers):
    """Of all that the middleware refuses, one case each (test_serving_options, _gate)."""
    server, forged = servers["vtc"], {"twinserve_client": "honest"}
    status, answer = server.complete("w1 w2 w3", key="greedy", vllm_xargs=forged)
    assert status == 400 and "clients must not set" in answer["error"]["message"]
    assert server.complete("w1 w2 w3", key="other")[0] == 200
    assert server.complete("w1 w2 w3")[0] == 401
    status, answer = servers["just"].complete("w1 w2 w3", vllm_xargs={"app": "other"})
    assert status == 400 and "app_class is missing" in answer["error"]["message"]


def test_applications_are_served_one_after_the_other(servers):
    """A request has the only seat while five of two applications come."""
    server = servers["just"]
    others = [(LARGE, "L1"), (SMALL, "S1"), (LARGE, "L2"), (SMALL, "S2")]
    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(send, server, "first", None, FIRST_TOKENS)]
        until(lambda: requests(server, "running") == 1)
        for attributes, name in [*others, ({**SMALL, "stage": 1}, "S3")]:
            work.append(pool.submit(send, server, name, attributes))
        until(lambda: requests(server, "waiting") == 5)
        for one in work:
            one.result()
    answered = [name for name in server.answered() if name]
    assert answered[0] == "first" and [name[0] for name in answered[1:]] == list("SSSLL")


def test_what_only_the_scheduler_can_know_is_a_server_error(servers):
    """The class of an open application. Others are served on, and nothing was decided that vLLM did
    not do."""
    server = servers["just"]
    third = {"app": "third", "app_class": "EV"}

    def status(said: dict) -> int:
        return server.complete("w1 w2 w3", vllm_xargs=said)[0]

    assert status(third) == 200 and status(third | {"app_class": "CC"}) == 500
    assert "application 'third' began as 'EV'" in server.said()
    assert status(third | {"app_requests": 2}) == 200
    assert status(third | {"app_class": "CC"}) == 200  # the third has ended
    until(lambda: stats(server)["finished"] >= 3)
    counted = stats(server)
    assert (counted["refused"], counted["drift"], counted["restarts"]) == (1, 0, 0)
