"""Ranks of an engine: what vLLM refuses, what lies on a rank, and what the busiest one takes."""

from itertools import combinations

import pytest

from tests.profiles.configs import DEEPSEEK_V3, LLAMA
from tests.profiles.test_hostile_configs import QWEN3_MOE
from twinserve.profiles.catalog import find_model
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.forms.kernels import busiest_experts, busiest_tokens
from twinserve.profiles.memory import with_fp8_kv, with_server_flags
from twinserve.profiles.models.config import read_config
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.ranks import (
    check_ranks,
    layers_of_stages,
    rank_weight_bytes,
    stage_models,
    without_embeddings,
)
from twinserve.profiles.specs import ProfileError

BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.mark.parametrize(("experts", "ranks"), [(6, 2), (7, 3), (4, 8)])
def test_the_busiest_rank_is_that_of_all_draws(experts, ranks):
    """By counting them."""
    sizes = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    home = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    for chosen in range(experts + 1):
        most = [
            max((sum(home[one] == rank for one in draw) for rank in range(ranks)), default=0)
            for draw in combinations(range(experts), chosen)
        ]
        expected = sum(most) / len(most)
        assert busiest_experts(experts, ranks)[chosen] == pytest.approx(expected)


def test_the_busiest_rank_has_the_mean_of_many_tokens():
    assert busiest_tokens(1e6, 128, 8, 4) == pytest.approx(2e6, rel=0.002)
    assert busiest_tokens(1, 128, 8, 64) <= 2  # no rank has more experts
    assert busiest_tokens(50, 8, 8, 4) == 100  # every token chooses all


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (LLAMA, (2, 1, True), "vLLM refuses"),
        (LLAMA, (1, 4, False), "--replicas 4"),
        (LLAMA, (3, 1, False), "tp=3"),
        ({**LLAMA, "intermediate_size": 14337}, (2, 1, False), "width 14337"),
        # 768 / 8 = 96, as in Qwen3-30B-A3B-FP8
        ({**QWEN3_MOE, **BLOCKS}, (8, 1, False), "experts whole with :ep"),
        ({**QWEN3_MOE, **BLOCKS}, (4, 2, False), "experts whole with :ep"),
        ({**LLAMA, **BLOCKS, "intermediate_size": 11008}, (4, 1, False), "smaller tp"),
        (QWEN3_MOE, (2, 8, True), "links between servers"),
        (QWEN3_MOE, (1, 1, True), "ep) of one rank does nothing"),
        (LLAMA, (16, 1, False), "links between servers"),
    ],
)
def test_ranks_that_vllm_would_refuse_are_refused(config, ranks, words):
    llm = read_config(config)
    with pytest.raises(ProfileError) as raised:
        check_ranks(llm, "h100", *ranks)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    if 1 < ranks[1] * ranks[0] <= 8 and llm.experts:
        check_ranks(llm, "h100", *ranks[:2], True)


# Qwen2.5-72B has 231 groups of 128, 28.9 a rank of eight; Qwen's GPTQ, by report, 232.
# Qwen2.5-0.5B has 14 heads of 64: half of them are 3.5 groups. Experts of Qwen3-30B-A3B have 768
# inputs, and AWQ's groups of 128 become 32 (vLLM 0.32: `check_marlin_supports_layer`,
# `BaseAWQLinearMethod`, `verify_group_size_divides_partition`, `MoeWNA16Method.create_weights`).
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2.5-72b-awq@h100:tp8", None),
        ("qwen2.5-72b-gptq@a100:tp8", None),
        ("qwen2.5-72b-int4@h100:tp8", "MLP of width 29,568 over 8 ranks is 3,696 each"),
        ("qwen2.5-72b-int4@a100:tp2", "multiple of the 128 weights"),
        ("qwen2.5-72b-int4@b200:tp4", "vLLM refuses that; choose a smaller tp"),
        ("qwen2.5-72b-int4@b200", None),
        ("qwen2.5-72b-nvfp4@b200:tp8", None),  # groups of 16
        ("qwen2.5-0.5b-awq@h100:tp2", "attention output of width 896 over 2 ranks is 448"),
        ("qwen2.5-0.5b-fp8@h100:tp2", None),
        ("qwen3-30b-a3b-awq@h100:tp8", None),
        ("qwen3-30b-a3b-int4@h100:tp8", "experts of width 768 over 8 ranks is 96 each"),
        ("qwen3-30b-a3b-int4@h100:tp8:ep", None),
        # `dispatch_scaled_mm` has no INT8 kernel there
        ("llama-3.1-8b-int8@h100:tp2", None),
        ("llama-3.1-8b-int8@b200", "no INT8 inputs from compute capability 10.0"),
        ("llama-3.1-8b-int8@rtxpro6000", "rtxpro6000 has 12.0; choose -fp8"),
        ("llama-2-7b-gptq@v100", "compute capability 7.5"),
    ],
)
def test_quantised_weights_run_where_vllm_runs_them(name, words):
    if words is None:
        assert load_profile(name).num_gpu_blocks > 0
        return
    with pytest.raises(ProfileError) as raised:
        load_profile(name)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "given", "tp", "words"),
    [
        ({"intermediate_size": 29568}, {"quant_method": "awq", "bits": 4}, 8, "of the 128 weights"),
        ({"intermediate_size": 29568}, {"quant_method": "awq", "group_size": 16}, 8, None),
        ({"intermediate_size": 29568}, {"quant_method": "gptq", "bits": 4}, 2, "no vLLM kernel"),
        ({"intermediate_size": 29568}, {"quant_method": "gptq", "group_size": -1}, 8, None),
        ({"intermediate_size": 29568}, {"quant_method": "gptq", "group_size": 32}, 8, "of the 32"),
        (
            {"hidden_size": 2880, "head_dim": 128},
            {"quant_method": "awq", "bits": 4},
            1,
            "hidden size of width 2,880",
        ),
        # 8 KV heads of 64 over 8 ranks: 64 of 128 (`validate_fp8_block_shape`)
        ({"head_dim": 64}, BLOCKS["quantization_config"], 8, "KV heads of width 512 over 8 ranks"),
        ({"head_dim": 64}, BLOCKS["quantization_config"], 4, None),
        ({"intermediate_size": 10944}, BLOCKS["quantization_config"], 1, "MLP of width 10,944"),
    ],
)
def test_groups_and_blocks_of_a_config_are_whole_on_each_rank(changes, given, tp, words):
    llm = read_config({**LLAMA, **changes, "quantization_config": given})
    if words is None:
        check_ranks(llm, "h100", tp)
        return
    with pytest.raises(ProfileError, match=words):
        check_ranks(llm, "h100", tp)


