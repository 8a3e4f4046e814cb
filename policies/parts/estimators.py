"""A policy's estimate of a batch's time. A policy's knowledge, not the simulator's truth.

A batch is given as columns over its requests in order: `is_prefill` bool[n]; `new` int64[n] tokens
to compute; `context` int64[n] resident and new tokens together; `swapped` int64[n] bytes that must
come back from the host first. Seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel, SwapTimeModel


@dataclass(slots=True)
class Batch:
    """Requests in order, as an estimator sees them. Never changed; not frozen, because a policy
    makes many in each step and a frozen one takes four times as long to make."""

    rows: np.ndarray
    is_prefill: np.ndarray
    new: np.ndarray
    context: np.ndarray
    swapped: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen) -> Batch:
        return Batch(
            self.rows[chosen],
            self.is_prefill[chosen],
            self.new[chosen],
            self.context[chosen],
            self.swapped[chosen],
        )

    def __add__(self, other: Batch) -> Batch:
        if not len(self.rows):
            return other
        if not len(other.rows):
            return self
        return Batch(
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.is_prefill, other.is_prefill]),
            np.concatenate([self.new, other.new]),
            np.concatenate([self.context, other.context]),
            np.concatenate([self.swapped, other.swapped]),
        )


class BatchEstimator(Protocol):
    """`behind`: a batch that runs in the same step, before the requests asked about; None:
    no batch.

    model  of steps without transfers, by their composition
    swap   of transfers
    """

    @property
    def model(self) -> StepTimeModel: ...

    @property
    def swap(self) -> SwapTimeModel: ...

    def prefixes(self, batch: Batch, behind: Batch | None = None) -> np.ndarray:
        """float64[n]: seconds of the batches of `behind` and the first 1, 2, .. n requests."""
        ...

    def seconds(self, batch: Batch, behind: Batch | None = None) -> float:
        """Seconds of both, transfers overlapped."""
        ...

    def fitting(self, batch: Batch, bound: float, behind: Batch | None = None) -> int:
        """How many requests from the front of `batch` make a batch of at most `bound` seconds with
        those of `behind`."""
        ...

    def decodes_within(self, batch: Batch, bound: float, limit: int) -> int:
        """Return for how many steps after this one, at most `limit`, a batch of decodes takes at
        most `bound` seconds a step. Its contexts grow by one token each time."""
        ...


@dataclass(frozen=True)
class LinearEstimator:
    """BROS's form: a linear model a phase, and max(execution, swap) (IEEE version, Sec. IV-A)."""

    model: BrosLinearModel
    swap: SwapTimeModel

    def prefixes(self, batch: Batch, behind: Batch | None = None) -> np.ndarray:
        before = _NOBODY if behind is None else _totals(behind)
        costs = self.model.prefix_costs(batch.is_prefill, batch.new, batch.context, before[:4])
        if before[4] or np.count_nonzero(batch.swapped):
            swapped = before[4] + batch.swapped.cumsum()
            swap_s = np.where(
                swapped > 0, self.swap.base_s + swapped * self.swap.seconds_per_byte, 0.0
            )
            costs = np.maximum(costs, swap_s)
        return costs

    def seconds(self, batch: Batch, behind: Batch | None = None) -> float:
        prefill, attended, decodes, context, swapped = _totals(batch)
        if behind is not None:
            before = _totals(behind)
            prefill, attended = prefill + before[0], attended + before[1]
            decodes, context, swapped = (
                decodes + before[2],
                context + before[3],
                swapped + before[4],
            )
        cost = self.model.batch_seconds(prefill, decodes, context - decodes, attended)
        return max(cost, self.swap.seconds(swapped)) if swapped else cost

    def fitting(self, batch: Batch, bound: float, behind: Batch | None = None) -> int:
        if not len(batch):
            return 0
        return int(self.prefixes(batch, behind).searchsorted(bound, side="right"))

    def decodes_within(self, batch: Batch, bound: float, limit: int) -> int:
        n, context, cost = len(batch), sum(batch.context.tolist()), self.model.decode
        if cost.seconds(n, context + n * limit) <= bound:  # the last step is the longest
            return limit
        later = cost.seconds(n, context + n * np.arange(1, limit + 1))
        return int(later.searchsorted(bound, side="right"))


_NOBODY = (0, 0, 0, 0, 0)


def _totals(batch: Batch) -> tuple[int, int, int, int, int]:
    """Of its prefills tokens computed and attended to, of its decodes requests and tokens attended
    to; bytes to be swapped in."""
    return kernels.totals(batch.is_prefill, batch.new, batch.context, batch.swapped)


@dataclass(frozen=True)
class ModelEstimator:
    """Any step-time model's. The simulator's own (`--estimator perfect`) shows what a policy would
    gain from never mispredicting."""

    model: StepTimeModel
    swap: SwapTimeModel

    def prefixes(self, batch: Batch, behind: Batch | None = None) -> np.ndarray:
        everyone = batch if behind is None else behind + batch
        before, prefill = len(everyone) - len(batch), everyone.is_prefill
        resident = everyone.context - everyone.new
        decoding = np.where(prefill, 0, resident)
        new, old = everyone.new[prefill], resident[prefill]
        columns = [(~prefill).cumsum(), decoding.cumsum(), np.maximum.accumulate(decoding)]
        columns += [prefill.cumsum(), everyone.swapped.cumsum()]
        return np.array(
            [
                max(
                    self.model.step_seconds(StepComposition(n, context, longest, new[:p], old[:p])),
                    self.swap.seconds(swapped),
                )
                for n, context, longest, p, swapped in zip(
                    *(c[before:].tolist() for c in columns), strict=True
                )
            ]
        )

    def seconds(self, batch: Batch, behind: Batch | None = None) -> float:
        if behind is not None:
            batch = behind + batch
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
        return max(self.model.step_seconds(work), self.swap.seconds(int(batch.swapped.sum())))

    def fitting(self, batch: Batch, bound: float, behind: Batch | None = None) -> int:
        """By bisection: a longer batch takes no less time."""
        fits, fails = 0, len(batch) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.seconds(batch[:middle], behind) <= bound:
                fits = middle
            else:
                fails = middle
        return fits

    def decodes_within(self, batch: Batch, bound: float, limit: int) -> int:
        resident = batch.context - 1
        run = self.model.decode_run_seconds(
            len(batch), int(resident.sum()), int(resident.max()), limit + 1
        )
        return int(run[1:].searchsorted(bound, side="right"))
