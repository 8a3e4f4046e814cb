"""Operator tables from aiconfigurator-core (the [profiles] extra): measured GEMM, attention and
all-reduce times of vLLM.

Its engine is asked operator by operator, so that a chunk on a long prefix costs its attention; its
own mixed step treats the context as a fraction of a request. Everything is tabulated, so a
simulation needs the profile alone.
"""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from twinserve.errors import worded
from twinserve.profiles.gpus import FEW_BITS, SYSTEMS
from twinserve.profiles.operators.bounds import (
    CACHE_BYTES,
    SMS,
    all_chosen,
    fa2_tables,
    off_the_halves,
    pair_groups,
    read_from_memory,
    read_then_multiply,
)
from twinserve.profiles.operators.interpolation import Curve, never_falling
from twinserve.profiles.operators.layers import _points, _rows, _times
from twinserve.profiles.operators.model import OperatorForm, capture_sizes
from twinserve.profiles.specs import ModelSpec, ProfileError

MILLI = 1e-3
# The sizes that the tables hold from 256 tokens on. GEMMs multiply whole tiles: a size just above a
# multiple of 256 may cost much more, so the tables have both, and a line between multiples alone
# would be too low everywhere.
TILED = (*(size + more for size in range(256, 4353, 256) for more in (0, 1)), 8192, 16384)
TOKENS = tuple(sorted({*capture_sizes(512), *TILED}))
ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SCATTER = 1.2  # of one kernel's tables against another's
FEW_TOKENS = 64  # of a step in which experts are read rather than multiplied
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNKS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PREFIXES = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# The A100's table has multiples of 256 only. On the GPUs with the same kind of kernel (L40S, RTX
# PRO 6000), one token more than a multiple costs as much as this many tokens do on average (72 to
# 108: Llama-3.1-8B, Qwen3-14B).
TILE_TOKENS = {"a100-80g": 91}
# The architecture whose operators a dense model of ours has, and the mixtures.
ARCHITECTURES = {
    "dense": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# Of GptOssForCausalLM the library takes this window in half of the layers, whatever a config says.
GPT_OSS_WINDOW = 128


Query = TypeVar("Query", bound=Callable)


def _in_one_line(query: Query) -> Query:
    """Also sizes that the tables lack are found out when they are asked: one line then."""

    @functools.wraps(query)
    def asked(llm: ModelSpec, gpu: str, tp: int, *args, **settings):
        try:
            return query(llm, gpu, tp, *args, **settings)
        except RuntimeError as error:  # the base of the library's own errors
            raise _no_tables(llm, gpu, tp, error) from None

    return cast(Query, asked)


@_in_one_line
def form_from_aiconfigurator(
    llm: ModelSpec,
    gpu: str,
    tp: int,
    *,
    capture_tokens: int = 512,
    host_s: float = 0.0,
    host_request_s: float = 0.0,
) -> OperatorForm:
    """The tables of `llm` on `tp` GPUs of the name `gpu` (SYSTEMS). ProfileError without the
    package or the tables.
    """
    engine = _engine(llm, gpu, tp)
    token_s, comm_s = _by_tokens(engine, gpu, llm, tp)
    _check_experts(engine, llm, gpu, tp)
    if llm.weights is not None and not llm.weights.experts_only:
        # a quantised model is taken to have an FP8 KV cache there, as vLLM's is only on request
        llm = replace(llm, weights=None)
        engine = _engine(llm, gpu, tp)
    rows = [_decode(engine, r, 128)["head"] for r in ROWS]
    longest = max(c for c in CONTEXTS if c <= max(llm.max_positions, 8192))
    contexts = [c for c in CONTEXTS if c <= longest]
    prefixes = [p for p in PREFIXES if p <= longest]
    attention = _decode_attention(engine, llm, gpu, tp, contexts)
    chunks = np.array([[_prefill(engine, a, r)["attention"] for r in prefixes] for a in CHUNKS])
    attention, chunks = never_falling(attention), never_falling(chunks * MILLI)
    # A chunk on a prefix is scaled from measured whole prompts by its pairs: at least it reads its
    # context, like a decode.
    reads = Curve(contexts, attention[0])
    chunks = np.maximum(chunks, [[reads.at(a + r) for r in prefixes] for a in CHUNKS])
    extra = {}
    if gpu in SMS:
        extra = fa2_tables(gpu, llm.kv_heads / tp, llm.layers, REQUESTS, contexts, attention)
        extra |= {name: _times(extra[name]) for name in ("skew_s", "skew_beside_s")}
        extra["beside_s"] = tuple(_rows(part) for part in extra["beside_s"])
    return OperatorForm(
        tokens=_points(np.array(TOKENS, float)),
        token_s=_times(token_s),
        comm_s=_times(comm_s) if tp > 1 else (),
        rows=_points(np.array(ROWS, float)),
        row_s=_times(never_falling(np.array(rows) * MILLI)),
        requests=_points(np.array(REQUESTS, float)),
        context=_points(np.array(contexts, float)),
        decode_s=_rows(attention),
        chunk=_points(np.array(CHUNKS, float)),
        prefix=_points(np.array(prefixes, float)),
        chunk_s=_rows(chunks),
        capture_tokens=capture_tokens,
        host_s=host_s,
        host_request_s=host_request_s,
        **extra,
    )


@_in_one_line
def measured_tokens(
    llm: ModelSpec, gpu: str, tp: int, expert_ranks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, seconds of all that each token passes through by itself), for forms that take the
    rest elsewhere.

    expert_ranks: data-parallel ranks that share the experts of a mixture and bring as many tokens
    each; seconds of the one that the table's uneven draws of experts load most.
    """
    engine = _engine(llm, gpu, tp, expert_ranks)
    return np.array(TOKENS, float), _by_tokens(engine, gpu, llm, tp, expert_ranks)[0]


def _decode_attention(engine, llm: ModelSpec, gpu: str, tp: int, contexts: list) -> np.ndarray:
    """float64[REQUESTS][contexts], seconds: as tabulated, or with the rules of `bounds`."""
    kv_heads, groups = max(llm.kv_heads // tp, 1), pair_groups(max(llm.kv_heads // tp, 1))
    if groups > 1:
        heads = llm.heads // tp // groups
        engine = _engine(replace(llm, heads=heads, kv_heads=kv_heads // groups), gpu, 1)
    found = MILLI * np.array(
        [[_decode(engine, n * groups, c)["attention"] for c in contexts] for n in REQUESTS]
    )
    if gpu in CACHE_BYTES:
        layer = llm.rank_kv_bytes_per_token(tp) / llm.layers
        found = read_from_memory(found, REQUESTS, contexts, layer, CACHE_BYTES[gpu])
    return found


def _by_tokens(
    engine, gpu: str, llm: ModelSpec, tp: int, expert_ranks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """float64[TOKENS], seconds: what tokens pass through by themselves, and communication."""
    steps = _steps(engine)
    token_s, comm_s, experts_s = (
        MILLI * np.array([step[name] for step in steps]) for name in ("tokens", "comm", "experts")
    )
    if llm.experts and expert_ranks == 1 and llm.kv_heads % (2 * tp) == 0:
        halves = _experts_of_halves(llm, gpu, tp)
        if halves is not None and off_the_halves(experts_s, halves):
            chosen = all_chosen(llm.experts, llm.experts_per_token)
            token_s += read_then_multiply(TOKENS, experts_s, chosen) - experts_s
    tokens = np.array(TOKENS)
    mean_s = token_s[TOKENS.index(2048)] / 2048
    # of the way to the next multiple, what is left
    above = np.where(tokens > 256, -tokens % 256 / 256, 0.0)
    token_s += TILE_TOKENS.get(gpu, 0) * mean_s * above
    return never_falling(token_s), never_falling(comm_s)


def _experts_of_halves(llm: ModelSpec, gpu: str, tp: int) -> np.ndarray | None:
    """Seconds of the experts by TOKENS on twice as many ranks; None without such tables, as of FP8
    blocks that do not divide further."""
    try:
        steps = _steps(_engine(llm, gpu, 2 * tp))
    except (ProfileError, RuntimeError):
        return None
    return MILLI * np.array([step["experts"] for step in steps])


def _check_experts(engine, llm: ModelSpec, gpu: str, tp: int) -> None:
    """ProfileError for tables of a mixture in FP8 that take longer than in 16 bits, which are twice
    the bytes: its experts, or all that tokens pass through. They are of kernels that an engine has
    no reason to choose."""
    if not llm.experts or llm.weights is None or llm.weights.multiplies != "fp8":
        return
    in_16_bits = _engine(replace(llm, weights=None), gpu, tp)
    ours, theirs = (_decode(one, FEW_TOKENS, 128) for one in (engine, in_16_bits))
    for part, said, most in (("experts", "its experts", 1.0), ("tokens", "its matrices", SCATTER)):
        if ours[part] > most * theirs[part]:
            raise ProfileError(
                f"{llm.name} on {gpu} tp={tp}: the tables of {said} take "
                f"{ours[part] / theirs[part]:.1f} times as long as those in 16 bits, as no "
                "engine's kernel does; choose --step-times roofline"
            )


def _steps(engine) -> list[dict[str, float]]:
    """Milliseconds of each of TOKENS, by what they depend on."""
    return [_decode(engine, t, 128) if t <= 512 else _prefill(engine, t, 0) for t in TOKENS]


def _decode(engine, tokens: int, context: int) -> dict[str, float]:
    return _grouped(engine.decode_step_per_op(tokens, max(context - 1, 1), 2))


def _prefill(engine, new: int, resident: int) -> dict[str, float]:
    context, _ = engine.run_static_per_op(
        batch_size=1, isl=new + resident, osl=1, prefix=resident, mode="static_ctx"
    )
    return _grouped(context)


def _grouped(operators: list) -> dict[str, float]:
    """Milliseconds by what the time depends on; `experts` is a part of `tokens`."""
    found = {"tokens": 0.0, "comm": 0.0, "head": 0.0, "attention": 0.0, "experts": 0.0}
    for name, milliseconds, *_ in operators:
        _, _, what = name.partition("_")
        if what == "attention":
            found["attention"] += milliseconds
        elif what == "logits_gemm":
            found["head"] += milliseconds
        elif "ar" in what.split("_") or "p2p" in what or "dispatch" in what:
            found["comm"] += milliseconds
        else:
            found["tokens"] += milliseconds
            found["experts"] += milliseconds if what == "moe" else 0.0
    return found


def _engine(llm: ModelSpec, gpu: str, tp: int, expert_ranks: int = 1):
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise ProfileError(
            "operator tables need aiconfigurator-core: pip install 'twinserve[profiles]'"
        ) from None
    system = SYSTEMS.get(gpu)
    if system is None:
        raise ProfileError(
            f"no operator tables for GPU {gpu!r}; there are some for {', '.join(sorted(SYSTEMS))}"
        )
    check_described(llm, gpu)
    llm.check_tp(tp)
    with _config_folder(llm, gpu) as folder, _quiet():
        try:
            split: dict[str, Any] = {"moe_tp_size": tp} if llm.experts else {}
            if llm.kv_dtype_bytes is not None:
                split["kvcache_quant_mode"] = "fp8"
            if expert_ranks > 1:
                split |= {"moe_ep_size": expert_ranks, "attention_dp_size": expert_ranks}
            return EngineHandle.compile(folder, system, "vllm", tp_size=tp, **split)
        except (RuntimeError, ValueError, LookupError, OSError, TypeError) as error:
            raise _no_tables(llm, gpu, tp, error) from None


def _no_tables(llm: ModelSpec, gpu: str, tp: int, error: Exception) -> ProfileError:
    line = worded(error)[:200]
    return ProfileError(f"{llm.name} on {gpu} tp={tp}: aiconfigurator has no tables ({line})")


def check_described(llm: ModelSpec, gpu: str) -> None:
    """ProfileError for a model that `_config_folder` would describe as another one."""
    gpt_oss = _is_gpt_oss(llm)
    strange = {
        "latent attention": llm.latent is not None,
        "layers with a window": llm.window > 0 and not gpt_oss,
        "shared experts": llm.shared_intermediate > 0,
        "dense layers in a mixture of experts": llm.dense_layers > 0,
        "an MLP of two matrices": not llm.gated_mlp,
        "quantised weights": llm.weights is not None and _quantization(llm, gpu) is None,
        "a KV cache of other bits than 16 and 8": llm.kv_dtype_bytes not in (None, 1.0),
    }
    found = [what for what, there in strange.items() if there]
    if found:
        raise ProfileError(
            f"{llm.name}: has {found[0]}, and the operator tables are not used for that; choose "
            "--step-times roofline, or MODEL@GPU without tables"
        )


def _is_gpt_oss(llm: ModelSpec) -> bool:
    """A mixture with MXFP4 experts and a short window in half of its layers: the library knows
    these together only."""
    halves = (llm.window, 2 * llm.window_layers) == (GPT_OSS_WINDOW, llm.layers)
    experts = llm.weights is not None and llm.weights.name == "mxfp4" and llm.weights.experts_only
    return halves and not llm.chunked_window and experts


def _quantization(llm: ModelSpec, gpu: str) -> dict | None:
    """Return the `quantization_config` of weights with tables, or None: FP8 in blocks or with a
    scale a tensor and NVFP4, if the GPU multiplies in them, and gpt-oss."""
    weights, few = llm.weights, FEW_BITS[gpu]
    if weights is None or weights.plain:
        return None
    if _is_gpt_oss(llm):
        return {"quant_method": "mxfp4"}
    if weights.multiplies == "fp4" and few.fp4 is not None and not llm.experts:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if weights.multiplies != "fp8" or few.fp8 is None:
        return None
    found = {"quant_method": "fp8", "activation_scheme": "static"}
    return found if weights.bits == 8 else found | {"weight_block_size": [128, 128]}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's log lines about tables that dense models do not use; they are written
    by native code."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


@contextlib.contextmanager
def _config_folder(llm: ModelSpec, gpu: str) -> Iterator[str]:
    """A folder with a config.json that describes `llm` to aiconfigurator."""
    kind = "dense" if not llm.experts else "mixtral" if llm.experts == 8 else "qwen3_moe"
    kind = "gpt_oss" if _is_gpt_oss(llm) else kind
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "llama" if kind == "dense" else kind,
        "hidden_size": llm.hidden,
        "num_hidden_layers": llm.layers,
        "num_attention_heads": llm.heads,
        "num_key_value_heads": llm.kv_heads,
        "head_dim": llm.head_dim,
        "intermediate_size": llm.intermediate,
        "vocab_size": llm.vocab,
        "max_position_embeddings": llm.max_positions,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": llm.tied_embeddings,
    }
    if llm.experts:
        config |= {
            "num_experts": llm.experts,
            "num_local_experts": llm.experts,
            "num_experts_per_tok": llm.experts_per_token,
            "moe_intermediate_size": llm.intermediate,
        }
    quantization = _quantization(llm, gpu)
    if quantization is not None:
        config["quantization_config"] = quantization
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder
