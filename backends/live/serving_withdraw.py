"""Taking a request out of policy, ledger and table, wherever it stands: waiting, running, on the host."""

from __future__ import annotations

import heapq

from ...policies.base import Policy
from ...policies.deadlines import DeadlineQueue, RowSet
from ...policies.queues import FcfsQueue, PriorityQueue
from ...policies.requests import State
from ...sim.core import EngineCore


def withdraw(core: EngineCore, row: int) -> None:
    """`row` ends without having been planned to: its client left, or it goes on as another row. Not while its own step
    is under way."""
    if row in core._arrived:
        core._arrived.remove(row)  # the policy has not heard of it
    else:
        _tell(core.policy, row)
    core.ledger.free(row)
    core.ready_s.pop(row, None)
    core.active -= 1
    core.holding -= int(core.requests.state[row] == State.RUNNING)
    core.requests.state[row] = int(State.FINISHED)


def _tell(policy: Policy, row: int) -> None:
    """`on_finish`, for a row in any of the policy's queues: some look for it only where running rows are."""
    try:
        policy.on_finish(row)
    except ValueError:
        pass  # list.remove: it was not running
    for queue in vars(policy).values():
        _take_out(queue, row)


def _take_out(queue: object, row: int) -> None:
    if isinstance(queue, RowSet):
        queue.discard(row)
    elif isinstance(queue, DeadlineQueue):
        queue.remove(row)
    elif isinstance(queue, PriorityQueue):
        queue._heap = [key for key in queue._heap if key[3] != row]
        heapq.heapify(queue._heap)
    elif isinstance(queue, list | FcfsQueue) and row in queue:
        queue.remove(row)
    elif isinstance(queue, tuple) and queue and all(isinstance(part, RowSet) for part in queue):
        for part in queue:
            part.discard(row)
