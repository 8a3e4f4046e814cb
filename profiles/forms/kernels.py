"""Step time of mixtures of experts and of quantised models: a sum of kernels.

The roofline takes each matrix as long as the longer of reading and multiplying. Kernels of experts
and of few bits do more. A token is permuted, quantised, written and summed once for each expert
that it chooses; inputs of few bits are converted. So here a step is a sum, per tensor-parallel
rank, with the constants of `kernel_rates.py`. T tokens, P parameters:

    gemm       matrices: bytes / read rate + 2 T P / compute rate + inputs and outputs moved,
               converting the inputs included
    experts    layer by layer: bytes of the chosen ones / read rate + 2 P x pairs / compute rate +
               tokens moved once for each chosen expert + a fixed time
    head, decode_kv, elementwise    as in the roofline
    prefill_attention    pairs' FLOPs / compute rate + a start and the moved heads
    allreduce  two a layer: start + ring bytes / bus rate, which grows with the message; and of
               data-parallel ranks, around experts, a gather of all tokens and a scatter
    layers     of small kernels, of which latent attention and products in FP8 blocks have more
    host       scheduler, input preparation, sampling

The experts that a step chooses are those of Zipf draws, which leave out more than even ones, and
load the busiest rank more. From vLLM 0.11 to 0.13, FP8 experts in blocks on Hopper below eight
ranks multiplied rows padded to 128 for each expert (`compute_aligned_M`; vLLM's issues 29346 and
39331). Layers of a step with prompts take at least PROMPT_LAYER_S. Experts that lie whole on ranks
take as long as on the busiest one, of even draws. Data-parallel ranks are taken to have as many
tokens each, and as many requests.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import comb, erf, sqrt

import numpy as np

from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.kernel_rates import (
    ALLREDUCE_START_S,
    CHUNK_START_S,
    EXPERTS_LONGER,
    PCIE_START_S,
    PROMPT_LAYER_S,
    RATES,
    TRITON_ATTENTION,
    ZIPF,
    Rates,
    format_of,
    nearest,
    rates_of,
    sustained,
)
from twinserve.profiles.forms.roofline import LAYER_KERNELS, Efficiency, RooflineModel, pcie_sharing
from twinserve.profiles.specs import GpuSpec, ModelSpec


@cache
def busiest_experts(experts: int, ranks: int) -> np.ndarray:
    """Return float64[experts + 1]: of c different experts, drawn evenly, the expected number on the
    rank with most of them.

    Exact: draws with at most x on every rank are the term z^c of prod over ranks (sum over j <= x
    of C(m, j) z^j), m experts each. The divisor is C(experts, c).
    """
    sizes = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    draws = np.array([float(comb(experts, c)) for c in range(experts + 1)])
    found = np.zeros(experts + 1)
    for most in range(max(sizes)):
        ways = np.ones(1)
        for size in sizes:
            ways = np.convolve(ways, [float(comb(size, j)) for j in range(min(most, size) + 1)])
        within = np.zeros(experts + 1)
        within[: len(ways)] = ways
        found += 1.0 - within / draws  # P(the most is above `most`)
    return found


@cache
def largest_of_normals(count: int) -> float:
    """The expected largest of so many independent standard normal values."""
    x = np.linspace(-9.0, 9.0, 18001)
    below = np.array([0.5 * (1.0 + erf(v / sqrt(2.0))) for v in x.tolist()]) ** count
    return float(((x > 0) - below).sum() * (x[1] - x[0]))


def busiest_tokens(
    tokens: float, experts: int, chosen: int, ranks: int, uneven: float = 0.0
) -> float:
    """Return the (token, expert) pairs on the rank with most, of `tokens` that choose `chosen` of
    `experts` each. This is their mean plus the largest of normal deviations with sum 0. uneven:
    `deviation` of draws that are not even."""
    mean = tokens * chosen / ranks
    spread = sqrt(mean * (experts - chosen) / max(experts - 1, 1) + (tokens * uneven) ** 2)
    most = tokens * min(chosen, -(-experts // ranks))
    return min(mean + largest_of_normals(ranks) * spread, most)


def deviation(shares: np.ndarray, ranks: int) -> float:
    """Standard deviation of what a token brings to a rank, with experts of these shares dealt to
    ranks at random."""
    experts, mine = len(shares), len(shares) / ranks
    return sqrt(mine * (1.0 - 1.0 / ranks) * experts / max(experts - 1, 1) * float(np.var(shares)))


PADDED_RELEASES = ((0, 11), (0, 14))  # from, to before
PADDED_ROWS = 127  # for each expert
PADDED_MOVED = 1.5  # read in 8 bits and written in 16: rows that no token has
QUANTISING_SHARE = 0.8  # of the memory's rate, for three bytes a value
# Products of a layer whose inputs a kernel of its own quantises, in FP8 blocks: attention's two and
# the MLP's or experts' two (vLLM 0.32, BlockScaledMMLinearKernel.py, moe_kernel_quantize_input).
QUANTISED_PRODUCTS = 4


def sums_kernels(llm: ModelSpec) -> bool:
    """Whether a model's steps are a sum of kernels rather than a roofline."""
    return bool(llm.experts) or llm.weights is not None


