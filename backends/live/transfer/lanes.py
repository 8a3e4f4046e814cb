"""Lanes: queues of work that run beside each other, each in the order in which it was given work.

The copies of a swap are written once, against lanes. On a GPU a lane is a CUDA stream; on a CPU
work is done at once. A mark is a place in a lane: another lane can wait for it, and marks give
times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    def done(self) -> bool:
        """Whether the lane has come past it."""

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier` to here; both must be done."""


class Lane(Protocol):
    def run(self, work: Callable[[], Any]) -> None:
        """Queue `work`."""

    def mark(self) -> Mark:
        """A mark after all work queued so far."""

    def wait(self, mark: Mark) -> None:
        """Let work queued from now on start only when `mark` is passed."""


class Instant:
    """A mark in a lane that does its work at once."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: Instant) -> float:
        return self.at - earlier.at


class InlineLane:
    """Does its work at once."""

    def run(self, work: Callable[[], Any]) -> None:
        work()

    def mark(self) -> Instant:
        return Instant()

    def wait(self, mark: Mark) -> None:
        pass


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()

    def seconds_since(self, earlier: CudaMark) -> float:
        return earlier.event.elapsed_time(self.event) / 1000


class CudaLane:
    """A CUDA stream of its own; with None, whichever stream is current when work is queued: the
    model's."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()

    def run(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def mark(self) -> CudaMark:
        return CudaMark(self.stream)

    def wait(self, mark: CudaMark) -> None:
        self.stream.wait_event(mark.event)


def lanes_for(device: torch.device) -> tuple[Lane, Lane, Lane]:
    """(the lane that computes, one for copies to the host, one for copies from it)."""
    if device.type == "cuda":
        streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return CudaLane(), CudaLane(streams[0]), CudaLane(streams[1])
    lane = InlineLane()
    return lane, lane, lane
