"""How far step times of mixtures and quantised models were off on servers of other people.

By form, step, kind of model and GPU family: the error that 90 % of the measured points keep, and
1.5 times that where all points are of one source. `twinserve.experiments.step_times.main.bars`
makes the numbers, and a test compares them.
"""

from __future__ import annotations

from twinserve.profiles.specs import ModelSpec

# (form, decode or prefill, kind, GPU family): (relative error, points)
SERVER_ERRORS: dict[tuple[str, str, str, str], tuple[float, int]] = {
    ("operators", "decode", "dense fp8", "blackwell"): (0.24, 60),
    ("operators", "decode", "dense fp8", "hopper"): (0.2, 98),
    ("operators", "decode", "dense nvfp4", "blackwell"): (0.2, 60),
    ("operators", "decode", "mixture 16 bits", "ampere"): (0.25, 10),
    ("operators", "decode", "mixture fp8", "hopper"): (0.44, 41),
    ("operators", "decode", "mixture mxfp4", "blackwell"): (0.78, 66),
    ("operators", "decode", "mixture mxfp4", "hopper"): (0.21, 107),
    ("operators", "prefill", "dense fp8", "blackwell"): (0.42, 8),
    ("operators", "prefill", "dense fp8", "hopper"): (0.29, 14),
    ("operators", "prefill", "dense nvfp4", "blackwell"): (0.51, 8),
    ("operators", "prefill", "mixture mxfp4", "blackwell"): (0.92, 8),
    ("operators", "prefill", "mixture mxfp4", "hopper"): (0.93, 23),
    ("roofline", "decode", "dense fp8", "blackwell"): (0.16, 60),
    ("roofline", "decode", "dense fp8", "hopper"): (0.15, 98),
    ("roofline", "decode", "dense nvfp4", "blackwell"): (0.17, 60),
    ("roofline", "decode", "mixture 16 bits", "ampere"): (0.18, 10),
    ("roofline", "decode", "mixture fp8", "blackwell"): (0.38, 146),
    ("roofline", "decode", "mixture fp8", "hopper"): (0.42, 59),
    ("roofline", "decode", "mixture mxfp4", "blackwell"): (0.34, 66),
    ("roofline", "decode", "mixture mxfp4", "hopper"): (0.29, 107),
    ("roofline", "decode", "mixture nvfp4", "blackwell"): (0.15, 104),
    ("roofline", "prefill", "dense fp8", "blackwell"): (0.29, 8),
    ("roofline", "prefill", "dense fp8", "hopper"): (0.28, 14),
    ("roofline", "prefill", "dense nvfp4", "blackwell"): (0.5, 8),
    ("roofline", "prefill", "mixture mxfp4", "ampere"): (0.2, 12),
    ("roofline", "prefill", "mixture mxfp4", "blackwell"): (0.31, 8),
    ("roofline", "prefill", "mixture mxfp4", "hopper"): (0.22, 23),
}


def kind_of_weights(llm: ModelSpec) -> str:
    """dense or mixture, and the format of its weights."""
    weights = "16 bits" if llm.weights is None else llm.weights.name
    return f"{'mixture' if llm.experts else 'dense'} {weights}"
