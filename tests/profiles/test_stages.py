"""Pipeline stages of a profile: which layers each has, what they take and hold, and what is
refused."""

import pytest

from twinserve.profiles.catalog import find_model
from twinserve.profiles.composition import decode_work, prefill_work
from twinserve.profiles.memory import with_fp8_kv, with_server_flags
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.ranks import layers_of_stages, stage_models, without_embeddings
from twinserve.profiles.specs import ProfileError

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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-3.1-8b@h100:tp4:pp4", "links between servers"),
        ("qwen3-30b-a3b@h100:pp2:dp2:ep", "pp2) of data-parallel ranks (dp2) are not simulated"),
        ("llama-3.1-8b@gb200:pp40", "leave a stage of pp40 without layers"),
        ("deepseek-v3@gb200:pp30", "without layers with experts"),
        ("llama-3.1-8b@h100:pp2:pp4", "pp is given twice"),
        ("llama-3.1-8b@h100:pp", "'pp' is not understood"),
    ],
)
def test_stages_that_cannot_be_are_one_clear_line(name, words):
    with pytest.raises(ProfileError) as raised:
        load_profile(name)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_profile_of_stages_cannot_be_scaled():
    with pytest.raises(ProfileError, match="pipeline stages cannot be scaled"):
        load_profile("llama-3.1-8b@h100:pp2").scaled(decode=1.1)
