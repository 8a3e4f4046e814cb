"""What an operator and a client can say to a steered server, and what they are told when it makes
no sense."""

import json
import math
from dataclasses import replace

import pytest

from tests.live.steered import ask
from twinserve.backends.live.serving import attributes
from twinserve.backends.live.serving.attributes import BadAttributeError, read_attributes
from twinserve.backends.live.serving.options import EngineFacts, build_core, read_options
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestClass
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import make_estimator

FACTS = EngineFacts(
    num_blocks=128, block_tokens=32, max_num_seqs=16, max_step_tokens=256, max_model_len=512,
    kv_bytes_per_token=1024, prefix_caching=True,
)  # fmt: skip
BROS = {"policy": "bros:chunk=64", "profile": "llama-3.1-8b@h100"}


def core_of(facts: EngineFacts = FACTS, **given):
    return build_core(read_options(given), facts)


def test_policy_vllm_has_the_engines_pool_and_prefix_cache():
    core = core_of(policy="vllm")
    assert (core.ledger.num_blocks, core.ledger.prefix_caching) == (128, True)
    limits = core.policy.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (
        16,
        256,
        512,
    )


def test_a_policy_has_all_blocks_of_an_engine_that_lays_kv_out_as_its_ledger():
    core = core_of(**BROS, max_num_batched_tokens=100)
    assert (core.policy.name, core.ledger.name, core.ledger.num_blocks) == ("bros", "paged", 128)
    assert core.ledger.host_blocks == 0
    assert core.policy.limits.max_num_batched_tokens == 100
    assert core.policy.estimator is not None
    assert core_of(**BROS, num_blocks=20).ledger.num_blocks == 20
    for policy in ("round-robin", "conserve", "layerkv", "mlfq", "vtc", "echo-bs"):
        options = {"policy": policy, "profile": BROS["profile"], "prefix_caching": None}
        options |= {"prefix_caching": False} if policy == "echo-bs" else {}
        assert core_of(**options).ledger.num_blocks == 128, policy


