"""KV memory term by term: against the terms that logs of real servers print, and what must hold of
any of them."""

import csv
from bisect import bisect_right
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import pytest

from tests.parameters import each
from tests.truth import truth
from twinserve.profiles.catalog import GPUS, MODELS, find_gpu, find_model
from twinserve.profiles.kv_memory.cards import GIB
from twinserve.profiles.kv_memory.derive import (
    BLOCK_TOKENS,
    MIB,
    KvBlocks,
    ServerFlags,
    allocated,
    blocks_or_none,
    kept_tokens,
    page_bytes,
    prints_longest,
    rank_weights,
    window_groups,
)
from twinserve.profiles.kv_memory.releases import (
    LATEST,
    check_release,
    default_budgets,
    default_utilization,
    parse_release,
    uses_v2_runner,
)
from twinserve.profiles.models.config import read_config
from twinserve.profiles.models.quantization import FORMATS
from twinserve.profiles.profile import derive_profile
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError, WeightFormat

# Start-ups of vLLM servers with public logs (`kv_logs.csv`), and what the derivation says of
# each: shared by tests that score it.
# Models of the logs that the catalogue does not have: sizes of their config.json.
_GEMMA = {"head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192}


def _config(kind: str, layers, hidden, heads, kv_heads, width, **more) -> dict:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width,
        **more,
    }  # fmt: skip


