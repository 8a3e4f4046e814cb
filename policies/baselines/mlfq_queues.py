"""The queues of a skip-join multi-level feedback queue: who is in which, since when, and how much
of its quantum is left.

All of it is a function of time and of when rows came into the batch and left it, so that nothing
needs to be looked at while the same batch runs. Seconds on the engine's clock.
"""

from __future__ import annotations

import math

import numpy as np

from twinserve.policies.parts.columns import room_for
from twinserve.policies.requests import FIRST_ROWS


class FeedbackQueues:
    """Queue 0 is served first; queue i has a quantum of quanta[i] seconds.

    While a row is in the batch its quantum runs down. Where it ends the row enters the next queue,
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
        self._batch = np.zeros(0, np.int64)

    def joined(self, seconds: float) -> int:
        """The first queue whose quantum covers an iteration of `seconds`; the last one if none
        does."""
        return min(int(np.searchsorted(self.quanta, seconds)), len(self.quanta) - 1)

    def add(self, row: int, level: int, now: float) -> None:
        for name in ("level", "entered", "running", "_until", "left_out"):
            setattr(self, name, room_for(getattr(self, name), row))
        self.level[row], self.entered[row], self.left_out[row] = level, now, now
        self.running[row], self._until[row] = False, self.quanta[level]

    def end(self, row: int) -> None:
        """`row` is no more. Until the next batch it stays in this one, where its quantum would end
        again and again over the time that nothing runs."""
        self._until[row] = math.inf

    def advance(self, rows: np.ndarray, now: float) -> None:
        """Demote in the batch and promote among `rows`, up to `now`."""
        late = self._batch[self._until[self._batch] <= now]
        while len(late):
            self.entered[late] = self._until[late]
            self.level[late] = np.minimum(self.level[late] + 1, len(self.quanta) - 1)
            self._until[late] += self.quanta[self.level[late]]
            late = late[self._until[late] <= now]
        promoted = self.left_out[rows] + self.starve_limit
        starving = ~self.running[rows] & (self.level[rows] > 0) & (promoted <= now)
        if np.count_nonzero(starving):
            some = rows[starving]
            self.level[some], self.entered[some], self._until[some] = (
                0,
                promoted[starving],
                self.quanta[0],
            )

    def order(self, rows: np.ndarray) -> np.ndarray:
        """`rows`, which ascend, by queue, then by when they entered it, then by number."""
        return rows[np.lexsort((self.entered[rows], self.level[rows]))]  # a stable sort

    def run(self, batch: np.ndarray, now: float) -> None:
        """From `now` on `batch` runs, in place of the one before."""
        before, came = self._batch, batch[~self.running[batch]]
        self.running[before] = False
        self.running[batch] = True
        left = before[~self.running[before]]
        self._until[came] += now
        self._until[left] -= now
        self.left_out[left] = now
        self._batch = batch

    def next_change(self, rows: np.ndarray) -> float:
        """When the order of `rows` changes if nobody enters or leaves the batch."""
        running = self.running[rows]
        demotion = self._until[rows[running]].min(initial=math.inf)
        lower = rows[~running & (self.level[rows] > 0)]
        return float(
            min(demotion, (self.left_out[lower] + self.starve_limit).min(initial=math.inf))
        )

    def next_scheduled(
        self, rows: np.ndarray, some: np.ndarray, seats: int, now: float
    ) -> np.ndarray:
        """float64: in how many seconds each of `some` will be scheduled, estimated (ENST): when it
        is promoted, or when all of `rows` in higher queues have used up the quanta down to its own,
        `seats` at a time."""
        before = np.concatenate([[0.0], self.quanta.cumsum()[:-1]])  # quanta of all higher queues
        number = np.bincount(self.level[rows], minlength=len(self.quanta))
        higher = np.concatenate([[0], number.cumsum()[:-1]])
        spent = np.concatenate([[0.0], (number * before).cumsum()[:-1]])
        level = self.level[some]
        execute = (higher[level] * before[level] - spent[level]) / seats
        promote = np.where(level > 0, self.left_out[some] + self.starve_limit - now, math.inf)
        return np.minimum(execute, promote)
