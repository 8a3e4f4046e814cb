"""How answers end where workers, routers and clients are in each other's way."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import Callable

import pytest

from tests.route.fronts import prompts_of, scene, text
from tests.route.test_front import raw, words
from tests.route.test_prompts import told
from twinserve.sim.fleet.routers.base import Router, Verdict

pytestmark = pytest.mark.usefixtures("http")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def lazy(port: int, request: bytes) -> socket.socket:
    """A client with little room, that has sent something and reads nothing yet."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", port))
    line.sendall(request)
    return line


def rest(line: socket.socket) -> bytes:
    with line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        line.settimeout(5)
        found = b""
        while piece := line.recv(2**20):
            found += piece
        return found


async def test_a_whole_answer_outlives_its_worker():
    """The worker is rid of it while the client takes its time, and may go down."""
    async with scene(1) as made:
        many = 8 * 2**20
        made.workers[0].fails_with = (200, {"text": "x" * many})
        body = b'{"prompt": "w1"}'
        line = lazy(made.port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await made.until(lambda: made.workers[0].seen and not made.front.fleet.in_flight)
        assert made.front.under_way == 1
        await made.workers[0].die()
        await made.until(lambda: not made.front.fleet.up)
        answer = await asyncio.to_thread(rest, line)
        said = json.loads(answer.partition(b"\r\n\r\n")[2])  # all of it, and nothing after it
        assert len(said["text"]) == many
        _, page = await made.get("/metrics")
        assert 'kind="worker_lost"' not in page and 'kind="cut_short"' not in page


async def test_a_worker_that_went_down_while_a_request_woke_up():
    async with scene(2, router="round-robin", health_s=3600) as made:
        front, place = made.front, made.front.admission.place

        async def late(*given, **more):
            stay = await place(*given, **more)
            if not stay.worker:
                front.workers._down(front.workers.all[0], "a test")
            return stay

        front.admission.place = late
        assert (await made.post(prompt="w1"))[0] == 200
        assert not made.workers[0].seen and len(made.workers[1].seen) == 1


async def test_an_error_of_a_worker_that_is_well_is_the_end():
    """Nobody goes on after it, though no [DONE] came."""
    async with scene(2, router="round-robin") as made:
        made.workers[0].fails_after = 3
        *events, last = await made.stream(prompt="w1")
        assert text(events) == words("w1", 3) and last["error"]["message"] == "out of memory"
        assert not made.workers[1].seen and made.front.fleet.up == [0, 1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_worker_gives_up_goes_on_elsewhere(path):
    """vLLM ends its answers with `abort` on SIGTERM; its client has not asked for that."""
    chat = {"messages": [{"role": "user", "content": "w1"}]}
    body = chat if path.startswith("/v1/chat") else {"prompt": "user w1"}
    for after in (0, 3):
        async with scene(2, router="round-robin") as made:
            made.workers[0].aborts_after = after
            events = await made.stream(path, **body)
            assert text(events) == words("user w1", 8) and events[-1] == {}
            ends = [c.get("finish_reason") for e in events[:-1] for c in e["choices"]]
            assert [end for end in ends if end] == ["length"]
    async with scene(2, router="round-robin") as made:
        made.workers[0].aborts_after = 3
        status, answer, _ = await made.post(path, **body)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        said = {"text": '"finish_reason": "abort"'}  # a text that says so is none
        for worker in made.workers:
            worker.fails_with = (200, said)
        assert (await made.post(path, **body))[1] == said
        lost = 'twinserve_route_errors_total{kind="worker_lost"}'
        assert await made.metric(lost) == 1


class Patient(Router):
    """Waits for room that is measured. No request may be called bad."""

    name = "patient"

    def place(self, request, stage, view):
        if request.id == "bad":
            raise KeyError("a defect")
        return Verdict.HOLD if view.load(view.up[0]).waiting else view.up[0]


def with_router(made: Callable[[], Router]):
    """A front whose router is not from the registry."""
    from unittest import mock

    return mock.patch("twinserve.backends.live.route.front.router_of", lambda *given: made())


async def test_held_requests_go_when_a_measurement_says_so():
    with with_router(Patient):
        async with scene(1) as made:
            made.workers[0].waiting = 3
            await made.until(lambda: made.front.fleet.view.load(0).waiting)
            held = asyncio.create_task(made.post(prompt="w1"))
            await made.until(lambda: made.front.admission.waiting)
            made.workers[0].waiting = 0
            async with asyncio.timeout(5):
                assert (await held)[0] == 200


async def test_a_routers_defect_is_the_affair_of_one_request():
    with with_router(Patient):
        async with scene(1, max_in_flight=1) as made:
            made.workers[0].gate.clear()
            tasks = []
            for name in ("first", "bad", "last"):
                headers = {"X-Request-Id": name}
                tasks.append(asyncio.create_task(made.post(prompt="w1", headers=headers)))
                await made.until(lambda: made.front.under_way == len(tasks))  # noqa: B023
            await made.until(lambda: made.front.admission.waiting == 2)
            made.workers[0].gate.set()
            answers = await asyncio.gather(*tasks)
            assert [status for status, *_ in answers] == [200, 500, 200]
            assert answers[1][1]["error"]["code"] == "internal_error"
            done = 'twinserve_route_requests_total{path="/v1/completions",status="500"}'
            assert await made.metric(done) == 1
            assert await made.metric('twinserve_route_errors_total{kind="internal_error"}') == 1
            assert made.front.fleet.in_flight == 0


@pytest.mark.slow
async def test_checks_go_on_after_one_that_went_wrong(monkeypatch):
    async with scene(1) as made:
        fleet = made.front.fleet
        with monkeypatch.context() as patch:
            patch.setattr(fleet, "measured", lambda *given: 1 / 0)
            patch.setattr(fleet, "came", lambda *given: 1 / 0)
            await made.workers[0].die()
            await made.until(lambda: not fleet.up)
            await made.workers[0].start()
            await asyncio.sleep(0.2)
        await made.until(lambda: fleet.up == [0])
        made.workers[0].running = 4
        await made.until(lambda: fleet.view.load(fleet.view.up[0]).running == 4)


@pytest.mark.slow
async def test_who_takes_none_of_the_fronts_own_answers_is_cut_off():
    async with scene(1, write_timeout_s=0.3) as made:
        line = lazy(made.port, b"")
        line.setblocking(False)
        page = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 4000
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(line, page))
        slow = made.front.counters.errors.labels("slow_client")
        await made.until(lambda: slow._value.get() == 1)
        with pytest.raises(OSError):  # noqa: PT011 - reset, or a broken pipe
            await sending
            while await asyncio.get_running_loop().sock_recv(line, 2**20):
                pass
        line.close()


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (chunked(b'{"prompt": "w1",', b' "max_tokens": 2}'), b"200"),
        (chunked(*[b'{"prompt": "' + b"w" * 900] * 9), b"413"),  # no length says so beforehand
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (HEAD + b"Content-Length: -5\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nxxxx", b"400"),
    ],
)
async def test_bodies_of_all_kinds(sent, status):
    async with scene(1, body_bytes=4096) as made:
        answer = await asyncio.to_thread(raw, made.port, sent)
        assert answer.split()[1] == status, answer
        assert made.front.under_way == 0