_CODE = {"vocab_size": 32016, "max_position_embeddings": 16384}
_GRANITE = {"vocab_size": 49155, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_CONFIGS = {
    "codellama-7b": _config("llama", 32, 4096, 32, 32, 11008, **_CODE),
    "gemma-7b": _config("gemma", 28, 3072, 16, 16, 24576, **_GEMMA),
    "gemma-2-2b": _config("gemma2", 26, 2304, 8, 4, 9216, **_GEMMA),
    "gemma-2-9b": _config("gemma2", 42, 3584, 16, 8, 14336, **_GEMMA),
    "gemma-2-27b": _config("gemma2", 46, 4608, 32, 16, 36864, **_GEMMA | {"head_dim": 128}),
    "granite-3.1-2b": _config("llama", 40, 2048, 32, 8, 8192, **_GRANITE),
    "granite-3.1-8b": _config("llama", 40, 4096, 32, 8, 12800, **_GRANITE),
    "granite-3.3-8b": _config("llama", 40, 4096, 32, 8, 12800, **_GRANITE | {"vocab_size": 49159}),
    "qwen1.5-moe-a2.7b": _config(
        "qwen2_moe", 24, 2048, 16, 16, 5632, vocab_size=151936, max_position_embeddings=8192,
        moe_intermediate_size=1408, num_experts=60, num_experts_per_tok=4,
        shared_expert_intermediate_size=5632,
    ),
    "deepseek-v2-lite": _config(
        "deepseek_v2", 27, 2048, 16, 16, 10944, vocab_size=102400, max_position_embeddings=163840,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, first_k_dense_replace=1, moe_intermediate_size=1408, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6,
    ),
}  # fmt: skip
_PHI_2 = ModelSpec("phi-2", 32, 2560, 32, 32, 80, 10240, 51200, 2048, gated_mlp=False, biases="all")
_FORMS = {
    "w8": FORMATS["int8"],
    "int4": FORMATS["int4"],
    "fp8b": WeightFormat("fp8", bits=8 + 32 / 128**2, block=128),
}
# a row's "other" is a card of 16 GB; the V100 has 32
_OTHER = GpuSpec("other", "turing", 65e12, 320e9, 15.55 * GIB, 16e9)
_V100 = replace(GPUS["v100-16g"], name="v100-32g", memory_bytes=31.74 * GIB)


def log_model(name: str, form: str = "", value_bytes: float = 2) -> ModelSpec:
    if name == "phi-2":
        found = _PHI_2
    else:
        found = MODELS[name] if name in MODELS else read_config(_CONFIGS[name], name)
    if form and found.weights is None:
        found = replace(found, weights=_FORMS[form])
    return found if value_bytes == 2 else replace(found, dtype_bytes=value_bytes)


def _release(text: str) -> str:
    """0.101 is 0.10.1, and 0.07 is 0.7."""
    minor = text.partition(".")[2]
    return f"0.{int(minor[:2])}.{minor[2:] or 0}"


@dataclass(frozen=True)
class LoggedStart:
    row: dict[str, str]
    model: ModelSpec
    flags: ServerFlags
    derived: KvBlocks

    def printed(self, column: str) -> float | None:
        return float(self.row[column]) if self.row[column] else None

    @property
    def printed_tokens(self) -> float:
        """Of the line, or of the GiB where a source gives no more."""
        said = self.printed("tokens_log")
        nbytes = (self.printed("avail_log") or 0.0) * GIB
        return said or self._tokens(nbytes)

    @property
    def tokens(self) -> tuple[float, float, float]:
        """Derived, low, high."""
        terms = self.derived.terms
        ends = (0.0, -terms.spread, terms.spread)
        return tuple(self._tokens(terms.available + e) for e in ends)

    def _tokens(self, nbytes: float) -> float:
        longest = int(self.row["max_len"])
        return printed_kv_tokens(self.model, int(self.row["tp"]), self.flags, nbytes, longest)


def logged_starts() -> list[LoggedStart]:
    """Every row; skips the test where the file is not at hand."""
    with truth("kv_logs.csv").open(newline="", encoding="utf-8") as file:
        return [_start(row) for row in csv.DictReader(file)]


def _start(row: dict[str, str]) -> LoggedStart:
    model = log_model(row["model"], "" if row["fmt"] == "mxfp4" else row["fmt"], float(row["base"]))
    kv_bytes = float(row["kv_bytes"])
    if kv_bytes != model.dtype_bytes:
        model = replace(model, kv_dtype_bytes=kv_bytes)
    gpu = {"other": _OTHER, "v100-32g": _V100}.get(row["gpu"]) or find_gpu(row["gpu"])
    release = parse_release(_release(row["rel"]))
    tokens, requests = default_budgets(gpu, release)
    flags = ServerFlags(
        int(row["T"] or tokens),
        int(row["seqs"] or requests),
        float(row["util"]),
        release,
        row["eager"] == "1",
        True if row["v2"] == "1" else None,
    )
    ep = int(row["ep"]) > 1
    return LoggedStart(row, model, flags, blocks_or_none(model, gpu, int(row["tp"]), flags, ep=ep))


def printed_kv_tokens(
    llm: ModelSpec, tp: int, flags: ServerFlags, nbytes: float, longest: int | None = None
) -> float:
    """vLLM's `GPU KV cache size: N tokens` for so many bytes of KV memory of a rank. Until 0.20 the
    line has `kept_tokens`. Later it is the concurrency of longest requests times their length
    (`get_kv_cache_capacity`), which are more tokens where layers have windows.
    longest: `--max-model-len`."""
    groups = window_groups(llm)
    if groups is None or not prints_longest(llm, flags.release) or nbytes <= 0:
        return kept_tokens(llm, tp, flags.release, nbytes)
    size, *counts = groups
    return _by_concurrency(
        llm, flags, int(nbytes // (page_bytes(llm, tp) * size)), tuple(counts), longest
    )


def _by_concurrency(
    llm: ModelSpec, flags: ServerFlags, blocks: int, groups: tuple[int, ...], longest: int | None
) -> float:
    """Of the longest request that fits. A window keeps what is in flight beside it
    (`SlidingWindowSpec.max_admission_blocks_per_request`): one step, from 0.32 on the two of
    asynchronous scheduling (`VllmConfig.max_in_flight_tokens`)."""
    flight = flags.tokens * (2 if flags.release >= LATEST else 1)
    beside = 0 if llm.chunked_window else -1

    def needed(length: int) -> int:
        kept = min(llm.window + beside + flight, length)
        return (
            ceil(length / BLOCK_TOKENS) * groups[0]
            + (ceil(kept / BLOCK_TOKENS) + (not llm.chunked_window)) * groups[1]
        )

    length = min(longest or llm.max_positions, llm.max_positions)
    if needed(length) > blocks:
        length = bisect_right(range(length), blocks, key=needed) - 1
    return blocks / needed(length) * length if length > 0 else 0.0


RELEASES = ["0.7", "0.9", "0.10.2", "0.11", "0.15", "0.17", "0.19", "0.21", "0.25", "0.28", "0.32"]


def _derived(model="llama-3.1-8b", gpu="h100", tp=1, release="0.19", **changes):
    card, found = find_gpu(gpu), parse_release(release)
    flags = ServerFlags(*default_budgets(card, found), default_utilization(found), found)
    return blocks_or_none(find_model(model), card, tp, replace(flags, **changes))


# column of the logs -> the term, and GiB that its error is at most in the median, at the 90th
# percentile, and at worst
TERMS = {
    "weights_log": ("weights", 0.01, 0.05, 0.25),
    "act_log": ("activation", 0.01, 0.01, 0.02),
    "nontorch_log": ("non_torch", 0.01, 0.05, 0.25),
    "avail_log": ("available", 0.05, 0.15, 0.3),
}


@pytest.mark.parametrize("column", TERMS)
def test_each_term_is_what_logs_print(column):
    term, *limits = TERMS[column]
    starts = logged_starts()
    printed = [(getattr(s.derived.terms, term) / GIB, s.printed(column)) for s in starts]
    errors = [abs(ours - theirs) for ours, theirs in printed if theirs is not None]
    assert len(errors) > 60
    found = [np.median(errors), np.percentile(errors, 90), max(errors)]
    assert all(f <= most for f, most in zip(found, limits, strict=True)), found


def test_tokens_are_near_those_of_logs_and_mostly_in_their_range():
    starts = logged_starts()
    derived = np.array([s.tokens for s in starts])
    printed = np.array([s.printed_tokens for s in starts])
    errors = np.abs(derived[:, 0] / printed - 1)
    assert np.median(errors) < 0.001 and np.percentile(errors, 90) < 0.005
    assert errors.max() < 0.06  # gpt-oss-120b with 3 GiB left
    inside = (derived[:, 1] <= printed) & (printed <= derived[:, 2])
    assert inside.mean() > 0.9
    assert np.median((derived[:, 2] - derived[:, 1]) / derived[:, 0]) < 0.01


def test_no_graphs_are_set_aside_where_logs_print_but_do_not_subtract_them():
    assert all(s.derived.terms.graphs == 0 for s in logged_starts())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("model", "gpu", "tp"), [
    ("llama-3.1-8b", "h100", 1), ("qwen3-30b-a3b", "a100-80g", 2), ("deepseek-v3", "h200", 8),
    ("gpt-oss-20b", "l40s", 1), ("gemma-3-27b", "h100", 2), ("opt-13b", "a100-40g", 2),
])  # fmt: skip
def test_more_of_a_flag_never_gives_more_memory(model, gpu, tp, release):
    def left(**changes):
        return _derived(model, gpu, tp, release, **changes).terms.available

    budgets = default_budgets(find_gpu(gpu), parse_release(release))
    requests = [left(requests=n) for n in (1, 64, 127, 256, 1024)]
    # below 128 requests the sort takes another path, with more for each
    assert all(a >= b for a, b in zip(requests[:3], requests[1:3], strict=False))
    assert requests[3] >= requests[4]
    tokens = [left(tokens=n) for n in (256, 2048, 8192, 32768)]
    assert all(a >= b for a, b in zip(tokens, tokens[1:], strict=False))
    assert left(eager=True) >= left()
    shares = [left(utilization=u) for u in (0.5, 0.8, 0.95)]
    assert shares == sorted(shares)
    found = _derived(model, gpu, tp, release)
    assert found.low <= found.blocks <= found.high and min(budgets) > 0


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-4b"])
def test_more_ranks_have_less_weights_each_and_more_tokens_together(model):
    found = [_derived(model, "h100", tp) for tp in (1, 2, 4)]
    assert all(a.terms.weights > b.terms.weights for a, b in zip(found, found[1:], strict=False))
    assert [one.blocks for one in found] == sorted(one.blocks for one in found)


@each("model", sorted(MODELS))
def test_weights_are_the_parameters_of_the_model_and_little_more(model):
    """Projections of latent attention are kept twice, and MXFP4 is padded."""
    llm = find_model(model)
    ours = rank_weights(llm, 1, (0, 19, 0)) / llm.weight_bytes
    assert 0.99 < ours < (1.08 if llm.weights is not None else 1.02)


def test_the_allocator_rounds_what_leaves_little_of_a_segment():
    assert allocated(1) == 512 and allocated(9 * MIB) == 9 * MIB
    assert allocated(11.5 * MIB) == 12 * MIB  # half a MiB left
    assert allocated(10.5 * MIB) == 10.5 * MIB  # split


def test_windows_share_one_pool_of_blocks():
    """gpt-oss-20b: 12 layers with a window of 128 tokens and 12 without, in groups of 12."""
    llm = find_model("gpt-oss-20b")
    page = 12 * 16 * llm.kv_bytes_per_token / llm.layers
    flags = ServerFlags(8192, 1024, 0.9, (0, 19, 0))
    assert printed_kv_tokens(llm, 1, flags, 1000 * page) == 500 * 16
    later = replace(flags, release=(0, 25, 0))
    # 512 blocks of the others, and what the window keeps beside a step of 8,192 tokens
    tokens = printed_kv_tokens(llm, 1, later, 1100 * page, longest=8192)
    assert tokens == pytest.approx(1100 / (512 + 513) * 8192)
    short = printed_kv_tokens(llm, 1, later, 1000 * page, longest=131072)
    assert 0 < short <= 1000 * 16  # the longest request that fits


def test_defaults_go_with_card_and_release():
    assert default_budgets(find_gpu("h100"), (0, 19, 0)) == (8192, 1024)
    assert default_budgets(find_gpu("a100-80g"), (0, 19, 0)) == (2048, 256)
    assert default_budgets(find_gpu("b200"), (0, 28, 0)) == (16384, 1024)
    assert default_budgets(find_gpu("b200"), (0, 27, 1)) == (8192, 1024)
    assert default_budgets(find_gpu("l40s"), LATEST) == (2048, 256)
    assert (default_utilization((0, 20, 0)), default_utilization((0, 21, 0))) == (0.9, 0.92)
    profile = derive_profile("qwen3-4b", "h100", engine_version="0.19")
    assert profile.gpu_memory_utilization == 0.9 and profile.max_num_seqs == 1024
    assert derive_profile("qwen3-4b", "h100").gpu_memory_utilization == 0.92


@pytest.mark.parametrize(
    ("model", "since"),
    [
        ("qwen3-8b", 22), ("llama-3.1-8b", 23), ("qwen3-8b-fp8", 24), ("deepseek-v2-lite", 24),
        ("qwen2.5-7b", 25), ("qwen3-vl-8b", 25), ("qwen3-30b-a3b", 29),
    ],
)  # fmt: skip
def test_the_new_runner_serves_a_model_from_that_release_on(model, since):
    llm = find_model(model)
    assert [uses_v2_runner(llm, (0, n, 0)) for n in (since - 1, since, since + 1)] == [0, 1, 1]


def test_releases_are_understood_or_refused():
    assert parse_release("0.10.2+cu128") == (0, 10, 2) and parse_release(None) == LATEST
    assert parse_release("1.4") == LATEST and parse_release("0.32.3") == LATEST
    for text in ("0.32.1", "v0.11.0", "0.8.5.post1", "0.10.1.1", "0.19.1rc1"):
        assert check_release(text) == text
    assert parse_release("0.8.5.post1") == (0, 8, 5)
    for text in ("0.5", "0.33", "main", "0.19rc1", "0.19.x", "0.\uff11\uff11"):
        with pytest.raises(ProfileError, match="--engine-version"):
            check_release(text)
