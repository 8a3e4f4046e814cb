"""The shares of peak rates that each GPU family reaches: the only tuned constants of the roofline,
none of them per model.

`efficiency_fit.py` gave them (docs/profiles.md has the recipe and the residuals):
- hopper (H100 and H200 together), ampere (A100-80G), ada (L40S): operator tables of
  aiconfigurator-core 0.12.0 and decode steps measured on vLLM; Llama-3.1-8B TP1 and TP2,
  Llama-3.1-70B TP4 and Qwen3-32B TP2 (L40S: up to TP2). On Hopper ten steps are of our servers.
- ada-geforce (RTX 4090): per-layer kernel times of vLLM 0.19.0 for Llama-3.1-8B; its host and
  all-reduce terms are assumed, not measured.
- blackwell (B200) and blackwell-workstation (RTX PRO 6000): operator tables alone.
- those of BORROWED are not measured at all: remarks of `efficiency.csv` say what was assumed.
"""

from twinserve.formats import shipped_rows
from twinserve.profiles.forms.roofline import Efficiency
from twinserve.profiles.specs import GpuSpec, ProfileError

_ROWS = {row.pop("family"): row for row in shipped_rows(__package__, "efficiency.csv")}
# Mean absolute relative error on the measured decode steps of others (11, 4 and 2 of them).
FAMILY_FIT_ERROR = {
    family: float(row["error"])
    for family, row in _ROWS.items()
    if row["error"] not in ("", "borrowed")
}
# Families whose constants are borrowed, and the error of the three measured ones on those steps
# with each other's (9 to 30 % on average, largest 51 %).
BORROWED = tuple(family for family, row in _ROWS.items() if row["error"] == "borrowed")
BORROWED_ERROR = 0.18
FAMILIES = {
    family: Efficiency(**{name: float(value) for name, value in row.items() if name != "error"})
    for family, row in _ROWS.items()
}


def find_efficiency(gpu: GpuSpec, sums: bool = False) -> Efficiency:
    """The constants of the GPU's family, for a sum of kernels its own if it has some. ProfileError
    if the family is unknown."""
    if gpu.family not in FAMILIES:
        raise ProfileError(
            f"GPU {gpu.name}: no efficiency constants for family {gpu.family!r};"
            f" known families: {', '.join(FAMILIES)}"
        )
    return FAMILIES.get(f"{gpu.family}-sum" if sums else "", FAMILIES[gpu.family])


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
