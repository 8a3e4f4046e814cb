"""The GPUs known by name: a row of `gpus.csv` each.

NVIDIA's and AMD's data sheets: dense rates. Memory is the total that CUDA (ROCm) reports, if a
report was at hand. Otherwise it is a total that agrees with KV pools seen on the GPU (H100, H200)
or with its siblings. PCIe is the lane rate of 16 lanes in one direction (gen 3, 4, 5, 6: 16, 32,
64, 128 GB/s), NVLink half the data sheet's bidirectional figure. Bridges that join pairs of cards
(H100 PCIe and NVL, A100 PCIe, RTX 3090, A40) are taken to be absent. The V100s are PCIe cards.
"""

from dataclasses import dataclass, replace

from twinserve.formats import number_or_none, shipped_rows
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError

GIB = 2**30

_ROWS = {row["name"]: row for row in shipped_rows(__package__, "gpus.csv")}
GPUS: dict[str, GpuSpec] = {
    name: GpuSpec(
        name,
        row["family"],
        float(row["peak_flops"]),
        float(row["memory_bytes_per_s"]),
        float(row["memory_gib"]) * GIB,
        float(row["pcie_bytes_per_s"]),
        number_or_none(row["nvlink_bytes_per_s"]),
    )
    for name, row in _ROWS.items()
}
ALIASES = {alias: name for name, row in _ROWS.items() for alias in row["aliases"].split()}
# GPUs with operator tables in aiconfigurator-core, and what these are called there.
SYSTEMS = {name: row["system"] for name, row in _ROWS.items() if row["system"]}
MULTIPROCESSORS = {n: int(r["multiprocessors"]) for n, r in _ROWS.items() if r["multiprocessors"]}
# GiB of `Free memory on device (a/b GiB)` in logs, where `memory_gib` is of another source.
REPORTED_GIB = {n: float(r["reported_gib"]) for n, r in _ROWS.items() if r["reported_gib"]}


@dataclass(frozen=True)
class FewBits:
    """Rates of tensor cores for fewer than 16 bits, FLOP/s; None: there are none, or (INT8 of A10G
    and L20, FP8 of L20) no source was at hand, and 16 bits stand for them. capability: the
    compute capability x 10 by which vLLM tells what it can run; None: not NVIDIA's."""

    capability: int | None
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None


FEW_BITS: dict[str, FewBits] = {
    name: FewBits(
        int(row["capability"]) if row["capability"] else None,
        *(number_or_none(row[f"{bits}_flops"]) for bits in ("fp8", "int8", "fp4")),
    )
    for name, row in _ROWS.items()
}


def gpu_source(name: str) -> str:
    """Where the numbers of a GPU are from."""
    return _ROWS[name]["source"] or "NVIDIA data sheet"


def gpu_for(llm: ModelSpec, gpu: GpuSpec) -> GpuSpec:
    """Return the GPU for a profile of this model: with rates of fewer bits if its weights are
    quantised. Raises ProfileError for a format that vLLM does not run on it."""
    if llm.weights is None or gpu.name not in FEW_BITS:
        return gpu
    few, weights = FEW_BITS[gpu.name], llm.weights
    least = LEAST_CAPABILITY.get(weights.name, 75)
    if few.capability is None and weights.name == "nvfp4":
        raise ProfileError(f"{llm.name}: vLLM runs {weights.name} on NVIDIA's GPUs only")
    if few.capability is not None and few.capability < least:
        raise ProfileError(
            f"{llm.name}: vLLM takes {weights.name} weights from compute capability "
            f"{least / 10:.1f} on, {gpu.name} has {few.capability / 10:.1f}; choose another GPU or "
            "format"
        )
    if few.capability is not None and few.capability >= 100 and weights.multiplies == "int8":
        raise ProfileError(
            f"{llm.name}: vLLM multiplies no INT8 inputs from compute capability 10.0 (Blackwell) "
            f"on, {gpu.name} has {few.capability / 10:.1f}; choose -fp8, or another GPU"
        )
    return replace(gpu, fp8_flops=few.fp8, int8_flops=few.int8, fp4_flops=few.fp4)


# The least with which vLLM 0.32 takes a format (`get_min_capability` of its quantisation methods,
# `query_marlin_supported_quant_types` for GPTQ). Where the GPU cannot multiply in it, vLLM
# multiplies in 16 bits (Marlin); INT8 on Blackwell it refuses, at the first step (its latest
# page "INT8 W8A8"; users report the same of `dispatch_scaled_mm`, whose source was not at hand).
LEAST_CAPABILITY = {"mxfp4": 80}
