"""What Echo's scheduler believes an iteration takes (Sec. 5.2), asked for one plan edit at a time.

The estimator of the paper is eqs. 6-8 (`twinserve.profiles.forms.echo.EchoModel`), fitted to the
profile; `echo_estimator` makes it. Any other estimator will do: what `--estimator perfect` gives,
or BROS's form if a run was set up for that.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twinserve.policies.errors import PolicyError
from twinserve.policies.parts.estimators import BatchEstimator, ModelEstimator
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.echo import EchoModel
from twinserve.profiles.forms.estimates import step_estimate
from twinserve.profiles.forms.sums import BatchSumsModel
from twinserve.profiles.profile import Profile

Prefills = Sequence[tuple[int, int]]  # (new tokens, resident tokens) of each prompt or chunk


class StepCost(Protocol):
    """Seconds of a batch: `prefills`, and `n` decodes with `total` resident tokens together,
    `longest` of one."""

    def seconds(self, prefills: Prefills, n: int, total: int, longest: int) -> float: ...

    def decode_run(self, n: int, total: int, longest: int, steps: int) -> np.ndarray:
        """float64[steps]: of `n` decodes alone, their contexts growing by one token a step; the
        same floats."""
        ...

    def longest_chunk(
        self,
        prefills: Prefills,
        decodes: tuple[int, int, int],
        resident: int,
        limit: int,
        bound: float,
    ) -> int:
        """Tokens of the longest chunk, at most `limit` (>= 1) on `resident` ones, that keeps the
        batch within `bound` seconds; 0 if none does."""
        ...


class EchoCost:
    """Eqs. 6-8."""

    def __init__(self, model: EchoModel) -> None:
        self.model = model
        # the decodes that were asked last: most edits of a plan leave them as they are
        self._decodes, self._decode_s = (0, 0, 0), 0.0

    def seconds(self, prefills: Prefills, n: int, total: int, longest: int) -> float:
        prefill = self._prefill_seconds(prefills)
        return self._batch_seconds(prefill, (n, total, longest)) if n else prefill

    def _prefill_seconds(self, prefills: Prefills) -> float:
        prefill, of_one = 0.0, self.model.prefill_seconds
        for new, resident in prefills:
            prefill += of_one(new, resident)
        return prefill

    def _decode_seconds(self, decodes: tuple[int, int, int]) -> float:
        if decodes != self._decodes:
            self._decodes, self._decode_s = decodes, self.model.decode_seconds(*decodes)
        return self._decode_s

    def _batch_seconds(self, prefill_s: float, decodes: tuple[int, int, int]) -> float:
        return self.model.batch_seconds(prefill_s, self._decode_seconds(decodes))

    def decode_run(self, n: int, total: int, longest: int, steps: int) -> np.ndarray:
        return self.model.decode_run_seconds(n, total, longest, steps)

    def longest_chunk(
        self,
        prefills: Prefills,
        decodes: tuple[int, int, int],
        resident: int,
        limit: int,
        bound: float,
    ) -> int:
        """The time of both solved for the prefill time that is left, then eq. 6 for the length."""
        model, n = self.model, decodes[0]
        decode = self._batch_seconds(0.0, decodes) if n else 0.0
        if bound < decode:
            # as printed, eq. 8 may say that a short chunk makes a batch of decodes shorter
            return 0
        spent = self._prefill_seconds(prefills)
        left = model.prefill_within(bound, decode) - spent
        if left <= 0.0:
            return 0
        # of eq. 6 at the chunk's end
        end = left + model.prefill_seconds(resident) if resident else left
        if end < model.c:
            return 0
        a, b = model.alpha, model.beta
        # the stable root of a x^2 + b x = end
        length = 2.0 * end / (b + math.sqrt(b * b + 4.0 * a * end)) if a or b else resident + limit
        chunk = int(min(limit, length - resident))
        while chunk > 0:
            prefill = spent + model.prefill_seconds(chunk, resident)
            if (self._batch_seconds(prefill, decodes) if n else prefill) <= bound:
                break
            chunk -= 1  # rounding
        return max(chunk, 0)


class ModelCost:
    """Any other model."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model

    def seconds(self, prefills: Prefills, n: int, total: int, longest: int) -> float:
        if not n and not prefills:
            return 0.0
        new = np.array([p[0] for p in prefills], np.int64)
        resident = np.array([p[1] for p in prefills], np.int64)
        return float(self.model.step_seconds(StepComposition(n, total, longest, new, resident)))

    def decode_run(self, n: int, total: int, longest: int, steps: int) -> np.ndarray:
        return self.model.decode_run_seconds(n, total, longest, steps) if n else np.zeros(steps)

    def longest_chunk(
        self,
        prefills: Prefills,
        decodes: tuple[int, int, int],
        resident: int,
        limit: int,
        bound: float,
    ) -> int:
        """By false position, as a longer chunk takes no less time; by bisection if that is too
        slow."""

        def takes(chunk: int) -> float:
            return self.seconds([*prefills, (chunk, resident)], *decodes)

        fits, fails = 0, limit
        least, most = self.seconds(prefills, *decodes), takes(limit)
        if most <= bound:
            return limit
        if least > bound:
            return 0
        slow = 0
        while (width := fails - fits) > 1:
            part = 0.5 if slow > 2 else (bound - least) / (most - least)
            chunk = min(max(fits + int(width * part), fits + 1), fails - 1)
            seconds = takes(chunk)
            if seconds <= bound:
                fits, least = chunk, seconds
            else:
                fails, most = chunk, seconds
            slow = slow + 1 if slow < 3 and 2 * (fails - fits) > width else 0
        return fits


