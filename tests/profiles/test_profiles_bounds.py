"""Bounds on operator tables: what no kernel of a running engine does, no shipped profile says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.parameters import each
from tests.profiles.test_profiles_evidence import MARKS
from twinserve.profiles.catalog import find_model
from twinserve.profiles.composition import decode_work
from twinserve.profiles.names import list_profiles
from twinserve.profiles.operators.bounds import (
    CACHE_BYTES,
    all_chosen,
    off_the_halves,
    pair_groups,
    read_from_memory,
    read_then_multiply,
)
from twinserve.profiles.operators.model import OperatorModel, capture_sizes
from twinserve.profiles.operators.shipped import AIC, operator_profile
from twinserve.profiles.profile import Profile, load_profile

MIB = 2**20
CACHES = CACHE_BYTES | {"a100-80g": 40 * MIB, "h100": 50 * MIB, "h200": 50 * MIB, "b200": 126 * MIB}
NAMES = set(list_profiles())
KEYS = [f"{model}@{gpu}" + (f":tp{tp}" if tp > 1 else "") for model, gpu, tp in AIC]
TABLES = [f"{key}/operators" if f"{key}/operators" in NAMES else key for key in KEYS]
MIXTURES = [name for name in TABLES if load_profile(name).llm.experts]


def _attention(profile: Profile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seconds, share of the memory's rate, bytes of KV in one layer), [requests][context]."""
    form, llm = profile.step_model, profile.llm
    kv = np.outer(form.requests, form.context) * llm.rank_kv_bytes_per_token(profile.tp)
    seconds = np.array(form.decode_s)
    return seconds, kv / seconds / profile.gpu.memory_bytes_per_s, kv / llm.layers


# Attention


@each("name", TABLES)
def test_attention_rises_with_requests_and_context_and_reads_from_memory(name):
    profile = load_profile(name)
    seconds, share, layer_bytes = _attention(profile)
    assert (np.diff(seconds, axis=0) >= 0).all() and (np.diff(seconds, axis=1) >= 0).all()
    assert share.max() < 1
    fits = layer_bytes <= CACHES[profile.gpu.name]
    assert share[fits].max() <= share[~fits].max() * 1.001


@each("name", TABLES)
def test_much_kv_is_read_at_most_of_the_memory_rate(name):
    """From 1,024 pairs of a request and a KV head on, with contexts of 1,024 tokens or more, at
    least 60 %."""
    profile = load_profile(name)
    _, share, _ = _attention(profile)
    heads = max(profile.llm.kv_heads / profile.tp, 1)
    many = np.outer(
        np.array(profile.step_model.requests) * heads >= 1024,
        np.array(profile.step_model.context) >= 1024,
    )
    assert share[many].min() > 0.6


def test_many_kv_heads_fill_a_gpu_with_few_requests():
    """16 requests on 32 KV heads are as many pairs as 64 on 8: measured steps reach 68 to 90 % of
    the bandwidth."""
    profile = load_profile("llama-2-7b@a100-80g/operators")
    _, share, _ = _attention(profile)
    form = profile.step_model
    at = {n: share[form.requests.index(n), form.context.index(1024.0)] for n in (1, 16, 32, 64)}
    assert at[1] > 0.2
    assert all(0.68 < at[n] < 0.9 for n in (16, 32, 64)), at


