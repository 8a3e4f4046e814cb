"""What a policy believes a batch will take. A policy's knowledge, not the simulator's truth.

A batch is given as columns over its requests in order: `is_prefill` bool[n], `new` int64[n] tokens to compute, `context`
int64[n] resident and new tokens together, `swapped` int64[n] bytes that must come back from the host first. Seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..profiles.bros import BrosLinearModel, SwapTimeModel
from ..profiles.composition import StepComposition, StepTimeModel


@dataclass(slots=True)
class Batch:
    """Requests in order, as an estimator sees them. Never changed; not frozen, because a policy makes many in each step
    and a frozen one takes four times as long to make."""

    rows: np.ndarray
    is_prefill: np.ndarray
    new: np.ndarray
    context: np.ndarray
    swapped: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen) -> Batch:
        return Batch(
            self.rows[chosen], self.is_prefill[chosen], self.new[chosen], self.context[chosen], self.swapped[chosen]
        )

    def __add__(self, other: Batch) -> Batch:
        return Batch(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.is_prefill, other.is_prefill]),
            np.concatenate([self.new, other.new]),
            np.concatenate([self.context, other.context]),
            np.concatenate([self.swapped, other.swapped]),
        )


class BatchEstimator(Protocol):
    def prefixes(self, batch: Batch) -> np.ndarray:
        """float64[n]: seconds of the batches of the first 1, 2, .. n requests."""
        ...

    def seconds(self, batch: Batch) -> float:
        """Seconds of the whole batch, transfers overlapped."""
        ...

    def fitting(self, batch: Batch, bound: float) -> int:
        """How many requests from the front make a batch of at most `bound` seconds."""
        ...

    def decode_run(self, batch: Batch, steps: int) -> np.ndarray:
        """float64[steps]: `seconds` of a batch of decodes at successive steps, its contexts growing by one a step."""
        ...


@dataclass(frozen=True)
class LinearEstimator:
    """BROS's form: a linear model a phase, and max(execution, swap) (IEEE version, Sec. IV-A)."""

    model: BrosLinearModel
    swap: SwapTimeModel

    def prefixes(self, batch: Batch) -> np.ndarray:
        costs = self.model.prefix_costs(batch.is_prefill, batch.new, batch.context)
        if np.count_nonzero(batch.swapped):
            swapped = np.cumsum(batch.swapped)
            swap_s = np.where(swapped > 0, self.swap.base_s + swapped * self.swap.seconds_per_byte, 0.0)
            costs = np.maximum(costs, swap_s)
        return costs

    def seconds(self, batch: Batch) -> float:
        decode_requests, prefill, attended = len(batch), 0, 0
        total = sum(batch.context.tolist())
        prefills = np.count_nonzero(batch.is_prefill)
        if prefills:
            prefill = sum(batch.new[batch.is_prefill].tolist())
            attended = sum(batch.context[batch.is_prefill].tolist())
            decode_requests -= prefills
        cost = self.model.batch_seconds(prefill, decode_requests, total - attended - decode_requests, attended)
        return max(cost, self.swap.seconds(sum(batch.swapped.tolist())))

    def fitting(self, batch: Batch, bound: float) -> int:
        if not len(batch):
            return 0
        return int(self.prefixes(batch).searchsorted(bound, side="right"))

    def decode_run(self, batch: Batch, steps: int) -> np.ndarray:
        n = len(batch)
        return 0.0 + self.model.decode.seconds(n, int(batch.context.sum()) + n * np.arange(steps))


@dataclass(frozen=True)
class PerfectEstimator:
    """The simulator's own model (`--estimator perfect`): what a policy would gain from never mispredicting."""

    truth: StepTimeModel
    swap: SwapTimeModel

    def prefixes(self, batch: Batch) -> np.ndarray:
        return np.array([self.seconds(batch[: i + 1]) for i in range(len(batch))])

    def seconds(self, batch: Batch) -> float:
        decode = ~batch.is_prefill
        resident = batch.context - batch.new
        n = int(decode.sum())
        work = StepComposition(
            n,
            int(resident[decode].sum()),
            int(resident[decode].max()) if n else 0,
            batch.new[batch.is_prefill],
            resident[batch.is_prefill],
        )
        return max(self.truth.step_seconds(work), self.swap.seconds(int(batch.swapped.sum())))

    def fitting(self, batch: Batch, bound: float) -> int:
        """By bisection: a longer batch takes no less time."""
        fits, fails = 0, len(batch) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.seconds(batch[:middle]) <= bound:
                fits = middle
            else:
                fails = middle
        return fits

    def decode_run(self, batch: Batch, steps: int) -> np.ndarray:
        resident = batch.context - 1
        return self.truth.decode_run_seconds(len(batch), int(resident.sum()), int(resident.max()), steps)
