"""What a router is told of bodies, and of pages of /metrics."""

import math
from hashlib import sha256

import pytest

from tests.route.fronts import prompts_of
from twinserve.backends.live.route.measured import KvMemory, read_load, read_memory
from twinserve.backends.live.route.prompts import Prompts, prompt_of
from twinserve.policies.requests import RequestClass
from twinserve.sim.results.recorder import Load


def told(body: dict, prompts: Prompts | None = None, session: str | None = None, headers=()):
    prompts = prompts or prompts_of()
    return prompts.request("r", body, 0.0, list(headers), session)


def test_prompts_that_begin_alike_have_blocks_of_the_same_names():
    prompts = prompts_of()
    shared = "You are helpful. " * 20  # 340 bytes: 5 blocks of 64
    a = told({"prompt": shared + "Why is the sky blue?" * 9}, prompts).contents(16)
    b = told({"prompt": shared + "How do birds fly?" * 9}, prompts).contents(16)
    assert a[:5].tolist() == b[:5].tolist()
    assert not set(a[5:].tolist()) & set(b[5:].tolist())
    # the same text after another beginning is another content
    late = told({"prompt": "x" * 64 + shared}, prompts).contents(16)
    assert not set(late.tolist()) & set(a.tolist())


def test_a_conversation_begins_with_what_it_was_a_turn_ago():
    prompts = prompts_of()
    turn = [{"role": "user", "content": "tell me more " * 30}]
    longer = [*turn, {"role": "assistant", "content": "more " * 80}]
    before = told({"messages": turn}, prompts).contents(16)
    after = told({"messages": longer}, prompts).contents(16)
    assert len(before) == 6 and after[:6].tolist() == before.tolist() and len(after) > 10


def test_token_ids_are_counted_and_named_exactly():
    prompts = prompts_of()
    request = told({"prompt": list(range(100))}, prompts)
    assert request.prompt_tokens == 100 and len(request.contents(16)) == 6
    other = told({"prompt": [*range(32), *[7] * 68]}, prompts)
    same = request.contents(16) == other.contents(16)
    assert same.tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "abcd" * 25}, 25),
        ({"prompt": "ä" * 6}, 3),  # bytes count
        ({"prompt": ["ab", "cdef"]}, 2),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"prompt": None}, 1),
        ({"messages": "none"}, 1),
        ({"messages": [{"role": "u", "content": [{"type": "text", "text": "abcde"}]}]}, 2),
    ],
)
def test_tokens_of_a_prompt(body, tokens):
    assert told(body).prompt_tokens == tokens


def test_a_picture_counts_little_and_is_told_apart():
    def seen(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return prompt_of({"messages": [{"role": "user", "content": [part]}]})

    assert len(seen("data:" + "A" * 10_000)) < 100 and seen("a") != seen("b")


def test_claims_are_believed_as_the_file_says(tmp_path):
    path = tmp_path / "clients.yaml"
    key = sha256(b"secret").hexdigest()
    path.write_text(
        "default: {class: be}\nclients:\n  shop: {class: rt, applications: true, "
        f"key_sha256: [{key}]}}\n"
    )
    prompts = prompts_of(str(path))
    body = {"prompt": "x", "vllm_xargs": {"class": "rt", "app": "a", "slo_ttft_s": 0.3}}
    anybody = told(body, prompts)
    shop = told(body, prompts, headers=[(b"authorization", b"Bearer secret")])
    assert anybody.values["service_class"] == RequestClass.BEST_EFFORT and anybody.affinity == -1
    assert shop.values["service_class"] == RequestClass.REAL_TIME and shop.affinity >= 0


def test_wrong_attributes_count_as_none():
    request = told({"prompt": "x", "vllm_xargs": {"class": "gold"}})
    assert request.values["service_class"] == RequestClass.REAL_TIME
    assert math.isnan(request.values["slo_ttft_s"])


def test_sessions_are_told_apart():
    prompts = prompts_of()
    numbers = [told({"prompt": "x"}, prompts, session=s).affinity for s in ("a", "b", "a", None)]
    assert numbers[0] == numbers[2] != numbers[1] and numbers[3] == -1


PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a}b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 90.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="128"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="72"} 1.0"""


def test_a_page_of_metrics_is_summed_over_engines():
    memory = read_memory("\n" + PAGE)
    assert memory == KvMemory(200, 32)
    assert read_load(PAGE, 1.5, memory) == Load(1.5, 7, 2, 100, 200)


def test_a_page_that_says_nothing():
    assert read_load("", 0.0, KvMemory()) is None
    assert read_load("\nvllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n", 0.0,
                     KvMemory()) is None  # fmt: skip
    memory = read_memory('\nvllm:cache_config_info{num_gpu_blocks="None"} 1.0\n')
    assert memory == KvMemory()


@pytest.mark.parametrize("huge", ["1e300", "+Inf", "1" + "0" * 5000])
def test_counts_that_no_server_has(huge):
    page = f"\nvllm:num_requests_running {huge}\nvllm:num_requests_waiting 1\n"
    assert read_load(page, 0.0, KvMemory()) is None
    label = f'\nvllm:cache_config_info{{num_gpu_blocks="{huge}",block_size="{huge}"}} 1.0\n'
    assert read_memory(label) == KvMemory()
