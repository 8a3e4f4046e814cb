"""KV memory as the engine has it: its share of the GPU, the longest request, FP8, its own log; and
the shipped numbers against measured runs."""

import json
import os

import pandas as pd
import pytest

from tests.truth import truth
from twinserve.profiles.composition import decode_work
from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.memory import with_fp8_kv
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve_hardware
from twinserve.sim.setup.presets import over

LOG = """INFO 11-20 10:02:11 [gpu_worker.py:359] Available KV cache memory: 5.05 GiB
(EngineCore_DP0 pid=42) INFO 11-20 10:02:12 [kv_cache_utils.py:1286] GPU KV cache size: 41,408 tokens
(EngineCore_DP0 pid=42) INFO 11-20 10:02:12 [kv_cache_utils.py:1291] Maximum concurrency for 32,768 tokens per request: 1.26x
"""  # noqa: E501


def _hardware(profile="llama-3.1-8b@h100", **settings):
    return resolve_hardware(SimulationConfig(profile=profile, async_scheduling=True, **settings))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("utilization", [0.5, 0.85, 0.95])
def test_another_share_of_the_memory_is_what_a_derivation_gives(tp, utilization):
    ours = _hardware(f"llama-3.1-8b@l40s:tp{tp}", gpu_memory_utilization=utilization)
    derived = derive_profile("llama-3.1-8b", "l40s", tp, utilization=utilization)
    assert abs(ours.num_blocks - derived.num_gpu_blocks) <= 1
    assert ours.profile.gpu_memory_utilization == utilization


def test_a_measured_number_of_blocks_moves_by_the_share():
    """2,588 blocks of 2 MiB at 0.9 of 25.25 GB."""
    more = _hardware("llama-3.1-8b@rtx4090", gpu_memory_utilization=0.95)
    assert more.num_blocks == 2588 + int(0.05 * 25250627584 / 2**21)
    assert more.limits.max_model_len == more.num_blocks * 16  # the pool bounds it, as before
    assert _hardware("llama-3.1-8b@rtx4090", gpu_memory_utilization=0.9).num_blocks == 2588


def test_the_line_before_a_run_has_the_blocks_in_force():
    assert "3446 KV blocks of 128 tokens (derived)" in _hardware(block_tokens=128).describe()
    assert "9 KV blocks of 16 tokens (in force)" in _hardware(num_blocks=9).describe()


def test_settings_that_are_not_given_change_nothing():
    assert _hardware().profile == load_profile("llama-3.1-8b@h100")


def test_the_log_of_vllms_start_says_the_blocks(tmp_path):
    path = tmp_path / "serve.log"
    path.write_text(LOG)
    assert _hardware(kv_from_log=str(path)).num_blocks == 2588
    assert not _hardware(kv_from_log=str(path)).notices
    # two engines: the one with less; and vLLM's older line
    path.write_text(LOG + LOG.replace("41,408", "41,392"))
    assert _hardware(kv_from_log=str(path)).num_blocks == 2587
    assert "41,392 to 41,408 tokens: the smallest" in _hardware(kv_from_log=str(path)).notices[0]
    path.write_text(LOG.replace("1.26x", "5.04x"))  # a hybrid model
    (said,) = _hardware(kv_from_log=str(path)).notices
    assert "is 41,408 tokens, and" in said and "5.04 x 32,768 tokens is 165,151" in said
    assert "the first is used" in said
    path.write_text("INFO # GPU blocks: 7447, # CPU blocks: 2048\n")
    assert _hardware(kv_from_log=str(path)).num_blocks == 7447


def test_fp8_keys_and_values_hold_twice_the_tokens_and_are_read_in_half_the_time():
    plain, fp8 = _hardware(), _hardware(kv_cache_dtype="fp8")
    assert fp8.num_blocks == 2 * plain.num_blocks
    assert fp8.limits.kv_bytes_per_token == plain.limits.kv_bytes_per_token / 2
    work = decode_work(64, 2000)
    halves = [one.model.terms(work)["decode_kv"] for one in (plain, fp8)]
    assert halves[1] == pytest.approx(halves[0] / 2)


def test_no_error_of_16_bit_kv_is_claimed_for_fp8():
    """Also not that of a fit to the engine's own steps."""
    fitted = derive_profile("llama-3.1-8b", "h100").with_host_terms(1e-3, 1e-5, 0.02)
    assert expected_errors(fitted).decode.error == 0.02
    fp8 = with_fp8_kv(fitted)
    assert fp8.fit_error is None and "KV in FP8" in fp8.notes
    errors = expected_errors(fp8)
    assert not errors.decode_small.known and not errors.decode_large.known


