"""Whole-step models to decide with: the published forms fitted to a profile, and what one would
take without measurements.

    bros        Sec. IV-A, each phase by itself, added
    echo        eqs. 6 and 7, with a constant for decodes, and the sentence before eq. 8
    echo-printed  the same with eq. 8 as printed
    echo-total  echo, and with the total context and the batch size in eq. 7
    echo-sum    and with both phases added, over one constant
    layerkv     eq. 3 for prompts; the paper has no decode form, so a constant stands for the
                decodes of a step
    roofline    the same engine derived from its specifications: no step of it was ever timed

`step_estimate` fits all but the last to steps of `truth` at lengths and batch sizes of powers of
two, as the papers do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.forms.echo import DecodeForm, EchoModel, Mixed
from twinserve.profiles.forms.layerkv import LayerKvModel
from twinserve.profiles.forms.sums import BatchSumsModel
from twinserve.profiles.profile import Profile, derive_profile
from twinserve.profiles.sampling import MAX_CONTEXT_TOKENS, decode_steps, relative_nnls
from twinserve.profiles.specs import ProfileError

FORMS = ("bros", "echo", "echo-printed", "echo-total", "echo-sum", "layerkv", "roofline")
_ECHO: dict[str, tuple[DecodeForm, Mixed]] = {
    "echo": ("constant", "sentence"),
    "echo-printed": ("constant", "printed"),
    "echo-total": ("total", "sentence"),
}


@dataclass(frozen=True)
class PromptsAndConstant(StepTimeModel):
    """LayerKV's eq. 3 as a step: prompts added up, a chunk the difference of eq. 3 at its ends, and
    `decode_s` seconds if any row decodes."""

    prompts: LayerKvModel
    decode_s: float

    def step_seconds(self, work: StepComposition) -> float:
        seconds = self.decode_s if work.decode_requests else 0.0
        for new, resident in zip(
            work.prefill_new.tolist(), work.prefill_resident.tolist(), strict=True
        ):
            whole = self.prompts.prefill_seconds(resident + new)
            seconds += whole - self.prompts.prefill_seconds(resident)
        return float(seconds)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        return np.full(steps, self.decode_s if n else 0.0)

    @classmethod
    def fit(cls, profile: Profile, truth: StepTimeModel) -> PromptsAndConstant:
        prompts = LayerKvModel.fit(
            truth, profile.llm, profile.gpu, profile.tp, profile.pcie_bytes_per_s / profile.tp
        )
        seconds = np.array([truth.step_seconds(work) for work in decode_steps()])
        (constant,), _ = relative_nnls(np.ones((len(seconds), 1)), seconds)
        return cls(prompts, float(constant))


def step_estimate(form: str, profile: Profile, truth: StepTimeModel) -> StepTimeModel:
    """A model of `form` (one of FORMS) of the engine that `profile` describes and `truth` times.
    ProfileError for another name, and for a roofline of a mixture of experts."""
    if form == "bros":
        return BrosLinearModel.fit(truth)
    longest = min(MAX_CONTEXT_TOKENS, profile.num_gpu_blocks * profile.block_tokens)
    if form in _ECHO:
        decode, mixed = _ECHO[form]
        return EchoModel.fit(truth, decode=decode, mixed=mixed, longest=longest)
    if form == "echo-sum":
        return BatchSumsModel.fit(truth, longest)
    if form == "layerkv":
        return PromptsAndConstant.fit(profile, truth)
    if form == "roofline":
        return derive_profile(
            profile.llm,
            profile.gpu,
            profile.tp,
            profile.dp,
            profile.ep,
            pp=profile.pp,
            num_gpu_blocks=profile.num_gpu_blocks,
        ).model()
    raise ProfileError(f"no form {form!r} of step times; choose {', '.join(FORMS)}")
