"""Streamed answers whose worker is lost in the middle: the client gets the rest, the same tokens,
or is told why not."""

import asyncio
import json

import pytest

from tests.route.fronts import scene, text
from tests.route.test_front import words
from twinserve.backends.live.route.continuation import CHAT, COMPLETIONS, Continuation, obstacle
from twinserve.backends.live.route.messages import data_of

USAGE = {"include_usage": True}
MESSAGES = [{"role": "user", "content": "w5 w6"}]


@pytest.mark.usefixtures("http")
@pytest.mark.parametrize("after", [0, 1, 5, 7])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_the_client_gets_the_rest(after, chat):
    async with scene(2, pace_s=0.005) as made:
        made.workers[0].dies_after = after
        if chat:
            events = await made.stream(CHAT, messages=MESSAGES, stream_options=USAGE)
            wanted, prompt = words("user w5 w6", 8), 3
        else:
            events = await made.stream(prompt="w1 w2", stream_options=USAGE)
            wanted, prompt = words("w1 w2", 8), 2
        assert text(events) == wanted and events[-1] == {}
        assert len({e["id"] for e in events[:-1]}) == 1  # one answer
        assert len({e["object"] for e in events[:-1]}) == 1
        assert [u for e in events if (u := e.get("usage"))] == [
            {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}
        ]
        finished = [c.get("finish_reason") for e in events[:-1] for c in e["choices"]]
        assert finished[-1] == "length" and set(finished[:-1]) <= {None}
        assert not any(c.get("token_ids") for e in events[:-1] for c in e["choices"])
        url = made.workers[0].url
        begun = after > 0 or chat
        kind = "migrations" if begun else "retries"
        assert await made.metric(f'twinserve_route_{kind}_total{{worker="{url}"}}') == 1
        assert len(made.workers[1].seen) == 1 and made.front.fleet.in_flight == 0


@pytest.mark.usefixtures("http")
async def test_an_answer_survives_one_worker_after_the_other():
    async with scene(3, pace_s=0.005) as made:
        made.workers[0].dies_after, made.workers[1].dies_after = 3, 2
        assert text(await made.stream(prompt="w1 w2")) == words("w1 w2", 8)
    async with scene(3, pace_s=0.005, retries=1) as made:
        made.workers[0].dies_after, made.workers[1].dies_after = 3, 2
        *events, last = await made.stream(prompt="w1 w2")
        assert text(events) == words("w1 w2", 5)
        assert last["error"]["code"] == "worker_lost"


@pytest.mark.usefixtures("http")
@pytest.mark.parametrize(
    ("body", "said"), [({"stop": "w3"}, "'stop'"), ({"logprobs": 1}, "'logprobs'")]
)
async def test_what_cannot_go_on_ends_with_an_error(body, said):
    async with scene(2, pace_s=0.005) as made:
        made.workers[0].dies_after = 3
        *events, last = await made.stream(prompt="w1 w2", **body)
        assert text(events) == words("w1 w2", 3)
        assert last["error"]["code"] == "worker_lost" and said in last["error"]["message"]
        assert await made.metric('twinserve_route_errors_total{kind="cut_short"}') == 1
    async with scene(2, migrate=False) as made:
        made.workers[0].dies_after = 3
        *events, last = await made.stream(prompt="w1 w2")
        assert text(events) == words("w1 w2", 3) and "with --no-migration" in str(last["error"])


@pytest.mark.usefixtures("http")
async def test_many_answers_move_at_once():
    async with scene(2, pace_s=0.01, router="round-robin") as made:
        tasks = [asyncio.create_task(made.stream(prompt=f"w{i}")) for i in range(40)]
        await made.until(lambda: made.workers[0].busy == 20)
        await asyncio.sleep(0.04)
        await made.workers[0].die()
        for i, events in enumerate(await asyncio.gather(*tasks)):
            assert text(events) == words(f"w{i}", 8), i


FINE = {
    "model": "m", "prompt": "x", "max_tokens": 9, "temperature": 0, "stream": True, "n": 1,
    "stop": [], "logprobs": None, "echo": False, "frequency_penalty": 0, "presence_penalty": 0.0,
    "response_format": {"type": "text"}, "min_tokens": 3, "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2}, {"echo": True}, {"stop": ["a"]}, {"logprobs": 0}, {"logprobs": 1},
        {"frequency_penalty": 0.1}, {"response_format": {"type": "json_object"}},
        {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"a_field_of_tomorrow": 1}, {"n": True},
    ],
)  # fmt: skip
def test_what_depends_on_where_an_answer_began(more):
    assert obstacle(COMPLETIONS, FINE) is None
    assert obstacle(COMPLETIONS, {**FINE, "prompt": [1, 2]}) is None
    assert obstacle(COMPLETIONS, {**FINE, **more}) == next(iter(more))


def chunk(*ids: int, text: str = "x", **more) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": list(ids), **more}
    return b"data: " + json.dumps({"id": "a", "created": 1, "choices": [choice]}).encode() + b"\n\n"


def test_tokens_whose_text_has_not_come_are_generated_again():
    """Half a character is in token 6: its text comes with the next one."""
    answer = Continuation(COMPLETIONS, FINE)
    answer.event(chunk(5, prompt_token_ids=[1, 2]))
    answer.event(chunk(6, text=""))
    path, body = answer.next()
    asked = json.loads(body)
    assert path == COMPLETIONS and asked["prompt"] == [1, 2, 5]
    assert asked["max_tokens"] == 8 and asked["min_tokens"] == 2 and asked["temperature"] == 0
    answer.event(chunk(6, 7))
    assert json.loads(answer.next()[1])["prompt"] == [1, 2, 5, 6, 7]


@pytest.mark.parametrize(
    ("path", "limits", "left"),
    [
        (COMPLETIONS, {}, 14),
        (COMPLETIONS, {"max_tokens": None}, None),
        (CHAT, {}, None),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 9}, 3),
    ],
)
def test_how_many_tokens_are_left(path, limits, left):
    begin = {"prompt": "x"} if path == COMPLETIONS else {"messages": []}
    answer = Continuation(path, {**begin, **limits})
    answer.event(chunk(5, 6, prompt_token_ids=[1]))
    assert json.loads(answer.next()[1])["max_tokens"] == left


def test_a_worker_that_sends_no_token_ids():
    answer = Continuation(COMPLETIONS, FINE)
    answer.event(chunk())
    assert "token ids" in answer.broken


def test_a_tool_call_that_had_begun():
    answer = Continuation(CHAT, {"messages": []})
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "token_ids": [3]}
    answer.event(b"data: " + json.dumps({"choices": [call]}).encode() + b"\n\n")
    assert "tool call" in answer.broken


def test_what_is_missing_after_the_last_token():
    answer = Continuation(COMPLETIONS, {**FINE, "stream_options": USAGE})
    answer.event(chunk(5, 6, prompt_token_ids=[1], finish_reason="length"))
    assert answer.complete
    told, done = answer.closing()
    assert data_of(told)["usage"] == {
        "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3
    }  # fmt: skip
    assert done == b"data: [DONE]\n\n"