def test_a_longest_request_is_taken_or_refused_as_vllm_does():
    assert _hardware(max_model_len=8192).limits.max_model_len == 8192
    small = {"profile": "llama-3.1-8b@rtx4090"}
    assert _hardware(**small, max_model_len=41408).limits.max_model_len == 41408
    assert _hardware(**small, max_model_len=50000, num_blocks=4000).limits.max_model_len == 50000


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 131073}, "131072 positions of the model"),
        ({"profile": "llama-3.1-8b@rtx4090", "max_model_len": 41409}, "2588 KV blocks of 16 hold"),
        ({"num_blocks": 9, "block_tokens": 128, "max_model_len": 1153}, "9 KV blocks of 128 hold"),
        (
            {"gpu_memory_utilization": 0.2},
            "leave no KV memory: of 15.8 GiB weights take 15.0, a full step",
        ),
        ({"profile": "llama-3.1-8b@rtx4090", "kv_cache_dtype": "fp8"}, "--step-times roofline"),
        ({"kv_from_log": "nowhere.log"}, "nowhere.log: cannot be read"),
        ({"kv_from_log": os.devnull}, "no line 'GPU KV cache size"),
    ],
)
def test_memory_that_cannot_be_had_is_one_clear_line(settings, words):
    with pytest.raises(ProfileError) as raised:
        _hardware(**settings)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_from_log": "x", "num_blocks": 9}, "--kv-from-log and --num-blocks"),
        ({"engine_version": "0.5"}, "^--engine-version: give a release of vLLM from 0.6.6 to 0.32"),
        ({"gpu_memory_utilization": 0.95, "num_blocks": 9}, "--gpu-memory-utilization and --num"),
    ],
)
def test_two_sizes_of_the_kv_memory_contradict_each_other(settings, words):
    with pytest.raises(SettingsError, match=words):
        SimulationConfig(**settings, async_scheduling=True)


def test_a_size_that_is_given_wins_over_another_one_of_a_former_run():
    config = over({"num_blocks": 9, "seed": 4}, SimulationConfig(gpu_memory_utilization=0.8))
    assert (config.num_blocks, config.gpu_memory_utilization, config.seed) == (None, 0.8, 4)
    assert over({"num_blocks": 9}, SimulationConfig(seed=4)).num_blocks == 9


def test_shipped_blocks_are_those_of_the_measured_runs():
    """Where a run recorded its KV blocks: the shipped file has them, and what is derived from
    specifications alone is within 1 %."""
    meta = json.loads((truth("vllm_runs") / "RTX4090__Llama-3.1-8B" / "meta.json").read_text())
    steps = pd.read_csv(truth("steps/h100_vllm_steps.csv.gz"))
    totals = {int(n) for n in steps.kv_blocks_total.unique()}
    measured = {("llama-3.1-8b", "rtx4090", 1): meta["kv_cache"]["num_gpu_blocks"]}
    for key in (("llama-2-70b", "h100", 4), ("codellama-34b", "h100", 2)):
        shipped = load_profile(f"{key[0]}@{key[1]}:tp{key[2]}")
        assert shipped.num_gpu_blocks in totals
        measured[key] = shipped.num_gpu_blocks
    for (model, gpu, tp), blocks in measured.items():
        shipped = load_profile(f"{model}@{gpu}:tp{tp}")
        server = {
            "max_num_batched_tokens": shipped.max_num_batched_tokens,
            "max_num_seqs": shipped.max_num_seqs,
            "engine_version": shipped.engine_version,
        }
        assert shipped.num_gpu_blocks == blocks
        # of the 4090's 21 GiB half a GiB more were taken, and its log is not at hand
        near = 0.11 if gpu == "rtx4090" else 0.002
        assert derive_profile(model, gpu, tp, **server).num_gpu_blocks == pytest.approx(
            blocks, rel=near
        )


def test_flags_of_a_server_move_derived_memory():
    plain = _hardware(engine_version="0.15").num_blocks
    fewer = _hardware(engine_version="0.15", max_num_seqs=256)
    # 768 requests x vocabulary x 38 bytes of the sampler's sort
    saved = 768 * 128256 * 38 + 2 * 768 * 4096 * 2
    assert fewer.num_blocks - plain == pytest.approx(saved / 2**21, abs=2)
    assert fewer.limits.max_num_seqs == 256 and fewer.profile.max_num_seqs == 256
    assert _hardware(engine_version="0.15", max_num_batched_tokens=2048).num_blocks > plain
    graphs = _hardware("qwen3-32b@h100")
    assert _hardware("qwen3-32b@h100", enforce_eager=True).num_blocks > graphs.num_blocks
    assert _hardware(engine_version="0.19").profile.gpu_memory_utilization == 0.9


def test_a_measured_number_moves_by_what_the_terms_differ():
    """The sampler of 0.19 holds 14 bytes for each request and word; the peak of the forward pass
    is below that of 64 requests."""
    fewer = _hardware("llama-3.1-8b@rtx4090", max_num_seqs=64)
    assert fewer.profile.num_gpu_blocks_source == "derived"
    assert 2588 < fewer.num_blocks < 2588 + 256 * 128256 * 14 / 2**21
    assert _hardware("llama-3.1-8b@rtx4090", max_num_seqs=256).num_blocks == 2588