class KernelsModel(RooflineModel):
    """As RooflineModel, of which it takes host terms and what reads KV. release: of vLLM, () for
    the latest."""

    def __init__(
        self,
        llm: ModelSpec,
        gpu: GpuSpec,
        tp: int,
        efficiency: Efficiency,
        dp: int = 1,
        ep: bool = False,
        head: bool = True,
        release: tuple[int, ...] = (),
    ) -> None:
        super().__init__(llm, gpu, tp, efficiency, head, dp, ep)
        self._dp = dp
        self._sharing = tp * dp if ep and tp * dp > 1 else 0
        rates = rates_of(gpu)
        self._set_matrices(rates)
        self._set_experts(rates, release)
        self._set_prompts(rates)
        self._set_exchange(tp * dp)
        self.chosen_seconds = lru_cache(maxsize=4096)(self._chosen_seconds)

    # -- constants ---------------------------------------------------------------------------------
    def _set_matrices(self, rates: Rates) -> None:
        llm, gpu, tp = self.llm, self.gpu, self.tp
        memory = gpu.memory_bytes_per_s
        matrix = (llm.matrix_parameters - llm.expert_parameters) / tp
        few = format_of(llm, gpu, of_experts=False)
        plain = 1.0 if few == "16" else llm.plain_share
        stored = llm.dtype_bytes if llm.weights is None else llm.weights.bits / 8
        self._gemm_floor = matrix * plain * llm.dtype_bytes / (memory * rates.read["16"])
        self._gemm_floor += (
            matrix * (1 - plain) * stored / (memory * rates.read.get(few, rates.read["few"]))
        )
        moved, inputs = _widths(llm, tp)
        self._gemm_token = self._gemm_moved = 0.0
        for share, name, multiplies in ((plain, "16", "bf16"), (1 - plain, few, _multiplied(llm))):
            if not share:
                continue
            of = rates.matrices.get(name, rates.matrices["16"])
            rate = gpu.flops_of(multiplies) * of.compute * sustained(gpu, multiplies)
            self._gemm_token += share * 2.0 * matrix / rate
            self._gemm_moved += share * of.moved * 2.0 * moved / memory
            if gpu.flops_of(multiplies) != gpu.peak_flops:
                self._gemm_moved += share * 3.0 * inputs / (QUANTISING_SHARE * memory)
        if few == "fp8 blocks" and rates is not RATES["hopper"]:  # layer_s of Hopper has them
            products = (
                QUANTISED_PRODUCTS + (llm.latent is not None) + 2 * (llm.shared_intermediate > 0)
            )
            started = llm.layers * self.efficiency.layer_s * products / LAYER_KERNELS
            self._layer_s, self._fixed = self._layer_s + started, self._fixed + started

    def _set_experts(self, rates: Rates, release: tuple[int, ...]) -> None:
        llm, gpu = self.llm, self.gpu
        if not llm.experts:
            return
        name = format_of(llm, gpu, of_experts=True)
        first, last = PADDED_RELEASES
        on_hopper = name == "fp8 blocks" and gpu.family == "hopper"
        padded = on_hopper and self.tp < 8 and first <= release < last
        kernel = name + (" padded" if padded else " whole" if self._sharing else "")
        of = rates.experts.get(kernel) or rates.experts.get(name) or rates.experts["16"]
        memory = gpu.memory_bytes_per_s
        multiplies = _multiplied(llm) if name in ("fp8 blocks", "fp4") else "bf16"
        rate = gpu.flops_of(multiplies) * sustained(gpu, multiplies) / of.slower
        width = 1 if self._sharing else self.tp * self._dp
        parameters = llm.expert_layers * llm.mlp_parameters / width
        share = of.read or rates.read["16" if llm.weights is None else "few"]
        self._expert_read = parameters * llm.matrix_bytes[1] / (memory * share)
        self._expert_token = 2.0 * parameters / rate
        inner = of.inner * llm.intermediate / width
        moved = llm.expert_layers * 2.0 * (of.moved * llm.hidden + inner) / memory
        self._expert_moved = moved
        # Marlin's kernels of unpacked weights align tokens on every GPU as they do on Hopper
        aligned = RATES["hopper"].expert_layer_s if name == "unpacked" else 0.0
        fixed = max(rates.expert_layer_s, aligned)
        self._expert_fixed = llm.expert_layers * fixed
        self._expert_prompt = llm.expert_layers * max(of.start_s, fixed)
        self._padded, self._padded_moved = 0, 0.0
        if padded:
            own = llm.experts / self._sharing if self._sharing else llm.experts  # of a rank
            self._padded = own * PADDED_ROWS
            row = 2.0 * (PADDED_MOVED * llm.hidden + inner) / (QUANTISING_SHARE * memory)
            self._padded_moved = llm.expert_layers * self._padded * row
        self._drawn = zipf_shares(llm.experts, llm.experts_per_token)
        if self._sharing:
            self._busiest = busiest_experts(llm.experts, self._sharing).tolist()
            self._uneven = deviation(self._drawn, self._sharing)

    def _set_prompts(self, rates: Rates) -> None:
        llm, gpu, tp = self.llm, self.gpu, self.tp
        heads = min(rates.attention, key=lambda size: abs(size - llm.head_dim))
        share = rates.attention[heads]
        sinks = llm.weights is not None and llm.weights.name == "mxfp4" and llm.window > 0
        if sinks and gpu.family != "hopper":
            share = TRITON_ATTENTION
        rate = gpu.peak_flops * share * sustained(gpu, "bf16")
        self._pair = llm.attention_flops_per_pair / tp / rate
        moved = 10.0 * llm.heads * llm.head_dim / tp / gpu.memory_bytes_per_s
        self._prompt_token = llm.layers * moved
        self._prompt_start = llm.layers * CHUNK_START_S
        longer = EXPERTS_LONGER * llm.expert_layers + llm.layers - llm.expert_layers
        self._prompt_least = longer * PROMPT_LAYER_S

    def _set_exchange(self, ranks: int) -> None:
        """A rank gets the tokens of the others before its experts, and sends as many back: vLLM's
        default, allgather_reducescatter. Together they begin as one all-reduce does."""
        llm, gpu, e, dp = self.llm, self.gpu, self.efficiency, self._dp
        between = gpu.link_bytes_per_s * e.link_share * pcie_sharing(gpu, ranks)
        exchanged = 2.0 * (dp - 1) * llm.expert_layers * llm.hidden * llm.dtype_bytes
        self._exchange_token = exchanged / between
        self._exchange_fixed = llm.expert_layers * e.allreduce_s if dp > 1 else 0.0
        self._allreduce_fixed += self._exchange_fixed

    def _messages(self, link: float) -> tuple[float, float, tuple[float, float]]:
        gpu, tp = self.gpu, self.tp
        start = ALLREDUCE_START_S.get(tp, 7e-6) if gpu.nvlink_bytes_per_s else PCIE_START_S
        each = 4.0 if self.llm.norms_over_heads else 2.0  # norms of q and k: a value a token
        return each, start, nearest(rates_of(gpu).bus, tp)

    # -- terms -------------------------------------------------------------------------------------
    def _allreduce(self, tokens: int) -> float:
        return super()._allreduce(tokens) + self._exchange_token * tokens

    def _gemm(self, tokens: int) -> float:
        dense = max(self._gemm_floor, self._gemm_token * tokens) + self._gemm_moved * tokens
        return dense + self._experts(tokens * self._dp) if self.llm.experts else dense

    def _experts(self, tokens: float) -> float:
        return self._expert_fixed + self.chosen_seconds(tokens)

    def _chosen_seconds(self, tokens: float) -> float:
        """Of the routed experts of all layers, but what is fixed."""
        llm = self.llm
        chosen = float(np.sum(1.0 - (1.0 - self._drawn) ** tokens))
        pairs = tokens * llm.experts_per_token
        if self._sharing:
            each, ranks = llm.experts_per_token, self._sharing
            pairs = busiest_tokens(tokens, llm.experts, each, ranks, self._uneven)
            below = min(int(chosen), llm.experts - 1)
            least, next_one = self._busiest[below], self._busiest[below + 1]
            chosen = least + (chosen - below) * (next_one - least)
        multiplied = self._expert_token * (pairs + self._padded)
        moved = self._padded_moved + self._expert_moved * pairs
        return max(self._expert_read * chosen, multiplied) + moved

    def step_seconds(self, work: StepComposition) -> float:
        """Seconds of one step. A step that computes no token costs the host's constant."""
        if len(work.prefill_new):
            return float(sum(self.terms(work).values()))
        return super().step_seconds(work)

    def terms(self, work: StepComposition) -> dict[str, float]:
        """The terms of the module's docstring, seconds; `gemm` with experts."""
        prompts = len(work.prefill_new)
        new, pairs, _ = self._prefill_totals(work)
        attention = self._pair * pairs + self._prompt_token * new
        attention += self._prompt_start if prompts else 0.0
        found = self._terms(work, new, attention)
        if prompts:
            if self.llm.experts:
                found["gemm"] += self._expert_prompt - self._expert_fixed
            left = self._prompt_least - found["gemm"] - attention - found["elementwise"]
            found["layers"] = max(left, 0.0)
        return found

    def token_seconds(self, tokens: float) -> float:
        """Return the seconds that depend on the tokens of all data-parallel ranks, if each has so
        many: experts, and messages between ranks. 0 if experts are not shared."""
        if self._dp == 1 or not tokens:
            return 0.0
        exchanged = self._exchange_fixed + self._exchange_token * tokens
        return self._experts(tokens * self._dp) + exchanged

    def allreduce_seconds(self, work: StepComposition) -> float:
        tokens = work.new_tokens
        return self._allreduce(tokens) if tokens and self.tp * self._dp > 1 else 0.0


