"""KV blocks of a vLLM server from its model, card and flags, term by term, with a range.

blocks = (total x utilisation - weights - activation peak - non-torch - CUDA graphs) / page

`Worker.determine_available_memory` and `v1/core/kv_cache_utils.py`. The terms are in the modules
beside this one; vLLM prints each in the log of its start. The engine's own number is always better.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot

from twinserve.profiles.kv_memory.cards import GIB, Card, card_of, graph_estimate, non_torch
from twinserve.profiles.kv_memory.peaks import Step, activation_peak
from twinserve.profiles.kv_memory.releases import LATEST, V1_ENGINE, Release, uses_v2_runner
from twinserve.profiles.kv_memory.weights import rank_weights
from twinserve.profiles.ranks import check_ranks, check_stages
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError
from twinserve.profiles.stages import stage_models

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
    """Tokens of which all layers keep their KV in so many bytes of a rank. That is what requests
    within the window have, and what a ledger that knows no windows may give away.

    Layers with a window beside others are grouped, so that all groups have as many layers; they
    share one pool of blocks (`_get_kv_cache_groups_uniform_page_size`).
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
