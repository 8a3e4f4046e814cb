"""Echo's batch execution time (Sec. 5.2, eqs. 6-8), fitted by micro-benchmark as the paper does.

    eq. 6  T_prefill(l) = max(alpha l^2 + beta l, c)        one prefill of l tokens
    eq. 7  T_decode     = gamma max(L) + delta mean(L)      L: lengths of the decoding requests
    eq. 8  T_batch      = lambda max(T_prefill, T_decode) + (1 - lambda) min(T_prefill, T_decode)

Our choices for open points: several prefills cost the sum of eq. 6; a chunk costs the difference of
eq. 6 at its two ends, with T_prefill(0) = 0, so that chunks add up to the prompt; eq. 8 is used
only when both phases are present. Eq. 7 as printed has neither a constant nor the batch size. A fit
may have more: `constant` adds `decode_base_s`, since weights are read at any length. As attention
reads all contexts, `total` also adds `total_s` for each of their tokens and `request_s` for each
request.

Eq. 8 contradicts the sentence that it models: a mixed batch takes longer than the longer phase and
less than both together. With lambda <= 1, eq. 8 is never above the longer phase. The sentence is

    T_batch = max(T_prefill, T_decode) + mu min(T_prefill, T_decode)       0 <= mu <= 1

A fit has either (`Mixed`); lambda of the printed one is fitted without a bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.sampling import (
    MAX_CONTEXT_TOKENS,
    MAX_SHARED_TOKENS,
    decode_steps,
    mixed_steps,
    powers_of_two,
    relative_nnls,
)
from twinserve.profiles.specs import STRICT

DecodeForm = Literal["printed", "constant", "total"]
Mixed = Literal["sentence", "printed"]
_TERMS = {"printed": 2, "constant": 3, "total": 5}  # of a decode, in the order of the fit


@dataclass(frozen=True, config=STRICT)
class EchoModel(StepTimeModel):
    """Coefficients in seconds and tokens, named as in the paper; mu: of the sentence before eq. 8,
    None: eq. 8 as printed, by `lambda_`; `*_error`: mean absolute relative fit error."""

    alpha: float = Field(ge=0)
    beta: float = Field(ge=0)
    c: float = Field(ge=0)
    gamma: float = Field(ge=0)
    delta: float = Field(ge=0)
    lambda_: float = Field(ge=0)
    decode_base_s: float = Field(default=0.0, ge=0)
    total_s: float = Field(default=0.0, ge=0)
    request_s: float = Field(default=0.0, ge=0)
    mu: float | None = Field(default=None, ge=0, le=1)
    prefill_error: float | None = None
    decode_error: float | None = None
    batch_error: float | None = None
    form: Literal["echo"] = "echo"

    def prefill_seconds(self, tokens: int, resident: int = 0) -> float:
        """Eq. 6 for a prompt, or for a chunk of `tokens` tokens on `resident` ones."""
        return self._whole(resident + tokens) - self._whole(resident)

    def decode_seconds(self, requests, context, context_max):
        """Eq. 7 from totals over resident tokens (the computed one comes on top); numbers or
        arrays."""
        together = context + requests
        printed = self.gamma * (context_max + 1) + self.delta * (together / requests)
        return printed + self.decode_base_s + (self.total_s * together + self.request_s * requests)

    def batch_seconds(self, prefill_s: float, decode_s: float) -> float:
        """Eq. 8, or the sentence before it; a phase of zero seconds counts as absent."""
        if not prefill_s or not decode_s:
            return prefill_s + decode_s
        longer, shorter = max(prefill_s, decode_s), min(prefill_s, decode_s)
        if self.mu is not None:
            return longer + self.mu * shorter
        return self.lambda_ * longer + (1.0 - self.lambda_) * shorter

    def prefill_within(self, bound_s: float, decode_s: float) -> float:
        """Seconds of prefill with which a batch takes bound_s, at least decode_s."""
        left = bound_s - decode_s
        if not decode_s:
            return bound_s
        if self.mu is None:
            return decode_s + left / self.lambda_ if self.lambda_ else bound_s
        hidden = self.mu * decode_s  # what a prefill as long as the decodes adds to them
        return left / self.mu if left < hidden else bound_s - hidden

    def step_seconds(self, work: StepComposition) -> float:
        prefill = 0.0
        for new, resident in zip(
            work.prefill_new.tolist(), work.prefill_resident.tolist(), strict=True
        ):
            prefill += self.prefill_seconds(new, resident)
        n = work.decode_requests
        if not n:
            return prefill
        return self.batch_seconds(
            prefill, self.decode_seconds(n, work.decode_context, work.decode_context_max)
        )

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        if not n:
            return np.zeros(steps)
        grown = np.arange(steps, dtype=np.int64)
        return 0.0 + self.decode_seconds(n, context + n * grown, context_max + grown)

    def _whole(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        return max(self.alpha * (tokens * tokens) + self.beta * tokens, self.c)

    @classmethod
    def fit(
        cls,
        truth: StepTimeModel,
        *,
        decode: DecodeForm = "printed",
        mixed: Mixed = "printed",
        longest: int = MAX_CONTEXT_TOKENS,
    ) -> EchoModel:
        """Fit eq. 6, then eq. 7, then eq. 8 on mixtures of both, to steps timed by `truth`.

        longest  tokens of a request, at most: what KV memory holds. Requests that share a prefix
                 attend to up to MAX_SHARED_TOKENS together
        """
        prefill = _fit_prefill(truth, longest)
        decodes = list(decode_steps(True, longest, MAX_SHARED_TOKENS))
        seconds = np.array([truth.step_seconds(work) for work in decodes])
        n, total, largest = (
            np.array([getattr(work, name) for work in decodes], float)
            for name in ("decode_requests", "decode_context", "decode_context_max")
        )
        columns = {
            "gamma": largest + 1,
            "delta": total / n + 1,
            "decode_base_s": np.ones(len(n)),
            "total_s": total + n,
            "request_s": n,
        }
        names = list(columns)[: _TERMS[decode]]
        fitted, error = relative_nnls(np.column_stack([columns[name] for name in names]), seconds)
        terms = dict(zip(names, fitted.tolist(), strict=True))
        parts = cls(**prefill, **terms, decode_error=error, lambda_=1.0)
        found, batch_error = _fit_mixed(parts, truth, decodes, longest, mixed)
        return replace(parts, **found, batch_error=batch_error)


def _fit_prefill(truth: StepTimeModel, longest: int) -> dict[str, float]:
    """Return alpha, beta, c: c is the time of the shortest prompt; the rest is fitted to longer
    times."""
    lengths = np.array(powers_of_two(longest, first=16))
    seconds = np.array([truth.step_seconds(_prompt(n)) for n in lengths.tolist()])
    floor = float(seconds[0])
    busy = seconds > 1.1 * floor
    squares = lengths.astype(float) ** 2
    (alpha, beta), _ = relative_nnls(
        np.column_stack([squares, lengths.astype(float)])[busy], seconds[busy]
    )
    predicted = np.maximum(alpha * squares + beta * lengths, floor)
    error = float(np.abs(predicted / seconds - 1.0).mean())
    return {"alpha": float(alpha), "beta": float(beta), "c": floor, "prefill_error": error}


def _fit_mixed(
    parts: EchoModel,
    truth: StepTimeModel,
    decodes: list[StepComposition],
    longest: int,
    mixed: Mixed,
) -> tuple[dict[str, float], float]:
    """lambda or mu, and the error: one linear coefficient on relative errors. Chunks are fresh
    ones, and the ends of long prompts."""
    longer, shorter, seconds = [], [], []
    for both in mixed_steps(decodes[::5], longest):
        new, resident = int(both.prefill_new[0]), int(both.prefill_resident[0])
        decode_s = parts.decode_seconds(
            both.decode_requests, both.decode_context, both.decode_context_max
        )
        phases = (parts.prefill_seconds(new, resident), decode_s)
        longer.append(max(phases))
        shorter.append(min(phases))
        seconds.append(truth.step_seconds(both))
    high, low, measured = np.array(longer), np.array(shorter), np.array(seconds)
    # measured = start + coefficient * term
    start, term = (high, low) if mixed == "sentence" else (low, high - low)
    slope, target = term / measured, (measured - start) / measured
    coefficient = max(0.0, float(slope @ target / (slope @ slope)))
    if mixed == "sentence":
        coefficient = min(coefficient, 1.0)
    error = float(np.abs((start + coefficient * term) / measured - 1.0).mean())
    return {"mu" if mixed == "sentence" else "lambda_": coefficient}, error


def _prompt(tokens: int) -> StepComposition:
    return StepComposition(prefill_new=np.array([tokens]), prefill_resident=np.array([0]))
