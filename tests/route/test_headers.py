"""Which headers reach workers and clients, and which are about a connection."""

import asyncio

import pytest

from tests.route.fronts import scene, text
from tests.route.test_front import raw, words

pytestmark = pytest.mark.usefixtures("http")


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