def test_a_rank_holds_its_share_of_the_experts_and_all_else_of_its_engine():
    llm = read_config(DEEPSEEK_V3)
    of_experts = llm.expert_parameters * 2
    others = llm.weight_bytes - of_experts
    assert rank_weight_bytes(llm, 8) == llm.weight_bytes / 8
    for ep in (True, False):
        assert rank_weight_bytes(llm, 2, 4, ep) == pytest.approx(others / 2 + of_experts / 8)
    # 128 experts on 3 ranks: 43 on the first
    uneven = read_config(QWEN3_MOE)
    most = uneven.expert_parameters * 2 * 43 / 128
    rest = uneven.weight_bytes - uneven.expert_parameters * 2
    assert rank_weight_bytes(uneven, 1, 3, True) == pytest.approx(rest + most)


def test_whole_experts_cost_few_tokens_more_and_many_the_same():
    split, whole = (
        derive_profile("qwen3-30b-a3b", "h100", 4, 1, ep).model() for ep in (False, True)
    )
    few, many = decode_work(1, 100), prefill_work(8192)
    assert split.step_seconds(few) < whole.step_seconds(few)
    # a split expert's tokens are moved on every rank
    assert 0.7 < whole.step_seconds(many) / split.step_seconds(many) < 1


def test_data_parallel_ranks_share_experts_but_not_attention():
    """Against two engines that have all to themselves."""
    alone = derive_profile("qwen3-30b-a3b", "h100")
    shared = derive_profile("qwen3-30b-a3b", "h100", 1, 2)
    assert shared.num_gpu_blocks > alone.num_gpu_blocks
    one, two = (p.model().terms(decode_work(64, 1000)) for p in (alone, shared))
    assert two["decode_kv"] == one["decode_kv"] and two["gemm"] < one["gemm"]
    assert one["allreduce"] == 0 < two["allreduce"]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b@h100:tp2:dp2:ep", "deepseek-v3@h200:tp8:ep"])
def test_a_name_says_its_ranks_and_comes_back(name, tmp_path):
    profile = load_profile(name.upper().replace(":EP", ":ep"))
    assert profile.name == name == str(ProfileName.parse(name))
    again = type(profile).model_validate(profile.model_dump(mode="json"))
    assert (again.dp, again.ep, again) == (profile.dp, profile.ep, profile)
    assert "dp" not in load_profile("qwen3-30b-a3b@h100").model_dump()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-30b-a3b@h100:ep4", "write :ep without a number"),
        ("qwen3-30b-a3b@h100:cp2", "'cp2' is not understood"),
        ("qwen3-30b-a3b@h100:dp0", "'dp0' is not understood"),
        ("qwen3-30b-a3b@h100:dp2:dp2", "dp is given twice"),
        ("llama-3.1-8b@h100:tp4:pp4", "links between servers"),
        ("qwen3-30b-a3b@h100:pp2:dp2:ep", "pp2) of data-parallel ranks (dp2) are not simulated"),
        ("llama-3.1-8b@gb200:pp40", "leave a stage of pp40 without layers"),
        ("deepseek-v3@gb200:pp30", "without layers with experts"),
        ("llama-3.1-8b@h100:pp2:pp4", "pp is given twice"),
        ("llama-3.1-8b@h100:pp", "'pp' is not understood"),
    ],
)
def test_ranks_that_a_name_cannot_say_are_one_clear_line(name, words):
    with pytest.raises(ProfileError) as raised:
        load_profile(name)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_measured_steps_of_more_ranks_than_a_server_has_need_no_links():
    made = derive_profile("llama-3.1-8b", "h100", 8)
    base = made.model_dump(mode="json") | {"tp": 16}
    with pytest.raises(ValueError, match="links between servers"):
        type(made).model_validate(base)
    phase = {"alpha0": 1e-5, "alpha1": 1e-9, "beta": 1e-3}
    measured = {"form": "bros", "prefill": phase, "decode": phase}
    assert type(made).model_validate(base | {"step_model": measured}).tp == 16


