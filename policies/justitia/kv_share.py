"""Instantaneous fair sharing: each application may hold its share of the KV memory and no more
(Yang et al., Justitia, Fig. 3a), what Justitia's order of completion is compared with.

The share is the device's blocks over the applications that have requests here now. A request is
admitted if its application stays within its share with it, or has none that runs. An application
may grow beyond its share, or its share may shrink because another one came. It then gives up the
memory of the request that it began last, until it fits or has one left. That request comes back
before those of its application that wait. Among applications that are within their share the order
is first come, first served, and one that is not holds up no other.

Applications are groups of any kind, as for VTC; a request without a group is its own. A decision
takes time in proportion to the applications that wait: this is a yardstick, not a system.
"""

import math
from dataclasses import replace

import numpy as np

from twinserve.policies.kv.base import KvLedger
from twinserve.policies.parts.queue_policy import QueueOptions, QueuePolicy
from twinserve.policies.parts.runs import LONGEST_RUN
from twinserve.policies.plan import StepPlan
from twinserve.policies.requests import RequestTable


class _InTurn:
    """Rows by application, in order of each one's first request; `allowed` is asked of each head in
    turn."""

    def __init__(self, allowed) -> None:
        self._allowed = allowed
        self._rows: dict[int, list[int]] = {}
        self._owner_of: dict[int, int] = {}

    def add(self, row: int, owner: int) -> None:
        self._rows.setdefault(owner, []).append(row)
        self._owner_of[row] = owner

    def peek(self) -> int:
        """The first head that is allowed; the first of all if none is."""
        allowed = (rows[0] for rows in self._rows.values() if self._allowed(rows[0]))
        head = next(allowed, None)
        return next(iter(self._rows.values()))[0] if head is None else head

    def remove(self, row: int) -> None:
        owner = self._owner_of.pop(row, None)
        if owner is not None:
            self._rows[owner].remove(row)
            if not self._rows[owner]:
                del self._rows[owner]

    def __len__(self) -> int:
        return len(self._owner_of)


class KvSharePolicy(QueuePolicy[QueueOptions]):
    name = "kv-share"
    Options = QueueOptions
    traits = replace(QueuePolicy.traits, orders_applications=True)
    waiting: _InTurn

    def setup(self) -> None:
        super().setup()
        self.waiting = _InTurn(self._allowed)
        self._owner: dict[int, int] = {}  # rows that are here -> application
        self._present: dict[int, int] = {}  # application -> how many of its rows are here
        self._running_of: dict[int, set[int]] = {}  # application -> its rows of `running`
        self._requests: RequestTable  # from the first arrival on
        self._ledger: KvLedger  # from the first plan on

    def on_arrival(self, row: int, requests: RequestTable) -> None:
        self._requests = requests
        group = int(requests.group[row])
        owner = self._owner[row] = group if group >= 0 else ~row
        self._present[owner] = self._present.get(owner, 0) + 1
        self.waiting.add(row, owner)

    def on_finish(self, row: int) -> None:
        super().on_finish(row)
        owner = self._owner.pop(row)
        self._stopped(row, owner)
        self._present[owner] -= 1
        if not self._present[owner]:
            del self._present[owner]

    def rank(self, row: int) -> tuple:
        return (row,)

    # -- shares ------------------------------------------------------------------------------------
    def share(self, ledger: KvLedger) -> int:
        """Blocks that an application may hold now."""
        return ledger.num_blocks // max(1, len(self._present))

    def _run(self, row: int, new: int, batch) -> None:
        super()._run(row, new, batch)
        self._running_of.setdefault(self._owner[row], set()).add(row)

    def _evict(self, row: int, plan: StepPlan, ledger: KvLedger) -> None:
        super()._evict(row, plan, ledger)
        self._stopped(row, self._owner[row])

    def _stopped(self, row: int, owner: int) -> None:
        mine = self._running_of.get(owner, set())
        mine.discard(row)
        if not mine:
            self._running_of.pop(owner, None)

    def _allowed(self, row: int) -> bool:
        """Whether the row's application may begin, or resume, it."""
        owner = self._owner[row]
        if row not in self.paused and any(self._owner[other] == owner for other in self.paused):
            return False
        mine = self._running_of.get(owner)
        return not mine or sum(map(self._blocks, [*mine, row])) <= self.share(self._ledger)

    def _blocks(self, row: int) -> int:
        """Blocks that the row's known text takes."""
        return -(-int(self._requests.known_tokens(row)) // self._ledger.block_tokens)

    def plan(self, view, ledger: KvLedger) -> StepPlan:
        self._ledger = ledger
        return super().plan(view, ledger)

    def preempts(self, ledger: KvLedger) -> list[int]:
        if len(self._running_of) == len(self.running):
            return []  # one of each application: the last one stays, however large
        share, victims = self.share(ledger), []
        running: dict[int, list[int]] = {}
        for row in self.running:
            running.setdefault(self._owner[row], []).append(row)
        for mine in running.values():
            if len(mine) == 1:
                continue
            blocks = sum(map(self._blocks, mine))  # with what this step adds
            while blocks > share and len(mine) > 1:
                victims.append(mine.pop())
                blocks -= self._blocks(victims[-1])
        return victims

    def may_begin(self, row: int, requests: RequestTable, ledger: KvLedger) -> bool:
        return self._allowed(row)

    def _come_back(self, batch, plan: StepPlan, requests: RequestTable, ledger: KvLedger) -> bool:
        for row in list(self.paused):
            if not self._allowed(row):
                continue
            if not (self._seat(batch) and self._resume(row, batch, plan, requests, ledger)):
                return False
            self.paused.remove(row)
        return True

    def quiet_steps(self, plan: StepPlan, ledger: KvLedger) -> float:
        """While no request waits: until an application has grown beyond its share."""
        if len(self._present) < 2:
            return math.inf
        if self.paused or self.waiting:
            return 0
        share, steps = self.share(ledger), LONGEST_RUN
        for mine in self._running_of.values():
            if len(mine) > 1:
                room = share - sum(map(self._blocks, mine))
                grown = np.cumsum(ledger.block_growth(np.array(sorted(mine), np.int64), steps))
                steps = min(steps, int(np.searchsorted(grown, room, side="right")))
        return max(0, steps - 1)
