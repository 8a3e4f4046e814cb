"""Events of workers, whatever way they are cut and written, and what an answer that moves makes of
them."""

import json

import pytest

from tests.route.test_migration import FINE, MESSAGES, USAGE, chunk
from twinserve.backends.live.route.continuation import CHAT, COMPLETIONS, Continuation, obstacle
from twinserve.backends.live.route.messages import (
    Events,
    EventTooLongError,
    data_of,
    event_of,
    is_done,
    is_error,
    payload_of,
)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_three_ways(end):
    lines = [b"data: a", b"", b": note", b"data: {", b"data: }", b"", b"data:[DONE]", b"", b""]
    whole = end.join(lines) + (b"x" if end == b"\r" else b"")  # a CR may be half of a CR LF
    wanted = [b"data: a\n\n", b": note\ndata: {\ndata: }\n\n", b"data:[DONE]\n\n"]
    for size in range(1, len(whole) + 1):
        events = Events()
        found = [e for i in range(0, len(whole), size) for e in events.feed(whole[i : i + size])]
        assert found == wanted, size


def test_what_an_event_holds():
    assert payload_of(b": ping\n\n") == payload_of(b"event: x\n\n") == b""
    assert payload_of(b": ping\nevent: x\ndata: {\ndata:}\nid: 3\n\n") == b"{\n}"
    assert data_of(b': ping\ndata: {"a":\ndata: 1}\n\n') == {"a": 1}
    assert data_of(b"data: [1]\n\n") is data_of(b"data: {\n\n") is data_of(b": {}\n\n") is None
    assert is_done(b"data:[DONE]\n\n") and is_done(b": x\ndata: [DONE]\n\n")
    assert not is_done(b'data: {"text": "[DONE]"}\n\n')
    assert is_error(b'data:  {"error": {"code": 500}}\n\n')
    assert not is_error(b'data: {"error": null}\n\n')
    assert not is_error(event_of({"text": '{"error": {"code": 1}}'}))


def test_letters_of_all_kinds():
    for text in ("äöü", "漢字", "🙂", "\u2028", '"\\', "\x00"):
        event = event_of({"text": text})
        assert event.count(b"\n") == 2 and data_of(event) == {"text": text}
    half = event_of({"text": "\ud83d"})
    assert data_of(half) == {"text": "\ud83d"} and b"\\ud83d" in half


@pytest.mark.slow
def test_an_event_without_end():
    events = Events()
    with pytest.raises(EventTooLongError):
        for _ in range(20):
            events.feed(b"x" * 2**20)


def test_tokens_beside_a_comment_count():
    answer = Continuation(COMPLETIONS, FINE)
    seen = answer.event(b": ping\n" + chunk(5, prompt_token_ids=[1, 2]))
    assert data_of(seen)["choices"][0]["token_ids"] is None
    assert json.loads(answer.next()[1])["prompt"] == [1, 2, 5]
    assert answer.event(b": ping\n\n") == b": ping\n\n" and not answer.broken


def test_an_event_that_cannot_be_read_moves_nowhere():
    answer = Continuation(COMPLETIONS, FINE)
    answer.event(b"data: what is this\n\n")
    assert "cannot read" in answer.broken


def test_without_the_prompts_ids_nothing_moves():
    """Else the next worker would begin anew, and the client have all that twice."""
    answer = Continuation(COMPLETIONS, FINE)
    answer.event(chunk(5))
    assert "prompt" in answer.broken


PICTURE = {"type": "image_url", "image_url": {"url": "data:x"}}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("text", None),
        (None, None),
        ([{"type": "text", "text": "x"}, "y"], None),
        ([{"type": "text", "text": "x"}, PICTURE], "messages"),
        ([{"type": "input_audio"}], "messages"),
        (7, "messages"),
    ],
)
def test_a_picture_is_not_in_the_tokens_that_stand_for_it(content, field):
    body = {"messages": [*MESSAGES, {"role": "user", "content": content}], "stream": True}
    assert obstacle(CHAT, body) == field


@pytest.mark.parametrize("more", [{"max_tokens": "8"}, {"max_tokens": 8.0}, {"min_tokens": "1"}])
def test_counts_that_are_no_integers(more):
    """vLLM makes integers of them; what is left could not be told."""
    assert obstacle(COMPLETIONS, {**FINE, **more}) == next(iter(more))


def test_a_completion_knows_no_limit_of_chats():
    body = {"prompt": "x", "max_tokens": 9, "max_completion_tokens": 5}
    answer = Continuation(COMPLETIONS, body)
    answer.event(chunk(5, 6, prompt_token_ids=[1]))
    assert json.loads(answer.next()[1])["max_tokens"] == 7


def test_a_chat_of_which_nothing_was_shown_begins_anew():
    """Its worker takes thoughts out, and must see them begin. The client has the role already."""
    answer = Continuation(CHAT, {"messages": MESSAGES, "stream": True})

    def said(name: str, delta: dict, **more) -> bytes:
        data = {"id": name, "created": 1, "choices": [{"index": 0, "delta": delta, **more}]}
        return event_of(data | {"prompt_token_ids": [1, 2]})

    role = {"role": "assistant", "content": ""}
    assert data_of(answer.event(said("a", role)))["choices"][0]["delta"] == role
    answer.event(said("a", {}, token_ids=[7]))  # of a thought that has begun
    path, body = answer.next()
    assert path == CHAT and json.loads(body)["messages"] == MESSAGES
    assert answer.event(said("b", role)) == b""
    first = data_of(answer.event(said("b", {"content": "x"}, token_ids=[8])))
    assert first["id"] == "a" and first["choices"][0]["delta"] == {"content": "x"}
    path, body = answer.next()
    assert path == COMPLETIONS and json.loads(body)["prompt"] == [1, 2, 8]


def test_all_tokens_have_come_and_nobody_said_so():
    answer = Continuation(COMPLETIONS, {**FINE, "max_tokens": 2, "stream_options": USAGE})
    answer.event(chunk(5, 6, prompt_token_ids=[1]))
    assert answer.complete
    finish, usage, _ = answer.closing()
    assert data_of(finish)["choices"][0]["finish_reason"] == "length"
    assert data_of(finish)["id"] == "a" and data_of(usage)["usage"]["total_tokens"] == 3


def test_an_error_ends_an_answer():
    answer = Continuation(COMPLETIONS, FINE)
    answer.event(chunk(5, prompt_token_ids=[1]))
    event = event_of({"error": {"message": "no", "code": 400}})
    assert answer.event(event) == event and answer.ended
