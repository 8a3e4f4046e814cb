"""Start-ups of vLLM servers with public logs (`kv_logs.csv`), and what the derivation says of each:
shared by tests that score it."""

import csv
from bisect import bisect_right
from dataclasses import dataclass, replace
from math import ceil

from tests.truth import truth
from twinserve.profiles.catalog import GPUS, MODELS, find_gpu
from twinserve.profiles.kv_memory.cards import GIB
from twinserve.profiles.kv_memory.derive import (
    BLOCK_TOKENS,
    KvBlocks,
    ServerFlags,
    blocks_or_none,
    kept_tokens,
    page_bytes,
    prints_longest,
    window_groups,
)
from twinserve.profiles.kv_memory.releases import LATEST, default_budgets, parse_release
from twinserve.profiles.models.config import read_config
from twinserve.profiles.models.quantization import FORMATS
from twinserve.profiles.specs import GpuSpec, ModelSpec, WeightFormat

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
