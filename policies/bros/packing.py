"""Rows that an iteration of BROS serves, memory permitting (Wan et al., IEEE version, Algorithm
1)."""

import numpy as np

from twinserve.policies.base import EngineLimits
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.bros.parts import Choice, Urgent, least, within_tokens
from twinserve.policies.bros.queues import Queues
from twinserve.policies.parts.estimators import Batch, BatchEstimator
from twinserve.policies.requests import RequestTable


class Packer:
    """Lines 3-36 but for memory."""

    def __init__(
        self, queues: Queues, limits: EngineLimits, options: BrosOptions, estimator: BatchEstimator
    ) -> None:
        self.queues, self.limits = queues, limits
        self.options, self.estimator = options, estimator

    def within_tokens(self, batch: Batch, behind: Batch | None = None) -> int:
        """Return how many requests from the front the engine can compute in one step, with those of
        `behind`."""
        return within_tokens(batch, self.limits.max_num_batched_tokens, behind)

    def choose(self, urgent: Urgent, candidates: Batch, size: int) -> Choice:
        """Algorithm 1 proper, without memory."""
        reach = self.within_tokens(urgent.batch[:size])
        fits = min(urgent.fitting(size), reach)
        packed, replaced = self.pack(urgent, fits, candidates, size)
        return Choice(urgent, candidates, fits, packed, replaced, early_return=fits < reach)

    def by_urgency(
        self, batch: Batch, residual: np.ndarray, requests: RequestTable, reach: int
    ) -> Urgent:
        """Real-time requests by residual time (line 3).

        The waiting queue is kept in order of its deadlines. So the batch is the pending ones and as
        many from the front of the queue as an iteration can hold (the paper's queue polling). A
        long queue is never sorted.
        """
        order = residual.argsort(kind="stable")
        if self.options.order == "savable":
            passed = (residual < 0) & (requests.computed_tokens[batch.rows] == 0)
            order = np.lexsort((residual, passed))
        return self.urgent(batch[order], residual[order], requests, reach)

    def urgent(
        self, batch: Batch, residual: np.ndarray, requests: RequestTable, reach: int
    ) -> Urgent:
        """What the deadlines of `batch`, in order of urgency, allow an iteration to take
        (T_min^res). reach: requests from the front that an iteration may take."""
        if not len(batch):
            return Urgent(batch, residual, residual, np.inf)
        costs = self.estimator.prefixes(batch[:reach])
        # A deadline bounds the iteration only if it can still be kept with all that is more urgent
        # in the batch too. Others would bound it for nothing: the batch would shrink to the late
        # ones alone, and stay there.
        savable = (residual[:reach] >= costs).nonzero()[0]
        if not len(savable) and reach < len(batch):
            costs = self.estimator.prefixes(batch)
            savable = (residual >= costs).nonzero()[0]
        if len(savable):
            bound = float(residual[savable[0]])  # in order, so the first is the least
        else:
            bound = least(requests.slo_tpot_s[batch.rows])
        return Urgent(batch, residual, costs, max(bound, float(costs[0])))

    def by_swap(self, batch: Batch) -> Batch:
        """Best-effort requests by the KV to be swapped in, then arrival (line 17)."""
        if not len(self.queues.be_waiting) and not np.count_nonzero(batch.swapped):
            return batch  # that is how they come
        return batch[np.lexsort((batch.rows, batch.swapped))]

    def pack(self, urgent: Urgent, fits: int, candidates: Batch, size: int) -> tuple[int, int]:
        """Return how many best-effort candidates fit behind the first `fits` real-time requests
        (lines 21-24). Also how many of the last of these give their places to further ones (lines
        26-34)."""
        if not len(candidates):
            return 0, 0
        chosen = urgent.batch[:fits]
        packed, replaced = self.room(chosen, candidates, urgent.bound, size), 0
        limit = {"none": 0, "once": min(fits, 1), "all": fits}[self.options.replacement]
        while packed < len(candidates) and replaced < limit:
            if not self.exchangeable(urgent, fits - replaced - 1, fits, candidates[: packed + 1]):
                break
            replaced, packed = replaced + 1, packed + 1
            if replaced < limit:
                rest = urgent.batch[: fits - replaced]
                packed = max(packed, self.room(rest, candidates, urgent.bound, size))
        return packed, replaced

    def room(self, chosen: Batch, candidates: Batch, bound: float, size: int) -> int:
        """How many candidates from the front stay, behind the chosen ones, within the bound
        (seconds), the batch size and the step's tokens."""
        candidates = candidates[: max(size - len(chosen), 0)]
        fitting = self.estimator.fitting(candidates, bound, chosen)
        return min(fitting, self.within_tokens(candidates, chosen))

    def exchangeable(self, urgent: Urgent, kept: int, fits: int, packed: Batch) -> bool:
        """Whether the candidates `packed` may run with the first `kept` real-time requests alone in
        place of the first `fits`."""
        chosen, left = urgent.batch[:kept], urgent.batch[kept:fits]
        if self.within_tokens(packed, chosen) < len(packed):
            return False
        exchanged = self.estimator.seconds(packed, chosen)
        # Those left out must keep their deadlines in the next iteration (constraint 6), which takes
        # at least the time that they need themselves: one that is late, or cannot but be, is never
        # replaced.
        following = max(self.queues.average_iteration_s, self.estimator.seconds(left))
        return exchanged <= urgent.bound and exchanged + following <= urgent.residual[kept]
