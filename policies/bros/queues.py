"""Rows that wait or are pending under BROS, and for how long each may (Wan et al., IEEE version,
Sec. IV-A and Table I)."""

from __future__ import annotations

from collections import deque

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import Policy, SystemView
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.drafting import DraftingLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import DeadlineQueue, RowSet
from twinserve.policies.parts.estimators import Batch, BatchEstimator
from twinserve.policies.plan import StepOutcome
from twinserve.policies.requests import RequestClass, RequestTable

_REAL_TIME = int(RequestClass.REAL_TIME)


class BrosQueues(Policy[BrosOptions]):
    """Queues of both classes, and what an iteration asks of their rows."""

    Options: type[BrosOptions] = BrosOptions
    estimator: BatchEstimator

    def setup(self) -> None:
        self._check_drafts()
        self.rt_waiting = DeadlineQueue()
        self.be_waiting = RowSet()
        self.rt_pending = RowSet()
        self.be_pending = RowSet()
        self.batch_size = min(self.options.base_batch, self.limits.max_num_seqs)
        self._iterations: deque[float] = deque(maxlen=self.options.avg_window)

    def _check_drafts(self) -> None:
        """Raises PolicyError for options of drafts where there are none."""
        given = sorted(self.options.model_fields_set & {"drafts", "draft_pace"})
        if given and not isinstance(self.limits, DraftingLimits):
            raise PolicyError(
                f"policy {self.name!r}, option {given[0]}: without drafts it does nothing; give "
                "--speculate, or drop it"
            )

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        if requests.service_class[row] == _REAL_TIME:
            self._wait_real_time(row, requests)
        elif self.options.best_effort:
            self.be_waiting.add(row)
        else:
            raise PolicyError(
                f"policy 'bros': request {requests.ids[row]!r} is best-effort, and "
                "best_effort=false leaves those out; "
                "drop that option, or the best-effort requests"
            )

    def _wait_real_time(self, row: int, requests: RequestTable) -> None:
        since, slo = self._due(np.array([row]), requests)
        self.rt_waiting.add(row, float(since[0] + slo[0]))

    def on_finish(self, row: int) -> None:
        self.rt_pending.discard(row)
        self.be_pending.discard(row)

    def on_withdraw(self, row: int) -> None:
        self.on_finish(row)
        self.rt_waiting.remove(row)
        self.be_waiting.discard(row)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self._iterations.extend(outcome.seconds.tolist())

    @property
    def average_iteration_s(self) -> float:
        """T_avg, seconds."""
        return sum(self._iterations) / len(self._iterations) if self._iterations else 0.0

    # -- what the algorithm looks at ---------------------------------------------------------------
    def _batch(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger) -> Batch:
        prefill, new, context = kernels.next_tokens(requests, rows, self.options.chunk or 0)
        return Batch(rows, prefill, new, context, self._missing(rows, ledger))

    def _first_waiting(self, now: float, reach: int) -> np.ndarray:
        """int64[n]: the first real-time requests without memory, at most `reach`."""
        if self.options.order == "savable":
            return self.rt_waiting.open_first(now, reach)
        return self.rt_waiting.first(reach)

    def _newcomers(self, view: SystemView, ledger: KvLedger, reach: int) -> np.ndarray:
        """int64[n]: best-effort requests without memory that this iteration may begin, at most
        `reach`. With `reserve` as many from the front as there is room for as a whole; the first in
        any case if no row has memory."""
        rows = self.be_waiting.first(reach)
        if not self.options.reserve or not len(rows):
            return rows
        requests, size = view.requests, ledger.block_tokens
        pending = np.concatenate([self.rt_pending.rows, self.be_pending.rows])
        held = np.array([ledger.held_blocks(row) for row in pending.tolist()], np.int64)
        lack = np.maximum(-(-requests.known_tokens(pending) // size) - held, 0)
        needed = (-(-requests.known_tokens(rows) // size)).cumsum()
        fits = int(needed.searchsorted(ledger.free_blocks - int(lack.sum()), side="right"))
        return rows[: max(fits, int(not len(pending)))]

    def _missing(self, rows: np.ndarray, ledger: KvLedger) -> np.ndarray:
        """int64[n]: bytes of each row that must come back before it can run."""
        missing = ledger.missing_tokens(rows)
        return missing * self.limits.kv_bytes_per_token if np.count_nonzero(missing) else missing

    def _due(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
        """Since when each row waits for its next token or group (seconds), and how long it may
        (T_SLO)."""
        since, slo = kernels.due(requests, rows)
        size = self.options.group_size
        if size > 1:
            # The first token is a group of its own. A later group of g tokens has g times as long,
            # of which the tokens of it that are out already have used their share.
            emitted = requests.output_tokens[rows]
            slo = np.where(emitted > 0, slo * (size - (emitted - 1) % size), slo)
        return since, slo  # infinite: no objective

    def _residual(self, rows: np.ndarray, requests: RequestTable, now: float) -> np.ndarray:
        """T_SLO - t_i - (k_i - 1) T_avg of each row, seconds (line 3)."""
        since, slo = self._due(rows, requests)
        residual = slo - (now - since)
        size = self.options.group_size
        if size > 1:
            emitted = requests.output_tokens[rows]
            remaining = np.where(emitted > 0, size - (emitted - 1) % size, 1)
            residual = residual - (remaining - 1) * self.average_iteration_s
        return residual