def zipf_shares(experts: int, each: int) -> np.ndarray:
    """float64[experts]: the share of tokens that choose each expert, of draws of `each` different
    ones with popularity 1 / rank ** ZIPF; their sum is `each`."""
    weights = np.arange(1, experts + 1, dtype=float) ** -ZIPF
    low, high = 0.0, 1e6
    for _ in range(200):  # of independent draws with the same sum
        middle = (low + high) / 2
        low, high = (middle, high) if np.sum(-np.expm1(-middle * weights)) < each else (low, middle)
    return -np.expm1(-low * weights)


def _multiplied(llm: ModelSpec) -> str:
    return "bf16" if llm.weights is None else llm.weights.multiplies


def _widths(llm: ModelSpec, tp: int) -> tuple[float, float]:
    """(inputs and outputs, inputs) of the matrices that every token passes, values a token on a
    rank, all layers."""
    q, kv = llm.heads * llm.head_dim / tp, 2 * llm.kv_heads * llm.head_dim / min(tp, llm.kv_heads)
    if llm.latent is not None:
        kv = llm.latent.cached + llm.latent.kv_rank
    attention = (2 * llm.hidden + 2 * q + kv, llm.hidden + q)

    def mlp(width: float) -> tuple[float, float]:
        inner = width / tp
        into = 2 if llm.gated_mlp else 1
        return (2 * llm.hidden + (into + 1) * inner, llm.hidden + inner) if width else (0.0, 0.0)

    dense = mlp(llm.dense_intermediate if llm.experts else llm.intermediate)
    shared = mlp(llm.shared_intermediate)
    dense_layers = llm.dense_layers if llm.experts else llm.layers
    both = [
        llm.layers * a + dense_layers * d + llm.expert_layers * s
        for a, d, s in zip(attention, dense, shared, strict=True)
    ]
    return both[0], both[1]


def rank_model(
    llm: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    efficiency: Efficiency,
    dp: int = 1,
    ep: bool = False,
    head: bool = True,
    release: tuple[int, ...] = (),
) -> RooflineModel:
    """Return the model of one rank, derived from specs: the roofline for a dense model in 16 bits.
    Other models have the sum of kernels, which is nearer to measured steps."""
    if sums_kernels(llm):
        return KernelsModel(llm, gpu, tp, efficiency, dp, ep, head, release)
    return RooflineModel(llm, gpu, tp, efficiency, head, dp, ep)
