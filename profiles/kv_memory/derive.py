"""KV blocks of a vLLM server from its model, card and flags, term by term, with a range.

blocks = (total x utilisation - weights - activation peak - non-torch - CUDA graphs) / page

`Worker.determine_available_memory` and `v1/core/kv_cache_utils.py`. Weights are every tensor as
vLLM makes it, by torch's allocator; the activation peak is the larger of a full step of dummy
tokens and of sampling (`GPUModelRunner.profile_run`). vLLM prints each term in the log of its
start. The engine's own number is always better.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, hypot

from twinserve.profiles.kv_memory.cards import GIB, Card, card_of, graph_estimate, non_torch
from twinserve.profiles.kv_memory.releases import (
    LATEST,
    V1_ENGINE,
    Release,
    masks_in_blocks,
    sampler_bytes,
    uses_v2_runner,
)
from twinserve.profiles.ranks import check_ranks, check_stages, local_experts, stage_models
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError, WeightFormat

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
        plain += sum(allocated(size) for size in _expert_tensors(llm, tp, release, dp, ep, hopper))
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


def _expert_tensors(
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


@dataclass(frozen=True)
class Step:
    """The profiling step of one rank: its tokens and requests. samples: it is of the last pipeline
    stage; receives: of no first one; dp: data-parallel ranks whose tokens meet at the experts."""

    tokens: int
    requests: int
    tp: int = 1
    dp: int = 1
    ep: bool = False
    samples: bool = True
    receives: bool = False


def activation_peak(llm: ModelSpec, card: Card, release: Release, step: Step, v2: bool) -> float:
    """Bytes of activations at the peak of the profiling step, cuBLAS's workspace included.

    The workspaces of mixtures stay allocated as well from 0.12 on (`v1/worker/workspace.py`).
    """
    sampler = _sampler(llm, card, release, step, v2) if step.samples else 0.0
    forward, experts = _forward(llm, release, step, v2), _experts(llm, step)
    if release >= (0, 12, 0):
        peak = max(sampler, forward) + experts
    else:
        peak = max(sampler, forward + experts)
    received = 2 * step.tokens * llm.hidden * llm.dtype_bytes if step.receives else 0.0
    return peak + received + card.cublas_bytes


def _sampler(llm: ModelSpec, card: Card, release: Release, step: Step, v2: bool) -> float:
    """`_dummy_sampler_run`: logits and their sort, with the hidden states of the step and those of
    the last tokens."""
    requests = min(step.requests, step.tokens)
    each = sampler_bytes(release, requests, v2, llm.dtype_bytes)
    hidden = (step.tokens + 2 * requests) * llm.hidden * llm.dtype_bytes
    mask = min(card.multiprocessors, requests) * llm.vocab * 4
    return requests * llm.vocab * each + hidden + (mask if masks_in_blocks(release, v2) else 0)


def _forward(llm: ModelSpec, release: Release, step: Step, v2: bool) -> float:
    """The widest point of a layer: gate and up projections and their product, with hidden states
    and residual. 3.75 hidden states are what the peaks of logs show of V1's runner, 3 of V0's and
    V2's."""
    width = max(llm.shared_intermediate, llm.dense_intermediate) if llm.experts else 0
    width = width or (0 if llm.experts else llm.intermediate)
    states = 3.0 if v2 or release < V1_ENGINE else 3.75
    wide = (3 if llm.gated_mlp else 2) * width / step.tp
    return step.tokens * (wide + states * llm.hidden) * llm.dtype_bytes


def _experts(llm: ModelSpec, step: Step) -> float:
    """The two workspaces of `FusedMoEKernel` (`fused_moe/modular_kernel.py`, and `fused_moe.py`
    before): each token once for each of its experts. Kernels of MXFP4 have none."""
    if not llm.experts or (llm.weights is not None and llm.weights.name == "mxfp4"):
        return 0.0
    width = llm.intermediate if step.ep else llm.intermediate // (step.tp * step.dp)
    passes = step.tokens * step.dp * llm.experts_per_token
    return passes * (max(width, llm.hidden) + max(2 * width, llm.hidden)) * llm.dtype_bytes


