"""What kernels reach of a GPU's peak numbers, by GPU family and by format of the weights, for the
sum of kernels (`kernels.py`). `kernel_rates.json` has a family each, lists in the order of the
fields below.

Matrices and experts: fits of the kernel tables of aiconfigurator-core 0.12.0 (4 to 18 % in the
median). Fixed times of layers and the spread of routing: points of published servers. Shares of the
memory's rate: published measurements (vLLM's issue 49363) and the same tables. Families without
tables have the rates of the nearest one. docs/profiles.md says how far each is off.
"""

from dataclasses import dataclass
from typing import Any

from twinserve.formats import shipped_json
from twinserve.profiles.specs import GpuSpec, ModelSpec

NEAREST = {
    "hopper-capped": "hopper",
    "cdna3": "hopper",
    "ada-capped": "ada",
    "ada-l4": "ada",
    "ampere-ga10x": "ampere",
    "ampere-geforce": "ada-geforce",
    "blackwell-geforce": "blackwell-workstation",
    "turing": "volta",
}


@dataclass(frozen=True)
class Matrices:
    """compute: share of the sustained rate; moved: how often a product's inputs and outputs of 16
    bits pass the memory."""

    compute: float
    moved: float


@dataclass(frozen=True)
class Experts:
    """slower: times that the FLOPs take at the sustained rate; moved: how often a token passes the
    memory for each expert that it chooses (permuted, quantised, written, summed); inner: the same
    of an expert's width; start_s: of a layer with prompts; read: share of the memory's rate, None:
    as other weights of few bits. " whole": experts that lie whole on ranks; " padded": of the
    releases of `PADDED_RELEASES`."""

    slower: float
    moved: float
    start_s: float = 0.0
    inner: float = 0.0
    read: float | None = None


@dataclass(frozen=True)
class Rates:
    """Of a GPU family, by format (`format_of`).

    read             share of the memory's rate at which weights are read; "few" where bits have no
                     entry of their own
    expert_layer_s   what a layer with experts takes besides (align, permute, sum): vLLM's issue
                     55225
    attention        share of the sustained rate, by head size
    bus              bytes/s of all-reduces of 1 and of 134 MB, by ranks
    start            seconds of the smallest all-reduces, by ranks, of the same tables (sglang's
                     pull request 2904 has 3.7, 4.8 and 5.9 us): of the roofline, whose constants
                     are fitted beside it
    """

    matrices: dict[str, Matrices]
    experts: dict[str, Experts]
    read: dict[str, float]
    expert_layer_s: float
    attention: dict[int, float]
    bus: dict[int, tuple[float, float]]
    start: dict[int, float]


# vLLM's issues 24111, 24532 and 37756, on NVLink
ALLREDUCE_START_S = {2: 6.4e-6, 4: 8.2e-6, 8: 6.4e-6}
PCIE_START_S = 25e-6  # assumed
SMALL_BYTES, LARGE_BYTES = 1e6, 134e6  # messages that `Rates.bus` has
ZIPF = 0.96  # of the experts' popularity
PROMPT_LAYER_S = 95e-6  # a layer of a step with prompts takes that at least
EXPERTS_LONGER = 1.3  # times, a layer with experts
CHUNK_START_S = 14e-6  # attention of a prompt, a layer
TRITON_ATTENTION = 0.19  # gpt-oss, whose sinks have other kernels off Hopper


def _rates(
    matrices: dict, experts: dict, attention: dict, bus: dict, start: Any = None, **more: Any
) -> Rates:
    return Rates(
        {bits: Matrices(*of) for bits, of in matrices.items()},
        {bits: Experts(*of) for bits, of in experts.items()},
        attention={int(size): share for size, share in attention.items()},
        bus={int(ranks): (small, large) for ranks, (small, large) in bus.items()},
        start={int(ranks): seconds for ranks, seconds in (start or {}).items()},
        **more,
    )


RATES = {
    family: _rates(**of) for family, of in shipped_json(__package__, "kernel_rates.json").items()
}


def rates_of(gpu: GpuSpec) -> Rates:
    """Of the GPU's family, or the nearest that has some."""
    return RATES[NEAREST.get(gpu.family, gpu.family)]


def nearest(by_ranks: dict[int, Any], ranks: int) -> Any:
    """The value of the nearest number of ranks."""
    return by_ranks[min(by_ranks, key=lambda known: abs(known - ranks))]


def measures_messages(gpu: GpuSpec) -> bool:
    """Whether starts and rates of all-reduces are measured, so that no fit has them."""
    return bool(gpu.nvlink_bytes_per_s) and gpu.family in RATES and bool(RATES[gpu.family].start)


def sustained(gpu: GpuSpec, multiplies: str) -> float:
    """Share of the peak rate that clocks allow under load, products in this format."""
    if gpu.family.startswith("blackwell") and gpu.nvlink_bytes_per_s:
        return 0.77
    return 1.06 if gpu.family == "hopper" and multiplies == "fp8" else 0.85


def format_of(llm: ModelSpec, gpu: GpuSpec, of_experts: bool) -> str:
    """What matrices (routed experts) are multiplied as: "16", "fp8", "fp8 blocks", "fp4", "mxfp4",
    or "unpacked" to 16 bits."""
    weights = llm.weights
    if weights is None or (weights.experts_only and not of_experts):
        return "16"
    if weights.name == "mxfp4":
        return "mxfp4"
    if gpu.flops_of(weights.multiplies) == gpu.peak_flops:
        return "unpacked"
    if weights.multiplies == "fp4":
        return "fp4"
    if of_experts or weights.block:
        return "fp8 blocks"
    return "fp8"
