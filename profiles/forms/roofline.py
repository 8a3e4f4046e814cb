"""Step time of any model on any GPU from their specs: no measurement of that pair is needed.

A step is the sum of named terms, each work over a rate. The rates are peak numbers times the
efficiency constants of the GPU's family (`efficiency.py`). T tokens are computed in the step, n of
them by decoding requests; rows = requests in the step. Everything is per tensor-parallel rank:

    gemm         max(weight bytes / memory rate, 2 x parameters x (T + half) / compute rate)
    head         the same for the output projection over the sampled rows, and its gather
    decode_kv    KV bytes of the decoding requests' contexts, new token included, / memory rate
    prefill_attention   max((query, key) pair FLOPs / compute rate, KV bytes / memory rate)
    elementwise  norms, rotary, activation: bytes moved per token / memory rate
    allreduce    two per layer: latency + ring bytes / rate. On Hopper over NVLink both are measured
                 (`kernel_rates.py`), and the rate grows with the message
    layers       kernel start and tail time that no amount of work hides, per layer; latent
                 attention has more kernels
    host         scheduler, input preparation, sampling: constant + per request

`half` makes small token counts inefficient: at T = half a GEMM runs at half its large-T rate.
Layers with a window read and attend to it at most, if contexts are about equal; in those with
chunks (Llama 4) a token counts as the last of its chunk. Decodes of latent attention take the
longer of multiplying on the latent vectors and reading them. Mixtures of experts and quantised
models have a sum of kernels instead (`kernels.py`). Left out: padding to CUDA-graph sizes, and skew
between context lengths (`decode_context_max` is not used).
"""

from math import log

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.kernel_rates import (
    LARGE_BYTES,
    RATES,
    SMALL_BYTES,
    measures_messages,
    nearest,
)
from twinserve.profiles.ranks import check_ranks
from twinserve.profiles.specs import STRICT, GpuSpec, ModelSpec

# Kernels of a layer of a dense model (llama.py: two norms, four products, rotary, cache, attention
# and its reduction, activation), and how many more there are with latent attention (deepseek_v2.py,
# mla_attention.py: two norms, a product before and one after the attention, q's product, q's parts
# joined).
LAYER_KERNELS, LATENT_KERNELS = 11, 6


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Efficiency:
    """Achieved shares of peak rates (`*_mfu`, `*_mbu`, `link_share`: 0..1 or a little above) and
    times in seconds. Defaults without a measurement are assumed."""

    gemm_mfu: float = Field(gt=0, le=1.2)
    gemm_half_tokens: float = Field(ge=0)
    gemm_mbu: float = Field(gt=0, le=1.2)
    kv_mbu: float = Field(gt=0, le=1.2)
    attention_mfu: float = Field(gt=0, le=1.2)
    elementwise_mbu: float = Field(default=0.8, gt=0, le=2.0)
    layer_s: float = Field(ge=0)
    allreduce_s: float = Field(ge=0)
    link_share: float = Field(gt=0, le=1.2)
    host_s: float = Field(default=0.5e-3, ge=0)
    host_request_s: float = Field(ge=0)


_MESSAGES = log(LARGE_BYTES / SMALL_BYTES)  # from the smallest measured message to the largest


