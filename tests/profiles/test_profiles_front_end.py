"""Front ends by name and from files, their seconds on an engine, and the fit of measured ones."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from twinserve.profiles.front_end import (
    FrontEnd,
    Serving,
    Threads,
    load_front_end,
    published,
    save_front_end,
    service_of,
)
from twinserve.profiles.measured.front_end import (
    Exchange,
    Load,
    bunched,
    fit_front_end,
    fit_threads,
    host_factor,
    server_seconds,
    threads_error,
)
from twinserve.profiles.specs import ProfileError
from twinserve.sim.setup.front_end import parse_front_end, serving_of

MINE = FrontEnd("mine", 0.002, 1e-6, 0.003, "a test", 0.1)


def test_service_times_are_of_the_servers_host_and_set_up():
    vllm = load_front_end("vllm")
    threads = vllm.threads
    plain = vllm.on(Serving(host_factor=1.0)).service
    assert (plain.accept_s, plain.token_s) == (threads.accept_s, threads.token_s)
    assert (plain.chat_s, plain.servers, plain.batch_wait_s) == (0.0, 1, 0.0)
    slow = vllm.on().service
    assert slow.submit_s == threads.host_factor * threads.submit_s > plain.submit_s
    chat = Serving(3, 5, stream=False, chat=True, client="none", batch_wait_s=0.002)
    other = vllm.on(replace(chat, host_factor=2.0)).service
    assert (other.chunk_s, other.client_request_s, other.client_chunk_s) == (0.0, 0.0, 0.0)
    assert (other.chat_s, other.batch_wait_s) == (2 * threads.chat_s, 0.002)
    assert (other.servers, other.stream_interval) == (3, 5)
    with pytest.raises(ProfileError, match="host factor 100: accept_s"):
        service_of(replace(threads, accept_s=5.0), Serving(host_factor=100.0))


@pytest.mark.parametrize(
    ("version", "model", "parse_s", "wait_s"),
    [
        (None, "qwen3-8b", 0.0, 0.0),
        ("0.9.1", "qwen3-8b", 5.8e-3, 0.0),
        ("0.10.2", "qwen3-8b", 0.0, 2e-3),
        ("0.11.0", "qwen3-8b", 12.7e-3, 2e-3),
        ("0.11.0", "gpt-oss-20b", 0.0, 2e-3),
        ("0.11.1", "qwen3-8b", 0.0, 2e-3),
        ("0.23.0", "qwen3-8b", 0.0, 2e-3),
        ("0.24.0", "qwen3-8b", 0.0, 0.0),
    ],
)
def test_some_releases_parse_the_template_of_every_chat(version, model, parse_s, wait_s):
    chats = serving_of(Serving(chat=True, host_factor=2.0), version, model)
    assert (chats.parse_s, chats.batch_wait_s) == (parse_s, wait_s)
    assert serving_of(Serving(), version, model).parse_s == 0.0
    threads = load_front_end("vllm").threads
    assert service_of(threads, chats).accept_s == 2 * (threads.accept_s + parse_s)


def test_a_file_with_decode_steps_is_not_read_any_more(tmp_path):
    file, old = tmp_path / "front.json", asdict(MINE) | {"version": 1}
    file.write_text(json.dumps(old | {"response_steps": 0.0, "spread": 0.2}))
    assert load_front_end(file) == MINE and MINE.on().request_side(1000) == pytest.approx(0.003)
    file.write_text(json.dumps(old | {"response_steps": 0.5}))
    with pytest.raises(ProfileError, match="response_steps are no longer supported; measure"):
        load_front_end(file)


def test_none_is_none_and_a_file_says_what_was_written(tmp_path):
    assert load_front_end("none") is None
    save_front_end(MINE, tmp_path / "new" / "mine.json")
    assert load_front_end(tmp_path / "new" / "mine.json") == MINE
    queued = replace(MINE, threads=Threads(1e-3, 2e-3, 3e-6, 4e-6, 5e-4, 6e-6, 7e-6))
    save_front_end(queued, tmp_path / "queued.json")
    assert load_front_end(tmp_path / "queued.json") == queued


def test_a_client_that_takes_no_time_is_named_none():
    assert parse_front_end("vllm:client=none")[1] == Serving(client="none")
    assert parse_front_end("vllm:host_factor=none")[1] == Serving()


def test_what_it_takes_can_be_read_in_a_line():
    said = MINE.describe()
    assert "mine: 2 ms a request, 1 us a prompt token, 3 ms to see a token" in said
    for front_end in published().values():
        assert "\n" not in front_end.describe() and front_end.source
        assert "one thread, 1.02 ms a request, 3.48 us a prompt token" in front_end.describe()
    _, given = parse_front_end("vllm:api_server_count=4,chat=yes,stream=no,host_factor=2")
    said = published()["vllm"].describe(serving_of(given, "0.11.0", "qwen3-8b"))
    assert "4 threads, 27.5 ms a chat, 5.8 us a prompt token, 0.54 ms a step, 34 us a token" in said
    assert (
        "2 ms until a batch is tokenised; host factor 2 in all" in said
        and "clients see E2E" in said
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"request_s": -1}, "request_s"),
        ({"response_s": "soon"}, "response_s"),
        ({"capacity": 5}, "capacity"),
        ({"version": 99}, "is of version 99"),
        ({"request_s": None}, "request_s"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(tmp_path, change, said):
    file = tmp_path / "front.json"
    file.write_text(json.dumps(asdict(MINE) | {"version": 2} | change))
    with pytest.raises(ProfileError, match=f"front.json.*{said}") as raised:
        load_front_end(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("vlm", "no front end 'vlm'.*vllm"), ("nowhere.json", "nowhere.json: cannot be read")],
)
def test_a_front_end_that_is_not_there_is_one_line(name, said):
    with pytest.raises(ProfileError, match=said):
        load_front_end(name)


# -- measured --------------------------------------------------------------------------------------
TERMS = replace(published()["vllm"].threads, host_factor=1.0)


def loads(noise: float = 0.0) -> list[Load]:
    """Four rounds on a server with these service times; noise: relative."""
    rng, found = np.random.default_rng(2), []
    for requests, prompt, tokens, steps, streamed in [
        (64, 30, 2, 30, True),
        (6, 30, 64, 384, True),
        (6, 30, 64, 200, False),
        (64, 30, 64, 70, True),
        (64, 30, 64, 70, False),
        (16, 2700, 2, 16, True),
    ] * 4:
        n = requests * tokens
        load = Load(requests, requests * prompt, steps, n, n if streamed else 0, 0.0, 0.0, 0.0)
        server_s = float(server_seconds(TERMS, [load])[0]) * (1 + noise * rng.normal())
        tokeniser_s = 1e-4 * requests + TERMS.tokenise_s * load.prompt_tokens
        client_s = TERMS.client_request_s * requests + TERMS.client_chunk_s * n
        times = {"server_s": server_s, "tokeniser_s": tokeniser_s, "client_s": client_s}
        found.append(replace(load, **times))
    return found


def exchanges(request_s=0.003, token_s=2e-6, response_s=0.004, noise=0.0, n=20):
    """Of a server with these terms on top; noise: exponential, seconds, on each side."""
    rng, found = np.random.default_rng(1), []
    t = TERMS
    once_s = request_s + t.client_request_s + t.accept_s + t.submit_s
    token_s += t.tokenise_s + t.prompt_token_s
    response_s += t.step_s + t.token_s + 0.5 * (t.chunk_s + t.client_chunk_s)
    for start, length in enumerate([16, 128, 1024, 2048] * n):
        queued = start + once_s + token_s * length + rng.exponential(noise or 1e-12)
        engine = queued + 1e-5 * length + 0.01 * np.arange(1, 9)
        seen = engine + response_s + rng.exponential(noise or 1e-12)
        seen[0] += t.detokenise_s * length
        found.append(Exchange(length, float(start), queued, engine.tolist(), seen.tolist()))
    return found


def test_a_fit_finds_the_terms_that_made_what_was_measured():
    found = fit_front_end(loads(), exchanges(), "it")
    assert found.request_s == pytest.approx(0.003, rel=1e-3)
    assert found.prompt_token_s == pytest.approx(2e-6, rel=1e-3)
    assert found.response_s == pytest.approx(0.004, rel=1e-3)
    assert found.name == "it"
    assert found.fit_error < 1e-3
    assert asdict(found.threads) == pytest.approx(asdict(TERMS), rel=1e-6)
    assert found.idle_s(1000) == pytest.approx(exchanges()[2].beyond_engine_s, 0.01)


def test_a_fit_says_how_far_it_is_off():
    found = fit_front_end(loads(), exchanges(noise=0.001, n=200), "it")
    assert 0.003 < found.request_s + found.response_s - 0.004 < 0.006
    assert 0 < found.fit_error < 0.1
    assert threads_error(loads()) < 1e-6 < 0.01 < threads_error(loads(noise=0.05)) < 0.12


def test_a_host_that_takes_longer_has_a_factor():
    slow = [replace(load, server_s=1.3 * load.server_s) for load in loads()]
    assert host_factor(loads()) == pytest.approx(1.0)
    assert host_factor(slow) == pytest.approx(1.3)
    assert fit_threads(slow).step_s == pytest.approx(1.3 * TERMS.step_s)


def test_prompts_of_one_length_tell_no_terms():
    with pytest.raises(ValueError, match="needs several"):
        fit_front_end(loads(), exchanges()[::4], "it")


def test_answers_that_arrive_in_one_piece_are_counted():
    streamed, whole = exchanges(), []
    for e in exchanges():
        whole.append(replace(e, seen_s=[e.engine_s[-1] + 0.001] * len(e.engine_s)))
    assert bunched(streamed) == 0 and bunched([*streamed, *whole]) == 0.5
