"""Rows that wait or are pending under BROS, and for how long each may (Wan et al., IEEE version,
Sec. IV-A and Table I)."""

from collections import deque

import numpy as np

from twinserve.native.chosen import batch as kernels
from twinserve.policies.base import EngineLimits, SystemView
from twinserve.policies.bros.options import BrosOptions
from twinserve.policies.errors import PolicyError
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.deadlines import DeadlineQueue, RowSet
from twinserve.policies.parts.estimators import Batch
from twinserve.policies.requests import RequestClass, RequestTable

_REAL_TIME = int(RequestClass.REAL_TIME)


class Queues:
    """Queues of both classes, and what an iteration asks of their rows. limits, options: those of
    the policy."""

    def __init__(self, limits: EngineLimits, options: BrosOptions) -> None:
        self.limits, self.options = limits, options
        self.rt_waiting = DeadlineQueue()
        self.be_waiting = RowSet()
        self.rt_pending = RowSet()
        self.be_pending = RowSet()
        self.iterations: deque[float] = deque(maxlen=options.avg_window)

    def arrives(self, row: int, requests: RequestTable) -> None:
        if requests.service_class[row] == _REAL_TIME:
            self.wait_real_time(row, requests)
        elif self.options.best_effort:
            self.be_waiting.add(row)
        else:
            raise PolicyError(
                f"policy 'bros': request {requests.ids[row]!r} is best-effort, and "
                "best_effort=false leaves those out; "
                "drop that option, or the best-effort requests"
            )

    def wait_real_time(self, row: int, requests: RequestTable) -> None:
        since, slo = self.due(np.array([row]), requests)
        self.rt_waiting.add(row, float(since[0] + slo[0]))

    def ends(self, row: int) -> None:
        self.rt_pending.discard(row)
        self.be_pending.discard(row)

    def leaves(self, row: int) -> None:
        """A row that may wait does so no more."""
        self.rt_waiting.remove(row)
        self.be_waiting.discard(row)

    def begins(self, row: int, requests: RequestTable) -> None:
        """A row that waited has got memory."""
        if requests.service_class[row] == _REAL_TIME:
            self.rt_waiting.remove(row)
            self.rt_pending.add(row)
        else:
            self.be_waiting.discard(row)
            self.be_pending.add(row)

    def begins_anew(self, row: int, requests: RequestTable) -> None:
        """A row that has lost its memory waits again."""
        if requests.service_class[row] == _REAL_TIME:
            self.rt_pending.discard(row)
            self.wait_real_time(row, requests)
        else:
            self.be_pending.discard(row)
            self.be_waiting.add(row)

    @property
    def average_iteration_s(self) -> float:
        """T_avg, seconds."""
        return sum(self.iterations) / len(self.iterations) if self.iterations else 0.0

    # -- what the algorithm looks at ---------------------------------------------------------------
    def batch(self, rows: np.ndarray, requests: RequestTable, ledger: KvLedger) -> Batch:
        prefill, new, context = kernels.next_tokens(requests, rows, self.options.chunk or 0)
        return Batch(rows, prefill, new, context, self.missing(rows, ledger))

    def first_waiting(self, now: float, reach: int) -> np.ndarray:
        """int64[n]: the first real-time requests without memory, at most `reach`."""
        if self.options.order == "savable":
            return self.rt_waiting.open_first(now, reach)
        return self.rt_waiting.first(reach)

    def newcomers(self, view: SystemView, ledger: KvLedger, reach: int) -> np.ndarray:
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

    def missing(self, rows: np.ndarray, ledger: KvLedger) -> np.ndarray:
        """int64[n]: bytes of each row that must come back before it can run."""
        missing = ledger.missing_tokens(rows)
        return missing * self.limits.kv_bytes_per_token if np.count_nonzero(missing) else missing

    def due(self, rows: np.ndarray, requests: RequestTable) -> tuple[np.ndarray, np.ndarray]:
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

    def residual(self, rows: np.ndarray, requests: RequestTable, now: float) -> np.ndarray:
        """T_SLO - t_i - (k_i - 1) T_avg of each row, seconds (line 3)."""
        since, slo = self.due(rows, requests)
        residual = slo - (now - since)
        size = self.options.group_size
        if size > 1:
            emitted = requests.output_tokens[rows]
            remaining = np.where(emitted > 0, size - (emitted - 1) % size, 1)
            residual = residual - (remaining - 1) * self.average_iteration_s
        return residual
