"""Bytes that the weights of one rank take: every tensor as vLLM makes it, by torch's allocator.

vLLM prints the sum as `Model loading took X GiB`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from twinserve.profiles.kv_memory.releases import Release
from twinserve.profiles.ranks import local_experts
from twinserve.profiles.specs import ModelSpec, WeightFormat

MIB = 2**20
VOCABULARY_UNIT = 64  # DEFAULT_VOCAB_PADDING_SIZE of layers/vocab_parallel_embedding.py


def allocated(nbytes: float) -> float:
    """What a tensor of so many bytes counts in torch's statistics
    (`c10/cuda/CUDACachingAllocator.cpp`: kMinLargeAlloc, kRoundLarge, should_split). From 10 MiB on
    a segment has steps of 2 MiB, and is split only where more than 1 MiB would be left."""
    exact = ceil(nbytes / 512) * 512
    if exact < 10 * MIB:
        return exact
    segment = ceil(exact / (2 * MIB)) * 2 * MIB
    return segment if segment - exact <= MIB else exact


def rank_weights(
    llm: ModelSpec,
    tp: int,
    release: Release,
    *,
    dp: int = 1,
    ep: bool = False,
    tables: int | None = None,
    hopper: bool = True,
) -> float:
    """Bytes of weights on the rank that has most.

    tables  embeddings and output projections that the rank has; None: those of the whole model
    hopper  which kernels run MXFP4, and so how it is padded: Triton's, or Marlin's and TRT-LLM's
    """
    dense = sum(allocated(size) for size in _layer(llm, tp, llm.dense_intermediate))
    plain = sum(allocated(size) for size in _layer(llm, tp, _width(llm)))
    if llm.experts:
        plain += sum(allocated(size) for size in _experts(llm, tp, release, dp, ep, hopper))
    whole = dense * llm.dense_layers + plain * (llm.layers - llm.dense_layers)
    if llm.weights is not None and llm.weights.plain:  # matrices that keep 16 bits after all
        whole += llm.weights.plain * (llm.dtype_bytes - llm.weights.bits / 8) / tp
    if tables is None:
        tables = 1 if llm.tied_embeddings else 2
    vocabulary = ceil(llm.vocab / VOCABULARY_UNIT) * VOCABULARY_UNIT
    whole += tables * allocated(vocabulary / tp * llm.hidden * llm.dtype_bytes)
    return whole + _positions(llm) + llm.other_parameters * llm.dtype_bytes / tp


def _width(llm: ModelSpec) -> int:
    """Of the MLP that every token passes."""
    return llm.shared_intermediate if llm.experts else llm.intermediate


def _positions(llm: ModelSpec) -> float:
    """A table of positions, or the cosines and sines of `RotaryEmbedding`, in fp32 for latent
    attention (DeepseekScalingRotaryEmbedding)."""
    if llm.learned_positions:
        return allocated(llm.learned_positions * llm.hidden * llm.dtype_bytes)
    if llm.latent is not None:
        return allocated(llm.max_positions * llm.latent.rope_dim * 4)
    return allocated(llm.max_positions * llm.head_dim * llm.dtype_bytes)


def _layer(llm: ModelSpec, tp: int, width: int) -> Iterator[float]:
    """Sizes of the tensors of one layer but its routed experts, with an MLP of `width`."""
    form = None if llm.weights is not None and llm.weights.experts_only else llm.weights
    value, heads = llm.dtype_bytes, llm.heads // tp
    if llm.latent is not None:
        yield from _latent_attention(llm, heads, form)
    else:
        rows = (heads + 2 * max(llm.kv_heads // tp, 1)) * llm.head_dim
        yield from _matrix(rows, llm.hidden, form, value)
        yield from _matrix(llm.hidden, heads * llm.head_dim, form, value)
        if llm.biases:
            yield rows * value
    if width:
        merged = (2 if llm.gated_mlp else 1) * width // tp
        yield from _matrix(merged, llm.hidden, form, value)
        yield from _matrix(llm.hidden, width // tp, form, value)
        if llm.biases == "all":
            yield (merged + llm.hidden) * value
    yield llm.hidden * value
    yield llm.hidden * value


def _latent_attention(llm: ModelSpec, heads: int, form: WeightFormat | None) -> Iterator[float]:
    """`DeepseekV2MLAAttention`; `MLACommonImpl.process_weights_after_loading` keeps the two
    projections of keys and values once more, in 16 bits."""
    latent, value = llm.latent, llm.dtype_bytes
    assert latent is not None
    queries = heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        yield from _matrix(latent.q_rank + latent.cached, llm.hidden, form, value)
        yield from _matrix(queries, latent.q_rank, form, value)
    else:
        yield from _matrix(queries, llm.hidden, form, value)
        yield from _matrix(latent.cached, llm.hidden, form, value)
    yield from _matrix(heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, form, value)
    yield heads * latent.kv_rank * latent.nope_dim * 2
    yield heads * latent.kv_rank * latent.v_dim * 2
    yield from _matrix(llm.hidden, heads * latent.v_dim, form, value)


def _experts(
    llm: ModelSpec, tp: int, release: Release, dp: int, ep: bool, hopper: bool
) -> Iterator[float]:
    """Router and routed experts of one layer: two tensors of all local experts."""
    ranks = tp * dp
    count = local_experts(llm, ranks) if ep else llm.experts
    width = llm.intermediate if ep else llm.intermediate // ranks
    hidden = llm.hidden
    yield llm.experts * llm.hidden * llm.dtype_bytes
    if llm.weights is not None and llm.weights.name == "mxfp4":
        width, hidden = _padded_mxfp4(width, hidden, release, hopper)
    yield from _matrix(2 * width, hidden, llm.weights, llm.dtype_bytes, count)
    yield from _matrix(hidden, width, llm.weights, llm.dtype_bytes, count)


def _padded_mxfp4(width: int, hidden: int, release: Release, hopper: bool) -> tuple[int, int]:
    """`Mxfp4MoEMethod.create_weights`; from 0.25 on
    `mxfp4_round_up_hidden_size_and_intermediate_size` (`fused_moe/oracle/mxfp4.py`), which leaves
    the hidden size of Triton's kernels alone."""
    step = 64 if hopper else 128
    padded = ceil(width / step) * step
    if hopper and release >= (0, 25, 0):
        return padded, hidden
    return padded, ceil(hidden / 256) * 256


def _matrix(
    rows: int, columns: int, form: WeightFormat | None, value: float, count: int = 1
) -> Iterator[float]:
    """The tensors of `count` matrices that lie in one: values, then scales."""
    cells = rows * columns * count
    if form is None:
        yield cells * value
        return
    bits = int(form.bits)
    yield cells * bits / 8
    if form.block or form.group or form.bits > bits:
        yield cells * (form.bits - bits) / 8
    else:
        yield rows * count * 4  # fp32, a channel
