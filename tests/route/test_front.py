"""The front before fake workers: what passes through, what is refused, what is counted."""

import asyncio
import json
import socket

import pytest

from tests.route.fronts import scene, text

pytestmark = pytest.mark.usefixtures("http")


def words(prompt, count: int) -> str:
    from tests.route.fake_worker import generated, text_of

    return text_of(generated(prompt, count))


async def test_answers_whole_and_streamed():
    async with scene() as made:
        status, answer, _ = await made.post(prompt="w1 w2", max_tokens=5)
        assert status == 200 and answer["choices"][0]["text"] == words("w1 w2", 5)
        messages = [{"role": "user", "content": "w5 w6"}]
        status, answer, _ = await made.post("/v1/chat/completions", messages=messages)
        said = answer["choices"][0]["message"]["content"]
        assert status == 200 and said == words("user w5 w6", 4)
        for more in ({}, {"stop": "none"}):  # followed event by event, and passed through
            events = await made.stream(prompt="w1 w2", **more)
            assert text(events) == words("w1 w2", 8) and events[-1] == {}
            assert not any(e["choices"][0].get("token_ids") for e in events[:-1])
        events = await made.stream("/v1/chat/completions", messages=messages)
        assert text(events) == words("user w5 w6", 8)
        assert events[0].get("prompt_token_ids") is None


async def test_a_client_that_asks_for_token_ids_gets_them():
    async with scene() as made:
        events = await made.stream(prompt="w1 w2", return_token_ids=True)
        choices = [event["choices"][0] for event in events[:-1]]
        assert choices[0]["prompt_token_ids"] == [1, 2]
        assert "".join(f" w{t}" for c in choices for t in c["token_ids"]) == words("w1 w2", 8)


@pytest.mark.slow
async def test_tokens_are_passed_on_as_they_come():
    async with scene(1, pace_s=0.02) as made:
        body = {"model": "fake", "prompt": "w1", "max_tokens": 30, "stream": True}
        async with made.session.post(made.url + "/v1/completions", json=body) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            busy = [made.workers[0].busy async for _ in answer.content.iter_any()]
        assert busy[0] == 1 and len(busy) > 1  # the worker has not ended when the first one comes


async def test_headers_of_clients_reach_workers_but_not_those_of_the_connection():
    async with scene(1) as made:
        mine = {"Authorization": "Bearer k", "X-Request-Id": "r-7", "Accept-Encoding": "br"}
        await made.post(prompt="w1", headers=mine, vllm_xargs={"class": "be"})
        (_, body, headers) = made.workers[0].seen[0]
        assert headers["Authorization"] == "Bearer k" and headers["X-Request-Id"] == "r-7"
        assert headers["Accept-Encoding"] == "identity"
        assert body["vllm_xargs"] == {"class": "be"}


async def test_round_robin_takes_turns_and_sessions_stay():
    async with scene(3, router="round-robin") as made:
        for _ in range(6):
            await made.post(prompt="w1")
        assert [len(worker.seen) for worker in made.workers] == [2, 2, 2]
    async with scene(3, router="session") as made:
        for i in range(12):
            await made.post(prompt="w1", headers={"X-Session-Id": f"s{i % 4}"})
        assert sum(len(worker.seen) for worker in made.workers) == 12
        assert all(len(worker.seen) % 3 == 0 for worker in made.workers)


async def test_the_router_decides_by_what_workers_measure():
    async with scene(2, router="vllm-dp") as made:
        made.workers[0].running, made.workers[0].waiting = 20, 5
        await made.until(lambda: made.front.fleet.view.load(0).waiting == 5)
        for _ in range(4):
            await made.post(prompt="w1")
        assert [len(worker.seen) for worker in made.workers] == [0, 4]
        assert made.front.fleet.view.num_blocks == [100, 100]
        age = f'twinserve_route_poll_age_seconds{{worker="{made.workers[0].url}"}}'
        assert 0 <= await made.metric(age) < 2


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", b"{", 400, "bad_json"),
        ("/v1/completions", b"[1]", 400, "bad_json"),
        ("/v1/completions", b"[" * 100_000, 400, "bad_json"),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"w" * 5000), 413, "body_too_large"),
        ("/v1/embeddings", b"{}", 404, "not_found"),
        ("/health", b"{}", 405, "method_not_allowed"),
    ],
)
async def test_errors_of_clients_are_one_json_error(path, body, status, code):
    async with scene(1, body_bytes=4096 if status != 400 else 2**20) as made:
        async with made.session.post(made.url + path, data=body) as answer:
            said = await answer.json()
            assert answer.status == status
            assert set(said) == {"error"} and said["error"]["code"] == code
            assert set(said["error"]) == {"message", "type", "param", "code"}
        assert await made.metric(f'twinserve_route_errors_total{{kind="{code}"}}') == 1
        assert (await made.post(prompt="w1"))[0] == 200