# Pipeline stages of a profile: which layers each has, what they take and hold, and what is
# refused.
MODELS = ["llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "qwen3-30b-a3b", "gemma-3-27b"]


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (80, 4, [20, 20, 20, 20]),
        (61, 2, [31, 30]),
        (61, 4, [15, 15, 16, 15]),
        (10, 4, [2, 3, 3, 2]),
        (7, 4, [2, 2, 2, 1]),
    ],
)
def test_layers_left_over_go_where_vllm_puts_them(layers, pp, expected):
    assert layers_of_stages(layers, pp) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_stages_hold_the_model_together(model, pp):
    """All its bytes of weights and KV. Tied embeddings are there twice: first and last stage."""
    llm = find_model(model)
    parts = stage_models(llm, pp)
    held = sum(p.weight_bytes - without_embeddings(llm, i, pp) for i, p in enumerate(parts))
    norms = (pp - 1) * llm.hidden * llm.dtype_bytes  # the final one, counted with each stage
    twice = llm.head_parameters * llm.dtype_bytes if llm.tied_embeddings else 0
    assert held == pytest.approx(llm.weight_bytes + norms + twice, rel=1e-12)
    cached = sum(p.kv_bytes_per_token for p in parts)
    assert cached == pytest.approx(llm.kv_bytes_per_token)
    assert sum(p.window_layers for p in parts) == llm.window_layers
    assert sum(p.expert_layers for p in parts) == llm.expert_layers


@pytest.mark.parametrize("model", MODELS)
def test_a_lone_batch_takes_what_one_stage_takes_and_the_transfers(model):
    one, three = (derive_profile(model, "gb200", 4, pp=pp).model() for pp in (1, 3))
    for work in (decode_work(1, 100), decode_work(64, 1000), prefill_work(4000)):
        stages = three.stage_seconds(work)
        sent = 2 * three.transfer_seconds(work.new_tokens)
        assert sent > 0 and all(seconds > 0 for seconds in stages)
        assert three.step_seconds(work) == pytest.approx(one.step_seconds(work) + sent, rel=1e-9)


def test_stages_split_weights_and_kv_as_ranks_do_and_copy_no_latent_vector():
    whole = derive_profile("llama-3.1-70b", "h200", 4)
    halves = derive_profile("llama-3.1-70b", "h200", 2, pp=2)
    assert halves.num_gpu_blocks == pytest.approx(whole.num_gpu_blocks, rel=0.05)
    assert halves.kv_bytes_per_token == whole.kv_bytes_per_token
    # a latent vector is copied on each tensor-parallel rank, and on no other stage
    copied = derive_profile("deepseek-v3", "h200", 8).num_gpu_blocks
    assert derive_profile("deepseek-v3", "h200", 4, pp=2).num_gpu_blocks > 1.8 * copied


def test_the_last_stage_has_memory_for_logits_and_so_the_fewest_blocks():
    """In a release that sets nothing aside for graphs, which all stages have."""
    few, many = (
        derive_profile(
            "llama-3.1-8b", "h100", pp=2, max_num_seqs=n, engine_version="0.19"
        ).num_gpu_blocks
        for n in (256, 1024)
    )
    assert many < few


def test_more_memory_gives_the_blocks_of_the_largest_stage():
    settings = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
    less, more = (
        derive_profile("llama-3.1-8b", "h100", pp=3, utilization=u, **settings) for u in (0.8, 0.9)
    )
    assert with_server_flags(less, utilization=0.9).num_gpu_blocks == pytest.approx(
        more.num_gpu_blocks, rel=0.01
    )
    assert with_fp8_kv(less).num_gpu_blocks == pytest.approx(2 * less.num_gpu_blocks, abs=1)


def test_one_stage_is_the_profile_without_stages():
    assert load_profile("llama-3.1-70b@h200:tp4:pp1") == load_profile("llama-3.1-70b@h200:tp4")


def test_a_name_says_its_stages_and_comes_back():
    profile = load_profile("Llama-3.1-70B@h100:pp4:tp2")
    assert profile.name == "llama-3.1-70b@h100:tp2:pp4" == str(ProfileName.parse(profile.name))
    again = type(profile).model_validate(profile.model_dump(mode="json"))
    assert again == profile and "8 x h100" in profile.describe()
    assert "pp" not in load_profile("llama-3.1-70b@h100:tp8").model_dump()


def test_a_profile_of_stages_cannot_be_scaled():
    with pytest.raises(ProfileError, match="pipeline stages cannot be scaled"):
        load_profile("llama-3.1-8b@h100:pp2").scaled(decode=1.1)