@pytest.mark.parametrize(
    ("kv_heads", "groups"), [(1, 1), (8, 1), (5, 1), (32, 4), (40, 5), (12, 3)]
)
def test_kv_heads_divide_into_groups_that_tables_hold(kv_heads, groups):
    assert pair_groups(kv_heads) == groups
    assert kv_heads % groups == 0 and kv_heads // groups <= 8


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100-80g", "h100", "l40s"])
def test_tables_of_few_kv_heads_agree_where_pairs_are_as_many(gpu):
    """What the rule rests on: 16 requests on 2 KV heads, 8 on 4 and 4 on 8 read alike."""
    pytest.importorskip("aiconfigurator_core")
    from twinserve.profiles.operators.aic import _decode, _engine

    llm = find_model("llama-2-7b")
    engines = {k: _engine(replace(llm, heads=k, kv_heads=k), gpu, 1) for k in (2, 4, 8)}
    for pairs in (32, 128, 512):
        for context in (1024, 4096):
            times = [_decode(e, pairs // k, context)["attention"] / k for k, e in engines.items()]
            per_pair = [t * k for t, k in zip(times, engines, strict=True)]
            assert max(per_pair) < 1.2 * min(per_pair), (pairs, context)


@examples(50)
@given(st.integers(1, 64), st.floats(0.3, 3.0), st.floats(1e6, 1e9))
def test_what_fits_the_cache_is_read_no_faster_than_what_does_not(n, gain, cache):
    contexts = np.array([16.0, 128, 1024, 8192, 65536, 524288])
    size = n * contexts * 4096.0
    seconds = 1e-6 + size / 1e12 / np.where(size <= 2 * cache, gain, 1.0)
    (bounded,) = read_from_memory(seconds[None], [n], contexts, 4096.0, cache)
    fits = size <= 2 * cache
    assert np.array_equal(bounded[~fits], seconds[~fits])
    assert (bounded >= seconds).all()
    if not fits.all():
        assert (size[fits] / bounded[fits] <= (size / bounded)[~fits][0] * (1 + 1e-9)).all()


def test_no_host_explains_how_steps_of_the_a100_rise_with_requests():
    """Host terms fitted to the marks of one GPU alone: below nothing on the A100, falling with
    requests on the L40S."""
    rows = []
    for name, requests, context, ms in MARKS:
        profile = load_profile(f"{name}/operators" if f"{name}/operators" in NAMES else name)
        bare = OperatorModel(replace(profile.step_model, host_s=0.0, host_request_s=0.0))
        kernels = bare.step_seconds(decode_work(requests, context))
        rows.append((profile.gpu.name, kernels * 1e3, requests, ms))
    found = {}
    for gpu in ("a100-80g", "h100", "l40s"):
        terms = np.array([[1 / ms, n / ms] for name, _, n, ms in rows if name == gpu])
        left = np.array([1 - kernels / ms for name, kernels, _, ms in rows if name == gpu])
        found[gpu] = np.linalg.lstsq(terms, left, rcond=None)[0]
    assert found["a100-80g"] == pytest.approx([-0.73, 0.070], rel=0.05)
    assert found["h100"] == pytest.approx([0.51, 0.005], rel=0.15)
    assert found["l40s"] == pytest.approx([0.85, -0.018], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), [("llama-2-13b", "rtxpro6000"), ("llama-13b", "l40s")])
def test_models_without_a_file_read_kv_from_memory_too(model, gpu):
    """40 KV heads: entries between the measured sizes."""
    pytest.importorskip("aiconfigurator_core")
    _, share, _ = _attention(operator_profile(model, gpu))
    assert share.max() < 1


# Experts


def test_even_draws_choose_all_experts_from_so_many_tokens_on():
    assert all_chosen(8, 2) == pytest.approx(16, abs=0.1)
    rng = np.random.default_rng(0)
    tokens = int(np.ceil(all_chosen(128, 8)))
    left = [
        128 - len({e for _ in range(tokens) for e in rng.choice(128, 8, replace=False)})
        for _ in range(100)
    ]
    assert np.mean(left) == pytest.approx(1.28, abs=0.4)
    assert all_chosen(4, 4) == 1


def test_a_rank_takes_no_longer_than_two_halves_one_after_the_other():
    halves = np.array([1.0, 2.0, 3.0])
    assert not off_the_halves(2 * halves, halves)
    assert off_the_halves(np.array([2.0, 4.5, 6.0]), halves)


@examples(100)
@given(st.lists(st.floats(0.5, 3.0), min_size=8, max_size=8))
def test_bounded_experts_read_and_multiply_at_the_tables_own_rates(noise):
    tokens = np.array([4.0, 8, 16, 32, 64, 128, 4096, 8192])
    clean = 1e-3 * np.minimum(tokens / 8, 1) + 1e-6 * tokens
    seconds = np.where(tokens < 4096, clean * np.array(noise), clean)
    bounded = read_then_multiply(tokens, seconds, 16.0)
    assert (bounded <= seconds).all() and bounded.min() == seconds.min()
    least = seconds[tokens >= 16].min()
    assert (bounded <= least + 1.01e-6 * np.maximum(tokens, 16)).all()


def test_experts_that_read_and_multiply_are_left_alone():
    tokens = np.array([1.0, 4, 16, 64, 256, 4096, 8192])
    seconds = np.maximum(1e-3 * np.minimum(tokens / 16, 1), 1e-6 * tokens)
    assert np.array_equal(read_then_multiply(tokens, seconds, 16.0), seconds)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_read_and_multiplied_no_faster_than_the_data_sheet(name):
    """From as many tokens on as choose all of them."""
    profile = load_profile(name)
    llm, gpu, form = profile.llm, profile.gpu, profile.step_model
    tokens, seconds = np.array(form.tokens), np.array(form.token_s)
    many = tokens >= all_chosen(llm.experts, llm.experts_per_token)
    weights = llm.layers * llm.mlp_parameters / profile.tp
    read = 0.99 * llm.experts * weights * llm.dtype_bytes / gpu.memory_bytes_per_s
    multiplied = 2 * llm.experts_per_token * weights * tokens / gpu.peak_flops
    assert (seconds[many] > np.maximum(read, multiplied)[many]).all()
    assert (np.diff(seconds) >= 0).all()


def test_mixtral_steps_rise_smoothly_once_all_experts_are_read():
    """No captured size from 16 to 256 tokens costs 3 % more than the one before; 96
    tokens cost at most 15 % more than 16."""
    model = load_profile("mixtral-8x7b@h100:tp2/operators").model()
    sizes = [n for n in capture_sizes(256) if n >= 16]
    times = np.array([model.token_seconds(n) for n in sizes])
    assert (np.diff(times) >= 0).all() and (times[1:] / times[:-1]).max() < 1.03
    assert times[sizes.index(96)] / times[0] < 1.15
