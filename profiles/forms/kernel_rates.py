"""What kernels reach of a GPU's peak numbers, by GPU family and by format of the weights, for the
sum of kernels (`kernels.py`).

Matrices and experts: fits of the kernel tables of aiconfigurator-core 0.12.0 (4 to 18 % in the
median). Fixed times of layers and the spread of routing: points of published servers. Shares of the
memory's rate: published measurements (vLLM's issue 49363) and the same tables. Families without
tables have the rates of the nearest one. docs/profiles.md says how far each is off.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    of an expert's width; start_s: of a layer with prompts."""

    slower: float
    moved: float
    start_s: float = 0.0
    inner: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Of a GPU family, by format (`format_of`).

    read             share of the memory's rate at which weights are read; "few" where bits have no
                     entry of their own
    expert_layer_s   what a layer with experts takes besides (align, permute, sum): vLLM's issue
                     55225
    attention        share of the sustained rate, by head size
    bus              bytes/s of all-reduces of 1 and of 134 MB, by ranks
    """

    matrices: dict[str, Matrices]
    experts: dict[str, Experts]
    read: dict[str, float]
    expert_layer_s: float
    attention: dict[int, float]
    bus: dict[int, tuple[float, float]]


# vLLM's issues 24111, 24532 and 37756, on NVLink
ALLREDUCE_START_S = {2: 6.4e-6, 4: 8.2e-6, 8: 6.4e-6}
PCIE_START_S = 25e-6  # assumed
ZIPF = 0.96  # of the experts' popularity
PROMPT_LAYER_S = 95e-6  # a layer of a step with prompts takes that at least
EXPERTS_LONGER = 1.3  # times, a layer with experts
CHUNK_START_S = 14e-6  # attention of a prompt, a layer
MARLIN = 2.4  # times the tables: the kernels that servers take for experts of few bits on Hopper
TRITON_ATTENTION = 0.19  # gpt-oss, whose sinks have other kernels off Hopper

RATES: dict[str, Rates] = {
    "hopper": Rates(
        matrices={
            "16": Matrices(0.90, 0.4),
            "fp8": Matrices(0.64, 1.7),
            "fp8 blocks": Matrices(0.74, 0.2),
        },
        experts={
            "16": Experts(1.3, 6.3, 70e-6),
            "fp8 blocks": Experts(2.4, 6.5, 68e-6, inner=6.5),
            "mxfp4": Experts(1.7 * MARLIN, 5.3, 46e-6),
            "unpacked": Experts(3.8, 7.5, 120e-6),
        },
        read={"16": 0.89, "fp8": 0.89, "few": 0.72},
        expert_layer_s=27e-6,
        attention={64: 0.53, 128: 0.67},
        bus={2: (169e9, 303e9), 8: (189e9, 431e9)},
    ),
    "ampere": Rates(
        matrices={"16": Matrices(0.93, 1.0)},
        experts={"16": Experts(2.1, 5.0, 22e-6)},
        read={"16": 0.75, "few": 0.72},
        expert_layer_s=58e-6,
        attention={128: 0.57},
        bus={2: (121e9, 216e9)},
    ),
    "ada": Rates(
        matrices={
            "16": Matrices(0.72, 0.4),
            "fp8": Matrices(0.72, 2.0),
            "fp8 blocks": Matrices(0.49, 2.0),
        },
        experts={
            "16": Experts(1.3, 3.5),
            "fp8 blocks": Experts(1.5, 3.4),
            "mxfp4": Experts(1.7, 4.2),
            "unpacked": Experts(1.2, 3.4),
        },
        read={"16": 0.83, "few": 0.72},
        expert_layer_s=27e-6,
        attention={64: 0.49, 128: 0.52},
        bus={2: (19e9, 19e9), 4: (4e9, 4e9)},
    ),
    "blackwell": Rates(
        matrices={
            "16": Matrices(0.79, 0.4),
            "fp8": Matrices(0.73, 3.6),
            "fp8 blocks": Matrices(1.16, 3.6),
            "fp4": Matrices(0.60, 1.5),
        },
        experts={
            "16": Experts(1.8, 3.0, 29e-6),
            "fp8 blocks": Experts(3.4, 4.1, 42e-6, inner=26.0),
            "fp4": Experts(1.6, 4.6, 31e-6),
            "mxfp4": Experts(0.7, 5.3, 88e-6),
            "unpacked": Experts(8.4, 13.0, 107e-6),
        },
        read={"16": 0.77, "fp4": 0.60, "few": 0.72},
        expert_layer_s=13e-6,
        attention={64: 0.33, 128: 0.57},
        bus={2: (83e9, 657e9)},
    ),
    "blackwell-workstation": Rates(
        matrices={
            "16": Matrices(0.85, 0.4),
            "fp8": Matrices(0.84, 0.9),
            "fp4": Matrices(0.67, 0.4),
        },
        experts={
            "16": Experts(2.0, 4.5),
            "fp4": Experts(1.1, 4.2, 36e-6),
            "mxfp4": Experts(1.8, 4.8, 17e-6),
            "unpacked": Experts(1.4, 3.6, 28e-6),
        },
        read={"16": 0.89, "few": 0.72},
        expert_layer_s=13e-6,
        attention={64: 0.55, 128: 0.59},
        bus={2: (36e9, 36e9)},
    ),
    "volta": Rates(
        matrices={"16": Matrices(0.84, 1.0)},
        experts={"16": Experts(2.1, 5.0, 22e-6)},
        read={"16": 0.75, "few": 0.72},
        expert_layer_s=58e-6,
        attention={128: 0.3},
        bus={2: (11e9, 11e9)},
    ),
    "ada-geforce": Rates(
        matrices={"16": Matrices(1.02, 0.4), "fp8": Matrices(0.72, 2.0)},
        experts={
            "16": Experts(1.3, 3.5),
            "mxfp4": Experts(1.7, 4.2),
            "unpacked": Experts(1.2, 3.4),
        },
        read={"16": 0.94, "few": 0.72},
        expert_layer_s=27e-6,
        attention={64: 0.75, 128: 0.75},
        bus={2: (10e9, 10e9)},
    ),
}


def rates_of(gpu: GpuSpec) -> Rates:
    """Of the GPU's family, or the nearest that has some."""
    return RATES[NEAREST.get(gpu.family, gpu.family)]


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