class RooflineModel(StepTimeModel):
    """From the ModelSpec of a dense model in 16 bits, a GpuSpec, the tensor-parallel degree and an
    Efficiency. head: with the output projection, which one pipeline stage has. dp, ep: further
    ranks to check.

    ProfileError if the model cannot be split so. Immutable after construction.
    """

    knows_host = True

    def __init__(
        self,
        llm: ModelSpec,
        gpu: GpuSpec,
        tp: int,
        efficiency: Efficiency,
        head: bool = True,
        dp: int = 1,
        ep: bool = False,
    ):
        check_ranks(llm, gpu.name, tp, dp, ep)
        self.llm, self.gpu, self.tp, self.efficiency = llm, gpu, tp, efficiency
        e, size = efficiency, llm.dtype_bytes
        compute = gpu.peak_flops * e.gemm_mfu
        memory = gpu.memory_bytes_per_s * e.gemm_mbu
        # GQA heads fewer than ranks are copied, which costs their matrices again; small, and left
        # out.
        matrix = (llm.matrix_parameters - llm.expert_parameters) / tp
        projection = llm.head_parameters / tp if head else 0.0
        self._half = e.gemm_half_tokens
        self._gemm_floor = matrix * size / memory
        self._gemm_token = 2.0 * matrix / compute
        self._head_floor = projection * size / memory
        self._head_row = 2.0 * projection / compute

        kv_rate = gpu.memory_bytes_per_s * e.kv_mbu
        self._kv_token = llm.rank_kv_bytes_per_token(tp) / kv_rate
        self._pair = llm.attention_flops_per_pair / tp / (gpu.peak_flops * e.attention_mfu)
        self._decode_token = self._kv_token
        if llm.latent is not None:
            multiplied = llm.decode_flops_per_pair / tp / (gpu.peak_flops * e.attention_mfu)
            self._decode_token = max(self._kv_token, multiplied)
        self._windowed = llm.window_layers / llm.layers

        # Read and written per token and layer: two norms with residual (4 x hidden each), q in and
        # out, gate, up, act.
        activations = (
            8.0 * llm.hidden
            + (2.0 * llm.heads * llm.head_dim + (3 if llm.gated_mlp else 2) * _mlp_width(llm)) / tp
        )
        elementwise_rate = gpu.memory_bytes_per_s * e.elementwise_mbu
        self._elementwise_token = llm.layers * activations * size / elementwise_rate

        # A ring all-reduce moves 2 (tp - 1) / tp of the message through each rank's link; a gather
        # half of that.
        link = gpu.link_bytes_per_s * e.link_share * pcie_sharing(gpu, tp)
        ring = 2.0 * (tp - 1) / tp
        self._set_allreduce(link)
        self._gather_row = ring / 2.0 * llm.vocab * size / link if head else 0.0
        self._row = self._gather_row + e.host_request_s
        more = LATENT_KERNELS / LAYER_KERNELS if llm.latent is not None else 0.0
        self._layer_s = llm.layers * e.layer_s * (1.0 + more)
        self._fixed = self._layer_s + e.host_s

    def _set_allreduce(self, link: float) -> None:
        """link: bytes/s of a rank, for GPUs whose messages were not measured."""
        llm, tp = self.llm, self.tp
        each, start, self._bus = self._messages(link)
        self._message = llm.hidden * llm.dtype_bytes
        self._ring = 2.0 * (tp - 1) / tp * (2.0 * llm.layers if tp > 1 else 0.0) * self._message
        self._allreduce_fixed = each * llm.layers * start if tp > 1 else 0.0

    def _messages(self, link: float) -> tuple[float, float, tuple[float, float]]:
        """All-reduces of a layer, seconds until one begins, bytes/s of small and of large ones."""
        if not measures_messages(self.gpu):
            return 2.0, self.efficiency.allreduce_s, (link, link)
        rates = RATES[self.gpu.family]
        return 2.0, nearest(rates.start, self.tp), nearest(rates.bus, self.tp)

    def step_seconds(self, work: StepComposition) -> float:
        """Seconds of one step. A step that computes no token costs the host's constant."""
        n = work.decode_requests
        if len(work.prefill_new) == 0:
            return self._without_decode_kv(n, n, 0.0) + self._decode_kv(work.decode_context + n, n)
        new, pairs, attended = self._prefill_totals(work)
        attention = max(self._pair * pairs, self._kv_token * attended)
        base = self._without_decode_kv(n + new, n + len(work.prefill_new), attention)
        return base + self._decode_kv(work.decode_context + n, n)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        """float64[steps], seconds; bit-identical to `step_seconds` since only the last sum depends
        on the step."""
        first = context + n
        attended = np.arange(first, first + n * steps, n, np.int64) if n else np.full(steps, first)
        return self._without_decode_kv(n, n, 0.0) + self._decode_kv(attended, n)

    def _decode_kv(self, attended, n: int):
        """Seconds, of one number of tokens or an array of them."""
        if not self._windowed:
            return self._decode_token * attended
        within = np.minimum(attended, n * self.llm.window)
        read = (1.0 - self._windowed) * attended + self._windowed * within
        return self._decode_token * read

    def _gemm(self, tokens: int) -> float:
        return max(self._gemm_floor, self._gemm_token * (tokens + self._half))

    def _prefill_totals(self, work: StepComposition) -> tuple[int, float, float]:
        new, pairs, attended = _prefill_totals(work)
        if not self._windowed:
            return new, pairs, attended
        near_pairs, near = pairs_within(work, self.llm.window)
        full, part = 1.0 - self._windowed, self._windowed
        return new, full * pairs + part * near_pairs, full * attended + part * near

    def _without_decode_kv(self, tokens: int, rows: int, prefill_attention: float) -> float:
        if not tokens:
            return self.efficiency.host_s
        gemm = self._gemm(tokens)
        head = max(self._head_floor, self._head_row * (rows + self._half))
        fixed = self._fixed + self._allreduce(tokens)
        per_token = self._elementwise_token * tokens
        return fixed + gemm + head + per_token + self._row * rows + prefill_attention

    def host_seconds(self, requests: int) -> float:
        """The term `host` of a step with so many requests."""
        return self.efficiency.host_s + self.efficiency.host_request_s * requests

    def allreduce_seconds(self, work: StepComposition) -> float:
        """The term `allreduce`; 0 on one rank."""
        tokens = work.new_tokens
        return self._allreduce(tokens) if tokens else 0.0

    def _allreduce(self, tokens: int) -> float:
        if self.tp == 1:
            return self._allreduce_fixed
        small, large = self._bus
        along = log(max(tokens * self._message / SMALL_BYTES, 1.0)) / _MESSAGES
        rate = small * (large / small) ** min(along, 1.0)
        return self._allreduce_fixed + self._ring * tokens / rate

    def terms(self, work: StepComposition) -> dict[str, float]:
        """The terms named in the module's docstring, seconds; their sum is `step_seconds` up to
        rounding."""
        new, pairs, attended = self._prefill_totals(work)
        return self._terms(work, new, max(self._pair * pairs, self._kv_token * attended))

    def _terms(self, work: StepComposition, new: int, prefill_attention: float) -> dict[str, float]:
        """new: tokens of prompts."""
        n, rows = work.decode_requests, work.decode_requests + len(work.prefill_new)
        tokens = n + new
        if not tokens:
            return {"host": self.efficiency.host_s}
        return {
            "gemm": self._gemm(tokens),
            "head": max(self._head_floor, self._head_row * (rows + self._half))
            + self._gather_row * rows,
            "decode_kv": float(self._decode_kv(work.decode_context + n, n)),
            "prefill_attention": prefill_attention,
            "elementwise": self._elementwise_token * tokens,
            "allreduce": self._allreduce(tokens),
            "layers": self._layer_s,
            "host": self.host_seconds(rows),
        }


