"""The GPUs known by name.

NVIDIA's and AMD's data sheets: dense rates. Memory is what CUDA (ROCm) reports as the device's
total where a report was at hand, else a total that agrees with KV pools seen on it (H100, H200) or
with its siblings. PCIe is the lane rate of 16 lanes in one direction (gen 3, 4, 5, 6: 16, 32, 64,
128 GB/s), NVLink half the data sheet's bidirectional figure. Bridges that join pairs of cards (H100
PCIe and NVL, A100 PCIe, RTX 3090, A40) are taken to be absent. The V100s are PCIe cards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError

GIB = 2**30

GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        GpuSpec("v100-16g", "volta", 112e12, 900e9, 15.77 * GIB, 16e9),
        GpuSpec("v100-32g", "volta", 112e12, 900e9, 31.73 * GIB, 16e9),
        GpuSpec("a100-40g", "ampere", 312e12, 1555e9, 39.49 * GIB, 32e9, 300e9),
        GpuSpec("a100-pcie-40g", "ampere", 312e12, 1555e9, 39.49 * GIB, 32e9),
        GpuSpec("a100-80g", "ampere", 312e12, 2039e9, 79.2 * GIB, 32e9, 300e9),
        GpuSpec("a100-pcie-80g", "ampere", 312e12, 1935e9, 79.2 * GIB, 32e9),
        GpuSpec("h100-nvl", "hopper", 835.5e12, 3938e9, 93.11 * GIB, 64e9),
        GpuSpec("h100", "hopper", 989e12, 3350e9, 79.2 * GIB, 64e9, 450e9),
        GpuSpec("h100-pcie", "hopper", 756.5e12, 2000e9, 79.2 * GIB, 64e9),
        GpuSpec("h200", "hopper", 989e12, 4800e9, 139.8 * GIB, 64e9, 450e9),
        GpuSpec("l20", "ada-capped", 119.5e12, 864e9, 44.5 * GIB, 32e9),
        GpuSpec("l40s", "ada", 362e12, 864e9, 44.5 * GIB, 32e9),
        GpuSpec("b200", "blackwell", 2250e12, 7700e9, 178.35 * GIB, 64e9, 900e9),
        GpuSpec("b300", "blackwell", 2250e12, 7750e9, 275040 * 2**20, 128e9, 900e9),
        GpuSpec("rtxpro6000", "blackwell-workstation", 503.8e12, 1597e9, 97887 * 2**20, 64e9),
        GpuSpec("t4", "turing", 65e12, 320e9, 14.56 * GIB, 16e9),
        GpuSpec("a10", "ampere-ga10x", 125e12, 600e9, 22.06 * GIB, 32e9),
        GpuSpec("a10g", "ampere-ga10x", 70e12, 600e9, 22.06 * GIB, 32e9),
        GpuSpec("a40", "ampere-ga10x", 149.7e12, 696e9, 44.5 * GIB, 32e9),
        GpuSpec("l4", "ada-l4", 121e12, 300e9, 22.04 * GIB, 32e9),
        GpuSpec("h20", "hopper-capped", 148e12, 4000e9, 97871 * 2**20, 64e9, 450e9),
        GpuSpec("gb200", "blackwell", 2500e12, 8000e9, 184.31 * GIB, 64e9, 900e9),
        # seven links of 64 GB/s in one direction, one to each other GPU of the server
        GpuSpec("mi300x", "cdna3", 1307.4e12, 5300e9, 191.69 * GIB, 64e9, 448e9),
        GpuSpec("rtx6000ada", "ada", 364.2e12, 960e9, 47.5 * GIB, 32e9),
        GpuSpec("rtx3090", "ampere-geforce", 71e12, 936.2e9, 23.68 * GIB, 32e9),
        GpuSpec("rtx4090", "ada-geforce", 165.2e12, 1008e9, 25250627584, 32e9),
        GpuSpec("rtx5090", "blackwell-geforce", 209.5e12, 1792e9, 31.36 * GIB, 64e9),
    )
}

ALIASES = {
    "a100": "a100-80g",
    "a100-40g-pcie": "a100-pcie-40g",
    "v100": "v100-16g",
    "rtx-pro-6000": "rtxpro6000",
    "rtx-6000-ada": "rtx6000ada",
}


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
    "v100-16g": FewBits(70),
    "v100-32g": FewBits(70),
    "t4": FewBits(75, int8=130e12),
    "a100-40g": FewBits(80, int8=624e12),
    "a100-pcie-40g": FewBits(80, int8=624e12),
    "a100-80g": FewBits(80, int8=624e12),
    "a100-pcie-80g": FewBits(80, int8=624e12),
    "a10": FewBits(86, int8=250e12),
    "a10g": FewBits(86),
    "a40": FewBits(86, int8=299.3e12),
    "rtx3090": FewBits(86, int8=285e12),
    "l4": FewBits(89, fp8=242e12, int8=242e12),
    "l20": FewBits(89),
    "l40s": FewBits(89, fp8=733e12, int8=733e12),
    "rtx6000ada": FewBits(89, fp8=728.5e12, int8=728.5e12),
    "rtx4090": FewBits(89, fp8=330.3e12, int8=660.6e12),
    "h20": FewBits(90, fp8=296e12, int8=296e12),
    "h100": FewBits(90, fp8=1979e12, int8=1979e12),
    "h100-nvl": FewBits(90, fp8=1670.5e12, int8=1670.5e12),
    "h100-pcie": FewBits(90, fp8=1513e12, int8=1513e12),
    "h200": FewBits(90, fp8=1979e12, int8=1979e12),
    "b200": FewBits(100, fp8=4500e12, int8=4500e12, fp4=9000e12),
    "gb200": FewBits(100, fp8=5000e12, int8=5000e12, fp4=10000e12),
    "b300": FewBits(103, fp8=4500e12, int8=153.5e12, fp4=14000e12),
    # with sums in FP32, as the rate for 16 bits
    "rtx5090": FewBits(120, fp8=419e12, int8=838e12, fp4=1676e12),
    # twice and four times what is taken for 16 bits
    "rtxpro6000": FewBits(120, fp8=1007.6e12, int8=1007.6e12, fp4=2015.2e12),
    "mi300x": FewBits(None, fp8=2614.9e12, int8=2614.9e12),
}

_NVIDIA = "NVIDIA data sheet"
SOURCES: dict[str, str] = {
    "t4": f"{_NVIDIA} (T4); total that CUDA reports",
    "a10": f"{_NVIDIA} (A10); memory as on the A10G",
    "a40": f"{_NVIDIA} (A40); memory as on the L40S, of which nvidia-smi says the same",
    "h100-nvl": f"{_NVIDIA} (H100 NVL), without its bridge; memory as vLLM's logs have it",
    "h100-pcie": f"{_NVIDIA} (H100 PCIe), as aiconfigurator-core has it; memory as on the H100",
    "v100-32g": f"{_NVIDIA} (V100 PCIe); total that CUDA reports",
    "rtx3090": "lists of NVIDIA GA102 whitepaper figures; total that CUDA reports",
    "rtx5090": "NVIDIA RTX Blackwell whitepaper, as others quote it; total that CUDA reports",
    "rtx6000ada": f"{_NVIDIA} (RTX 6000 Ada), as others quote it; total that CUDA reports",
    "b300": "NVIDIA DGX B300 data sheet, as aiconfigurator-core has it; memory of nvidia-smi",
    "a10g": f"{_NVIDIA} (A10G, for AWS g5); total that CUDA reports",
    "l4": f"{_NVIDIA} (L4); total that CUDA reports",
    "h20": "published figures of the H20 (96 GB), no data sheet of NVIDIA; memory of nvidia-smi",
    "b200": "NVIDIA Blackwell data sheet, as aiconfigurator-core 0.12.0 has it",
    "gb200": "NVIDIA Blackwell data sheet, one GPU of an NVL72; total that CUDA reports",
    "mi300x": "AMD Instinct MI300X data sheet; total that ROCm reports",
    "rtx4090": "NVIDIA Ada whitepaper; total that CUDA reports",
    "rtxpro6000": "NVIDIA data sheet (RTX PRO 6000 Blackwell, server); memory of nvidia-smi",
}


def gpu_source(name: str) -> str:
    """Where the numbers of a GPU are from."""
    return SOURCES.get(name, _NVIDIA)


def gpu_for(llm: ModelSpec, gpu: GpuSpec) -> GpuSpec:
    """The GPU as a profile of this model has it: with rates of fewer bits where the model's weights
    are quantised. ProfileError for a format that vLLM does not run on it."""
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