BLOCK_TOKENS = 16
# What terms may be off, as the rows of public logs have it: boards of a kind report totals that
# differ by 0.08 GiB; weights by a share that depends on their format; the peak of activations.
TOTAL_SPREAD = 0.08 * GIB
WEIGHTS_SPREAD = {"": 0.002, "mxfp4": 0.012}
QUANTISED_SPREAD = 0.006
ACTIVATION_SPREAD = (0.03, 0.02 * GIB)  # a share, and bytes beside
DP_ACTIVATION_SPREAD = 0.3  # no log of data-parallel ranks was at hand
GRAPH_SPREAD = 0.6
V2_GRAPH_SPREAD = 0.6 * GIB
PRINTED_SPREAD = 0.005 * GIB  # of a number that a log prints with two decimals


@dataclass(frozen=True)
class ServerFlags:
    """Flags of `vllm serve` that move its KV memory.

    tokens, requests  `--max-num-batched-tokens`, `--max-num-seqs`: sizes of the profiling step
    eager             `--enforce-eager`: no CUDA graphs
    v2                Model Runner V2; None: as the release has it
    weights           bytes of a rank, as the log of a start has them; None: counted
    """

    tokens: int
    requests: int
    utilization: float
    release: Release = LATEST
    eager: bool = False
    v2: bool | None = None
    weights: float | None = None

    def runner_v2(self, llm: ModelSpec) -> bool:
        return uses_v2_runner(llm, self.release) if self.v2 is None else self.v2


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes of one rank, and by how many what is left may be off in either direction."""

    requested: float
    weights: float
    activation: float
    non_torch: float
    graphs: float
    spread: float

    @property
    def available(self) -> float:
        """vLLM's `Available KV cache memory`."""
        return self.requested - self.weights - self.activation - self.non_torch - self.graphs

    def __str__(self) -> str:
        left, weights, step = (n / GIB for n in (self.requested, self.weights, self.activation))
        others = (self.non_torch + self.graphs) / GIB
        return (
            f"of {left:.1f} GiB weights take {weights:.1f}, a full step {step:.1f}, "
            f"CUDA graphs and others {others:.1f}"
        )


@dataclass(frozen=True)
class KvBlocks:
    """KV blocks of BLOCK_TOKENS tokens that requests can use, with the ends of their range; and the
    terms of the rank that decides. blocks, low: 0 where nothing is left."""

    blocks: int
    low: int
    high: int
    terms: MemoryTerms


def memory_terms(llm: ModelSpec, card: Card, flags: ServerFlags, step: Step, **rank) -> MemoryTerms:
    """The terms of one rank. rank: `tables` of embeddings, and `ranks` that talk to each other."""
    v2 = flags.runner_v2(llm)
    weights, weights_spread = _weights(llm, card, flags, step, rank.get("tables"))
    activation = activation_peak(llm, card, flags.release, step, v2)
    outside, outside_spread = non_torch(card, flags.release, rank.get("ranks", step.tp * step.dp))
    graphs = graph_spread = 0.0
    if not flags.eager:
        graphs = graph_estimate(llm, card, flags.release, flags.requests, step.tp, v2)
        graph_spread = max(GRAPH_SPREAD * graphs, V2_GRAPH_SPREAD if v2 and graphs else 0.0)
    share, fixed = ACTIVATION_SPREAD
    share = share if step.dp == 1 else DP_ACTIVATION_SPREAD
    spread = hypot(
        TOTAL_SPREAD * flags.utilization,
        weights_spread,
        share * activation + fixed,
        outside_spread,
        graph_spread,
    )
    return MemoryTerms(
        card.total_bytes * flags.utilization, weights, activation, outside, graphs, spread
    )


def _weights(
    llm: ModelSpec, card: Card, flags: ServerFlags, step: Step, tables: int | None
) -> tuple[float, float]:
    """Bytes of weights of a rank, and by how many they may be off."""
    if flags.weights is not None:
        return flags.weights, PRINTED_SPREAD
    found = rank_weights(
        llm, step.tp, flags.release, dp=step.dp, ep=step.ep, tables=tables, hopper=card.hopper
    )
    form = llm.weights.name if llm.weights is not None else ""
    return found, WEIGHTS_SPREAD.get(form, QUANTISED_SPREAD) * found


