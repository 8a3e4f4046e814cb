"""`vllm serve` with a file of clients, over HTTP: a greedy and an honest client side by side, known
by their API keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from tests.live.serve_http import Server, write_served_model

pytestmark = [pytest.mark.nightly, pytest.mark.live]

CLIENTS = ("greedy", "honest")
ARGUMENTS = ["--max-model-len", "2048", "--max-num-seqs", "1", "--max-num-batched-tokens", "256"]


@pytest.fixture(scope="module")
def server(vllm, tmp_path_factory) -> Iterator[Server]:
    """It has one seat, so that requests are served one by one."""
    folder = tmp_path_factory.mktemp("served")
    listed = {name: {"key_sha256": [sha256(name.encode()).hexdigest()]} for name in CLIENTS}
    (folder / "clients.yaml").write_text(json.dumps({"clients": listed}))
    options = {
        "policy": "vtc",
        "clients": str(folder / "clients.yaml"),
        "strict": True,
        "stats_path": str(folder / "stats.json"),
    }
    model = write_served_model(folder / "model")
    arguments = [*ARGUMENTS, "--num-gpu-blocks-override", "200", "--api-key", *CLIENTS, "other"]
    served = Server(folder, model, options, arguments, emulated=True)
    try:
        served.wait()
        yield served
    finally:
        served.stop()


def test_a_greedy_client_does_not_keep_an_honest_one_waiting(server):
    """Thirty requests of the greedy client, each in an application of its own and of the smallest
    priority, and then four of the honest one: these are among the first nine, as they take turns.
    """

    def send(client: str, name: str, said: dict | None, tokens: int) -> None:
        status, answer = server.complete(
            "w1 w2 w3", name=name, key=client, max_tokens=tokens, vllm_xargs=said
        )
        assert status == 200, answer

    with ThreadPoolExecutor(40) as pool:
        work = [pool.submit(send, "greedy", "first", None, 1500)]  # eleven seconds
        time.sleep(0.3)
        for i in range(30):
            said = {"app": f"app-{i}", "priority": -1000, "slo_ttft_s": 0.001}
            work.append(pool.submit(send, "greedy", f"greedy{i}", said, 20))
        time.sleep(0.3)
        work += [pool.submit(send, "honest", f"honest{i}", None, 20) for i in range(4)]
        for one in work:
            one.result()
    names = server.answered()
    places = [place for place, name in enumerate(names) if name.startswith("honest")]
    assert len(names) == 35
    assert max(places) < 10, names
    counted = json.loads((server.log.parent / "stats.json").read_text())
    assert (counted["drift"], counted["restarts"], counted["refused"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vllm_xargs": {"twinserve_client": "honest"}}, "clients must not set"),
        ({"vllm_xargs": {f"key-{i}": i for i in range(50_000)}}, "50,000 names"),
        ({"vllm_xargs": {"priority": -(2**63)}}, "vllm_xargs.priority"),
        ({"vllm_xargs": {"slo_ttft_s": 1e-9}}, "vllm_xargs.slo_ttft_s"),
        ({"vllm_xargs": {"app": "a", "app_text": "x" * 65_537}}, "vllm_xargs.app_text"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_no_request_is_answered_at_once(server, values, said):
    status, answer = server.complete("w1 w2 w3", key="greedy", **values)
    assert status == 400
    assert said in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_others_with_a_key_are_served_and_those_without_are_not(server):
    assert server.complete("w1 w2 w3", key="other")[0] == 200
    assert server.complete("w1 w2 w3")[0] == 401
