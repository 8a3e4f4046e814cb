"""The queues of a skip-join multi-level feedback queue: which row is in which, since when, and how
much of its quantum is left.

All of it follows from time and from when rows entered and left the batch. So nothing needs an
update while the same batch runs. Except for copies of arrays, a plan takes time in proportion to
the rows whose place has changed, not to all that wait. Seconds on the engine's clock.
"""

import heapq
import math

import numpy as np

from twinserve.policies.parts.queues import room_for
from twinserve.policies.requests import FIRST_ROWS

_NOWHERE = -1  # in place of a queue


class FeedbackQueues:
    """Queue 0 is served first; queue i has a quantum of quanta[i] seconds.

    While a row is in the batch its quantum runs down. If it ends the row enters the next queue,
    behind those there, and its next quantum begins; so an iteration that lasts longer than the
    quantum is charged to several queues. In the last queue the row goes to the end. A row left out
    for `starve_limit` seconds enters queue 0.
    """

    def __init__(self, quanta: np.ndarray, starve_limit: float) -> None:
        self.quanta = quanta
        self.starve_limit = starve_limit
        self.level = np.zeros(FIRST_ROWS, np.int64)
        self.entered = np.zeros(FIRST_ROWS)  # when the row entered its queue
        self.running = np.zeros(FIRST_ROWS, bool)  # in the batch
        # in the batch: when its quantum ends; else: seconds left of it
        self._until = np.zeros(FIRST_ROWS)
        self.left_out = np.zeros(FIRST_ROWS)  # since when it has been out of the batch
        self._alive = np.zeros(FIRST_ROWS, bool)  # added, and not ended
        self._batch = np.zeros(0, np.int64)
        # rows of each queue by (entered, row), but for those in `_moved`, which are not in place
        self._queues = [np.zeros(0, np.int64) for _ in quanta]
        # 1 + the one of `_queues` it is in; 0: none
        self._queue_of = np.zeros(FIRST_ROWS, np.int64)
        self._moved: list[np.ndarray] = []
        # (left_out, row) of all that are out of the batch; entries of former times may be there
        self._starving: list[tuple[float, int]] = []
        self._looked_through = FIRST_ROWS  # entries at which those of former times are forgotten

    def joined(self, seconds: float) -> int:
        """The first queue whose quantum covers an iteration of `seconds`; the last one if none
        does."""
        return min(int(np.searchsorted(self.quanta, seconds)), len(self.quanta) - 1)

    def add(self, row: int, level: int, now: float) -> None:
        names = ("level", "entered", "running", "_until", "left_out", "_alive", "_queue_of")
        for name in names:
            setattr(self, name, room_for(getattr(self, name), row))
        self.level[row], self.entered[row], self.left_out[row] = level, now, now
        self.running[row], self._until[row] = False, self.quanta[level]
        self._alive[row] = True
        self._moved.append(np.array([row]))
        self._leaves([row], now)

    def end(self, row: int) -> None:
        """`row` has ended. Until the next batch it stays in this one, if its quantum would end
        again and again over the time that nothing runs."""
        self._until[row] = math.inf
        self._alive[row] = False
        self._moved.append(np.array([row]))

    def advance(self, now: float) -> None:
        """Demote in the batch, and promote out of it, up to `now`."""
        late = self._batch[self._until[self._batch] <= now]
        if len(late):
            self._moved.append(late)
        while len(late):
            self.entered[late] = self._until[late]
            self.level[late] = np.minimum(self.level[late] + 1, len(self.quanta) - 1)
            self._until[late] += self.quanta[self.level[late]]
            late = late[self._until[late] <= now]
        starving = []
        while (row := self._first_starving()) is not None:
            if not self.left_out[row] + self.starve_limit <= now:
                break
            heapq.heappop(self._starving)
            starving.append(row)
        if starving:
            some = np.array(starving, np.int64)
            promoted = self.left_out[some] + self.starve_limit
            self.level[some], self.entered[some], self._until[some] = 0, promoted, self.quanta[0]
            self._moved.append(some)

    def order(self) -> np.ndarray:
        """All rows by queue, then by when they entered it, then by number."""
        self._put_in_place()
        return np.concatenate(self._queues)

    def run(self, batch: np.ndarray, now: float) -> None:
        """From `now` on `batch` runs, in place of the one before."""
        before, came = self._batch, batch[~self.running[batch]]
        self.running[before] = False
        self.running[batch] = True
        left = before[~self.running[before]]
        self._until[came] += now
        self._until[left] -= now
        self.left_out[left] = now
        self._leaves(left.tolist(), now)
        self._batch = batch

    def next_change(self) -> float:
        """When the order changes if no row enters or leaves the batch."""
        demotion = float(self._until[self._batch].min(initial=math.inf))
        first = self._first_starving()
        promotion = math.inf if first is None else self.left_out[first] + self.starve_limit
        return float(min(demotion, promotion))

    def next_scheduled(self, some: np.ndarray, seats: int, now: float) -> np.ndarray:
        """Return float64: estimated seconds until each of `some` is scheduled (ENST). A row is
        scheduled when promoted, or when all in higher queues have used up the quanta down to its
        own, `seats` at a time."""
        self._put_in_place()
        before = np.concatenate([[0.0], self.quanta.cumsum()[:-1]])  # quanta of all higher queues
        number = np.array([len(rows) for rows in self._queues])
        higher = np.concatenate([[0], number.cumsum()[:-1]])
        spent = np.concatenate([[0.0], (number * before).cumsum()[:-1]])
        level = self.level[some]
        execute = (higher[level] * before[level] - spent[level]) / seats
        promote = np.where(level > 0, self.left_out[some] + self.starve_limit - now, math.inf)
        return np.minimum(execute, promote)

    # -- starvation --------------------------------------------------------------------------------
    def _leaves(self, rows: list[int], now: float) -> None:
        """`rows` are out of the batch from `now` on."""
        if self.starve_limit < math.inf:
            for row in rows:
                heapq.heappush(self._starving, (now, row))
        if len(self._starving) > self._looked_through:  # with a long limit the first one stays
            self._starving = [entry for entry in self._starving if self._starves(*entry)]
            heapq.heapify(self._starving)
            self._looked_through = max(FIRST_ROWS, 2 * len(self._starving))

    def _starves(self, since: float, row: int) -> bool:
        """Whether an entry still holds: the row has been out since then, and below queue 0."""
        out = self._alive[row] and not self.running[row]
        return bool(out and self.level[row] > 0 and self.left_out[row] == since)

    def _first_starving(self) -> int | None:
        """The row that has been out of the batch for longest, of those below the first queue: no
        row enters a lower queue while it is out. What does not hold any more is forgotten."""
        heap = self._starving
        while heap:
            since, row = heap[0]
            if self._starves(since, row):
                return row
            heapq.heappop(heap)
        return None

    # -- order -------------------------------------------------------------------------------------
    def _put_in_place(self) -> None:
        if not self._moved:
            return
        moved = np.unique(np.concatenate(self._moved))
        self._moved.clear()
        was = self._queue_of[moved] - 1
        now = np.where(self._alive[moved], self.level[moved], _NOWHERE)
        self._queue_of[moved] = 0  # so they are known as those that leave
        for queue in np.unique(was[was >= 0]).tolist():
            rows = self._queues[queue]
            self._queues[queue] = rows[self._queue_of[rows] > 0]
        self._queue_of[moved] = now + 1
        for queue in np.unique(now[now >= 0]).tolist():
            self._queues[queue] = self._merged(self._queues[queue], moved[now == queue])

    def _merged(self, rows: np.ndarray, more: np.ndarray) -> np.ndarray:
        """`rows`, by (entered, row), with `more`, which ascend, in their places."""
        more = more[np.argsort(self.entered[more], kind="stable")]
        times, new = self.entered[rows], self.entered[more]
        at, end = (np.searchsorted(times, new, side) for side in ("left", "right"))
        for i in np.flatnonzero(at < end).tolist():  # as many entered at the very same time
            at[i] += np.searchsorted(rows[at[i] : end[i]], more[i])
        return np.insert(rows, at, more)