def _mlp_width(llm: ModelSpec) -> float:
    """Of the MLPs that a token passes in a layer, on average over the layers."""
    if not llm.experts:
        return llm.intermediate
    mixed = llm.experts_per_token * llm.intermediate + llm.shared_intermediate
    return (llm.expert_layers * mixed + llm.dense_layers * llm.dense_intermediate) / llm.layers


def pcie_sharing(gpu: GpuSpec, tp: int) -> float:
    """Share of the two-rank PCIe rate that is left at `tp` ranks; 1 with NVLink.

    Without NVLink a ring of four crosses the host bridge: the measured all-reduce of four L40S
    moves data about four times slower per rank than that of two. Beyond four nothing is known, and
    four's value is kept.
    """
    return 1.0 if gpu.nvlink_bytes_per_s or tp <= 2 else (2.0 / min(tp, 4)) ** 2


def _prefill_totals(work: StepComposition) -> tuple[int, float, int]:
    """Tokens computed, (query, key) pairs and tokens attended to, summed over the step's prefills.

    Integers in plain Python: exact, and faster than numpy for the few prefills that a step has.
    """
    new_tokens = twice_pairs = attended = 0
    for new, resident in zip(
        work.prefill_new.tolist(), work.prefill_resident.tolist(), strict=True
    ):
        new_tokens += new
        # causal: token i of the chunk sees the resident ones, the chunk's before it, and itself
        twice_pairs += new * (2 * resident + new + 1)
        attended += resident + new
    return new_tokens, twice_pairs / 2, attended


def pairs_within(work: StepComposition, window: int) -> tuple[float, int]:
    """(query, key) pairs and tokens attended to in a layer whose tokens see `window` at most."""
    twice_pairs = attended = 0
    for new, resident in zip(
        work.prefill_new.tolist(), work.prefill_resident.tolist(), strict=True
    ):
        # token i sees min(resident + i, window): the first `growing` of them see all
        growing = min(max(window - resident, 0), new)
        twice_pairs += growing * (2 * resident + growing + 1) + 2 * (new - growing) * window
        attended += min(resident + new, window + new - 1)
    return twice_pairs / 2, attended
