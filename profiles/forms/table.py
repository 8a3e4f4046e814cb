"""A step-time model fitted to measured steps of one engine: what `twinserve calibrate` writes into
a profile.

    T = f(tokens computed) + request_s x requests + context_s x (decode context + decode requests)
        + pair_s x (query, key) pairs of prefills

f is piecewise linear between measured token counts (interpolated linearly, not in logarithms, and
extended with its last slope), and never falls. Everything is linear in its coefficients, so the fit
is one non-negative least squares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.sampling import relative_nnls
from twinserve.profiles.specs import STRICT, ProfileError

DEFAULT_KNOTS = (1, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True, config=STRICT)
class TableModel(StepTimeModel):
    """`tokens` (strictly rising, two or more) and `token_s` (seconds, never falling) are the points
    of f."""

    tokens: tuple[int, ...] = Field(min_length=2)
    token_s: tuple[float, ...] = Field(min_length=2)
    request_s: float = Field(ge=0)
    context_s: float = Field(ge=0)
    pair_s: float = Field(ge=0)
    fit_error: float | None = None
    form: Literal["table"] = "table"

    @model_validator(mode="after")
    def _ordered(self):
        if len(self.tokens) != len(self.token_s):
            raise ValueError(f"{len(self.tokens)} token counts but {len(self.token_s)} times")
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError("tokens must rise strictly")
        if any(b < a for a, b in zip(self.token_s, self.token_s[1:], strict=False)):
            raise ValueError("token_s must not fall")
        return self

    def step_seconds(self, work: StepComposition) -> float:
        n = work.decode_requests
        tokens, rows, pairs = n, n, 0.0
        if len(work.prefill_new):
            tokens, rows = work.new_tokens, n + len(work.prefill_new)
            pairs = _pairs(work)
        return self._without_context(tokens, rows, pairs) + self.context_s * (
            work.decode_context + n
        )

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        attended = (context + n) + n * np.arange(steps, dtype=np.int64)
        return self._without_context(n, n, 0.0) + self.context_s * attended

    def _without_context(self, tokens: int, rows: int, pairs: float) -> float:
        return self.tokens_seconds(tokens) + self.request_s * rows + self.pair_s * pairs

    def tokens_seconds(self, tokens: int) -> float:
        """f(tokens); flat below the first point."""
        if tokens <= self.tokens[0]:
            return self.token_s[0]
        i = min(bisect_right(self.tokens, tokens), len(self.tokens) - 1)
        left, right = self.tokens[i - 1], self.tokens[i]
        slope = (self.token_s[i] - self.token_s[i - 1]) / (right - left)
        return self.token_s[i - 1] + slope * (tokens - left)

    @classmethod
    def fit(
        cls,
        steps: Sequence[StepComposition],
        seconds: Sequence[float],
        knots: Sequence[int] = DEFAULT_KNOTS,
    ) -> TableModel:
        """From measured steps. Knots past the largest measured step are dropped; ProfileError if
        two do not remain, or if there are fewer steps than coefficients."""
        tokens = np.array([work.new_tokens for work in steps])
        points = [k for k in knots if len(steps) and k <= tokens.max()]
        if len(points) < 2:
            raise ProfileError(
                "a table needs steps of two token counts or more; measure larger steps"
            )
        if len(steps) < len(points) + 3:
            raise ProfileError(f"{len(steps)} steps cannot fix {len(points) + 3} coefficients")
        rows = np.array([work.decode_requests + len(work.prefill_new) for work in steps])
        context = np.array([work.decode_context + work.decode_requests for work in steps])
        pairs = np.array([_pairs(work) for work in steps])
        # Ramps from knot to knot: non-negative heights make f rise. The last ramp goes on past its
        # end.
        edges = np.array(points, float)
        ramps = (tokens[:, None] - edges[:-1]) / np.diff(edges)
        ramps[:, :-1] = np.minimum(ramps[:, :-1], 1.0)
        ramps = np.maximum(ramps, 0.0)
        features = np.column_stack([np.ones(len(steps)), ramps, rows, context, pairs])
        found, error = relative_nnls(features, np.asarray(seconds, float))
        heights = np.cumsum(found[: len(points)])
        request_s, context_s, pair_s = found[len(points) :].tolist()
        return cls(
            tuple(points), tuple(heights.tolist()), request_s, context_s, pair_s, fit_error=error
        )


def _pairs(work: StepComposition) -> float:
    new, resident = work.prefill_new, work.prefill_resident
    return float((new * (2 * resident + new + 1)).sum()) / 2
