"""Kernel tables of weights and KV in few bits, and of gpt-oss: each is what its bytes allow, and is
refused where the tables are of something else."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("aiconfigurator_core")
pytestmark = pytest.mark.slow  # each reads whole tables

from tests.parameters import mostly_nightly  # noqa: E402
from twinserve.profiles.catalog import find_gpu, find_model  # noqa: E402
from twinserve.profiles.composition import decode_work, prefill_work  # noqa: E402
from twinserve.profiles.memory import with_fp8_kv  # noqa: E402
from twinserve.profiles.operators.aic import form_from_aiconfigurator  # noqa: E402
from twinserve.profiles.operators.model import OperatorModel  # noqa: E402
from twinserve.profiles.specs import ModelSpec, ProfileError  # noqa: E402
from twinserve.profiles.step_times import choose  # noqa: E402

KV_IN_FP8 = ("llama-3.1-8b@h100", "llama-3.1-70b-fp8@b200:tp4")


@cache
def _tables(llm: ModelSpec, gpu: str, tp: int = 1) -> OperatorModel:
    return OperatorModel(form_from_aiconfigurator(llm, gpu, tp))


def test_half_of_the_layers_of_gpt_oss_read_their_window_alone():
    """Attention of 64 long contexts: between reading half of the KV at the peak rate, and twice
    that, which is all of it."""
    llm, gpu = find_model("gpt-oss-120b"), find_gpu("h200")
    contexts = 65536, 131072
    found = [_tables(llm, "h200").terms(decode_work(64, c))["decode"] for c in contexts]
    kv_bytes = 64 * (contexts[1] - contexts[0]) * llm.kv_bytes_per_token
    half = kv_bytes / 2 / gpu.memory_bytes_per_s
    assert half < found[1] - found[0] < 2 * half


@pytest.mark.parametrize("tp", mostly_nightly([1, 2, 4, 8], 1))
def test_experts_of_gpt_oss_are_no_faster_than_reading_them(tp):
    llm, gpu = find_model("gpt-oss-120b"), find_gpu("h200")
    tables = _tables(llm, "h200", tp)
    read = llm.expert_parameters * llm.matrix_bytes[1] / tp / gpu.memory_bytes_per_s
    assert read < tables.terms(decode_work(512, 16))["tokens"] < 5 * read


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 256}, "layers with a window"),
        ({"window_layers": 8}, "layers with a window"),
        ({"weights": None}, "layers with a window"),
        ({"window": 0, "window_layers": 0}, "quantised weights"),
    ],
)
def test_only_gpt_oss_itself_has_tables_of_windows(change, words):
    with pytest.raises(ProfileError, match=words):
        _tables(replace(find_model("gpt-oss-20b"), **change), "h100")


def test_nvfp4_takes_less_than_fp8_where_matrices_are_read_or_multiplied():
    fp8, nvfp4 = (_tables(find_model(f"llama-3.1-70b-{name}"), "b200") for name in ("fp8", "nvfp4"))
    for work in (decode_work(4, 1000), prefill_work(4096)):
        assert nvfp4.terms(work)["tokens"] < 0.8 * fp8.terms(work)["tokens"]
    with pytest.raises(ProfileError, match="quantised weights"):  # it has no such tensor cores
        _tables(find_model("llama-3.1-8b-nvfp4"), "h100")


@pytest.mark.parametrize(
    ("name", "gpu"),
    mostly_nightly(
        [("qwen3-30b-a3b-fp8", "h100"), ("mixtral-8x7b-fp8", "h200")], ("mixtral-8x7b-fp8", "h200")
    ),
)
def test_experts_that_are_slower_in_fewer_bits_are_refused(name, gpu):
    with pytest.raises(ProfileError, match="times as long as those in 16 bits"):
        _tables(find_model(name), gpu, 2)
    faster = _tables(find_model(name), "b200", 2).terms(decode_work(64, 100))["tokens"]
    in_16_bits = find_model(name.removesuffix("-fp8"))
    assert faster < _tables(in_16_bits, "b200", 2).terms(decode_work(64, 100))["tokens"]


@pytest.mark.parametrize("name", mostly_nightly([*KV_IN_FP8], "llama-3.1-70b-fp8@b200:tp4"))
def test_tables_of_fp8_kv_are_read_in_about_half_the_time(name):
    plain = choose(name, "operators").profile
    fp8 = with_fp8_kv(plain)
    assert fp8.num_gpu_blocks == 2 * plain.num_gpu_blocks
    work = decode_work(64, 16384)
    before, after = (p.model().terms(work) for p in (plain, fp8))
    assert 0.45 < after["decode"] / before["decode"] < 0.75
    rest = [sum(t.values()) - t["decode"] for t in (before, after)]
    assert np.isclose(*rest)  # nothing else changes, host terms included


def test_fp8_kv_without_tables_is_one_clear_line():
    for name in ("llama-3.1-8b@a100-80g", "llama-3.1-8b@rtx4090"):
        with pytest.raises(ProfileError, match="choose --step-times roofline") as raised:
            with_fp8_kv(choose(name, "operators").profile)
        assert "\n" not in str(raised.value)