class SumsCost(ModelCost):
    """The same numbers without an array for each question: a batch by its sums."""

    model: BatchSumsModel

    def seconds(self, prefills: Prefills, n: int, total: int, longest: int) -> float:
        if not n and not prefills:
            return 0.0
        return self.model.seconds(*self._sums(prefills), total + n, n)

    @staticmethod
    def _sums(prefills: Prefills) -> tuple[int, int]:
        """Tokens of the prompts and their differences of squares."""
        new = squares = 0
        for tokens, resident in prefills:
            new, squares = new + tokens, squares + tokens * (tokens + 2 * resident)
        return new, squares

    def longest_chunk(
        self,
        prefills: Prefills,
        decodes: tuple[int, int, int],
        resident: int,
        limit: int,
        bound: float,
    ) -> int:
        """By the root of a quadratic, and what rounding makes of that."""
        model, (n, total, _) = self.model, decodes
        new, squares = self._sums(prefills)

        def takes(chunk: int) -> float:
            more = squares + chunk * (chunk + 2 * resident)
            return model.seconds(new + chunk, more, total + n, n)

        if takes(limit) <= bound:
            return limit
        least = takes(0) if n or prefills else model.base
        if least > bound:
            return 0
        left, slope = bound - least, model.beta + 2.0 * model.alpha * resident
        steep = slope + math.sqrt(slope * slope + 4.0 * model.alpha * left)
        chunk = min(int(2.0 * left / steep), limit - 1) if steep else 0
        while chunk and takes(chunk) > bound:
            chunk -= 1
        while chunk + 1 < limit and takes(chunk + 1) <= bound:
            chunk += 1
        return chunk


class Unasked:
    """For plans that neither an SLO nor a reward decides: nothing takes time."""

    def seconds(self, prefills: Prefills, n: int, total: int, longest: int) -> float:
        return 0.0

    def decode_run(self, n: int, total: int, longest: int, steps: int) -> np.ndarray:
        return np.zeros(steps)

    def longest_chunk(
        self,
        prefills: Prefills,
        decodes: tuple[int, int, int],
        resident: int,
        limit: int,
        bound: float,
    ) -> int:
        return limit


def echo_estimator(profile: Profile, truth: StepTimeModel) -> ModelEstimator:
    """Eqs. 6-8 fitted to what `truth` takes, the paper's micro-benchmark. Eq. 7 gets a constant: as
    printed it has none, and says that a few short decodes take no time; the weights are read all
    the same."""
    return ModelEstimator(step_estimate("echo", profile, truth), profile.swap_model())


def step_cost(estimator: BatchEstimator | None, policy: str) -> StepCost:
    """The cost that an estimator stands for. Raises PolicyError if there is none."""
    if estimator is None:
        raise PolicyError(
            f"policy {policy!r} plans with step times but has no estimator; set slo_aware=false "
            "and kv_aware=false"
        )
    model = estimator.model
    if isinstance(model, EchoModel):
        return EchoCost(model)
    return SumsCost(model) if isinstance(model, BatchSumsModel) else ModelCost(model)
