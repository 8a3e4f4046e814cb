"""A profile that is off on purpose: step times, or one part of them, multiplied by a factor.

What a step takes is cut into three parts. With H the host's share and D what the step's decodes
would take by themselves,

    host      H: the constant and the requests' terms of the form
    decode    D - H of the decodes alone: weights, their attention, padding, all-reduce
    prefill   the rest: what the step's prompt tokens add

so a step of both kinds pays for its weights once, in `decode`, as an engine does. Every form can be
scaled as a whole and by `prefill` and `decode`; `host` needs a form that knows its host time.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import AroundModel, StepComposition, StepTimeModel
from twinserve.profiles.specs import STRICT, ProfileError

# Launches of a layer: Qwen1.5-72B on eight L20 takes 39 ms a token (vLLM's issue 4852).
EAGER_LAYER_S = 480e-6
# of a factor; far beyond them no clock could tell steps apart, or count them
LEAST, MOST = 1e-3, 1e3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepScale:
    """Factors from LEAST to MOST: `step` on whole steps, the others on their part, before it."""

    step: float = Field(default=1.0, ge=LEAST, le=MOST)
    prefill: float = Field(default=1.0, ge=LEAST, le=MOST)
    decode: float = Field(default=1.0, ge=LEAST, le=MOST)
    host: float = Field(default=1.0, ge=LEAST, le=MOST)

    def __mul__(self, other: StepScale) -> StepScale:
        """Both. Raises ProfileError if that leaves the range."""
        product = {f.name: getattr(self, f.name) * getattr(other, f.name) for f in fields(self)}
        for part, factor in product.items():
            check_factor(part, factor)
        return StepScale(**product)

    def __str__(self) -> str:
        return ", ".join(
            f"{f.name} x {getattr(self, f.name):g}"
            for f in fields(self)
            if getattr(self, f.name) != 1.0
        )


def check_factor(part: str, factor: float) -> None:
    """Raises ProfileError for a factor that is no number from LEAST to MOST."""
    if not LEAST <= factor <= MOST:
        raise ProfileError(
            f"factor {factor:g} of {part} must be positive, from {LEAST:g} to {MOST:g}"
        )


class ScaledModel(AroundModel):
    """`model` with parts of its steps multiplied by `scale`. Runs of decodes are
    the single steps bit for bit wherever those of `model` are, and with factors of 1 all times are
    those of `model`.

    ProfileError if the host's part is scaled and `model` has none (`knows_host`).
    """

    def __init__(self, model: StepTimeModel, scale: StepScale) -> None:
        if scale.host != 1.0 and not model.knows_host:
            raise ProfileError(
                f"{type(model).__name__} does not know its host time; scale step, prefill or decode"
            )
        super().__init__(model)
        self.scale = scale
        self._host = model.host_seconds

    def host_seconds(self, requests: int) -> float:
        return self._host(requests) * self.scale.host * self.scale.step

    def hidden_seconds(self, requests: int) -> float:
        return self.model.hidden_seconds(requests) * self.scale.step

    def allreduce_seconds(self, work: StepComposition) -> float:
        """Their part of the step is that of the model."""
        seconds = self.model.allreduce_seconds(work)
        return seconds and seconds / self.model.step_seconds(work) * self.step_seconds(work)

    def step_seconds(self, work: StepComposition) -> float:
        n, whole = work.decode_requests, self.model.step_seconds(work)
        if not len(work.prefill_new):
            return self._decodes(whole, self._host(n))
        host = self._host(n + len(work.prefill_new))
        decode = 0.0
        if n:
            alone = self.model.step_seconds(
                StepComposition(n, work.decode_context, work.decode_context_max)
            )
            # padding may make a batch of decodes alone take longer than one with a short prompt
            decode = min(alone - self._host(n), whole - host)
        scale = self.scale
        prefill = whole - host - decode
        extra = (
            (scale.host - 1.0) * host
            + (scale.decode - 1.0) * decode
            + (scale.prefill - 1.0) * prefill
        )
        return (whole + extra) * scale.step

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        return self._decodes(
            self.model.decode_run_seconds(n, context, context_max, steps), self._host(n)
        )

    def _decodes(self, whole, host: float):
        """Of decodes alone; a number or an array, in the same order of operations."""
        extra = (self.scale.host - 1.0) * host + (self.scale.decode - 1.0) * (whole - host)
        return (whole + extra) * self.scale.step


class EagerModel(AroundModel):
    """A model's steps without CUDA graphs (`--enforce-eager`): no shorter than the launches of
    their kernels."""

    def __init__(self, model: StepTimeModel, layers: int) -> None:
        super().__init__(model)
        self.launches_s = layers * EAGER_LAYER_S

    def step_seconds(self, work: StepComposition) -> float:
        return max(self.model.step_seconds(work), self.launches_s)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        found = self.model.decode_run_seconds(n, context, context_max, steps)
        return np.maximum(found, self.launches_s)
