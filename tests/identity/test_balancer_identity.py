"""Our router `vllm-dp` beside vLLM's own balancer, pick for pick.

The method needs no engine: an object without one gets the six attributes that it reads, the same
snapshots and the same ends of requests.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from tests.sim.routing import Scene, prompt
from twinserve.sim.fleet.routers import vllm_dp

pytestmark = pytest.mark.live


def theirs(engines: int, clients: int):
    client_of = pytest.importorskip("vllm.v1.engine.core_client").DPLBAsyncMPClient
    client = client_of.__new__(client_of)
    client.client_count = clients
    client.core_engines = [bytes([i]) for i in range(engines)]
    client.reqs_in_flight, client.engine_inflight = {}, Counter()
    client.lb_engines = [[0, 0, 0.0] for _ in range(engines)]
    client.eng_start_index = 0
    return client


def differing(picks: int, engines: int, clients: int, seed: int) -> int:
    """In how many of so many picks both differ. Snapshots of random loads come at random times;
    requests end at random."""
    rng = np.random.default_rng([seed, engines, clients])
    ours, vllm = Scene(f"vllm-dp:clients={clients}", engines, blocks=1000), theirs(engines, clients)
    here: list[tuple[str, int]] = []
    wrong = tick = 0
    for number in range(picks):
        if rng.random() < 0.05:
            tick += 1
            ours.view.now = tick * 0.1 + 0.05
            loads = rng.integers(0, [30, 20, 1001], (engines, 3))
            loads[rng.random(engines) < 0.5, 1] = 0  # often nobody waits
            ours.loads = [tuple(map(int, load)) for load in loads]
            vllm.lb_engines = [[w, r, used / 1000] for r, w, used in ours.loads]
        while here and rng.random() < 0.45:
            name, engine = here.pop(int(rng.integers(len(here))))
            ours.end(prompt(), engine)
            ended = SimpleNamespace(finished_requests={name})
            drive(type(vllm).process_engine_outputs(vllm, ended))
        request = SimpleNamespace(
            request_id=f"r{number}", data_parallel_rank=None, pooling_params=None
        )
        chosen = vllm.core_engines.index(vllm.get_core_engine_for_request(request))
        wrong += ours.choose(prompt()) != chosen
        ours.view.in_flight[chosen] += 1  # both go on from vLLM's pick
        here.append((request.request_id, chosen))
    return wrong


def drive(coroutine) -> None:
    with pytest.raises(StopIteration):
        coroutine.send(None)


@pytest.mark.parametrize(("engines", "clients"), [(2, 1), (3, 1), (8, 1), (5, 4)])
def test_every_pick_is_vllms(engines, clients):
    assert differing(3_000, engines, clients, seed=0) == 0


@pytest.mark.nightly
def test_every_one_of_100_000_picks_is_vllms():
    assert sum(differing(25_000, *pair, seed=1) for pair in [(2, 1), (4, 1), (16, 1), (8, 3)]) == 0


BREAKS = {
    "a weight of 5": {"_WAITING_WEIGHT": 5.0},
    "memory from 40 % on": {"_KV_FREE": 0.4},
    "no share for what is under way": {"score": lambda counts, under_way: counts[0] + counts[1]},
}


@pytest.mark.parametrize("change", BREAKS)
def test_a_difference_would_be_seen(change, monkeypatch):
    for name, value in BREAKS[change].items():
        monkeypatch.setattr(vllm_dp, name, value)
    assert differing(3_000, 4, 1, seed=2) > 0
