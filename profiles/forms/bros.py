"""BROS's inference cost model (Sec. IV-A): alpha0 Ln + alpha1 Ln La + beta, per phase, and the
linear swap model.

Ln is the number of tokens that a phase's requests compute in the step, La those they attend to
(computed and cached). Both are summed over the batch as in the paper's (3) and (4). For prefills of
prompts with nothing cached La = Ln, the paper's case; a chunk or a prefix hit has La > Ln here, by
the same definition. A phase that is present pays its beta once, and the batch costs the sum of its
phases. The product of sums is the paper's: two prompts of 1,000 tokens are charged attention over
2,000 x 2,000. This overestimates large batches, as the published policy does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.sampling import decode_steps, prefill_steps, relative_nnls
from twinserve.profiles.specs import STRICT


@dataclass(frozen=True, config=STRICT)
class PhaseCost:
    """alpha0 (seconds per token), alpha1 (seconds per token squared), beta (seconds); `fit_error`
    is the mean absolute relative error on the samples of the fit, None if there was none."""

    alpha0: float = Field(ge=0)
    alpha1: float = Field(ge=0)
    beta: float = Field(ge=0)
    fit_error: float | None = None

    def seconds(self, new_tokens, attended_tokens):
        """Of a phase that is present; numbers or arrays."""
        return self.alpha0 * new_tokens + self.alpha1 * (new_tokens * attended_tokens) + self.beta

    @classmethod
    def fit(cls, new: np.ndarray, attended: np.ndarray, seconds: np.ndarray) -> PhaseCost:
        """From int64[m] token counts and float64[m] seconds, by non-negative least squares on
        relative errors."""
        product = new.astype(float) * attended
        found, error = relative_nnls(np.column_stack([new, product, np.ones(len(new))]), seconds)
        return cls(*found.tolist(), fit_error=error)


@dataclass(frozen=True, config=STRICT)
class BrosLinearModel(StepTimeModel):
    """The estimator that BROS decides with; also a StepTimeModel, so that a run can use it as the
    truth."""

    prefill: PhaseCost
    decode: PhaseCost
    form: Literal["bros"] = "bros"

    def batch_seconds(
        self,
        prefill_tokens: int,
        decode_requests: int,
        decode_context: int,
        prefill_context: int | None = None,
    ) -> float:
        """Seconds of a batch by its totals.

        prefill_tokens   computed by prefills
        prefill_context  computed and resident tokens of the same requests; None: nothing was
                         cached, so La = Ln
        decode_context   resident tokens of the decoding requests, without those being computed
        """
        total = 0.0
        if prefill_tokens:
            attended = prefill_tokens if prefill_context is None else prefill_context
            total = total + self.prefill.seconds(prefill_tokens, attended)
        if decode_requests:
            total = total + self.decode.seconds(decode_requests, decode_context + decode_requests)
        return total

    def prefix_costs(
        self,
        is_prefill: np.ndarray,
        new_tokens: np.ndarray,
        context_tokens: np.ndarray,
        before: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> np.ndarray:
        """float64[n]: element i is the cost of a batch of the first i + 1 requests of the given
        order.

        is_prefill      bool[n]
        new_tokens      int64[n], tokens the request would compute
        context_tokens  int64[n], resident and new tokens together, the request's part of La
        before          Ln and La of the prefills, then of the decodes, that are in the batch anyway
        """
        prefilling = np.asarray(is_prefill, bool)
        new, attended = np.asarray(new_tokens, np.int64), np.asarray(context_tokens, np.int64)
        n, prefills = len(new), np.count_nonzero(prefilling)
        total = np.zeros(n)
        for cost, chosen, own, ln, la in (
            (self.prefill, prefilling, prefills, before[0], before[1]),
            (self.decode, ~prefilling, n - prefills, before[2], before[3]),
        ):
            if not own and not ln:
                continue
            if own:
                mine, theirs = (new, attended) if own == n else (new * chosen, attended * chosen)
                ln, la = ln + mine.cumsum(), la + theirs.cumsum()
            seconds = cost.seconds(ln, la)
            if own and not ln[0]:
                seconds *= ln > 0  # nothing before the first of its phase
            total += seconds
        return total

    def step_seconds(self, work: StepComposition) -> float:
        new = int(work.prefill_new.sum())
        resident = int(work.prefill_resident.sum())
        return self.batch_seconds(new, work.decode_requests, work.decode_context, new + resident)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        if not n:
            return np.zeros(steps)
        attended = (context + n) + n * np.arange(steps, dtype=np.int64)
        return 0.0 + self.decode.seconds(n, attended)

    @classmethod
    def fit(cls, truth: StepTimeModel) -> BrosLinearModel:
        """Fit each phase by itself, on steps timed by `truth`, with lengths and batch sizes at
        powers of two (Sec. IV-A). Sizes go up to what an engine can hold; the paper's go up to
        context length x batch size."""
        prefills = list(prefill_steps())
        decodes = list(decode_steps())
        tokens = np.array([work.new_tokens for work in prefills])
        requests = np.array([work.decode_requests for work in decodes])
        contexts = np.array([work.decode_context for work in decodes])
        return cls(
            prefill=PhaseCost.fit(tokens, tokens, _times(truth, prefills)),
            decode=PhaseCost.fit(requests, contexts + requests, _times(truth, decodes)),
        )


@dataclass(frozen=True, config=STRICT)
class SwapTimeModel:
    """t_swap = base + bytes x seconds a byte (BROS Sec. IV-A, fitted to a bandwidth profile). An
    iteration that swaps takes max(t_exec, t_swap): transfers overlap the computation."""

    seconds_per_byte: float = Field(gt=0)
    base_s: float = Field(default=0.0, ge=0)

    def seconds(self, swapped_bytes: float) -> float:
        return self.base_s + swapped_bytes * self.seconds_per_byte if swapped_bytes else 0.0

    @classmethod
    def fit(cls, swapped_bytes: np.ndarray, seconds: np.ndarray) -> SwapTimeModel:
        """From timed transfers, float64[m] each."""
        features = np.column_stack([np.ones(len(seconds)), np.asarray(swapped_bytes, float)])
        (base, slope), _ = relative_nnls(features, np.asarray(seconds, float))
        return cls(seconds_per_byte=float(slope), base_s=float(base))


def _times(truth: StepTimeModel, steps: list[StepComposition]) -> np.ndarray:
    return np.array([truth.step_seconds(work) for work in steps])
