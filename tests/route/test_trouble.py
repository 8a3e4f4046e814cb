"""The front in trouble: workers that are lost, too many requests, and its own end."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import refused
from tests.route.fronts import scene, text
from tests.route.test_front import words

pytestmark = pytest.mark.usefixtures("http")


async def test_a_request_without_an_answer_yet_is_sent_elsewhere():
    async with scene(2, router="round-robin") as made:
        made.workers[0].drops_before_answer = 2
        for streams in (False, True):
            for _ in range(2):
                if streams:
                    assert text(await made.stream(prompt="w1")) == words("w1", 8)
                else:
                    assert (await made.post(prompt="w1"))[0] == 200
        url = made.workers[0].url
        assert await made.metric(f'twinserve_route_retries_total{{worker="{url}"}}') == 2
        assert made.front.fleet.up == [0, 1]  # it answers when asked, and stays


@pytest.mark.slow
async def test_a_dead_worker_is_left_out_and_comes_back():
    async with scene(2, pace_s=0.02, router="round-robin") as made:
        under_way = [asyncio.create_task(made.post(prompt="w1")) for _ in range(6)]
        await made.until(lambda: made.workers[0].busy == 3)
        await made.workers[0].die()
        assert [status for status, *_ in await asyncio.gather(*under_way)] == [200] * 6
        assert made.front.fleet.up == [1]
        up = f'twinserve_route_worker_up{{worker="{made.workers[0].url}"}}'
        assert await made.metric(up) == 0
        assert (await made.post(prompt="w1"))[0] == 200
        before = len(made.workers[0].seen)
        await made.workers[0].start()
        await made.until(lambda: made.front.fleet.up == [0, 1])
        for _ in range(4):
            await made.post(prompt="w1")
        assert len(made.workers[0].seen) == before + 2 and await made.metric(up) == 1


@pytest.mark.slow
async def test_a_worker_that_falls_silent_loses_its_requests_to_others():
    """It accepts connections, and answers nothing: only health checks tell."""
    async with scene(2, router="round-robin") as made:
        made.workers[0].silent = True
        answers = await asyncio.gather(*(made.post(prompt="w1") for _ in range(4)))
        assert [status for status, *_ in answers] == [200] * 4
        assert made.front.fleet.up == [1]


async def test_a_worker_whose_engine_died_is_asked_no_more():
    """Its process answers: 500, and 503 on /health."""
    async with scene(2, router="round-robin", health_s=3600) as made:
        made.workers[0].fails_with = (500, {"error": {"message": "EngineDeadError"}})
        made.workers[0].healthy = False
        answers = [(await made.post(prompt="w1"))[0] for _ in range(4)]
        assert answers == [200] * 4 and made.front.fleet.up == [1]
        assert len(made.workers[0].seen) == 1


async def test_a_request_is_not_sent_to_all_workers_in_turn():
    """One that kills engines would kill them all."""
    async with scene(4, router="round-robin", retries=1) as made:
        for worker in made.workers:
            worker.drops_before_answer = 100
        status, answer, headers = await made.post(prompt="w1")
        assert (status, answer["error"]["code"]) == (502, "worker_lost")
        assert headers["Retry-After"] == "1"
        assert sum(len(worker.seen) for worker in made.workers) == 2


@pytest.mark.slow
async def test_without_a_worker_requests_wait_and_then_are_told_to_come_again():
    async with scene(1, queue_timeout_s=0.3) as made:
        await made.workers[0].die()
        await made.until(lambda: not made.front.fleet.up)
        status, answer, headers = await made.post(prompt="w1")
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert "no worker is up" in answer["error"]["message"] and headers["Retry-After"]
    async with scene(1) as made:
        await made.workers[0].die()
        await made.until(lambda: not made.front.fleet.up)
        waiting = asyncio.create_task(made.post(prompt="w1"))
        await made.until(lambda: made.front.admission.waiting == 1)
        await made.workers[0].start()
        assert (await waiting)[0] == 200


async def test_back_pressure():
    """Two at the worker, three that wait, and the sixth is told to come again."""
    async with scene(1, max_in_flight=2, queue=3) as made:
        worker = made.workers[0]
        worker.gate.clear()
        tasks = []
        for i in range(5):
            tasks.append(asyncio.create_task(made.post(prompt=f"w{i}")))
            await made.until(lambda: made.front.under_way == len(tasks))  # noqa: B023
        await made.until(lambda: worker.busy == 2)
        assert made.front.admission.waiting == 3
        assert await made.metric("twinserve_route_waiting") == 3
        status, answer, headers = await made.post(prompt="w9")
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert answer["error"]["type"] == "rate_limit_error" and headers["Retry-After"] == "1"
        tasks.pop(2).cancel()  # the first that waits: its place is free
        await made.until(lambda: made.front.admission.waiting == 2)
        worker.gate.set()
        assert [status for status, *_ in await asyncio.gather(*tasks)] == [200] * 4
        assert [body["prompt"] for _, body, _ in worker.seen] == ["w0", "w1", "w3", "w4"]
        assert made.front.fleet.in_flight == 0


async def test_a_router_may_reject():
    async with scene(1, router="round-robin:shed_be=1") as made:
        made.workers[0].gate.clear()
        first = asyncio.create_task(made.post(prompt="w1"))
        await made.until(lambda: made.workers[0].busy)
        status, answer, headers = await made.post(prompt="w2", vllm_xargs={"class": "be"})
        assert (status, answer["error"]["code"]) == (429, "rejected") and headers["Retry-After"]
        made.workers[0].gate.set()
        assert (await first)[0] == 200


@pytest.mark.slow
async def test_draining_refuses_new_requests_and_ends_old_ones():
    async with scene(1, pace_s=0.05, drain_s=10.0) as made:
        old = asyncio.create_task(made.stream(prompt="w1"))
        await made.until(lambda: made.workers[0].busy)
        drained = asyncio.create_task(made.front.drain())
        await made.until(lambda: made.front.draining)
        status, answer, headers = await made.post(prompt="w1")
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert headers["Retry-After"] == "1"
        assert (await made.get("/health"))[0] == 503
        assert text(await old) == words("w1", 8) and await drained == 0


async def test_draining_ends_though_requests_do_not():
    async with scene(1, drain_s=0.2) as made:
        made.workers[0].gate.clear()
        old = asyncio.create_task(made.post(prompt="w1"))
        await made.until(lambda: made.workers[0].busy)
        assert await made.front.drain() == 1
        await made.front.stop()
        with pytest.raises(Exception, match="(?i)disconnect|reset|closed"):
            await old


COMMAND = [sys.executable, "-c", "from twinserve.sim.cli.main import main; main()", "route"]


@pytest.mark.slow
async def test_the_command_drains_on_sigterm_and_ends_well():
    async with scene(1, pace_s=0.1) as made:
        arguments = ["--worker", made.workers[0].url, "--port", "0", "--health-interval", "0.1"]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on http://127.0.0.1:")
        made.url = line.split()[-1]
        under_way = asyncio.create_task(made.stream(prompt="w1"))
        await made.until(lambda: made.workers[0].busy)
        process.send_signal(signal.SIGTERM)
        assert text(await under_way) == words("w1", 8)
        _, said = await process.communicate()
        assert process.returncode == 0, said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--worker http://HOST:PORT"),
        (["--worker", "localhost:8000"], "write http://HOST:PORT"),
        (["--worker", "http://a:1", "--worker", "http://a:1/"], "named twice"),
        (["--worker", "http://a:1", "--router", "dynamo-kv"], "index=approximate"),
        (["--worker", "http://a:1", "--health-interval", "0"], "--health-interval"),
        (["--worker", "http://a:1", "--clients", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--worker", "http://a:1", "--port", "70000"], "--port"),
        (["--worker", "http://a b:1"], "write http://HOST:PORT"),
        (["--worker", "http://a..b:1"], "write http://HOST:PORT"),
        (["--worker", "http://a:1/v1"], "write http://HOST:PORT"),
        (["--worker", "http://a:1", "--worker", "HTTP://A:1"], "named twice"),
        (["--worker", "http://a:1", "--host", ""], "--host"),
        (["--worker", "http://a:1", "--host", "a" * 70], "write an address of this machine"),
        (["--worker", f"http://{'a' * 70}:1"], "is no server"),
        (["--worker", "http://a:1", "--host", "256.1.1.1", "--port", "0"], "--host 256.1.1.1"),
        (["--worker", "http://a:1", "--session-expiry", "nan"], "--session-expiry"),
        (["--worker", "http://a:1", "--header-bytes", "9" * 30], "--header-bytes"),
        (["--worker", "http://a:1", "--router", "session:x=1"], "no option 'x'"),
        (["--worker", "http://a:1", "--clients", "/"], "cannot be read"),
        (["--worker", "http://a:1", "--retries", "1.5"], "--retries"),
        (["--worker", "http://a:1", "--port", "80.0"], "'80.0' is no whole number"),
        (["--worker", "http://a:1", "--queue", "1e3"], "--queue"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    from twinserve.sim.cli.main import main

    assert said in refused(capsys, main, ["route", *arguments])


@pytest.mark.parametrize("url", ["http://[::1]:80", "https://a-b.c_d.e.:1", "http://10.0.0.1:8000"])
def test_servers_of_all_kinds(url):
    from twinserve.backends.live.route.settings import RouteSettings

    assert RouteSettings(workers=[url + "/"]).workers == [url]


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "--worker", "http://127.0.0.1:9", "--port", port],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert port in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
async def test_a_worker_with_another_kv_memory_is_a_new_replica():
    """It may not tell when it comes up, or be started anew between two checks."""
    async with scene(2, pace_s=0.05, router="least-requests") as made:
        view = made.front.fleet.view
        under_way = [asyncio.create_task(made.post(prompt="w1")) for _ in range(4)]
        await made.until(lambda: made.workers[0].busy == 2)
        made.workers[0].block_tokens = 0
        for size, replicas in ((32, 3), (16, 4)):
            made.workers[0].block_tokens = size
            await made.until(lambda replicas=replicas: len(view.block_tokens) == replicas)
            assert view.block_tokens[-1] == size and len(view.up) == 2
            assert made.front.fleet.up == [0, 1]
        made.workers[0].block_tokens = 0  # what does not tell is as before
        polls = view.loads[view.up[-1]].at_s
        await made.until(lambda: view.loads[view.up[-1]].at_s > polls)
        assert len(view.block_tokens) == 4
        assert [status for status, *_ in await asyncio.gather(*under_way)] == [200] * 4
        assert sum(view.in_flight) == 0
        assert (await made.post(prompt="w1"))[0] == 200


@pytest.mark.slow
async def test_a_front_that_stands_still_blames_no_worker():
    """Its timers are due before it has read what came meanwhile."""
    async with scene(2) as made:
        workers = made.front.workers
        for worker in workers.all:
            asked = asyncio.create_task(workers._healthy(worker))
            for _ in range(3):  # the question is under way
                await asyncio.sleep(0)
            time.sleep(2 * made.front.settings.health_timeout_s)
            assert await asked
        made.workers[0].silent = True
        assert not await workers._healthy(workers.all[0])


@pytest.mark.slow
async def test_a_worker_that_sends_answers_is_alive_though_its_health_check_is_late():
    """Until it sends nothing any more."""
    async with scene(1, pace_s=0.02, health_s=3600) as made:
        (worker,) = made.front.workers.all
        asked = asyncio.create_task(made.stream(prompt="w1", max_tokens=100))
        await made.until(lambda: worker.heard_s > 0)
        made.workers[0].silent = True
        assert await made.front.workers._healthy(worker)
        await asked
        assert not await made.front.workers._healthy(worker)
