"""A batch by its sums: what it computes, what it attends to, how many decode. One constant.

    T = base + alpha sum(end^2 - resident^2) + beta sum(new) + gamma sum(context) + delta n

The sums of eq. 6 over the prompts and chunks (`resident` tokens before, `end` after), those of the
contexts that decode, and their number n. Weights are read once whatever a batch holds, which is
`base`, and attention of prompts and decodes adds up: Echo's eq. 7 has no sum of contexts, and its
eq. 8 hides at least a part of the shorter phase. Ours, not a published form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.sampling import (
    MAX_CONTEXT_TOKENS,
    MAX_SHARED_TOKENS,
    decode_steps,
    mixed_steps,
    powers_of_two,
    relative_nnls,
)


@dataclass(frozen=True)
class BatchSumsModel(StepTimeModel):
    """Coefficients in seconds and tokens; `error`: mean absolute relative fit error."""

    base: float
    alpha: float
    beta: float
    gamma: float
    delta: float
    error: float | None = None

    def step_seconds(self, work: StepComposition) -> float:
        return self.seconds(*_sums(work))

    def seconds(self, new: int, squares: int, context: int, n: int) -> float:
        """Of a batch by its sums, as `_sums` has them."""
        if not new and not n:
            return 0.0
        prompts = self.alpha * squares + self.beta * new
        return self.base + prompts + (self.gamma * context + self.delta * n)

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        if not n:
            return np.zeros(steps)
        grown = (context + n) + n * np.arange(steps, dtype=np.int64)
        return self.base + 0.0 + (self.gamma * grown + self.delta * n)

    @classmethod
    def fit(cls, truth: StepTimeModel, longest: int = MAX_CONTEXT_TOKENS) -> BatchSumsModel:
        """To steps timed by `truth`: prompts alone, decodes alone, and both, up to
        MAX_SHARED_TOKENS tokens attended to together, `longest` by one request."""
        decodes = list(decode_steps(True, longest, MAX_SHARED_TOKENS))
        fresh = [
            StepComposition(prefill_new=np.array([n]), prefill_resident=np.array([0]))
            for n in powers_of_two(longest, first=16)
        ]
        steps = [*fresh, *decodes, *mixed_steps(decodes[::2], longest)]
        sums = np.array([_sums(work) for work in steps], float)
        seconds = np.array([truth.step_seconds(work) for work in steps])
        found, error = relative_nnls(np.column_stack([np.ones(len(steps)), sums]), seconds)
        base, beta, alpha, gamma, delta = found.tolist()
        return cls(base, alpha, beta, gamma, delta, error)


def _sums(work: StepComposition) -> tuple[int, int, int, int]:
    """Tokens of prompts, differences of squares, contexts of decodes with the tokens that they
    compute, decodes."""
    new = squares = 0
    for tokens, resident in zip(
        work.prefill_new.tolist(), work.prefill_resident.tolist(), strict=True
    ):
        new += tokens
        squares += tokens * (tokens + 2 * resident)
    n = work.decode_requests
    return new, squares, work.decode_context + n, n