async def test_an_error_of_a_worker_is_passed_on():
    async with scene(2) as made:
        for status in (400, 500):  # a worker that is healthy after all is asked once
            said = {"error": {"message": "no", "type": "x", "param": None, "code": status}}
            for worker in made.workers:
                worker.fails_with = (status, said)
                worker.seen.clear()
            for streams in (False, True):
                answered, answer, _ = await made.post(prompt="w1", stream=streams)
                assert (answered, answer) == (status, said)
            assert sum(len(worker.seen) for worker in made.workers) == 2


def raw(port: int, *pieces: bytes, wait_s: float = 60.0) -> bytes:
    """What comes back for bytes sent as they are, until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as line:
        for piece in pieces:
            line.sendall(piece)
        found = b""
        while piece := line.recv(65536):
            found += piece
        return found


async def test_heads_that_are_too_long_or_no_http():
    async with scene(1, header_bytes=1000) as made:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2000
        for sent, status, code in (
            (head + b"\r\n\r\n", b"431", "headers_too_large"),
            (b"HELO there\r\n\r\n", b"400", "bad_request"),
        ):
            answer = await asyncio.to_thread(raw, made.port, sent)
            assert answer.split()[1] == status, answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code


async def test_a_client_that_asks_before_it_sends_a_body():
    """As curl does with long ones."""
    async with scene(1) as made:
        body = json.dumps({"prompt": "w1 w2", "max_tokens": 4}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            "Expect: 100-continue\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(head.encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200") and words("w1 w2", 4).encode() in answer


@pytest.mark.slow
async def test_half_open_connections_are_closed():
    """A head that does not end, and a body that does not come."""
    async with scene(1, idle_timeout_s=0.3) as made:
        assert await asyncio.to_thread(raw, made.port, b"POST /v1/comp") == b""
    async with scene(1, body_timeout_s=0.3) as made:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        answer = await asyncio.to_thread(raw, made.port, head)
        assert answer.split()[1] == b"408" and b"body_timeout" in answer
        assert made.front.under_way == 0


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_cut_off():
    async with scene(1, write_timeout_s=0.5) as made:
        body = json.dumps(
            {"prompt": "w1 " * 2000, "max_tokens": 200_000, "stream": True, "stop": "x"}
        ).encode()
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", made.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        line.sendall(head.encode() + b"\r\n" + body)
        await made.until(lambda: made.front.under_way)
        assert (await made.post(prompt="w1"))[0] == 200  # others are served meanwhile
        await made.until(lambda: not made.front.under_way)
        line.close()
        assert await made.metric('twinserve_route_errors_total{kind="slow_client"}') == 1
        await made.until(lambda: made.workers[0].busy == 0)  # the worker is rid of it, too
        assert made.front.fleet.in_flight == 0


async def test_a_client_that_hangs_up_frees_its_worker():
    async with scene(1, pace_s=0.05) as made:
        task = asyncio.create_task(made.stream(prompt="w1", max_tokens=1000))
        await made.until(lambda: made.workers[0].busy)
        task.cancel()
        await made.until(lambda: made.workers[0].left == 1)
        await made.until(lambda: made.front.fleet.in_flight == 0)
        assert await made.metric('twinserve_route_errors_total{kind="disconnected"}') == 1


async def test_models_health_and_metrics():
    async with scene(2) as made:
        assert json.loads((await made.get("/v1/models"))[1])["data"][0]["id"] == "fake"
        assert await made.get("/health") == (200, '{"workers_up": 2}')
        for _ in range(3):
            await made.post(prompt="w1")
        await made.stream(prompt="w1")
        done = 'twinserve_route_requests_total{path="/v1/completions",status="200"}'
        assert await made.metric(done) == 4
        picks = [
            await made.metric(f'twinserve_route_picks_total{{worker="{worker.url}"}}')
            for worker in made.workers
        ]
        assert picks == [len(worker.seen) for worker in made.workers] and sum(picks) == 4
        assert await made.metric("twinserve_route_first_byte_seconds_count") == 4
        assert await made.metric("twinserve_route_request_seconds_count") == 4
        for worker in made.workers:
            await worker.stop()
        await made.until(lambda: not made.front.fleet.up)
        assert (await made.get("/health"))[0] == 503
        assert (await made.get("/v1/models"))[0] == 503


# -- which headers reach workers and clients, and which are about a connection ---------------------
def test_what_connection_names_stays_and_what_is_said_twice_stays_twice():
    from multidict import CIMultiDict

    from twinserve.backends.live.route.messages import for_client, for_worker

    given = CIMultiDict(
        [
            ("Connection", "close, X-Mine"), ("connection", "X-Other"), ("x-mine", "1"),
            ("X-Other", "1"), ("Keep-Alive", "timeout=5"), ("TE", "trailers"), ("Upgrade", "h2c"),
            ("Proxy-Authorization", "p"), ("Content-Length", "9"), ("Transfer-Encoding", "chunked"),
            ("Authorization", "Bearer a"), ("Authorization", "Bearer b"), ("Content-Type", "x/y"),
            ("X-Request-Id", "mine"), ("Host", "front"), ("Expect", "100-continue"),
        ]
    )  # fmt: skip
    kept = [("Authorization", "Bearer a"), ("Authorization", "Bearer b"), ("Content-Type", "x/y")]
    assert list(for_worker(given, "r").items()) == [*kept, ("X-Request-Id", "r")]
    assert list(for_worker(given).items()) == kept
    back = CIMultiDict([("Connection", "X-Hop"), ("X-Hop", "1"), ("Set-Cookie", "a=b"),
                        ("Retry-After", "3"), ("Date", "d"), ("Content-Length", "1")])  # fmt: skip
    assert list(for_client(back).items()) == [("Retry-After", "3")]


async def test_headers_of_answers_come_back():
    """Such as the one by which a server says what it did not believe."""
    async with scene(1) as made:
        made.workers[0].adds = {"X-Twinserve-Not-Believed": "app", "Keep-Alive": "timeout=9"}
        for streams in (False, True):
            body = {"prompt": "w1", "stream": streams}
            async with made.session.post(made.url + "/v1/completions", json=body) as answer:
                await answer.read()
                assert answer.headers["X-Twinserve-Not-Believed"] == "app"
                assert "Keep-Alive" not in answer.headers
                assert len(answer.headers.getall("Content-Type")) == 1


async def test_the_type_of_a_body_is_what_its_client_says():
    """A page in a browser can post text to anybody; workers refuse that if they hear of it."""
    async with scene(1) as made:
        for kind in ("text/plain", "application/json; charset=utf-8"):
            await made.session.post(
                made.url + "/v1/completions",
                data=b'{"prompt": "w1", "max_tokens": 1}',
                headers={"Content-Type": kind},
            )
            assert made.workers[0].seen[-1][2]["Content-Type"] == kind
        sent = b'{"prompt": "w1"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(sent)
        await asyncio.to_thread(raw, made.port, head + length + sent)
        assert "Content-Type" not in made.workers[0].seen[-1][2]


async def test_a_workers_cookie_is_nobody_elses():
    async with scene(1, host="localhost") as made:
        made.workers[0].adds = {"Set-Cookie": "who=alice; Path=/"}
        _, _, headers = await made.post(prompt="w1")
        await made.post(prompt="w1")
        assert "Set-Cookie" not in headers
        assert "Cookie" not in made.workers[0].seen[1][2]


async def test_a_redirection_is_not_followed():
    async with scene(2, router="round-robin") as made:
        first, second = made.workers
        first.fails_with = (307, {"moved": True})
        first.adds = {"Location": f"{second.url}/v1/completions"}
        url = made.url + "/v1/completions"
        body = {"prompt": "w1"}
        async with made.session.post(url, json=body, allow_redirects=False) as answer:
            assert answer.status == 307 and (await answer.json()) == {"moved": True}
        assert not second.seen


async def test_bytes_that_are_no_text_in_a_header():
    async with scene(1) as made:
        body = b'{"prompt": "w1", "max_tokens": 2}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        for odd in (b"X-Name: Jos\xe9\r\n", b"X-Request-Id: \xff\xfe\r\n"):
            sent = head + odd + b"Content-Length: %d\r\n\r\n" % len(body) + body
            answer = await asyncio.to_thread(raw, made.port, sent)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert words("w1", 2).encode() in answer


async def test_what_counts_as_true_is_streamed():
    """vLLM takes 1 for true."""
    async with scene(1) as made:
        assert text(await made.stream(prompt="w1", stream=1)) == words("w1", 8)
        body = {"prompt": "w1", "stream": 1}
        async with made.session.post(made.url + "/v1/completions", json=body) as answer:
            assert "Content-Length" not in answer.headers