def test_an_engine_that_lays_kv_out_otherwise_has_room_to_spare():
    """Two requests in one block, layers on the host, prefixes that vLLM's cache might not keep."""
    assert core_of(**BROS, kv="bidirectional").ledger.num_blocks == 56
    caching = core_of(policy="round-robin:kv=paged", prefix_caching=True).ledger
    assert (caching.prefix_caching, caching.num_blocks) == (True, 56)
    facts = replace(FACTS, host_blocks=64)
    assert core_of(facts, policy="layerkv", profile=BROS["profile"]).ledger.num_blocks == 56


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "name a policy"),
        ({"policy": "brs"}, "did you mean 'bros'"),
        ({"policy": "bros:chunck=3"}, "did you mean 'chunk'"),
        ({"polcy": "bros"}, "did you mean 'policy'"),
        ({"policy": "bros"}, '"profile"'),
        ({"policy": "bros", "profile": "no-such"}, "no-such"),
        ({**BROS, "num_blocks": 0}, "num_blocks=0"),
        ({**BROS, "num_blocks": 129}, "at most 128"),
        ({**BROS, "kv": "bidirectional", "num_blocks": 57}, "at most 56"),
        ({**BROS, "num_blocks": 10}, "--max-model-len 512"),
        ({**BROS, "kv": "pagd"}, "'pagd'"),
        ({**BROS, "kv": "paged", "policy": "bros:kv=bidirectional"}, "give one of them"),
        ({**BROS, "host_blocks": 8}, "TwinserveConnector"),
        ({**BROS, "prefix_caching": True}, "looks no prefixes up"),
        ({"policy": "conserve:kv=bidirectional", "prefix_caching": True}, "kv=paged"),
        ({**BROS, "max_num_batched_tokens": 512}, "--max-num-batched-tokens"),
        ({**BROS, "estimator": "psychic"}, "psychic"),
        ({**BROS, "stats_path": "/no/such/folder/stats.json"}, "no such folder"),
        ({**BROS, "slo_ttft_s": -1}, "slo_ttft_s"),
        ({"policy": "vllm", "num_blocks": 64}, "--num-gpu-blocks-override"),
        ({"policy": "vllm", "prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"policy": "vllm-v0:max_num_batched_tokens=64"}, "--max-model-len lower"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given, said):
    with pytest.raises(LiveEngineError) as error:
        core_of(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_keys_that_vllm_puts_there_are_its_own():
    assert read_options({"policy": "vllm", "gdn_prefill_backend": "triton"}).policy == "vllm"


# -- attributes ------------------------------------------------------------------------------------
def test_attributes_are_read():
    read = read_attributes(
        {
            "class": "be", "priority": -3, "slo_ttft_s": 1, "slo_tpot_s": 0.2, "app": "agent",
            "stage": 2, "top_n_sigma": 1.0,
        }
    )  # fmt: skip
    assert (read.service_class, read.priority, read.slo_ttft_s, read.slo_tpot_s) == (
        RequestClass.BEST_EFFORT,
        -3,
        1.0,
        0.2,
    )
    assert (read.app, read.stage) == ("agent", 2)
    plain = read_attributes(None)
    assert (plain.service_class, plain.priority, plain.app) == (RequestClass.REAL_TIME, None, None)
    assert math.isnan(plain.slo_ttft_s)


# Of each the last name is the one that is wrong.
BAD = [
    {"class": "realtime"}, {"class": 1}, {"class": ["rt"]}, {"clas": "rt"}, {"slo_ttft": 0.4},
    {"slo_ttft_s": 0}, {"slo_ttft_s": "0.4"}, {"slo_ttft_s": 1e-9}, {"slo_tpot_s": True},
    {"slo_tpot_s": math.inf}, {"slo_tpot_s": math.nan}, {"slo_tpot_s": 10**400},
    {"slo_tpot_s": 86_401}, {"priority": 1.5}, {"priority": 2**63}, {"priority": -(2**63)},
    {"priority": 10**3000}, {"app": ""}, {"app": "x" * 300}, {"stage": 1},
    {"app": "a", "stage": -1}, {"app": "a", "stage": 1_000_001}, {"app_class": "CC"},
    {"app_text": "words"}, {"app_requests": 2}, {"app": "a", "app_class": ""},
    {"app": "a", "app_class": 3}, {"app": "a", "app_text": "x" * 65_537},
    {"app": "a", "app_requests": 0}, {"app": "a", "app_requests": 1_000_001},
    {"app": "a", "app_requests": 1.5}, {"app": "a", "app_clas": "CC"},
]  # fmt: skip


@pytest.mark.parametrize("given", BAD, ids=lambda given: str(given)[:40])
def test_bad_attributes_are_named(given):
    with pytest.raises(BadAttributeError) as error:
        read_attributes(given)
    assert list(given)[-1] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({f"key-{i}": i for i in range(50_000)}, "50,000 names"),
        ({"k" * 65: 1}, "a name of 65 characters"),
        ({"mine": "x" * 65_537}, "vllm_xargs.mine"),
        ({"mine": [1] * 65_537}, "vllm_xargs.mine"),
        ({f"key-{i}": "x" * 10_000 for i in range(7)}, "vllm_xargs.key-6"),
        ({"mine": ["x" * 70_000]}, "vllm_xargs.mine"),
        ({"app": "x" * 10**6}, "a text of 1,000,000 characters"),
        ({"class": {str(i): i for i in range(10**5)}}, "a dict of 100,000"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_what_is_large_is_refused_before_it_is_looked_at(given, said, monkeypatch):
    """With one short line, and without comparing its names with ours, which takes long."""
    monkeypatch.setattr(attributes, "get_close_matches", None)
    with pytest.raises(BadAttributeError) as error:
        read_attributes(given)
    assert said in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_what_others_need_goes_through():
    read_attributes({f"key-{i}": "x" * 2000 for i in range(32)})
    read_attributes({"bad_words": ["a word"] * 5000, "kv_transfer_params": {"x": ["y"] * 10**5}})


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_middleware_passes_on_what_it_read(pieces):
    body = json.dumps({"prompt": "w1", "vllm_xargs": {"class": "rt", "slo_ttft_s": 0.5}}).encode()
    assert ask(body, pieces=pieces).got == body
    for other in (
        b"",
        b"{not json, with vllm_xargs",
        b'["vllm_xargs"]',
        b'{"prompt": "vllm_xargs"}',
    ):
        assert ask(other, pieces=pieces).got == other


@pytest.mark.parametrize("given", [*BAD[:2], "rt", [1]], ids=str)
def test_the_middleware_answers_400_with_one_line(given):
    answer = ask({"vllm_xargs": given}, pieces=2)
    error = answer.error
    assert (answer.status, error["code"], error["param"]) == (400, 400, "vllm_xargs")
    assert "\n" not in error["message"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_estimator_is_fitted_to_steps_as_this_engine_makes_them(asynchronous):
    found = build_core(read_options(BROS), FACTS, asynchronous).policy.estimator
    config = SimulationConfig(
        profile=BROS["profile"], async_scheduling=asynchronous, max_num_seqs=16, num_blocks=128,
        block_tokens=32,
    )  # fmt: skip
    spec = parse_policy(BROS["policy"])
    assert found.model == make_estimator(config, resolve_hardware(config), spec.policy).model
    other = build_core(read_options(BROS), FACTS, not asynchronous).policy.estimator
    assert found.model != other.model  # the host's part of a step depends on it
