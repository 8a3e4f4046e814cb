"""Step times of mixtures and quantised models: a sum of kernels."""

import numpy as np
import pytest

from twinserve.profiles.composition import StepComposition, decode_work, prefill_work
from twinserve.profiles.forms.efficiency import FAMILIES
from twinserve.profiles.forms.kernel_rates import RATES, rates_of
from twinserve.profiles.forms.kernels import (
    PADDED_ROWS,
    KernelsModel,
    busiest_tokens,
    deviation,
    zipf_shares,
)
from twinserve.profiles.forms.roofline import LATENT_KERNELS, LAYER_KERNELS, RooflineModel
from twinserve.profiles.forms.scaled import EAGER_LAYER_S
from twinserve.profiles.gpus import GPUS
from twinserve.profiles.profile import derive_profile, load_profile

NAMES = (
    "qwen3-30b-a3b@h100", "mixtral-8x7b@a100:tp2", "gpt-oss-120b@b200", "gpt-oss-20b@l4",
    "llama-3.1-70b-fp8@h200:tp2", "llama-3.1-70b-nvfp4@b200", "llama-3.1-8b-awq@rtx4090",
    "llama-3.1-8b-int8@l40s", "minimax-m2.5-fp8@h200:tp4:ep", "deepseek-v3@h200:tp8:ep",
    "qwen3-30b-a3b@rtxpro6000:dp2:ep",
)  # fmt: skip


def derived(name):
    profile = load_profile(name)
    return derive_profile(profile.llm, profile.gpu, profile.tp, profile.dp, profile.ep)


def test_dense_models_of_16_bits_keep_the_roofline():
    assert type(derived("qwen3-8b@h100").model()) is RooflineModel
    assert type(derived("qwen3-8b-fp8@h100").model()) is KernelsModel


@pytest.mark.parametrize("name", NAMES)
def test_terms_add_up_and_runs_are_single_steps(name):
    model = derived(name).model()
    mixed = StepComposition(
        7, 7000, 1500, prefill_new=np.array([900, 30]), prefill_resident=np.array([0, 4096])
    )
    for work in (decode_work(1, 50), decode_work(96, 800), prefill_work(4096), mixed):
        assert model.step_seconds(work) == pytest.approx(sum(model.terms(work).values()))
    run = model.decode_run_seconds(9, 9000, 1200, 40)
    single = [model.step_seconds(StepComposition(9, 9000 + 9 * j, 1200 + j)) for j in range(40)]
    assert run.tolist() == single


@pytest.mark.parametrize("name", NAMES)
def test_more_work_takes_longer_and_no_step_beats_the_memory(name):
    profile = derived(name)
    model = profile.model()
    sizes = [model.step_seconds(decode_work(n, 500)) for n in (1, 2, 8, 32, 100, 256)]
    assert sizes == sorted(sizes)
    prompts = [model.step_seconds(prefill_work(n)) for n in (64, 512, 2048, 8192)]
    assert prompts == sorted(prompts)
    beside = model.step_seconds(StepComposition(64, 64 * 500, 500, *_chunk(512, 0)))
    assert beside > model.step_seconds(decode_work(64, 500))
    llm, gpu = profile.llm, profile.gpu
    dense = (llm.matrix_parameters - llm.expert_parameters) / profile.tp * llm.matrix_bytes[0]
    assert sizes[0] > dense / gpu.memory_bytes_per_s


def _chunk(new, resident):
    work = prefill_work(new)
    return work.prefill_new, np.array([resident])


def test_skewed_draws_choose_fewer_experts_than_even_ones():
    shares = zipf_shares(128, 8)
    assert shares.sum() == pytest.approx(8) and np.all(np.diff(shares) < 0) and shares[0] < 1
    for tokens in (8, 64):
        chosen = np.sum(1 - (1 - shares) ** tokens)
        assert 8 < chosen < 128 * (1 - (1 - 8 / 128) ** tokens)