async def test_a_front_stops_though_a_timeout_took_the_place_of_a_cancellation():
    async def deaf(worker) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(99)

    async with scene(1) as made:
        workers = made.front.workers
        workers._tasks.append(asyncio.create_task(workers._always(workers.all[0], deaf, 0.01)))
        await asyncio.sleep(0)


async def test_a_packed_body_counts_as_long_as_it_is():
    async with scene(1, body_bytes=10_000) as made:
        for count, status in ((5_000, 200), (10_000_000, 413)):
            packed = gzip.compress(b'{"max_tokens": 1, "prompt": "%s"}' % (b"w" * count))
            given = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            url = made.url + "/v1/completions"
            async with made.session.post(url, data=packed, headers=given) as answer:
                assert answer.status == status
        assert "Content-Encoding" not in made.workers[0].seen[0][2]


async def test_a_body_of_brackets():
    """At every depth one answer, not a failure of the front."""
    async with scene(1) as made:
        for depth in (300, 700, 900, 950, 980, 2000):
            deep = '{"a":' * depth + "1" + "}" * depth
            for field in ("tools", "vllm_xargs", "chat_template_kwargs"):
                one = f'{{"role": {deep}, "content": [{deep}]}}'
                body = f'{{"stream": true, "messages": [{one}], "{field}": {deep}}}'
                url = made.url + "/v1/chat/completions"
                made.workers[0].fails_with = (400, {"error": {"code": "worker"}})
                async with made.session.post(url, data=body.encode()) as answer:
                    assert answer.status == 400, depth


async def test_a_method_that_there_is_not_and_heads_that_are_wrong_are_counted():
    async with scene(1) as made:
        async with made.session.delete(made.url + "/v1/completions") as answer:
            assert answer.status == 405 and answer.headers["Allow"] == "POST"
        await asyncio.to_thread(raw, made.port, b"HELO there\r\n\r\n")
        assert await made.metric('twinserve_route_errors_total{kind="bad_request"}') == 1


def test_the_attributes_of_a_listed_client_cannot_be_another_ones(tmp_path):
    """What it writes into its own stamp is overwritten."""
    path = tmp_path / "clients.yaml"
    path.write_text(
        "header: X-Client\ndefault: {class: be}\nclients:\n  vip: {header: [v], class: rt}\n"
    )
    prompts = prompts_of(str(path))
    body = {"prompt": "x", "vllm_xargs": {"class": "rt", "twinserve_client": "vip"}}
    kinds = [
        told(body, prompts, headers=given).values["service_class"]
        for given in ([], [(b"x-client", b"v"), (b"x-client", b"v")], [(b"x-client", b"v")])
    ]
    assert kinds[0] == kinds[1] != kinds[2]
