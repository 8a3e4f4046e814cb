"""The step time that `chunk=fit` believes: one form for the whole step. A prompt costs the same
however it is cut, except for the free first tokens of a step.

    seconds = beta + alpha max(tokens - knee, 0) + kappa sum of n (n + 2 resident)
              + delta0 decodes + delta1 context

beta is paid once a step; BROS's printed form pays one for each present phase. n (n + 2 resident) is
the part of (resident + n)^2 that a chunk of n tokens adds. The first `knee` tokens of a step are
free, since the weights are read in any case. Fitted to steps that mix prompts and decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from twinserve.policies.parts.estimators import BatchEstimator, LinearEstimator, ModelEstimator
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.profile import Profile
from twinserve.profiles.sampling import powers_of_two, relative_nnls

_KNEES = (0, 32, 64, 96, 128, 192, 256, 384)  # tokens
_KEPT = 65_536  # costs of single prompts
_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class Load:
    """A step while it is composed: `decodes` with `context` resident tokens together, `longest` of
    one; chunks as (new, resident) tokens, `new` of all of them, and `pairs`: the sum of n (n + 2
    resident)."""

    decodes: int = 0
    context: int = 0
    longest: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    new: int = 0
    pairs: int = 0

    def add_decodes(self, resident: np.ndarray) -> None:
        """int64[n], tokens."""
        if len(resident):
            lengths = resident.tolist()
            self.decodes += len(lengths)
            self.context += sum(lengths)
            self.longest = max(self.longest, max(lengths))

    def add_chunk(self, new: int, resident: int) -> None:
        self.chunks.append((new, resident))
        self.new += new
        self.pairs += new * (new + 2 * resident)

    @property
    def tokens(self) -> int:
        return self.decodes + self.new

    def composition(self, new: int = 0, resident: int = 0) -> StepComposition:
        """Of the step, with a further chunk where `new` is not 0."""
        chunks = [*self.chunks, (new, resident)] if new else self.chunks
        if not chunks:
            return StepComposition(self.decodes, self.context, self.longest, _NONE, _NONE)
        columns = np.array(chunks, np.int64)
        return StepComposition(
            self.decodes, self.context, self.longest, columns[:, 0], columns[:, 1]
        )


@dataclass(frozen=True)
class FitModel(StepTimeModel):
    """The form above; seconds, a token, a token squared, a request. error: mean absolute relative
    error of the fit."""

    beta: float
    alpha: float
    knee: int
    kappa: float
    delta0: float
    delta1: float
    error: float | None = None

    def total(self, tokens, pairs, decodes, context):
        """Seconds; numbers or arrays. tokens: of prompts and decodes; context: resident tokens of
        the decodes."""
        free = np.minimum(tokens, self.knee)
        work = self.beta + self.alpha * (tokens - free) + self.kappa * pairs
        return (work + self.delta0 * decodes) + self.delta1 * (context + decodes)

    def step_seconds(self, work: StepComposition) -> float:
        new, n = work.prefill_new, work.decode_requests
        tokens = n + int(new.sum())
        pairs = int((new * (new + 2 * work.prefill_resident)).sum())
        return float(self.total(tokens, pairs, n, work.decode_context))

    def decode_run_seconds(self, n: int, context: int, context_max: int, steps: int) -> np.ndarray:
        return self.total(n, 0, n, context + n * np.arange(steps, dtype=np.int64))

    @classmethod
    def fit(cls, truth: StepTimeModel) -> FitModel:
        """The knee with the least error, and non-negative coefficients on relative errors."""
        works = list(_steps())
        seconds = np.array([truth.step_seconds(work) for work in works])
        columns = np.array([_features(work) for work in works], float)
        found = []
        for knee in _KNEES:
            features = columns.copy()
            features[:, 1] = np.maximum(features[:, 1] - knee, 0)
            found.append((*relative_nnls(features, seconds), knee))
        (beta, alpha, kappa, delta0, delta1), error, knee = min(found, key=lambda one: one[1])
        coefficients = dict(beta=beta, alpha=alpha, kappa=kappa, delta0=delta0, delta1=delta1)
        return cls(knee=knee, error=error, **{k: float(x) for k, x in coefficients.items()})


def _steps() -> Iterator[StepComposition]:
    """Chunks of up to 8,192 tokens, fresh and on resident ones, with up to 128 decodes."""
    for n in (0, *powers_of_two(128)):
        for context in powers_of_two(2048, first=128) if n else (0,):
            decodes = (n, n * context, context)
            if n:
                yield StepComposition(*decodes, _NONE, _NONE)
            for new in powers_of_two(8192, first=16):
                for resident in (0, 2048, 16384) if n in (0, 16) and new >= 256 else (0,):
                    yield StepComposition(*decodes, np.array([new]), np.array([resident]))


def _features(work: StepComposition) -> tuple[float, ...]:
    new, n = work.prefill_new, work.decode_requests
    pairs = (new * (new + 2 * work.prefill_resident)).sum()
    return 1, n + new.sum(), pairs, n, work.decode_context + n


@dataclass(frozen=True)
class FitEstimator(ModelEstimator):
    """The form above for a profile; printed: BROS's own, for `fit_estimator=printed`."""

    form: FitModel
    printed: LinearEstimator


def fit_estimator(profile: Profile, truth: StepTimeModel) -> FitEstimator:
    """Both forms, fitted to what `truth` takes."""
    swap = profile.swap_model()
    printed = LinearEstimator(BrosLinearModel.fit(truth), swap)
    form = FitModel.fit(truth)
    return FitEstimator(form, swap, form, printed)


