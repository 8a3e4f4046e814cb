"""Where the log of an emulated engine parts from the simulated one, and what a server adds."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from twinserve.backends.live.emulate.steps import Lateness
from twinserve.backends.live.measure.replayed import Seen, replayed
from twinserve.sim.results.decisions import DecisionLog, LoggedRequest, LoggedStep
from twinserve.sim.results.files import ResultsError, read_run
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin.emulated import VirtualPace
from twinserve.sim.twin.emulated_server import check_served, of_stamps
from twinserve.sim.twin.validate_emulated import EmulatedComparison, parted, write_emulated
from twinserve.traces.workload import Workload

REQUESTS = [LoggedRequest("a", 0.0, 4, 2, None), LoggedRequest("b", 0.0, 4, 2, None)]
STEP = LoggedStep(0.5, 0.1, {0: 1, 1: 4}, {1: 0}, (), (), 7)


def log(*steps: LoggedStep) -> DecisionLog:
    return DecisionLog({}, REQUESTS, list(steps))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grants": {0: 1, 1: 3}}, "b computes 4 tokens in the simulation, 3 under vLLM"),
        ({"grants": {0: 1}}, "b computes 4 tokens in the simulation, 0 under vLLM"),
        ({"admitted": {}}, "admitted {1: 0} in the simulation, {} under vLLM"),
        ({"free_blocks": 6}, "free blocks 7 in the simulation, 6 under vLLM"),
        ({"seconds": 0.2}, "seconds 0.1 in the simulation, 0.2 under vLLM"),
    ],
)
def test_the_first_difference_is_named(change, said):
    line = parted(log(STEP, STEP), log(STEP, replace(STEP, **change)))
    assert line == f"step 1 at 0.500000 s: {said}"


def test_equal_logs_do_not_part_whatever_the_order_of_a_batch():
    assert parted(log(STEP), log(replace(STEP, grants={1: 4, 0: 1}))) == ""
    assert parted(log(STEP, STEP), log(STEP)) == "2 steps were simulated, and vLLM made 1"


def test_a_step_hides_no_host_time_if_none_is_under_way():
    """Even if it begins when the one before it ends: a client asked again then."""
    engine = SimpleNamespace(clock=SimpleNamespace(now=0.0), exposed_s=lambda: 0.25, launch_s=0.0)
    pace = VirtualPace(engine)
    assert [pace.launch(1.0, False), pace.launch(1.0, True)] == [1.25, 2.25]
    pace.begins.clear()  # both are booked
    engine.clock.now = 2.25
    assert pace.launch(1.0, False) == 3.5


def served(late: int, sent_late_s: float = 0.004):
    """Two requests: the first with three tokens, the second with one."""
    seen = Seen(
        due_s=np.array([10.0, 20.0]),
        sent_s=np.array([10.0, 20.0]) + sent_late_s,
        first_s=np.array([10.6, 20.5]),
        last_s=np.array([11.0, 20.5]),
        cached=np.zeros(2),
        tokens=np.array([3, 1]),
    )
    lines = [  # in the order in which they ended
        {"name": "cmpl-1-0-9f", "came_s": 20.1, "tokens_s": [20.4]},
        {"name": "cmpl-0-0-7e", "came_s": 10.1, "tokens_s": [10.5, 10.7, 10.9]},
    ]
    for line, reached_s in zip(lines, (20.2, 10.3), strict=True):
        line |= {"reached_s": reached_s, "scheduled_s": reached_s + 0.05}
    return of_stamps(seen, lines, Lateness(200, late, 0.5, 9.0))


@pytest.fixture(scope="module")
def run():
    inputs = resolve(SimulationConfig(trace="fixed:10,2", rate=1.0, requests=2, policy=("vllm",)))
    return inputs, run_policy(inputs, inputs.policies[0])


def test_a_clients_wait_is_told_by_its_parts(run):
    server, (_, simulated) = served(late=2), run
    assert server.engine["ttft"] == pytest.approx([0.2, 0.2])
    assert server.engine["tpot"][0] == pytest.approx(0.2) and np.isnan(server.engine["tpot"][1])
    assert server.client["e2el"] == pytest.approx([1.0, 0.5])
    means, parts = server.means(simulated, simulated), server.mean_parts(simulated)
    before = [server.parts[name].mean() for name in ("client late", "HTTP", "API server")]
    assert before == pytest.approx([0.004, 0.096, 0.15])
    assert parts["to the engine"] == (0.0, pytest.approx(0.25))
    assert parts["back"] == (0.0, pytest.approx(0.1))
    assert np.sum(list(parts.values()), axis=0) == pytest.approx(means["client", "ttft"])


def test_the_engine_is_compared_by_its_own_arrivals(run):
    workload = run[0].workload
    came = served(late=0).arrived(workload)
    assert came.ids == workload.ids
    assert came.arrival_s == pytest.approx([0.3, 10.2])
    assert served(late=0).arrived(replace(workload, concurrency=1)).concurrency is None


def test_a_simulated_front_end_has_the_same_parts(run):
    fronted = resolve(run[0].config.model_copy(update={"front_end": "vllm"}))
    server, simulated = served(late=0), run_policy(fronted, fronted.policies[0])
    parts = server.mean_parts(simulated)
    assert all(ours > 0 for name, (ours, _) in parts.items() if name != "waits there")
    mean = server.means(run[1], simulated)["client", "ttft"][0]
    assert sum(ours for ours, _ in parts.values()) == pytest.approx(mean)


def test_no_error_is_printed_where_the_host_was_late(run):
    runs = run[1], run[1]
    said = dict(served(late=2).lines(*runs))
    assert said["engine, mean ttft"].endswith("%") and "note" not in said
    said = dict(served(late=3).lines(*runs))
    assert said["engine, mean ttft"].endswith("ms") and "host was late" in said["note"]
    assert "note" in dict(served(late=0, sent_late_s=0.006).lines(*runs))
    assert "1.5 % of them ended late (3), by 0.50 s" in said["server"]


def test_requests_that_wait_for_others_are_not_served():
    for settings in ({"trace": "fixed:10,2", "pool": 2}, {"trace": "agents:sessions=2"}):
        inputs = resolve(SimulationConfig(requests=4, **settings))
        with pytest.raises(SettingsError, match="--served: .* drop --served"):
            check_served(inputs)


def test_a_comparison_is_written_whole(run, tmp_path):
    inputs, simulated = run
    one = EmulatedComparison(
        inputs.policies[0], simulated, simulated, "", (2, 2), 0, served(late=0)
    )
    out = tmp_path / "out"
    write_emulated(out, [one], inputs, "0.32.0", overwrite=False)
    (policy,) = json.loads((out / "emulated.json").read_text())["policies"]
    assert policy["served"]["steps"] == 200 and policy["served"]["host_keeps_up"]
    assert len((out / "vllm" / "served.csv").read_text().splitlines()) == 3
    assert read_run(out / "vllm" / "emulated").summary == simulated.summary
    with pytest.raises(ResultsError, match="already holds a comparison"):
        write_emulated(out, [one], inputs, "0.32.0", overwrite=False)
    write_emulated(out, [one], inputs, "0.32.0", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


async def _ask_in_a_loop(workload: Workload) -> tuple[Seen, int]:
    """Send it to a server that needs 20 ms. Returns the most that it had at once, too."""
    under_way: list[int] = [0]

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        under_way.append(under_way[-1] + 1)
        reply = web.StreamResponse()
        await reply.prepare(request)
        await asyncio.sleep(0.02)
        under_way.append(under_way[-1] - 1)
        event = {"choices": [{}], "usage": {"completion_tokens": body["max_tokens"]}}
        await reply.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        seen = await replayed(url, "m", workload, [[1]] * len(workload))
    return seen, max(under_way)


def test_clients_of_a_closed_loop_send_when_another_answer_has_ended(run):
    workload = replace(run[0].workload, arrival_s=np.zeros(2))
    for limit, most in ((1, 1), (None, 2)):
        seen, at_once = asyncio.run(_ask_in_a_loop(replace(workload, concurrency=limit)))
        assert at_once == most and not np.isnan(seen.last_s).any()
        if limit:
            assert seen.due_s[1] >= seen.last_s[0]
        else:
            assert seen.due_s[1] == seen.due_s[0]
