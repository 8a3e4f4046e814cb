"""What each GPU family reaches of its peak numbers: the only tuned constants of the roofline, none
of them per model.

`experiments/validation/efficiency_fit.py` gave them (docs/profiles.md has the recipe and the
residuals):
- hopper (H100 and H200 together), ampere (A100-80G), ada (L40S): operator tables of
  aiconfigurator-core 0.12.0 for Llama-3.1-8B TP1 and TP2, Llama-3.1-70B TP4 and Qwen3-32B TP2
  (L40S: up to TP2), and decode steps measured on vLLM.
- ada-geforce (RTX 4090): per-layer kernel times of vLLM 0.19.0 for Llama-3.1-8B; its host and
  all-reduce terms are assumed, not measured.
- blackwell (B200) and blackwell-workstation (RTX PRO 6000): operator tables alone.
- those of BORROWED are not measured at all: see their comments.
"""

from __future__ import annotations

from dataclasses import replace

from twinserve.profiles.forms.roofline import Efficiency
from twinserve.profiles.specs import GpuSpec, ProfileError

HOPPER = Efficiency(
    gemm_mfu=0.686,
    gemm_half_tokens=81.0,
    gemm_mbu=0.894,
    kv_mbu=0.874,
    attention_mfu=0.554,
    layer_s=45.9e-6,
    allreduce_s=3.0e-6,
    link_share=0.712,
    host_request_s=12.1e-6,
)

AMPERE = Efficiency(
    gemm_mfu=0.771,
    gemm_half_tokens=128.0,
    gemm_mbu=0.676,
    kv_mbu=0.753,
    attention_mfu=0.476,
    layer_s=21.6e-6,
    allreduce_s=12.0e-6,
    link_share=0.453,
    host_request_s=48.9e-6,
)

# The L40S cannot hold its data-sheet clock under tensor load: its compute share is low.
ADA = Efficiency(
    gemm_mfu=0.555,
    gemm_half_tokens=8.25,
    gemm_mbu=0.795,
    kv_mbu=0.764,
    attention_mfu=0.449,
    layer_s=20.0e-6,
    allreduce_s=5.71e-6,
    link_share=0.526,
    host_request_s=34.3e-6,
)

ADA_GEFORCE = Efficiency(
    gemm_mfu=1.05,
    gemm_half_tokens=6.2,
    gemm_mbu=0.877,
    kv_mbu=0.95,
    attention_mfu=0.745,
    layer_s=39.5e-6,
    allreduce_s=5.71e-6,
    link_share=0.3,
    host_request_s=10.0e-6,
)

# Kernels only (operator tables of aiconfigurator-core 0.12.0, 212 samples each, mean error 4.2 %
# and 7.2 %); the host terms are assumed.
BLACKWELL = Efficiency(
    gemm_mfu=0.638,
    gemm_half_tokens=194.0,
    gemm_mbu=0.846,
    kv_mbu=0.947,
    attention_mfu=0.467,
    layer_s=34.7e-6,
    allreduce_s=7.64e-6,
    link_share=0.397,
    host_request_s=10.0e-6,
)

BLACKWELL_WORKSTATION = Efficiency(
    gemm_mfu=0.618,
    gemm_half_tokens=85.9,
    gemm_mbu=0.892,
    kv_mbu=0.928,
    attention_mfu=0.5,
    layer_s=20.0e-6,
    allreduce_s=7.75e-6,
    link_share=0.29,  # 18.5 of 64 GB/s, two ranks: the measured all-reduce of large messages
    host_request_s=10.0e-6,
)

# Assumed: Ampere's memory and host terms; vLLM's Volta kernels (no bf16, no FlashAttention 2) reach
# less compute.
VOLTA = replace(AMPERE, gemm_mfu=0.6, attention_mfu=0.25, link_share=0.526)

FAMILIES: dict[str, Efficiency] = {
    "hopper": HOPPER,
    "ampere": AMPERE,
    "ada": ADA,
    "ada-geforce": ADA_GEFORCE,
    # Assumed: an AD102 whose tensor rate is capped far below what its power allows, so it reaches
    # the cap.
    "ada-capped": replace(ADA, gemm_mfu=0.9, attention_mfu=0.75),
    "volta": VOLTA,
    # Assumed, as nothing was measured on them: constants of the nearest family.
    "turing": VOLTA,
    "ampere-ga10x": AMPERE,
    # As on the RTX 4090: GeForce cards have half the tensor rate of their chip, and reach it.
    "ampere-geforce": ADA_GEFORCE,
    "blackwell-geforce": ADA_GEFORCE,
    "ada-l4": ADA,
    "hopper-capped": replace(HOPPER, gemm_mfu=0.9, attention_mfu=0.75),  # as on the L20
    "cdna3": HOPPER,
    "blackwell": BLACKWELL,
    "blackwell-workstation": BLACKWELL_WORKSTATION,
}


def find_efficiency(gpu: GpuSpec) -> Efficiency:
    """The constants of the GPU's family; ProfileError if the family is unknown."""
    if gpu.family not in FAMILIES:
        raise ProfileError(
            f"GPU {gpu.name}: no efficiency constants for family {gpu.family!r};"
            f" known families: {', '.join(FAMILIES)}"
        )
    return FAMILIES[gpu.family]


# Mean absolute relative error on the measured decode steps of the fit (11, 4 and 2 of them).
FAMILY_FIT_ERROR: dict[str, float] = {"hopper": 0.025, "ampere": 0.022, "ada": 0.012}
# Families whose constants are borrowed, and the error of the three measured ones on those steps
# with each other's (9 to 30 % on average, largest 51 %).
BORROWED = (
    "volta",
    "ada-capped",
    "turing",
    "ampere-ga10x",
    "ampere-geforce",
    "blackwell-geforce",
    "ada-l4",
    "hopper-capped",
    "cdna3",
)
BORROWED_ERROR = 0.18


def family_error(family: str) -> tuple[float | None, str]:
    """(mean relative error or None, what it is of)."""
    if family in BORROWED:
        return (
            BORROWED_ERROR,
            "that of measured families with each other's constants: this one's are borrowed, not "
            "measured",
        )
    return FAMILY_FIT_ERROR.get(
        family
    ), "the family's on measured decode steps (null: not measured)"
