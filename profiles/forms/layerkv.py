"""LayerKV's prefill and offload times (eqs. 3-4), which decide how many layers of a prompt stay on
the GPU.

    eq. 3  T_prefill = alpha seqlen (2 n_param + 2 seqlen n_hidden n_layers) / FLOP/s
    eq. 4  T_offload = beta seqlen 2 (L - x) d_head n_kv_heads f_precision / PCIe bytes/s

Two readings differ from the print. Eq. 3's attention term is per layer, so the layer count is put
in (2 seqlen^2 hidden a layer are the causal scores and weighted values). Eq. 4's n_heads means KV
heads, which are stored, if the model has fewer of them than query heads. Under tensor parallelism
both numerator and rate are per engine: all ranks' FLOP/s, and each rank moves its own heads over
its own link.

There is no decode form in the paper (its scheduler uses the measured TPOT), so this is an estimator
of prompts and not a StepTimeModel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import StepTimeModel, isolated_prefill_seconds
from twinserve.profiles.sampling import MAX_PREFILL_TOKENS, powers_of_two, relative_nnls
from twinserve.profiles.specs import STRICT, GpuSpec, ModelSpec


@dataclass(frozen=True, config=STRICT)
class LayerKvModel:
    """alpha, beta: the paper's empirical correction factors (beta 1 = the PCIe rate given is what
    is reached)."""

    alpha: float = Field(gt=0)
    beta: float = Field(gt=0)
    parameters: int = Field(gt=0)
    hidden: int = Field(gt=0)
    layers: int = Field(gt=0)
    flops: float = Field(gt=0)
    layer_kv_bytes: float = Field(gt=0)
    pcie_bytes_per_s: float = Field(gt=0)
    fit_error: float | None = None
    form: Literal["layerkv"] = "layerkv"

    def prefill_seconds(self, seqlen):
        """Eq. 3; tokens, a number or an array."""
        work = 2.0 * self.parameters + 2.0 * seqlen * self.hidden * self.layers
        return self.alpha * seqlen * work / self.flops

    def offload_seconds(self, seqlen, resident_layers: int = 0):
        """Eq. 4 with x = `resident_layers`."""
        moved = (self.layers - resident_layers) * self.layer_kv_bytes
        return self.beta * seqlen * moved / self.pcie_bytes_per_s

    def min_resident_layers(self, seqlen: int) -> int:
        """x, the fewest layers to keep so that T_offload <= T_prefill (Sec. 3.1.1); 0..layers."""
        if seqlen <= 0:
            return 0
        per_layer = self.offload_seconds(seqlen, self.layers - 1)
        hidden_layers = math.floor(self.prefill_seconds(seqlen) / per_layer)
        x = max(0, self.layers - hidden_layers)
        # The division may round across the boundary.
        while x < self.layers and self.offload_seconds(seqlen, x) > self.prefill_seconds(seqlen):
            x += 1
        return x

    @classmethod
    def fit(
        cls, truth: StepTimeModel, llm: ModelSpec, gpu: GpuSpec, tp: int, pcie_bytes_per_s: float
    ) -> LayerKvModel:
        """alpha from isolated prefills of 128 tokens and more timed by `truth`; beta is 1, as
        `pcie_bytes_per_s`, one rank's, is what transfers achieve."""
        ranks = min(tp, llm.kv_heads)
        exact = cls(
            alpha=1.0,
            beta=1.0,
            parameters=llm.parameters,
            hidden=llm.hidden,
            layers=llm.layers,
            flops=gpu.peak_flops * tp,
            layer_kv_bytes=llm.kv_bytes_per_token / llm.layers,
            pcie_bytes_per_s=pcie_bytes_per_s * ranks,
        )
        lengths = np.array(powers_of_two(MAX_PREFILL_TOKENS, first=128))
        seconds = np.array([isolated_prefill_seconds(truth, n) for n in lengths.tolist()])
        (alpha,), error = relative_nnls(exact.prefill_seconds(lengths)[:, None], seconds)
        return replace(exact, alpha=float(alpha), fit_error=error)
