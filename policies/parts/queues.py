"""Queues of rows that policies share."""

import heapq
from collections import deque

import numpy as np

from twinserve.policies.requests import RequestTable


def room_for(column: np.ndarray, row: int) -> np.ndarray:
    """`column`, or a longer one that begins with it and has a place for `row`; new places hold
    0."""
    if row < len(column):
        return column
    size = max(row + 1, 2 * len(column))
    return np.concatenate([column, np.zeros(size - len(column), column.dtype)])


class FcfsQueue(deque[int]):
    """First come, first served; a preempted request goes back to the front."""

    def add(self, row: int, requests: RequestTable) -> None:
        self.append(row)

    def put_back(self, row: int, requests: RequestTable) -> None:
        self.appendleft(row)

    def peek(self) -> int:
        return self[0]

    pop = deque.popleft


class PriorityQueue:
    """Smallest (priority, arrival, request id) first; vLLM breaks ties by the id as text."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, int]] = []

    def add(self, row: int, requests: RequestTable) -> None:
        key = (int(requests.priority[row]), float(requests.placed_s[row]), requests.ids[row], row)
        heapq.heappush(self._heap, key)

    put_back = add

    def peek(self) -> int:
        return self._heap[0][3]

    def pop(self) -> int:
        return heapq.heappop(self._heap)[3]

    def remove(self, row: int) -> None:
        self._heap = [key for key in self._heap if key[3] != row]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self):
        return (key[3] for key in sorted(self._heap))


def make_queue(scheduling: str) -> FcfsQueue | PriorityQueue:
    return PriorityQueue() if scheduling == "priority" else FcfsQueue()