def test_derived_memory_has_a_range_and_says_what_would_make_it_exact():
    found = _hardware("qwen3-32b@h100")
    low, high = found.profile.num_gpu_blocks_range
    assert low < found.num_blocks < high and found.least_kv_tokens == low * 16
    assert f"(derived, {low} to {high})" in found.describe()
    assert "'Available KV cache memory' of the server's log" in found.notices[0]
    assert json.loads(found.profile.model_dump_json())["num_gpu_blocks_range"] == [low, high]
    larger = _hardware("qwen3-32b@h100", block_tokens=128)  # the range is of these blocks
    assert f" {low // 8:,} to {high // 8:,} KV blocks" in larger.notices[0]
    assert "num_gpu_blocks_range" not in _hardware().profile.model_dump()
    # a shipped file keeps its number, and a server is started with no more than is derived
    kept = _hardware("qwen3-32b@h100:tp2")
    assert kept.num_blocks == 19525 and kept.least_kv_tokens < 19525 * 16


FULL_LOG = """INFO [api_server.py:1] vLLM API server version 0.19.0
INFO [gpu_model_runner.py:1] Model loading took 14.99 GiB memory and 3.2 seconds
INFO [gpu_worker.py:1] Available KV cache memory: 54.15 GiB
INFO [gpu_worker.py:2] Free memory on device (78.6/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). Actual usage is 14.99 GiB for weight, 1.89 GiB for peak activation, 0.25 GiB for non-torch memory, and 0.84 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=57` (53.9 GiB) to fit
"""  # noqa: E501


def _of_lines(tmp_path, *numbers, **settings):
    path = tmp_path / "serve.log"
    path.write_text("\n".join(FULL_LOG.splitlines()[n] for n in numbers))
    return _hardware(kv_from_log=str(path), **settings)


def test_other_lines_of_a_log_settle_what_they_say(tmp_path):
    """A server's tokens at 0.95 were 476,016."""
    exact = 54.15 * 2**30 // 2**21
    assert _of_lines(tmp_path, 0, 2).num_blocks == exact
    assert _of_lines(tmp_path, 3).num_blocks == pytest.approx(exact, abs=8)
    more = _of_lines(tmp_path, 2, 3, gpu_memory_utilization=0.95)
    assert more.num_blocks == pytest.approx(476_016 / 16, abs=8)
    assert more.profile.gpu_memory_utilization == 0.95
    weights = _of_lines(tmp_path, 0, 1)
    assert weights.num_blocks == pytest.approx(exact, rel=0.002)
    assert weights.profile.engine_version == "0.19.0" and "weights of the log" in weights.notices[0]
    for lines in ((2,), (1, 2)):
        with pytest.raises(ProfileError, match="Free memory on device"):
            _of_lines(tmp_path, *lines, gpu_memory_utilization=0.95)


def test_the_runner_that_a_log_names_is_taken(tmp_path):
    path = tmp_path / "serve.log"
    path.write_text("vLLM API server version 0.22.0\nUsing V2 Model Runner\n")
    version_two = _hardware(kv_from_log=str(path))
    assert version_two.num_blocks > _hardware(engine_version="0.22").num_blocks


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("GPU KV cache size: , tokens", "no line 'GPU KV cache size"),
        ("GPU KV cache size: \u0664\u0662\u0660\u0660\u0660 tokens", "no line 'GPU KV cache size"),
        ("Available KV cache memory: 5.1.3 GiB", "no line 'GPU KV cache size"),
        ("Available KV cache memory: . GiB", "no line 'GPU KV cache size"),
        ("Available KV cache memory: -1.38 GiB", "0 tokens is less than one block"),
        ("Available KV cache memory: 400 GiB", "more than the .* of llama-3.1-8b@h100 would hold"),
        (f"GPU KV cache size: {'9' * 30} tokens", "give the log of this model on this GPU"),
    ],
)
def test_a_damaged_log_is_one_clear_line(tmp_path, line, words):
    path = tmp_path / "serve.log"
    path.write_text(f"INFO {line}\r\n", encoding="utf-8")
    with pytest.raises(ProfileError, match=words) as raised:
        _hardware(kv_from_log=str(path))
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def test_a_size_that_counts_longest_requests_gives_way_to_the_memory(tmp_path):
    """From 0.21 on the line has 1.8 times of what gpt-oss keeps of requests within the window."""
    path = tmp_path / "serve.log"
    memory = "vLLM API server version 0.32.0\nAvailable KV cache memory: 10.19 GiB\n"
    path.write_text(memory)
    kept = _hardware("gpt-oss-120b@h100", kv_from_log=str(path)).num_blocks
    path.write_text(memory + "GPU KV cache size: 264,000 tokens\n")
    assert _hardware("gpt-oss-120b@h100", kv_from_log=str(path)).num_blocks == kept
    path.write_text(memory.replace("0.32", "0.19") + "GPU KV cache size: 148,400 tokens\n")
    assert _hardware("gpt-oss-120b@h100", kv_from_log=str(path)).num_blocks == 148_400 // 16


def test_memory_of_pipeline_stages_alone_is_not_enough(tmp_path):
    path = tmp_path / "serve.log"
    path.write_text("Available KV cache memory: 30.0 GiB\nAvailable KV cache memory: 28.0 GiB\n")
    with pytest.raises(ProfileError, match="single pipeline stages.*or --num-blocks"):
        _hardware("qwen3-32b@h100:pp2", kv_from_log=str(path))