def derive_kv_blocks(
    llm: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    flags: ServerFlags,
    dp: int = 1,
    ep: bool = False,
    pp: int = 1,
) -> KvBlocks:
    """Blocks of one engine. ProfileError if the model leaves no memory, with the tp that would do.
    dp, ep, pp: as in `ranks.py`."""
    check_ranks(llm, gpu.name, tp, dp, ep)
    check_stages(llm, gpu.name, tp, pp, dp)
    found = blocks_or_none(llm, gpu, tp, flags, dp, ep, pp)
    if found.blocks > 0:
        return found
    larger = [r for r in (2, 4, 8) if r > tp and llm.heads % r == 0]
    fits = [r for r in larger if blocks_or_none(llm, gpu, r, flags, dp, ep, pp).blocks > 0]
    advice = f"use tp={fits[0]}" if fits else "no tp up to 8 is enough"
    raise ProfileError(
        f"{llm.name} ({llm.weight_bytes / 1e9:.1f} GB of weights) leaves no KV memory on"
        f" {tp * pp} x {gpu.name} ({gpu.memory_bytes / 1e9:.1f} GB each); {advice}"
    )


def blocks_or_none(
    llm: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    flags: ServerFlags,
    dp: int = 1,
    ep: bool = False,
    pp: int = 1,
) -> KvBlocks:
    """The same with 0 blocks where none fit. Of pipeline stages the one with fewest decides
    (`get_kv_cache_configs`)."""
    card = card_of(gpu)
    if pp == 1:
        terms = memory_terms(llm, card, flags, Step(flags.tokens, flags.requests, tp, dp, ep))
        return _blocks_of(llm, tp, flags, terms)
    found = []
    for i, part in enumerate(stage_models(llm, pp)):
        last = i == pp - 1
        step = Step(flags.tokens, flags.requests, tp, 1, ep, samples=last, receives=i > 0)
        terms = memory_terms(
            part, card, flags, step, tables=int(i in (0, pp - 1)), ranks=min(tp * pp, 8)
        )
        found.append(_blocks_of(part, tp, flags, terms))
    return min(found, key=lambda one: one.blocks)


def _blocks_of(llm: ModelSpec, tp: int, flags: ServerFlags, terms: MemoryTerms) -> KvBlocks:
    def blocks(nbytes: float) -> int:
        return max(int(kept_tokens(llm, tp, flags.release, nbytes)), 0) // BLOCK_TOKENS

    room, spread = terms.available, terms.spread
    return KvBlocks(blocks(room), blocks(room - spread), blocks(room + spread), terms)


def kept_tokens(llm: ModelSpec, tp: int, release: Release, nbytes: float) -> float:
    """Return the tokens whose KV fits into so many bytes of a rank, if all layers keep it. Requests
    within the window hold so many, and a ledger that knows no windows may give away no more.

    Layers with and without a window are grouped, so that all groups have as many layers; they share
    one pool of blocks (`_get_kv_cache_groups_uniform_page_size`).
    """
    if nbytes <= 0:
        return 0
    groups = window_groups(llm)
    if groups is None or release < V1_ENGINE:
        return nbytes // (page_bytes(llm, tp) * llm.layers) * BLOCK_TOKENS
    size, *counts = groups
    return int(nbytes // (page_bytes(llm, tp) * size)) // sum(counts) * BLOCK_TOKENS


def prints_longest(llm: ModelSpec, release: Release) -> bool:
    """Whether `GPU KV cache size` counts the longest requests, and so more than `kept_tokens`."""
    return window_groups(llm) is not None and release >= (0, 21, 0)


def page_bytes(llm: ModelSpec, tp: int) -> float:
    """Bytes of a block of one layer on a rank."""
    return BLOCK_TOKENS * llm.rank_kv_bytes_per_token(tp) / llm.layers


def window_groups(llm: ModelSpec) -> tuple[int, int, int] | None:
    """Layers of a group; groups of full layers, and of those with a window. None: one group."""
    windowed = llm.window_layers if llm.window else 0
    full = llm.layers - windowed
    if not windowed or not full:
        return None
    few, many = sorted((full, windowed))
    size = many if many < 1.5 * few else few
    return size, ceil(full / size), ceil(windowed / size)
