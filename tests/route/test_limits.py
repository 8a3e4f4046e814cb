"""Who waits, who is refused, and who is left out for a while."""

import asyncio

import pytest

from tests.route.fronts import Scene, scene
from twinserve.backends.live.route.admission import Admission
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Verdict

pytestmark = pytest.mark.usefixtures("http")
PATIENT = {"health_timeout_s": 5.0}  # a busy machine is no dead worker


async def waiting(made: Scene, count: int) -> None:
    await made.until(lambda: made.front.admission.waiting == count)


async def test_real_time_requests_take_the_places_of_best_effort_ones_in_the_queue():
    """The one that came last goes first, and gets the answer of a full queue."""
    limits = {"max_in_flight": 1, "queue": 3, "clients": "trusted", "queue_timeout_s": 20.0}
    async with scene(1, **limits, **PATIENT) as made:
        made.workers[0].gate.clear()

        def send(kind: str, name: str) -> asyncio.Task:
            body = {"prompt": name, "vllm_xargs": {"class": kind}}
            return asyncio.create_task(made.post(**body))

        under_way = send("be", "w0")
        await made.until(lambda: made.workers[0].busy == 1)
        best = []
        for i in range(3):
            best.append(send("be", f"w{i}"))
            await waiting(made, i + 1)
        status, answer, _ = await made.post(prompt="w", vllm_xargs={"class": "be"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        live = []
        for i in range(3):
            live.append(send("rt", f"w{i}"))
            status, answer, headers = await best[2 - i]
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert headers["Retry-After"] == "1"
            await waiting(made, 3)
        status, answer, _ = await made.post(prompt="w", vllm_xargs={"class": "rt"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        made.workers[0].gate.set()
        assert [(await one)[0] for one in (under_way, *live)] == [200] * 4
        assert made.front.fleet.in_flight == made.front.admission.waiting == 0


async def test_a_best_effort_request_that_lost_its_worker_keeps_its_place():
    limits = {"queue": 1, "clients": "trusted", "queue_timeout_s": 20.0, "misses": 1}
    async with scene(1, pace_s=0.05, **limits, **PATIENT) as made:
        body = {"prompt": "w1", "vllm_xargs": {"class": "be"}}
        lost = asyncio.create_task(made.post(**body))
        await made.until(lambda: made.workers[0].busy == 1)
        await made.workers[0].die()
        await waiting(made, 1)
        answer = await made.post(prompt="w", vllm_xargs={"class": "rt"})
        assert (answer[0], answer[1]["error"]["code"]) == (429, "queue_full")
        await made.workers[0].start()
        assert (await lost)[0] == 200


class FullFleet:
    """Takes nothing until it is `open`."""

    def __init__(self) -> None:
        self.open, self.in_flight, self.up = False, 0, [0]
        self.taken, self.over = [], []

    def choose(self, request, avoid):
        return 0 if self.open else Verdict.HOLD

    def sent(self, request, choice):
        self.taken.append(request.id)
        return request.id

    def ended(self, stay) -> None:
        self.over.append(stay)


async def test_those_under_way_are_placed_first_and_who_left_keeps_no_place():
    def one(name: str, service_class: int = 1) -> Request:
        return Request(name, 0, 0.0, {"service_class": service_class}, lambda size: None)

    fleet = FullFleet()
    admission = Admission(fleet, 9, 9, 10.0)
    new = asyncio.create_task(admission.place(one("new")))
    await asyncio.sleep(0)
    lost = asyncio.create_task(admission.place(one("lost"), first=True))
    await asyncio.sleep(0)
    live = asyncio.create_task(admission.place(one("real-time", 0)))
    await asyncio.sleep(0)
    fleet.open = True
    admission.ask_again()
    assert fleet.taken == ["real-time", "lost", "new"]
    new.cancel()
    await asyncio.gather(new, lost, live, return_exceptions=True)
    assert fleet.over == ["new"] and lost.result() == "lost"


async def test_connections_have_a_limit():
    async with scene(1, connections=2, **PATIENT) as made:
        held = [await asyncio.open_connection("127.0.0.1", made.port) for _ in range(2)]
        server = made.front._http
        assert server is not None
        await made.until(lambda: len(server.connections) == 2)
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in answer
            writer.close()
        said = made.front.counters.errors.labels("too_many_connections")
        assert said._value.get() == 3
        reader, writer = held[0]  # those that are there are served
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.close()
        await made.until(lambda: not server.connections)
        assert (await made.get("/health"))[0] == 200


@pytest.mark.slow
async def test_a_worker_that_comes_and_goes_is_left_out_longer_each_time():
    """It is back at once after the first time."""
    async with scene(2, health_s=0.1, misses=1, back_off_s=0.4, **PATIENT) as made:
        worker, front = made.workers[0], made.front
        clock = asyncio.get_running_loop().time
        went_s = clock()
        for _ in range(5):
            await worker.die()
            await made.until(lambda: front.fleet.up == [1])
            back_s = front.workers.all[0].out_until_s
            await worker.start()
            await made.until(lambda: front.fleet.up == [0, 1])
            assert clock() >= back_s
            assert (await made.post(prompt="w1"))[0] == 200
        assert clock() - went_s >= 0.0 + 0.2 + 0.4 + 0.4 + 0.4
        assert front.workers.all[0].falls == 5 and front.workers.all[1].falls == 0


def test_a_worker_that_was_well_for_long_comes_back_at_once():
    from twinserve.backends.live.route.workers import Worker

    worker = Worker(0, "http://a:1")
    pauses = []
    for now in (100.0, 130.0, 150.0, 160.0, 300.0):
        pauses.append(worker.fell(now, 1.0, 5.0))
        worker.came_s = now + 10.0
    assert pauses == [0.0, 2.0, 4.0, 5.0, 0.0]