class StepCost(Protocol):
    """Estimated seconds of a step while it is composed."""

    @property
    def model(self) -> StepTimeModel: ...

    def seconds(self, load: Load) -> float: ...

    def chunk(self, load: Load, resident: int, limit: int, bound: float) -> int:
        """Tokens of the longest chunk, at most `limit`, on `resident` ones that keeps the step
        within `bound` seconds; 0 if none does."""
        ...

    def decodes(self, load: Load, resident: np.ndarray, bound: float) -> int:
        """How many of further decodes, from the front, keep the step within `bound` seconds.
        int64[n], tokens."""
        ...

    def own(self, left: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """float64[n]: what prompts still add to steps at most, by themselves."""
        ...


@dataclass(frozen=True)
class FitCost:
    """In closed form."""

    model: FitModel

    def seconds(self, load: Load) -> float:
        return self._total(load.decodes + load.new, load.pairs, load.decodes, load.context)

    def _total(self, tokens: int, pairs: int, n: int, context: int) -> float:
        """`FitModel.total` of one step: numpy takes ten times as long for a number."""
        m = self.model
        free = tokens if tokens < m.knee else m.knee
        work = m.beta + m.alpha * (tokens - free) + m.kappa * pairs
        return (work + m.delta0 * n) + m.delta1 * (context + n)

    def chunk(self, load: Load, resident: int, limit: int, bound: float) -> int:
        m, left = self.model, bound - self.seconds(load)
        if left <= 0.0 or limit <= 0:
            return 0
        if left == math.inf:
            return limit
        free = max(m.knee - load.tokens, 0)
        b = 2.0 * m.kappa * resident
        # alpha (x - free) + kappa x (x + 2 resident) = left, where that is beyond the free tokens
        x = _root(m.kappa, m.alpha + b, left + m.alpha * free)
        if x < free:
            x = min(float(free), _root(m.kappa, b, left))
        found = limit if x >= limit else int(x)
        while found > 0 and self._with(load, found, resident) > bound:
            found -= 1  # rounding
        return found

    def _with(self, load: Load, new: int, resident: int) -> float:
        pairs = load.pairs + new * (new + 2 * resident)
        return self._total(load.tokens + new, pairs, load.decodes, load.context)

    def decodes(self, load: Load, resident: np.ndarray, bound: float) -> int:
        n = len(resident)
        context = load.context + sum(resident.tolist())
        if self._total(load.tokens + n, load.pairs, load.decodes + n, context) <= bound:
            return n
        count = np.arange(1, n + 1)
        seconds = self.model.total(
            load.tokens + count, load.pairs, load.decodes + count, load.context + resident.cumsum()
        )
        return int(seconds.searchsorted(bound, side="right"))

    def own(self, left: np.ndarray, resident: np.ndarray) -> np.ndarray:
        return self.model.alpha * left + self.model.kappa * (left * (left + 2 * resident))


def _root(a: float, b: float, c: float) -> float:
    """Of a x^2 + b x = c, stable; c >= 0. Infinite where nothing costs."""
    below = b + math.sqrt(b * b + 4.0 * a * c)
    return 2.0 * c / below if below > 0.0 else math.inf


class AnyCost:
    """Of any other model, by bisection: a longer step takes no less time."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self._own: dict[tuple[int, int], float] = {}  # of prompts asked about before

    def seconds(self, load: Load) -> float:
        return float(self.model.step_seconds(load.composition())) if load.tokens else 0.0

    def chunk(self, load: Load, resident: int, limit: int, bound: float) -> int:
        def fits(new: int) -> bool:
            return self.model.step_seconds(load.composition(new, resident)) <= bound

        return _most(max(limit, 0), fits)

    def decodes(self, load: Load, resident: np.ndarray, bound: float) -> int:
        context, longest = resident.cumsum().tolist(), np.maximum.accumulate(resident).tolist()

        def fits(n: int) -> bool:
            more = Load(load.decodes + n, load.context + context[n - 1])
            more.longest, more.chunks = max(load.longest, longest[n - 1]), load.chunks
            return self.model.step_seconds(more.composition()) <= bound

        return _most(len(resident), fits)

    def own(self, left: np.ndarray, resident: np.ndarray) -> np.ndarray:
        pairs = zip(left.tolist(), resident.tolist(), strict=True)
        return np.array([self._alone(pair) for pair in pairs], float)

    def _alone(self, prompt: tuple[int, int]) -> float:
        """Seconds of one prompt's rest, less those of a step that computes one token."""
        if prompt not in self._own:
            if len(self._own) >= _KEPT:
                self._own.clear()
            new, resident = prompt
            rest, one = (
                self.model.step_seconds(
                    StepComposition(
                        prefill_new=np.array([n]), prefill_resident=np.array([resident])
                    )
                )
                for n in (max(new, 1), 1)
            )
            self._own[prompt] = max(float(rest - one), 0.0)
        return self._own[prompt]


def _most(limit: int, fits) -> int:
    """The largest number up to `limit` that fits, 0 if none does."""
    if limit and fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cost_of(estimator: BatchEstimator, printed: bool) -> StepCost:
    """By the form above, or by whatever else there is to estimate with."""
    if isinstance(estimator, FitEstimator):
        return AnyCost(estimator.printed.model) if printed else FitCost(estimator.form)
    return AnyCost(estimator.model)
