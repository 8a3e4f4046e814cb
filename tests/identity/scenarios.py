"""Seeded workloads that force the scheduler into the corners where two implementations could
differ.

Each generator takes a seed and returns one `Scenario`; the seed also picks a variant (watermark,
prefix caching, admission check, chunk cap), so that a handful of seeds covers a class. Lengths in
tokens, arrivals in steps.
"""

import json
import os
from pathlib import Path

import numpy as np

from tests.identity.protocol import EngineSettings, RequestSpec, Scenario

TRACE = "mooncake_conversation.jsonl"
TRACE_BLOCK_TOKENS = 512
SECONDS_A_STEP = 0.05


class TraceMissing(Exception):
    """The Mooncake trace is in none of the folders of TWINSERVE_TRACES."""


def _arrivals(rng, count: int, per_step: float, bursts: bool) -> np.ndarray:
    """Non-decreasing step indices; with `bursts` a third of the gaps are zero and some are long."""
    gaps = rng.exponential(1 / per_step, count)
    if bursts:
        kind = rng.random(count)
        gaps = np.where(kind < 0.35, 0.0, np.where(kind > 0.97, 8 * gaps, gaps))
    return np.floor(np.cumsum(gaps)).astype(int)


def _shared_prefixes(
    rng, prompts: np.ndarray, block_tokens: int, documents: int, repeat: float
) -> list:
    """Content ids for each prompt: a piece of one of `documents` texts, then text of its own.

    A share `repeat` of the prompts repeats an earlier prompt in full, cut to whole blocks, which is
    where the rule that the last token is always computed shows. Changes `prompts` in place for
    those.
    """
    stride = 1 << 20
    out = []
    for i, tokens in enumerate(prompts):
        if i and rng.random() < repeat:
            j = int(rng.integers(max(0, i - 40), i))
            whole = len(out[j]) if prompts[j] % block_tokens == 0 else len(out[j]) - 1
            if whole > 0:
                prompts[i] = whole * block_tokens
                out.append(out[j][:whole])
                continue
        blocks = -(-int(tokens) // block_tokens)
        ids = (documents + 1 + i) * stride + np.arange(blocks, dtype=np.int64)
        common = int(rng.integers(0, blocks + 1))
        document = int(rng.integers(documents))
        ids[:common] = document * stride + np.arange(common)
        if common == blocks and tokens % block_tokens:
            ids[-1] = (documents + 1 + i) * stride  # half a block of its own
        out.append(ids)
    return out


def _build(
    name: str,
    rng,
    settings: EngineSettings,
    count: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    per_step: float,
    bursts: bool = True,
    documents: int = 6,
    repeat: float = 0.2,
    levels: int = 1,
) -> Scenario:
    """`count` requests with prompt and output tokens uniform in the given closed ranges and
    `levels` priorities."""
    prompts = rng.integers(prompt[0], prompt[1] + 1, count)
    outputs = rng.integers(output[0], output[1] + 1, count)
    steps = _arrivals(rng, count, per_step, bursts)
    prefixes = [None] * count
    if settings.enable_prefix_caching:
        prefixes = _shared_prefixes(rng, prompts, settings.block_tokens, documents, repeat)
    # Few urgent requests among many patient ones; coarse clocks make arrival times tie, as real
    # ones do.
    weights = 2.0 ** np.arange(levels)
    priorities = rng.choice(levels, count, p=weights / weights.sum())
    requests = [
        RequestSpec(
            request_id=f"r{i}",
            prompt_tokens=int(prompts[i]),
            output_tokens=int(outputs[i]),
            prefix=prefixes[i],
            priority=int(priorities[i]),
            arrival_step=int(steps[i]),
            arrival_s=float(steps[i] // 4 * 4) * SECONDS_A_STEP,
        )
        for i in range(count)
    ]
    return Scenario(name, settings, requests)


def preemption(seed: int, count: int = 500) -> Scenario:
    """A cache far smaller than the batch would fill: victims every few steps; variants by seed
    modulo 7.

    In the last variant single prompts nearly fill the cache, so that the watermark matters to a
    lone request.
    """
    rng = np.random.default_rng([1, seed])
    variant = [
        {},
        {"enable_prefix_caching": True, "reserve_full_isl": False},
        {"watermark": 0.05},
        {"enable_prefix_caching": True, "watermark": 0.02, "long_prefill_token_threshold": 48},
        {"reserve_full_isl": False, "long_prefill_token_threshold": 32},
        {"enable_prefix_caching": True},
        # 0.3 of 64 blocks is 19, of 63 it is 18: the null block counts
        {"enable_prefix_caching": True, "watermark": 0.3, "num_blocks": 63, "max_model_len": 1000},
    ][seed % 7]
    settings = EngineSettings(
        **{
            "num_blocks": int(rng.integers(80, 320)),
            "max_num_seqs": 48,
            "max_num_batched_tokens": 256,
            "max_model_len": 1200,
            **variant,
        }
    )
    if settings.max_model_len == 1000:
        return _build(
            f"preemption {seed}", rng, settings, count // 2, (10, 840), (5, 110), per_step=0.2
        )
    return _build(f"preemption {seed}", rng, settings, count, (10, 260), (20, 230), per_step=0.3)


def partial_chunks(seed: int, count: int = 420) -> Scenario:
    """Prompts of many steps' budget; variants by seed modulo 6, one of them without chunking."""
    rng = np.random.default_rng([3, seed])
    variant = [
        {"max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 192, "long_prefill_token_threshold": 50},
        {"max_num_batched_tokens": 96, "long_prefill_token_threshold": 33,
         "enable_prefix_caching": True},
        {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 160, "long_prefill_token_threshold": 64, "num_blocks": 150},
        {"max_num_batched_tokens": 224, "long_prefill_token_threshold": 20,
         "enable_prefix_caching": True, "reserve_full_isl": False, "num_blocks": 170},
    ][seed % 6]  # fmt: skip
    settings = EngineSettings(
        **{"num_blocks": 600, "max_num_seqs": 12, "max_model_len": 2048, **variant}
    )
    # Slow arrivals now and then leave one request alone, which lifts the cap on its chunks.
    rate = 0.035 if settings.long_prefill_token_threshold == 0 else 0.11
    rate = 0.12 if not settings.enable_chunked_prefill else rate
    return _build(
        f"partial_chunks {seed}", rng, settings, count, (17, 1900), (1, 60), per_step=rate
    )


def priority(seed: int, count: int = 400) -> Scenario:
    """Policy 'priority' in a tight cache: late urgent requests push patient ones out; variants
    modulo 6."""
    rng = np.random.default_rng([4, seed])
    variant = [
        {},
        {"enable_prefix_caching": True},
        {"watermark": 0.04, "long_prefill_token_threshold": 40},
        {
            "enable_prefix_caching": True,
            "reserve_full_isl": False,
            "long_prefill_token_threshold": 64,
        },
        {"max_num_seqs": 6, "reserve_full_isl": False},
        {"max_num_batched_tokens": 40, "num_blocks": 100, "reserve_full_isl": False},
    ][seed % 6]
    settings = EngineSettings(
        **{
            "num_blocks": int(rng.integers(80, 320)), "max_num_seqs": 40,
            "max_num_batched_tokens": 256, "max_model_len": 1200, "policy": "priority", **variant,
        }
    )  # fmt: skip
    levels = int(rng.integers(2, 6))
    return _build(
        f"priority {seed}", rng, settings, count, (10, 300), (10, 240), per_step=0.25, levels=levels
    )


def mixed(seed: int, count: int = 300) -> Scenario:
    """Everything at once: shared prefixes, victims that find their own blocks again, caps,
    watermark, block size."""
    rng = np.random.default_rng([5, seed])
    settings = EngineSettings(
        num_blocks=int(rng.integers(90, 200)),
        max_num_seqs=int(rng.integers(4, 28)),
        max_num_batched_tokens=int(rng.integers(64, 400)),
        max_model_len=700,
        block_tokens=int(rng.choice([8, 16, 32])),
        long_prefill_token_threshold=int(rng.choice([0, 24, 100])),
        enable_prefix_caching=True,
        policy=str(rng.choice(["fcfs", "priority"])),
        watermark=float(rng.choice([0.0, 0.03, 0.1])),
        reserve_full_isl=bool(rng.integers(2)),
    )
    return _build(
        f"mixed {seed}",
        rng,
        settings,
        count,
        (8, 420),
        (4, 220),
        per_step=0.2,
        levels=3,
        repeat=0.35,
    )


def short_outputs(seed: int) -> Scenario:
    """Many requests end with their first tokens, in little memory: victims with the last token on
    its way."""
    rng = np.random.default_rng([9, seed])
    settings = EngineSettings(
        num_blocks=60,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=600,
        reserve_full_isl=False,
        policy="priority",
    )
    return _build("short outputs", rng, settings, 900, (10, 120), (1, 40), per_step=0.4, levels=3)


def trace_path() -> Path:
    """The Mooncake conversation trace in the folders of TWINSERVE_TRACES; raises TraceMissing."""
    for folder in os.environ.get("TWINSERVE_TRACES", "").split(os.pathsep):
        path = Path(folder or ".") / TRACE
        if folder and path.is_file():
            return path
    raise TraceMissing(f"{TRACE} is in no folder of TWINSERVE_TRACES; point that variable at it")


def prefix_eviction(seed: int, count: int = 900, cap_tokens: int = 3072) -> Scenario:
    """A window of the Mooncake conversation trace in a cache that holds a part of what it shares.

    A 512-token block `h` of the trace becomes the content ids 32 h .. 32 h + 31 of 16-token blocks.
    Prompts are cut to `cap_tokens` and outputs quartered, for speed only. One row in twelve comes
    again some rows later, cut to whole blocks, as a client that repeats its request does. Raises
    TraceMissing.
    """
    rng = np.random.default_rng([2, seed])
    blocks, watermark, threshold = [
        (1500, 0.0, 0),
        (3000, 0.0, 256),
        (6000, 0.01, 0),
        (900, 0.0, 512),
    ][seed % 4]
    settings = EngineSettings(
        num_blocks=blocks,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=cap_tokens + 600,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=True,
        watermark=watermark,
        reserve_full_isl=seed % 3 != 1,
    )
    with trace_path().open() as lines:
        rows = [json.loads(line) for line in lines]
    start = int(rng.integers(0, len(rows) - count))
    rows = rows[start : start + count]
    sub = TRACE_BLOCK_TOKENS // settings.block_tokens
    offsets = np.arange(sub, dtype=np.int64)
    requests: list[RequestSpec] = []
    for i, row in enumerate(rows):
        tokens = min(int(row["input_length"]), cap_tokens)
        ids = (np.asarray(row["hash_ids"], np.int64)[:, None] * sub + offsets).ravel()
        prefix = ids[: -(-tokens // settings.block_tokens)]
        if i % 12 == 11:
            again = requests[int(rng.integers(max(0, i - 30), i))]
            whole = again.prompt_tokens // settings.block_tokens
            if whole:
                tokens, prefix = whole * settings.block_tokens, again.prefix[:whole]
        seconds = (row["timestamp"] - rows[0]["timestamp"]) / 1000
        requests.append(
            RequestSpec(
                request_id=f"row{start + i}",
                prompt_tokens=tokens,
                output_tokens=max(1, int(row["output_length"]) // 4),
                prefix=prefix,
                arrival_step=int(seconds * 12),
                arrival_s=seconds,
            )
        )
    return Scenario(f"prefix_eviction {seed}", settings, requests)