@pytest.mark.parametrize("tp", [2, 4])
def test_padded_rows_take_as_long_for_few_requests_as_for_many(tp):
    """FP8 experts in blocks on Hopper from vLLM 0.11 to 0.13, below eight ranks."""
    profile = load_profile(f"minimax-m2.5-fp8@h200:tp{tp}")
    later, padded = (
        profile.model_copy(update={"engine_version": version}).model()
        for version in ("0.16.0", "0.12.0")
    )
    few, many = decode_work(4, 1000), decode_work(48, 1000)
    rows = profile.llm.experts * PADDED_ROWS
    peak = 2 * rows * profile.llm.mlp_parameters / tp / profile.gpu.fp8_flops * profile.llm.layers
    more = padded.step_seconds(few) - later.step_seconds(few)
    assert peak / 2 < more < 4 * peak
    assert padded.step_seconds(many) < 1.25 * padded.step_seconds(few)
    assert later.step_seconds(many) > 1.5 * later.step_seconds(few)


def test_padding_is_of_a_rank_s_own_experts():
    """Whole on two ranks or split over two: as many padded values."""
    split, whole = (
        load_profile(f"minimax-m2.5-fp8@h200:tp2{ep}").model_copy(
            update={"engine_version": "0.12.0"}
        )
        for ep in ("", ":ep")
    )
    seconds = [one.model().step_seconds(decode_work(4, 1000)) for one in (split, whole)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)


def test_experts_of_few_bits_are_split_where_vllm_does():
    assert load_profile("minimax-m2.5-fp8@h200:tp8:ep").model().step_seconds(decode_work(4, 1000))


def test_the_busiest_rank_of_skewed_draws_has_more_than_of_even_ones():
    shares = zipf_shares(256, 8)
    dealt = np.random.default_rng(0).permuted(np.tile(shares, (400, 1)), axis=1)
    drawn = dealt.reshape(400, 8, 32).sum(axis=2).max(axis=1).mean()
    even = busiest_tokens(8192, 256, 8, 8)
    uneven = busiest_tokens(8192, 256, 8, 8, deviation(shares, 8))
    assert even < uneven == pytest.approx(8192 * drawn, rel=0.12)


def test_latent_attention_has_more_kernels_a_layer():
    profile = load_profile("kimi-k2.5@h200:tp8")
    layers = profile.model().terms(decode_work(4, 500))["layers"]
    more = 1 + LATENT_KERNELS / LAYER_KERNELS
    assert layers == pytest.approx(more * profile.llm.layers * FAMILIES["hopper-sum"].layer_s)


def test_eager_steps_take_as_long_as_their_launches():
    profile = load_profile("llama-3.1-8b@h100")
    eager = profile.model_copy(update={"enforce_eager": True}).model()
    launches = 32 * EAGER_LAYER_S
    assert eager.step_seconds(decode_work(1, 50)) == launches
    assert eager.decode_run_seconds(1, 50, 50, 3).tolist() == [launches] * 3
    long = prefill_work(8192)
    assert eager.step_seconds(long) == profile.model().step_seconds(long) > launches
    assert eager.host_seconds(4) == profile.model().host_seconds(4)


def test_norms_over_all_heads_make_four_all_reduces_a_layer():
    profile = load_profile("minimax-m2.5-fp8@h200:tp4")
    assert profile.llm.norms_over_heads
    work = decode_work(4, 500)
    seconds = profile.model().allreduce_seconds(work)
    assert seconds > 4 * profile.llm.layers * 8.2e-6
    assert profile.model().allreduce_seconds(work) < 5 * profile.llm.layers * 8.2e-6


def test_every_gpu_has_rates_within_physics():
    for gpu in GPUS.values():
        rates = rates_of(gpu)
        assert all(0 < share <= 1 for share in rates.read.values())
    for rates in RATES.values():
        assert {"16"} <= rates.matrices.keys() and {"16"} <= rates.experts.keys()
        assert all(0 < of.compute < 1.2 for of in rates.matrices.values())
